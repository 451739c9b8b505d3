"""Client of the retrieval protocol of Search-R1: `POST /retrieve {"queries", "topk", "return_scores"}`.

The answer is `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each query, or
with `return_scores` false the documents themselves. What a server sends is checked here, so that nothing
further in has to: whatever goes wrong is a `SearchError`. The server's side is `jaxsearch.tools.search_server`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import httpx

from jaxsearch.data.corpus import Document, split_contents
from jaxsearch.tools.http_client import Poster, RequestError, checked_secret


class SearchError(RequestError):
  """A search that got no usable answer; `url` and `reason` say from whom and why."""

  kind = 'search'


class HttpSearch:
  """Searches with a retrieval server; may be called from several threads."""

  def __init__(self, url: str, *, timeout: float = 30.0, attempts: int = 4, backoff: float = 0.2,
               token: str | None = None):
    """Opens no connection yet.

    Args:
      url: the address of the server; without a path, '/retrieve' is meant.
      timeout, attempts, backoff: of one `search`, see `tools.post.Poster`.
      token: sent as a bearer token.
    """
    address = httpx.URL(url)
    checked_secret(token, 'a token')
    self._poster = Poster(
      address.copy_with(path='/retrieve') if address.host and address.path in ('', '/') else address, SearchError,
      'retrieval protocol', timeout=timeout, attempts=attempts, backoff=backoff, secret=token,
      headers={'authorization': f'Bearer {token}'} if token else {})
    self.url = self._poster.url

  def close(self) -> None:
    self._poster.close()

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, in the server's order.

    Raises:
      SearchError: no answer in time, a refusal, or an answer that is not of the protocol.
    """
    if isinstance(queries, str):
      raise TypeError('queries must be a list of strings, not one string')
    if not queries:
      return []
    body = {'queries': list(queries), 'topk': topk, 'return_scores': True}
    return self._poster.post(body, lambda reply: parse_reply(reply, len(queries), topk))


def parse_reply(reply: object, num_queries: int, topk: int) -> list[list[Document]]:
  """Documents of a reply, with scores or without; those past `topk` are cut off.

  Raises:
    ValueError: the reply has another shape; names the place in it.
  """
  results = reply.get('result') if isinstance(reply, dict) else None
  if not isinstance(results, list):
    raise ValueError("no list 'result' in it")
  if len(results) != num_queries:
    raise ValueError(f"'result' holds {len(results)} lists for {num_queries} queries")
  for index, found in enumerate(results):
    if not isinstance(found, list):
      raise ValueError(f'result[{index}] is not a list')
  return [[_parse_document(item, f'result[{i}][{j}]') for j, item in enumerate(found[:topk])]
          for i, found in enumerate(results)]


def _parse_document(item: object, place: str) -> Document:
  scored = isinstance(item, dict) and 'document' in item
  document, score = (item['document'], item.get('score', 0.0)) if scored else (item, 0.0)
  if not isinstance(document, dict) or not isinstance(document.get('contents'), str):
    raise ValueError(f"{place} holds no document with 'contents'")
  if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
    raise ValueError(f'the score of {place} is {str(score)[:40]!r}, not a finite number')
  # Search-R1's own BM25 server sends no ids. Half a surrogate pair passes JSON and would break a tokenizer.
  contents = document['contents'].encode('utf-8', 'replace').decode()
  return Document(str(document.get('id', '')), *split_contents(contents), float(score))
