"""The search back end over retrieval servers that speak Search-R1's protocol.

`POST /retrieve {"queries", "topk", "return_scores"}`. The response is `{"result": [[{"document": {"id",
"contents"}, "score"}, ...], ...]}`, a list for each query, or with `return_scores` false the documents
themselves. It is checked here, so that nothing further in has to. tools/http_server.py is a server.
"""

import functools
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, model_validator

from jaxsearch.data.corpus import Document, split_contents
from jaxsearch.tools import Backend
from jaxsearch.tools.cache import Cache
from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.http_client import JsonClient, RequestError, parse_json, secret_from_env

MAX_QUERIES = 32  # of one request
REQUESTS = 8      # at a time, to each server


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
  result: Annotated[list[Annotated[list[Hit], FailFast()]], FailFast()]


class HttpSearch(JsonClient):
  """Searches with retrieval servers of one corpus; may be called from several threads.

  Args:
    url: of the server; commas between several.
    cache: file that keeps the results, by corpus (its hash, where the server tells it, else the url), query
      and topk.
    replay: take results from the cache alone: a query that is not in it fails, and no server is asked.
  """

  error, default_path = SearchError, '/retrieve'

  def __init__(self, url: str, *, cache: str | os.PathLike | None = None, replay: bool = False, **options):
    super().__init__(url.split(','), **options)
    self._cache, self._corpus = Cache(cache, replay), ''  # what the server said that it serves
    together = lambda topk: functools.partial(self._ask_together, topk=topk)
    workers = REQUESTS * len(self._addresses)
    self._batched = functools.cache(lambda topk: DynamicBatcher(together(topk), workers, MAX_QUERIES))

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """Returns at most `topk` documents for each query, in the server's order.

    Queries of all threads that wait at the same time go in one request. Raises SearchError, and LookupError
    for a query that is not in a cache which is replayed.
    """
    if not self._cache:
      return self._find(queries, topk)
    corpus = self._corpus or self._cache.get(['corpus', self.identity], self._tell_corpus, again=True)
    return [self._kept(corpus, query, topk) for query in queries]

  def _kept(self, corpus: str, query: str, topk: int) -> list[Document]:
    """Returns the documents of a query, from the cache if they are there."""
    fields = lambda document: [document.id, document.title, document.text, document.score]
    fetch = lambda: list(map(fields, self._find([query], topk)[0]))
    return [Document(*kept) for kept in self._cache.get(['search', corpus, query, topk], fetch)]

  def _find(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
    results = self._batched(topk)(queries)
    for result in results:
      if isinstance(result, SearchError):
        raise result
    return results

  def _ask_together(self, queries: Sequence[str], topk: int) -> list[list[Document] | SearchError]:
    """Returns the documents of each query, or its error; one that the server cannot serve fails no other."""
    end = time.monotonic() + self._timeout
    try:
      return self._ask(queries, topk)
    except SearchError as error:
      failed, alone = error, error.fault in ('too_long', 'malformed') or error.status in (400, 413, 422, 500)
      if len(queries) == 1 or not alone:
        return [error] * len(queries)
    results = []
    for query in queries:
      results += self._ask_together([query], topk)
      same = len(results) > 1 and all(getattr(each, 'status', None) == 500 for each in results[-2:])
      if same or (failed.status == 500 and time.monotonic() > end):  # it fails at anything, or too slowly
        return results + [failed] * (len(queries) - len(results))
    return results

  def _tell_corpus(self) -> str:
    """Returns the corpus and index that a server says it serves; the url if none, as Search-R1's own."""
    for address in self._addresses:
      health = address.copy_with(path='/health', query=None)
      try:
        said = parse_json(self._request('GET', health, min(self._timeout, 5.0)))
        self._corpus = f'{said["corpus"]} {said.get("index", "")}'.strip()
        return self._corpus
      except SearchError as error:
        if error.fault == 'refused':
          break
        if address is self._addresses[-1]:
          raise
      except (ValueError, LookupError, TypeError):
        break
    self._corpus = self.identity
    return self._corpus

  def _ask(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
    def document(hit: Hit) -> Document:
      return Document(str(hit.document.id), *split_contents(hit.document.contents), hit.score)

    def parse(response: object) -> list[list[Document]]:
      result = Response.model_validate(response).result
      if len(result) != len(queries):
        raise ValueError(f'result: {len(result)} lists for {len(queries)} queries')
      return [list(map(document, hits[:topk])) for hits in result]

    return self.post({'queries': list(queries), 'topk': topk, 'return_scores': True}, parse)


def _open(settings: Any, **_) -> HttpSearch:
  return HttpSearch(settings.url, timeout=settings.timeout, cache=settings.cache, replay=settings.replay,
                    token=secret_from_env('JAXSEARCH_SEARCH_TOKEN'))


def _mistakes(settings: Any) -> Iterator[str]:
  if settings.replay and not (settings.backend == 'http' and pathlib.Path(settings.cache).is_file()):
    yield ("search.replay=True needs search.backend='http' and a recording in search.cache "
           f'(now {settings.cache!r})')


BACKEND = Backend(_open, needs=lambda settings: {'url': 'url'}, mistakes=_mistakes, by_source=True,
                  identity=lambda settings: {'url': settings.url})
