"""Search back ends behind a server: retrieval servers that speak Search-R1's protocol, and Google through SERPER.

`SearchServers` is the back end over one server or several: it goes to the next server when one fails, and keeps results in a
file if one is named.

`HttpSearch`, one server: `POST /retrieve {"queries", "topk", "return_scores"}`. The response is
`{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each query, or with `return_scores` false the
documents themselves. It is checked here, so that nothing further in has to. Its server is `tools.http_server.search_app`.

`WebSearch`: `POST https://google.serper.dev/search {"q", "num"}` with the header `X-API-KEY` (https://serper.dev). The documents
of a query are its answer box and its knowledge graph where there are any, then the `organic` results: title and snippet.
Searches cost money, so they are rate-limited, counted, and kept in a file if one is named.
"""

import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from jaxsearch.data.corpus import Document, split_contents
from jaxsearch.tools import check_search
from jaxsearch.tools.cache import Cache, NotRecorded
from jaxsearch.tools.http_client import JsonClient, RequestError, secret_from_env

SERPER = 'https://google.serper.dev/search'
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


class HttpSearch(JsonClient):
  """Searches with a retrieval server; may be called from several threads. Args as of `JsonClient`."""

  error, default_path = SearchError, '/retrieve'

  def search(self, queries: Sequence[str], topk: int = 3, **limits) -> list[list[Document]]:
    """At most `topk` documents for each query, in the server's order; `limits` as of `post`. Raises SearchError."""
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
    return self.post(body, parse, min(len(queries), MAX_TOGETHER), **limits)

  def corpus_hash(self) -> str:
    """The corpus that the server says it serves; '' if it does not say, as Search-R1's own. Raises SearchError."""
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
    cache: file that keeps the results, by corpus (its hash, where the server tells it, else the url), query and topk.
    replay: take results from the cache alone: a query that is not in it fails, and no server is asked.
    options: of `JsonClient`.
  """

  def __init__(self, urls: str | Sequence[str], *, timeout: float = 30.0, attempts: int = 4,
               cache: str | os.PathLike | None = None, replay: bool = False, **options):
    urls = [urls] if isinstance(urls, str) else list(urls)
    if replay and not (cache and os.path.exists(cache)):
      raise ValueError(f'replay needs a cache that was recorded: {cache or "no file is named"}')
    self._servers = [HttpSearch(url, timeout=timeout, attempts=attempts, **options) for url in urls]
    self._timeout, self._attempts, self._cache = timeout, attempts, Cache(cache, replay=replay)
    self._turn, self._identity = itertools.count(), ''

  @property
  def url(self) -> str:
    return ','.join(server.url for server in self._servers)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, in the server's order. Raises SearchError."""
    check_search(queries, topk)
    if not self._cache:
      return self._ask(queries, topk)
    fields = lambda found: [[one.id, one.title, one.text, one.score] for one in found]
    try:
      return [[Document(*own) for own in self._cache.get(
        ['search', self._corpus(), query, topk], lambda: fields(self._ask([query], topk)[0]))] for query in queries]
    except NotRecorded as error:
      raise SearchError(self.url, str(error)) from None

  def _corpus(self) -> str:
    """What results are kept under."""
    if not self._identity:
      def ask() -> str:
        told = {server.corpus_hash() for server in self._servers}
        if len(told) > 1:
          raise SearchError(self.url, 'the servers serve different corpora', 'malformed')
        return told.pop() or self.url
      self._identity = self._cache.get(['corpus', self.url], ask)
    return self._identity

  def _ask(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
    deadline = time.monotonic() + self._timeout
    parts = [queries[start:start + MAX_QUERIES] for start in range(0, len(queries), MAX_QUERIES)]
    return [found for part in parts for found in self._failover(part, topk, deadline)]

  def _failover(self, queries: Sequence[str], topk: int, deadline: float) -> list[list[Document]]:
    """The first response of a server, tried one after the other. Raises SearchError."""
    first, number = next(self._turn), len(self._servers)
    for left in range(number, 0, -1):
      timeout = max(deadline - time.monotonic(), 0.05) / left  # the servers that are left want time, too
      try:
        return self._servers[(first - left) % number].search(
          queries, topk, timeout=timeout, attempts=self._attempts if left == 1 else 1)
      except SearchError as failure:
        if left == 1 or failure.fault not in TRANSIENT:
          raise


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
    price: of a credit; a search costs one or, with many results, more.
    options: of `JsonClient`; the timeout is that of one query.

  Attributes:
    paid: credits so far. SERPER takes them for successful responses alone; what comes out of the cache costs none.

  Raises ValueError if the environment variable SERPER_API_KEY holds no key.
  """

  error = SearchError

  def __init__(self, url: str = SERPER, *, cache: str | os.PathLike | None = None, price: float = 0.0, **options):
    key = secret_from_env('SERPER_API_KEY')
    if key is None:
      raise ValueError('searching the web needs an API key in the environment variable SERPER_API_KEY')
    super().__init__(url, token=key, token_header='x-api-key', **{'backoff': 0.5, 'rate': 20.0} | options)
    self._cache, self.price, self.paid, self._paying = Cache(cache), price, 0, threading.Lock()

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, one query after the other; none for a blank one. Raises SearchError."""
    check_search(queries, topk)
    return [self._find(query, topk) if query.strip() else [] for query in queries]

  def _find(self, query: str, topk: int) -> list[Document]:
    body = {'q': ' '.join(query.split()), 'num': topk}

    def parse(response: object) -> list[tuple[str, str, str]]:
      told = response.get('credits') if isinstance(response, dict) else None
      with self._paying:
        self.paid += told if isinstance(told, int) and told >= 0 else 1
      return parse_response(response, topk)

    return [Document(*fields) for fields in self._cache.get(body, lambda: self.post(body, parse))]


def parse_response(response: object, topk: int) -> list[tuple[str, str, str]]:
  """(address, title, text) of the first `topk` results with a text. Raises ValueError for a response of another shape."""
  found = WebResponse.model_validate(response)
  results = [result for result in (found.answerBox, found.knowledgeGraph, *found.organic[:topk]) if result and result.text]
  return [(result.link or result.descriptionLink, result.title, result.text) for result in results[:topk]]
