"""Search back ends behind a server: a retrieval server that speaks Search-R1's protocol, and Google through SERPER.

`HttpSearch`: `POST /retrieve {"queries", "topk", "return_scores"}`. The response is
`{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each query, or with `return_scores` false the
documents themselves. It is checked here, so that nothing further in has to. Its server is `tools.http_server.search_app`.

`WebSearch`: `POST https://google.serper.dev/search {"q", "num"}` with the header `X-API-KEY` (https://serper.dev). The documents
of a query are its answer box and its knowledge graph where there are any, then the `organic` results: title and snippet.
Searches cost money, so they are rate-limited, and kept in a file if one is named.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from jaxsearch.data.corpus import Document, split_contents
from jaxsearch.tools import check_search
from jaxsearch.tools.cache import Cache
from jaxsearch.tools.http_client import JsonClient, RequestError, secret_from_env

SERPER = 'https://google.serper.dev/search'
MAX_HITS = 100  # of a query that are looked at; a server at fault may send millions
MAX_ID = 1000  # characters of an id that are kept
MAX_TOGETHER = 8  # a response to several queries may be as long as so many to one
FIRST = BeforeValidator(lambda hits: hits[:MAX_HITS] if isinstance(hits, list) else hits)


class SearchError(RequestError):
  kind = 'search'


class Passage(BaseModel):
  id: Any = ''  # Search-R1's own BM25 server sends none
  contents: str


class Hit(BaseModel):
  document: Passage
  score: float = Field(0.0, strict=True, allow_inf_nan=False)

  @model_validator(mode='before')
  @classmethod
  def _without_score(cls, item: Any) -> Any:
    return item if isinstance(item, dict) and 'document' in item else {'document': item}


class Response(BaseModel):
  result: Annotated[list[Annotated[list[Hit], FailFast(), FIRST]], FailFast()]


class HttpSearch(JsonClient):
  """Searches with a retrieval server; may be called from several threads. Args as of `JsonClient`."""

  error, default_path = SearchError, '/retrieve'

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, in the server's order. Raises SearchError."""
    check_search(queries, topk)
    if not queries:
      return []

    def parse(response: object) -> list[list[Document]]:
      result = Response.model_validate(response).result
      if len(result) != len(queries):
        raise ValueError(f'result: {len(result)} lists for {len(queries)} queries')
      return [[Document(str(hit.document.id)[:MAX_ID], *split_contents(hit.document.contents), hit.score) for hit in hits[:topk]]
              for hits in result]

    body = {'queries': list(queries), 'topk': topk, 'return_scores': True}
    return self.post(body, parse, min(len(queries), MAX_TOGETHER))


class WebResult(BaseModel):
  """A page, an answer box or a knowledge graph; some pages have no snippet."""
  model_config = ConfigDict(coerce_numbers_to_str=True, str_strip_whitespace=True)
  title: str = ''
  link: str = ''
  descriptionLink: str = ''
  answer: str = ''
  type: str = ''
  description: str = ''
  snippet: str = ''
  attributes: dict[str, str] = {}

  @property
  def text(self) -> str:
    parts = [self.answer, self.type, self.description, self.snippet]
    parts = [part for part in parts if part] + [f'{name}: {value}' for name, value in self.attributes.items()]
    return ' '.join([*(part if part.endswith('.') else part + '.' for part in parts[:-1]), *parts[-1:]])


class WebResponse(BaseModel):
  answerBox: WebResult | None = None
  knowledgeGraph: WebResult | None = None
  organic: Annotated[list[WebResult], FailFast(), FIRST]


class WebSearch(JsonClient):
  """Searches with SERPER; may be called from several threads.

  Args:
    url: the whole address, if not SERPER's own.
    cache: file that keeps the documents of a query; None keeps nothing.
    options: of `JsonClient`; the timeout is that of one query.

  Raises ValueError if the environment variable SERPER_API_KEY holds no key.
  """

  error = SearchError

  def __init__(self, url: str = SERPER, *, cache: str | os.PathLike | None = None, **options):
    key = secret_from_env('SERPER_API_KEY')
    if key is None:
      raise ValueError('searching the web needs an API key in the environment variable SERPER_API_KEY')
    super().__init__(url, token=key, token_header='x-api-key', **{'backoff': 0.5, 'rate': 20.0} | options)
    self._cache = Cache(cache)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, one query after the other; none for a blank one. Raises SearchError."""
    check_search(queries, topk)
    return [self._find(query, topk) if query.strip() else [] for query in queries]

  def _find(self, query: str, topk: int) -> list[Document]:
    body = {'q': ' '.join(query.split()), 'num': topk}
    found = self._cache.get(body, lambda: self.post(body, lambda response: parse_response(response, topk)))
    return [Document(*fields) for fields in found]


def parse_response(response: object, topk: int) -> list[tuple[str, str, str]]:
  """(address, title, text) of the first `topk` results with a text. Raises ValueError for a response of another shape."""
  found = WebResponse.model_validate(response)
  results = [result for result in (found.answerBox, found.knowledgeGraph, *found.organic[:topk]) if result and result.text]
  return [(result.link or result.descriptionLink, result.title, result.text) for result in results[:topk]]
