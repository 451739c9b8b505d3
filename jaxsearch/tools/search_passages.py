"""The tool `search`: passages for a query, or for each query of a list, together."""

from typing import Annotated

from pydantic import Field

from jaxsearch.tools.calls import Search
from jaxsearch.tools.tool import Arguments, declare

Query = Annotated[str, Field(pattern=r'\S')]  # vectors would find something for a blank one


class SearchPassages(Arguments):
  """Searches for passages. Several queries, in a list, are searched for at the same time."""
  query: Query | Annotated[list[Query], Field(min_length=1, max_length=8)] = Field(
    description='What to look for, in a few words; or a list of such queries.')


def _serve(node, arguments, show):
  queries = [arguments.query] if isinstance(arguments.query, str) else arguments.query
  return [Search(node, query, show=show) for query in queries]


TOOL = declare('search', SearchPassages, _serve)
