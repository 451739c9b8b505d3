"""R-Search as a tool (RSTool, arXiv 2506.04185): its protocol, and the client of other models.

`POST /evidence {"question": "…"}` returns {"evidence", "answer", "searches", "forfeited"}; for a list of
questions, a list of these. `SCHEMA` describes it to a model that calls functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import FailFast, Field, TypeAdapter

from jaxsearch.tools.http_client import JsonClient, RequestError

SCHEMA = {'type': 'function', 'function': {
  'name': 'search_evidence',
  'description': (
    'Searches a corpus in as many steps as a question needs, and returns the passages that answer it, in '
    'their own words. Ask it the whole question, not keywords.'),
  'parameters': {
    'type': 'object',
    'properties': {
      'question': {'type': 'string', 'description': 'The question, complete and in plain words.'}},
    'required': ['question'],
    'additionalProperties': False}}}


@dataclass(frozen=True)
class Evidence:
  """The evidence for a question."""
  evidence: str       # '' if nothing was found, or no well-formed box of evidence was written
  answer: str | None  # that of the policy which searched; None without one
  searches: Annotated[int, Field(strict=True, ge=0)]
  forfeited: bool = False  # evidence was written before any documents were found, and so withheld


class EvidenceError(RequestError):
  kind = 'search for evidence'


class EvidenceClient(JsonClient):
  """Gets evidence from a server; may be called from several threads. Args as of `JsonClient`."""

  error, default_path = EvidenceError, '/evidence'

  def __init__(self, url: str, **options):
    super().__init__([url], **{'timeout': 300.0, 'backoff': 0.5} | options)

  def find(self, questions: Sequence[str]) -> list[Evidence]:
    """Returns the evidence for each question, asked for in one request. Raises EvidenceError."""
    if not questions:
      return []
    lists = Annotated[list[Evidence], Field(min_length=len(questions), max_length=len(questions)), FailFast()]
    return self.post({'question': list(questions)}, TypeAdapter(lists).validate_python)
