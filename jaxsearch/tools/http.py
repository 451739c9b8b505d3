"""Client of the retrieval protocol of Search-R1: `POST /retrieve {"queries", "topk", "return_scores"}`.

The answer is `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each query, or
with `return_scores` false the documents themselves. What a server sends is checked here, so that nothing
further in has to: whatever goes wrong is a `SearchError`. The server's side is `jaxsearch.tools.server`.
"""

from __future__ import annotations

import ipaddress
import json
import math
import time
from collections.abc import Sequence

import httpx
import tenacity

from jaxsearch.data.corpus import split_contents
from jaxsearch.tools.documents import Document

MAX_REPLY_BYTES = 64 * 2**20
_RETRIED_STATUS = (408, 425, 429)  # and all 5xx


class SearchError(RuntimeError):
  """A search that got no usable answer; `url` and `reason` say from whom and why."""

  def __init__(self, url: str, reason: str):
    super().__init__(f'search at {url} failed: {reason}')
    self.url, self.reason = url, reason


class _Transient(SearchError):
  """A fault that may pass: worth another attempt."""


class HttpSearch:
  """Searches with a retrieval server; may be called from several threads."""

  def __init__(self, url: str, *, timeout: float = 30.0, attempts: int = 4, backoff: float = 0.2,
               token: str | None = None):
    """Opens no connection yet.

    Args:
      url: the address of the server; without a path, '/retrieve' is meant.
      timeout: seconds for one `search`, all attempts together.
      attempts: at most so many; connection errors, 5xx and 'too many requests' are tried again, other faults
        are not.
      backoff: seconds before the second attempt, doubled before each further one (up to 5), with jitter.
      token: sent as a bearer token.
    """
    address = httpx.URL(url)
    if address.scheme not in ('http', 'https') or not address.host:
      raise ValueError(f'not an http address: {url!r}')
    if timeout <= 0 or attempts < 1:
      raise ValueError(f'timeout={timeout} must be positive and attempts={attempts} at least 1')
    if token and not (token.isascii() and token.isprintable() and ' ' not in token):
      raise ValueError('a token is printable ASCII without blanks or line ends')
    self._address = address.copy_with(path='/retrieve') if address.path in ('', '/') else address
    # Messages end up in logs and observations: no password, no query string in them.
    self.url = f'{address.scheme}://{address.netloc.decode()}{self._address.path}'
    self._timeout, self._attempts, self._backoff = timeout, attempts, backoff
    self._client = httpx.Client(
        headers={'authorization': f'Bearer {token}'} if token else {},
        trust_env=not _is_loopback(address.host))  # a proxy cannot reach this machine's own server

  def close(self) -> None:
    self._client.close()

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, in the server's order.

    Raises:
      SearchError: no answer in time, a refusal, or an answer that is not of the protocol.
    """
    if isinstance(queries, str):
      raise TypeError('queries must be a list of strings, not one string')
    if not queries:
      return []
    body = json.dumps({'queries': list(queries), 'topk': topk, 'return_scores': True}).encode()
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(self._attempts) | tenacity.stop_before_delay(self._timeout),
        wait=tenacity.wait_exponential(self._backoff, max=5.0) + tenacity.wait_random(0, self._backoff),
        retry=tenacity.retry_if_exception_type(_Transient), reraise=True)
    deadline = time.monotonic() + self._timeout
    try:
      reply = retrying(self._post, body, deadline)
    except _Transient as error:
      attempts = retrying.statistics['attempt_number']
      raise SearchError(self.url, f'{error.reason} (attempts: {attempts})') from error
    try:
      return parse_reply(json.loads(reply), len(queries), topk)
    except (ValueError, RecursionError) as error:
      raise SearchError(self.url, f'not an answer of the retrieval protocol: {error}') from error

  def _post(self, body: bytes, deadline: float) -> bytes:
    """One attempt: the body of a good reply."""
    left = max(deadline - time.monotonic(), 0.01)
    chunks, size = [], 0
    try:
      with self._client.stream('POST', self._address, content=body, timeout=left,
                               headers={'content-type': 'application/json'}) as response:
        for chunk in response.iter_bytes():
          chunks.append(chunk)
          size += len(chunk)
          if size > MAX_REPLY_BYTES:
            raise SearchError(self.url, f'the reply is longer than {MAX_REPLY_BYTES} bytes')
          if time.monotonic() > deadline:  # httpx limits the wait for each piece, not for all of them
            raise _Transient(self.url, f'no whole reply within {self._timeout:g} s')
    except httpx.TimeoutException as error:
      raise _Transient(self.url, f'no reply within {self._timeout:g} s ({type(error).__name__})') from error
    except httpx.TransportError as error:
      raise _Transient(self.url, f'{type(error).__name__}: {error}') from error
    except httpx.HTTPError as error:
      raise SearchError(self.url, f'{type(error).__name__}: {error}') from error
    reply = b''.join(chunks)
    if response.is_success:
      return reply
    reason = f'status {response.status_code}: {reply[:200].decode(errors="replace")}'
    transient = response.is_server_error or response.status_code in _RETRIED_STATUS
    raise (_Transient if transient else SearchError)(self.url, reason)


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


def _is_loopback(host: str) -> bool:
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:  # a name, not a number
    return False
