"""The search back end over retrieval servers that speak Search-R1's protocol.

`POST /retrieve {"queries", "topk", "return_scores"}`. The response is `{"result": [[{"document": {"id",
"contents"}, "score"}, ...], ...]}`, a list for each query, or with `return_scores` false the documents
themselves. It is checked here, so that nothing further in has to. `HttpSearch` asks one server,
`SearchServers` several; tools/http_server.py is a server.
"""

import itertools
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator

from jaxsearch.data.corpus import Document, split_contents
from jaxsearch.tools import Backend, check_search
from jaxsearch.tools.cache import Cache, NotRecorded
from jaxsearch.tools.http_client import JsonClient, RequestError, secret_from_env

MAX_HITS = 100  # of a query that are looked at; a server at fault may send millions
MAX_ID = 1000  # characters of an id that are kept
MAX_TOGETHER = 8  # a response to several queries may be as long as so many to one
MAX_QUERIES = 64  # of one request
TRANSIENT = ('timeout', 'connection', 'server')  # faults of a server; others are the request's own
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


def _document(hit: Hit) -> Document:
  return Document(str(hit.document.id)[:MAX_ID], *split_contents(hit.document.contents), hit.score)


class HttpSearch(JsonClient):
  """Searches with a retrieval server; may be called from several threads. Args as of `JsonClient`."""

  error, default_path = SearchError, '/retrieve'

  def search(self, queries: Sequence[str], topk: int = 3, **limits) -> list[list[Document]]:
    """Returns at most `topk` documents for each query, in the server's order.

    `limits` as of `post`. Raises SearchError.
    """
    check_search(queries, topk)
    if not queries:
      return []

    def parse(response: object) -> list[list[Document]]:
      result = Response.model_validate(response).result
      if len(result) != len(queries):
        raise ValueError(f'result: {len(result)} lists for {len(queries)} queries')
      return [[_document(hit) for hit in hits[:topk]] for hits in result]

    body = {'queries': list(queries), 'topk': topk, 'return_scores': True}
    return self.post(body, parse, min(len(queries), MAX_TOGETHER), **limits)

  def corpus_hash(self) -> str:
    """Returns the corpus that the server says it serves.

    '' if it does not say, as Search-R1's own. Raises SearchError.
    """
    try:
      told = self.get('/health', min(self._timeout, 5.0))
    except SearchError as error:
      if error.fault in ('connection', 'timeout'):
        raise
      return ''
    return str(told.get('corpus', ''))[:MAX_ID] if isinstance(told, dict) else ''


class SearchServers:
  """Searches with one retrieval server or several of the same corpus; may be called from several threads.

  Args:
    urls: of the servers. Requests go round; one that fails is sent to the next.
    timeout: seconds for a search, all servers and attempts together.
    attempts: of the last server that is left; the others have one each.
    cache: file that keeps the results, by corpus (its hash, where the server tells it, else the url), query
      and topk.
    replay: take results from the cache alone: a query that is not in it fails, and no server is asked.
    options: of `JsonClient`.
  """

  def __init__(self, urls: Sequence[str], *, timeout: float = 30.0, attempts: int = 4,
               cache: str | os.PathLike | None = None, replay: bool = False, **options):
    self._servers = [HttpSearch(url, timeout=timeout, attempts=attempts, **options) for url in urls]
    self._timeout, self._attempts, self._cache = timeout, attempts, Cache(cache, replay=replay)
    self._turn, self._corpus = itertools.count(), ''  # what results are kept under
    self.url = ','.join(server.url for server in self._servers)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """Returns at most `topk` documents for each query, in the server's order. Raises SearchError."""
    check_search(queries, topk)
    if not self._cache:
      return self._ask(queries, topk)
    try:
      self._corpus = self._corpus or self._cache.get(['corpus', self.url], self._tell_corpus)
      return [[Document(*fields) for fields in self._kept(query, topk)] for query in queries]
    except NotRecorded as error:
      raise SearchError(self.url, str(error)) from None

  def _kept(self, query: str, topk: int) -> list[list]:
    """Returns the fields of the documents of a query, from the cache if they are there."""
    fetch = lambda: [[one.id, one.title, one.text, one.score] for one in self._ask([query], topk)[0]]
    return self._cache.get(['search', self._corpus, query, topk], fetch)

  def _tell_corpus(self) -> str:
    hashes = {server.corpus_hash() for server in self._servers}
    if len(hashes) > 1:
      raise SearchError(self.url, 'the servers serve different corpora', 'malformed')
    return hashes.pop() or self.url

  def _ask(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
    deadline = time.monotonic() + self._timeout
    parts = [queries[start:start + MAX_QUERIES] for start in range(0, len(queries), MAX_QUERIES)]
    return [found for part in parts for found in self._failover(part, topk, deadline)]

  def _failover(self, queries: Sequence[str], topk: int, deadline: float) -> list[list[Document]]:
    """Returns the first response of a server, tried one after the other. Raises SearchError."""
    first, number = next(self._turn), len(self._servers)
    for left in range(number, 0, -1):
      timeout = max(deadline - time.monotonic(), 0.05) / left  # the servers that are left want time, too
      try:
        return self._servers[(first - left) % number].search(
          queries, topk, timeout=timeout, attempts=self._attempts if left == 1 else 1)
      except SearchError as failure:
        if left == 1 or failure.fault not in TRANSIENT:
          raise


def _open(settings: Any, **_) -> SearchServers:
  return SearchServers(settings.url.split(','), timeout=settings.timeout, cache=settings.cache,
                       replay=settings.replay, token=secret_from_env('JAXSEARCH_SEARCH_TOKEN'))


def _mistakes(settings: Any) -> Iterator[str]:
  if settings.replay and not (settings.backend == 'http' and pathlib.Path(settings.cache).is_file()):
    yield ("search.replay=True needs search.backend='http' and a recording in search.cache "
           f'(now {settings.cache!r})')


BACKEND = Backend(_open, needs=lambda settings: {'url': 'url'}, mistakes=_mistakes, by_source=True,
                  identity=lambda settings: {'url': settings.url})
