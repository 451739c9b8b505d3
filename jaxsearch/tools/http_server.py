"""HTTP servers: a search back end that many trainers share, and a policy that finds evidence for other models
(RSTool).

  search_app    POST /retrieve   {"queries": [...], "topk": 3, "return_scores": true}, see
                tools/search_http.py
  evidence_app  POST /evidence   {"question": "…"} or a list of questions, see tools/evidence_client.py
                GET /tool        the tool's function schema in OpenAI's format
  both          GET /health      requests in flight, and the hash of an index's corpus; needs no token
                GET /metrics     counts, times and memory for Prometheus

`make_app` has the checks around these, `bind` and `run` serve them. Refusals are `{"error": …}` with 400 for
what is not of the protocol, 401 for a missing token, 408 and 413 for what takes too long or is too large, 415
for what is not sent as JSON, 503 for what may be retried. Needs the extra `serve`.

Web pages in a browser on this machine can send requests, too. One that reaches it under a name of its own is
refused by its `Host`, all others by the content type: a browser asks before it sends JSON elsewhere.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import anyio.to_thread
import prometheus_client
import uvicorn
from pydantic import BaseModel, Field, StrictBool, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxsearch.data.corpus import join_contents
from jaxsearch.tools import SearchBackend
from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.evidence_client import SCHEMA, Evidence
from jaxsearch.tools.http_client import parse_json

CONNECTIONS = 256    # open ones of one address
HEAD_SECONDS = 10.0  # from a connection or a response to the next request
OURS = re.compile(r'(localhost|127(\.\d+){3}|\[::1\])(:\d+)?', re.IGNORECASE)  # a `Host` of this machine
RETRY = {'retry-after': '1'}


@dataclasses.dataclass(frozen=True)
class Limits:
  body_bytes: int = 2**20
  body_seconds: float = 10.0   # for a request to arrive whole
  requests: int = 256          # in flight; further ones get 503 and may be retried
  texts: int = 512             # queries or questions of one request
  text_chars: int = 8192       # of each
  topk: int = 100              # of a search
  threads: int = 4             # that search; more of BM25 would only take the processor from each other
  seconds: float = 60.0        # of a search, waiting for a thread included; then 503


def search_app(backend: SearchBackend, *, token: str | None = None, limits: Limits = Limits()) -> Starlette:
  """Returns the application around any search back end; with a `token`, requests must bring it."""
  threads = ThreadPoolExecutor(limits.threads)  # a search that is given up keeps its thread until it ends
  query = Annotated[str, Field(max_length=limits.text_chars)]

  class Retrieve(BaseModel):
    queries: Annotated[list[query], Field(max_length=limits.texts)]
    topk: Annotated[StrictInt, Field(ge=1, le=limits.topk)] | None = 3
    return_scores: StrictBool = False

  async def retrieve(request: object) -> dict:
    asked = Retrieve.model_validate(request)
    search = threads.submit(backend.search, asked.queries, asked.topk or 3)
    try:
      results = await asyncio.wait_for(asyncio.wrap_future(search), limits.seconds)
    except TimeoutError as error:
      raise HTTPException(503, f'the search took longer than {limits.seconds:g} s', RETRY) from error
    if len(results) != len(asked.queries):
      raise ValueError(f'{len(results)} lists of documents for {len(asked.queries)} queries')
    entry = lambda document: {'id': document.id, 'contents': join_contents(document.title, document.text)}
    scored = lambda document: {'document': entry(document), 'score': document.score}
    shown = scored if asked.return_scores else entry
    return {'result': [list(map(shown, documents)) for documents in results]}

  # Clients keep results under it.
  known = {'corpus': backend.corpus_hash} if hasattr(backend, 'corpus_hash') else {}
  return make_app('/retrieve', retrieve, 'search', token, limits, health=known)


def evidence_app(find: Callable[[list[str]], Sequence[Evidence]], *,
                 check: Callable[[str], None] = lambda question: None, token: str | None = None,
                 limits: Limits = Limits(requests=64, texts=64)) -> Starlette:
  """Returns the application around a function that finds evidence; with a `token`, requests must bring it.

  Args:
    find: evidence for questions; called for one batch at a time, with the questions of all requests that wait
      for it.
    check: raises ValueError for a question that is too long for the policy.
  """
  batched, threads = DynamicBatcher(find), anyio.CapacityLimiter(limits.requests)  # each waits for its batch
  text = Annotated[str, Field(pattern=r'\S', max_length=limits.text_chars)]

  class Ask(BaseModel):
    question: text | Annotated[list[text], Field(min_length=1, max_length=limits.texts)]

  async def evidence(request: object) -> object:
    question = Ask.model_validate(request).question
    questions = question if isinstance(question, list) else [question]
    try:
      for asked in questions:
        check(asked)
    except ValueError as error:
      raise HTTPException(413, str(error)) from error
    found = await anyio.to_thread.run_sync(batched, questions, limiter=threads)
    answers = list(map(dataclasses.asdict, found))
    return answers if isinstance(question, list) else answers[0]

  return make_app('/evidence', evidence, 'search for evidence', token, limits, pages={'/tool': SCHEMA})


def make_app(path: str, handle: Callable[[object], Awaitable[object]], name: str, token: str | None,
             limits: Limits, *, pages: Mapping[str, object] = {},
             health: Mapping[str, object] = {}) -> Starlette:
  """Returns an application that answers POST requests to `path` with what `handle` makes of their JSON.

  Args:
    handle: raises HTTPException or pydantic's ValidationError to refuse a request; anything else it raises is
      logged, and answered with 500.
    name: of what it does, for that answer.
    pages: JSON for GET requests, by path.
    health: what GET /health says besides the number of requests in flight.
  """
  in_flight, registry = anyio.CapacityLimiter(limits.requests), prometheus_client.CollectorRegistry()
  prometheus_client.ProcessCollector(registry=registry)
  seconds = prometheus_client.Histogram(
    'jaxsearch_request_seconds', 'Time of a request, by status', ['status'], registry=registry,
    buckets=[0.001 * 2**n for n in range(17)])
  waiting = prometheus_client.Gauge(
    'jaxsearch_requests_in_flight', 'Requests that have no response yet', registry=registry)
  waiting.set_function(lambda: in_flight.borrowed_tokens)

  def check(request: Request) -> None:
    given = request.headers.get('authorization', '').encode()
    if token and not hmac.compare_digest(given, f'Bearer {token}'.encode()):
      raise HTTPException(401, 'a bearer token is needed', {'www-authenticate': 'Bearer'})
    if not token and not OURS.fullmatch(request.headers.get('host', '')):
      raise HTTPException(400, 'the header Host names none of the names of this machine')

  async def respond(request: Request) -> JSONResponse:
    start, status = time.perf_counter(), 200
    try:
      check(request)
      if request.headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
        raise HTTPException(415, 'the content-type must be application/json')
      if in_flight.available_tokens < 1:
        raise HTTPException(503, f'{limits.requests} requests are in flight', RETRY)
      async with in_flight:
        return JSONResponse(await handle(await _read_body(request, limits)))
    except HTTPException as error:
      status = error.status_code
      raise
    except ValidationError as error:
      first = error.errors(include_url=False, include_input=False)[0]
      status = 413 if 'too_long' in first['type'] else 400
      place = '.'.join(map(str, first['loc'])) or 'the body'
      raise HTTPException(status, f'{place}: {first["msg"]}') from error
    except Exception as error:  # the client gets an answer and the log the cause
      status = 500
      logging.getLogger(__name__).exception('the %s failed', name)
      raise HTTPException(500, f'the {name} failed ({type(error).__name__})') from error
    finally:
      seconds.labels(status).observe(time.perf_counter() - start)

  async def show_page(request: Request) -> JSONResponse:
    check(request)
    return JSONResponse(pages[request.url.path])

  async def show_health(request: Request) -> JSONResponse:
    if not token:  # with one, a probe needs none
      check(request)
    return JSONResponse({'status': 'ok', 'requests': in_flight.borrowed_tokens, **health})

  async def show_metrics(request: Request) -> Response:
    check(request)
    text = prometheus_client.generate_latest(registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

  async def refuse(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({'error': error.detail}, error.status_code, error.headers)

  routes = [Route(path, respond, methods=['POST']), Route('/health', show_health),
            Route('/metrics', show_metrics), *(Route(page, show_page) for page in pages)]
  return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


async def _read_body(request: Request, limits: Limits) -> object:
  body = bytearray()
  try:
    async with asyncio.timeout(limits.body_seconds):
      async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body_bytes:
          raise HTTPException(413, f'the request is longer than {limits.body_bytes} bytes')
  except TimeoutError as error:
    raise HTTPException(408, f'the request took longer than {limits.body_seconds:g} s to arrive') from error
  try:
    return parse_json(bytes(body))
  except (ValueError, RecursionError) as error:
    raise HTTPException(400, f'bad JSON: {error}') from error


def bind(host: str, port: int, token: str | None = None) -> socket.socket:
  """Returns a listening socket. Port 0 takes a free one.

  Raises ValueError for an address that cannot be had, or that others reach without a `token`; says why.
  """
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
  except (OSError, OverflowError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(f'cannot listen on {host}:{port}: {reason}') from error
  if not (token or ipaddress.ip_address(listener.getsockname()[0]).is_loopback):
    listener.close()
    raise ValueError(f'--host {host} is reached from other machines: that needs a token (--token)')
  return listener


def run(app: Starlette, listener: socket.socket, name: str) -> None:
  """Prints `name` with its address, and serves the app until a signal; requests in flight are answered."""
  host, port = listener.getsockname()[:2]
  print(f'{name}: http://{f"[{host}]" if ":" in host else host}:{port}', flush=True)
  with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has stopped
    uvicorn.Server(make_server_config(app)).run(sockets=[listener])


class Protocol(H11Protocol):
  """Limits the connections of one address, and the time until the next request, as uvicorn's does not."""

  def connection_made(self, transport: asyncio.Transport) -> None:
    super().connection_made(transport)
    if sum(other.client[0] == self.client[0] for other in self.connections) > CONNECTIONS:
      transport.abort()
    self.loop.call_later(HEAD_SECONDS, self._close_unless_asked, None)

  def on_response_complete(self) -> None:
    self.loop.call_later(HEAD_SECONDS, self._close_unless_asked, self.cycle)
    super().on_response_complete()

  def _close_unless_asked(self, last: object) -> None:
    """Closes the connection without a request since the `last`; what is not read in a minute is not sent."""
    if self.cycle is last:
      self.transport.close()
      self.loop.call_later(60.0, self.transport.abort)


def make_server_config(app: Starlette) -> uvicorn.Config:
  """Configures uvicorn without its configuration of `logging`, which would close the handlers of every other
  library.

  Its own limit, of open connections, is a backstop behind `Limits.requests`. On SIGTERM it accepts no more,
  and requests in flight have a minute left.
  """
  return uvicorn.Config(app, http=Protocol, ws='none', log_config=None, log_level='warning', lifespan='off',
                        limit_concurrency=2 * CONNECTIONS, timeout_graceful_shutdown=60)
