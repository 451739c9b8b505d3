"""R-Search as a tool (RSTool, arXiv 2506.04185): what other models get for a question, and how they ask for it.

`POST /evidence {"question": "…"}` is answered with `{"evidence": "…", "answer": "…", "searches": n}`; for a list of
questions with a list of these. `SCHEMA` tells a model that calls functions about it: the arguments of its call are the
body of the request. The server's side is `jaxsearch.tools.evidence_server`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from jaxsearch.tools.http_client import Poster, RequestError, checked_secret

SCHEMA = {
  'type': 'function',
  'function': {
    'name': 'search_evidence',
    'description': 'Searches a corpus in as many steps as a question needs, and returns the passages that answer it, in '
                   'their own words. Ask it the whole question, not keywords.',
    'parameters': {
      'type': 'object',
      'properties': {'question': {'type': 'string', 'description': 'The question, complete and in plain words.'}},
      'required': ['question'],
      'additionalProperties': False,
    },
  },
}  # fmt: skip


@dataclass(frozen=True)
class Evidence:
  """What was found for a question.

  Attributes:
    evidence: '' if there is none: nothing was found, or no well-formed box of evidence was written.
    answer: that of the policy which searched; None without one.
    searches: how many it made.
  """
  evidence: str
  answer: str | None
  searches: int


class EvidenceError(RequestError):
  """A question that got no usable reply; `url`, `reason` and `status` say from whom and why."""

  kind = 'search for evidence'


class EvidenceTool:
  """Asks a server for evidence; may be called from several threads."""

  def __init__(self, url: str, *, timeout: float = 300.0, attempts: int = 4, backoff: float = 0.5, token: str | None = None):
    """Opens no connection yet.

    Args:
      url: the address of the server; without a path, '/evidence' is meant.
      timeout, attempts, backoff: of one request, see `tools.post.Poster`.
      token: sent as a bearer token.
    """
    address = httpx.URL(url)
    checked_secret(token, 'a token')
    self._poster = Poster(
      address.copy_with(path='/evidence') if address.host and address.path in ('', '/') else address, EvidenceError,
      'evidence protocol', timeout=timeout, attempts=attempts, backoff=backoff, secret=token,
      headers={'authorization': f'Bearer {token}'} if token else {})
    self.url = self._poster.url

  def close(self) -> None:
    self._poster.close()

  def __call__(self, question: str) -> str:
    """The evidence for a question, '' if there is none. Raises EvidenceError as `find` does."""
    return self.find([question])[0].evidence

  def find(self, questions: Sequence[str]) -> list[Evidence]:
    """What was found for each question, in one request.

    Raises:
      EvidenceError: no answer in time, a refusal, or an answer that is not of the protocol.
    """
    if isinstance(questions, str):
      raise TypeError('questions must be a list of strings, not one string')
    if not questions:
      return []
    return self._poster.post({'question': list(questions)}, lambda reply: parse_reply(reply, len(questions)))


def parse_reply(reply: object, num_questions: int) -> list[Evidence]:
  """What a reply to a list of questions holds. Raises ValueError if it has another shape; names the place in it."""
  if not isinstance(reply, list) or len(reply) != num_questions:
    raise ValueError(f'not a list of {num_questions}')
  return [_parse(found, f'[{index}]') for index, found in enumerate(reply)]


def _parse(found: object, place: str) -> Evidence:
  if not isinstance(found, dict) or not isinstance(found.get('evidence'), str):
    raise ValueError(f"{place} holds no text 'evidence'")
  answer, searches = found.get('answer'), found.get('searches')
  if not (answer is None or isinstance(answer, str)):
    raise ValueError(f"'answer' of {place} is neither text nor null")
  if isinstance(searches, bool) or not isinstance(searches, int) or searches < 0:
    raise ValueError(f"'searches' of {place} is {str(searches)[:40]!r}, not a count")
  return Evidence(_clean(found['evidence']), None if answer is None else _clean(answer), searches)


def _clean(text: str) -> str:
  return text.encode('utf-8', 'replace').decode()  # half a surrogate pair passes JSON and would break a tokenizer
