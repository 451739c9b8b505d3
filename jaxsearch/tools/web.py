"""Searching the web: client of SERPER, which returns Google's results as JSON (https://serper.dev).

`POST https://google.serper.dev/search {"q", "num"}` with the header `X-API-KEY`. The documents of a query are its
answer box and its knowledge graph where there are any, then the `organic` results: title and snippet. Searches cost
money, so they are paced, and kept in a file if one is named.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jaxsearch.data.corpus import Document
from jaxsearch.tools.cache import open_cache
from jaxsearch.tools.http_client import Poster, key_from
from jaxsearch.tools.search_client import SearchError

SERPER = 'https://google.serper.dev/search'


class WebSearch:
  """Searches with SERPER; may be called from several threads."""

  def __init__(self, url: str = SERPER, *, timeout: float = 30.0, attempts: int = 4, backoff: float = 0.5,
               rate: float = 20.0, cache: str | os.PathLike | None = None, key_variable: str = 'SERPER_API_KEY'):
    """Opens no connection yet.

    Args:
      url: the whole address, if not SERPER's own.
      timeout, attempts, backoff: of one query, see `tools.post.Poster`.
      rate: requests begun per second, by all threads of this process together.
      cache: file that keeps the documents of a query; None keeps nothing.
      key_variable: the environment variable that holds the API key.

    Raises:
      ValueError: the variable holds no key; names it.
    """
    key = key_from(key_variable)
    if key is None:
      raise ValueError(f'searching the web needs an API key in the environment variable {key_variable}')
    self._poster = Poster(url, SearchError, 'SERPER protocol', timeout=timeout, attempts=attempts, backoff=backoff,
                          headers={'x-api-key': key}, secret=key, rate=rate)
    self.url = self._poster.url
    self._cache = open_cache(cache)

  def close(self) -> None:
    self._poster.close()

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, in Google's order, one query after the other; none for a blank one.

    Raises:
      SearchError: no answer in time, a refusal, or an answer that is not of the protocol.
    """
    if isinstance(queries, str):
      raise TypeError('queries must be a list of strings, not one string')
    if topk < 1:
      raise ValueError(f'topk={topk} must be at least 1')
    return [self._find(query, topk) if query.strip() else [] for query in queries]

  def _find(self, query: str, topk: int) -> list[Document]:
    body = {'q': ' '.join(query.split()), 'num': topk}
    found = self._cache.answer(body, lambda: self._poster.post(body, lambda reply: parse_results(reply, topk)))
    return [Document(*fields) for fields in found]


def parse_results(reply: object, topk: int) -> list[tuple[str, str, str]]:
  """(address, title, text) of the first `topk` documents of a reply.

  Raises:
    ValueError: the reply has another shape; names the place in it.
  """
  if not isinstance(reply, dict) or not isinstance(reply.get('organic'), list):
    raise ValueError("no list 'organic' in it")
  found = [_document(reply[name], name) for name in ('answerBox', 'knowledgeGraph') if reply.get(name) is not None]
  found += [_document(item, f'organic[{i}]') for i, item in enumerate(reply['organic'][:topk])]
  return [document for document in found if document[2]][:topk]


def _document(item: Any, place: str) -> tuple[str, str, str]:
  """A result, an answer box or a knowledge graph; the text is '' where it has none, as some pages have no snippet."""
  if not isinstance(item, dict):
    raise ValueError(f'{place} is not an object')
  attributes = item.get('attributes', {})
  if not isinstance(attributes, dict):
    raise ValueError(f"'attributes' of {place} is not an object")
  told = [_field(item, name, place) for name in ('answer', 'type', 'description', 'snippet')]
  told += [f'{_clean(name)}: {_field(attributes, name, place)}' for name in attributes]
  told = [part for part in told if part]
  text = ' '.join([*(part if part.endswith('.') else part + '.' for part in told[:-1]), *told[-1:]])
  return _field(item, 'link', place) or _field(item, 'descriptionLink', place), _field(item, 'title', place), text


def _field(item: dict, name: str, place: str) -> str:
  value = item.get(name, '')
  if isinstance(value, bool) or not isinstance(value, (str, int, float)):
    raise ValueError(f'{name!r} of {place} is not text')
  return _clean(str(value))


def _clean(text: str) -> str:
  return text.encode('utf-8', 'replace').decode().strip()  # half a surrogate pair passes JSON and would break a tokenizer
