"""The search back end over Google, by way of SERPER (https://serper.dev).

`POST https://google.serper.dev/search {"q", "num"}` with the header `X-API-KEY`. The documents of a query are
its answer box and its knowledge graph where there are any, then the `organic` results: title and snippet.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast

from jaxsearch.data.corpus import Document
from jaxsearch.tools import Backend
from jaxsearch.tools.cache import Cache
from jaxsearch.tools.http_client import JsonClient, secret_from_env
from jaxsearch.tools.search_http import SearchError

SERPER = 'https://google.serper.dev/search'


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
  organic: Annotated[list[WebResult], FailFast()]


class WebSearch(JsonClient):
  """Searches with SERPER; may be called from several threads.

  Args:
    url: the whole address, if not SERPER's own.
    cache: file that keeps the documents of a query; None keeps nothing.
    price: of a credit; a search costs one or, with many results, more.

  `paid` counts credits: SERPER takes them for successful responses alone. Raises ValueError if the
  environment variable SERPER_API_KEY holds no key.
  """

  error = SearchError

  def __init__(self, url: str = SERPER, *, cache: str | os.PathLike | None = None, price: float = 0.0,
               **options):
    key = secret_from_env('SERPER_API_KEY')
    if key is None:
      raise ValueError('searching the web needs an API key in the environment variable SERPER_API_KEY')
    super().__init__([url], token=key, token_header='x-api-key', **{'backoff': 0.5} | options)
    self._cache, self.price, self.paid, self._paying = Cache(cache), price, 0, threading.Lock()

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """Returns at most `topk` documents for each query, one query after the other.

    A blank query is not sent and gets no documents. Raises SearchError.
    """
    return [self._find(query, topk) if query.strip() else [] for query in queries]

  def _find(self, query: str, topk: int) -> list[Document]:
    body = {'q': ' '.join(query.split()), 'num': topk}

    def parse(response: object) -> list[tuple[str, str, str]]:
      told = response.get('credits') if isinstance(response, dict) else None
      with self._paying:
        self.paid += told if isinstance(told, int) and told >= 0 else 1
      return parse_response(response, topk)

    kept = self._cache.get([self.identity, body], lambda: self.post(body, parse))
    return [Document(*fields) for fields in kept]


def parse_response(response: object, topk: int) -> list[tuple[str, str, str]]:
  """Returns (address, title, text) of the first `topk` results with a text.

  Raises ValueError for a response of another shape.
  """
  told = WebResponse.model_validate(response)
  results = [told.answerBox, told.knowledgeGraph, *told.organic]
  texts = [(result.link or result.descriptionLink, result.title, result.text)
           for result in results if result and result.text]
  return texts[:topk]


def _mistakes(settings: Any) -> Iterator[str]:
  if settings.backend == 'web' and not os.environ.get('SERPER_API_KEY'):
    yield "search.backend='web' needs a key in the environment variable SERPER_API_KEY"


BACKEND = Backend(lambda settings, **_: WebSearch(settings.url or SERPER, timeout=settings.timeout,
                                                  cache=settings.cache, price=settings.price),
                  mistakes=_mistakes, identity=lambda settings: {'url': settings.url})
