"""HTTP servers: a search back end that many trainers share, and a policy that finds evidence for other models
(RSTool).

  jaxsearch serve --index DIR --port 8000          (or --corpus corpus.jsonl)
    POST /retrieve   {"queries": [...], "topk": 3, "return_scores": true}; for the response see
    `tools.search_http`
  jaxsearch serve --as-tool --config configs/r_search.py --checkpoint runs/r_search
    POST /evidence   {"question": "…"} or a list of questions; for the response see `tools.evidence_client`
    GET /tool        the tool's function schema in OpenAI's format
  both
    GET /health      requests in flight, and the hash of an index's corpus; needs no token
    GET /metrics     counts, times and memory for Prometheus

`search_app` and `evidence_app` are these two protocols, `make_app` the checks around them, `bind` and `run`
serve them. Refusals are `{"error": …}` with 400 for what is not of the protocol, 401 for a missing token, 408
and 413 for what takes too long or is too large, 415 for what is not sent as JSON, 429 and 503 for what may be
retried. Needs the extra `serve`.

Web pages in a browser on this machine can send requests here, too. One that reaches this machine under a name
of its own is refused by its `Host`, all others by the content type: a browser asks before it sends JSON
elsewhere.
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

import anyio.to_thread
import prometheus_client
import uvicorn
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
  questions: int = 256         # in flight, of all requests for evidence; further ones get 429


def search_app(backend: SearchBackend, *, token: str | None = None, limits: Limits = Limits()) -> Starlette:
  """Returns the application around any search back end; with a `token`, requests must bring it."""
  threads = ThreadPoolExecutor(limits.threads)  # a search that is given up keeps its thread until it ends

  async def retrieve(request: dict) -> dict:
    queries, return_scores = request.get('queries'), request.get('return_scores', False)
    topk = 3 if request.get('topk') is None else request['topk']
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
      raise HTTPException(400, "'queries' must be a list of strings")
    _check_size(queries, 'queries', limits)
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= limits.topk:
      raise HTTPException(400, f"'topk' must be a whole number from 1 to {limits.topk}")
    if not isinstance(return_scores, bool):
      raise HTTPException(400, "'return_scores' must be true or false")
    try:
      async with asyncio.timeout(limits.seconds):
        results = await asyncio.get_running_loop().run_in_executor(threads, backend.search, queries, topk)
    except TimeoutError as error:
      raise HTTPException(503, f'the search took longer than {limits.seconds:g} s', RETRY) from error
    if len(results) != len(queries):
      raise ValueError(f'{len(results)} lists of documents for {len(queries)} queries')
    entry = lambda document: {'id': document.id, 'contents': join_contents(document.title, document.text)}
    scored = lambda document: {'document': entry(document), 'score': document.score}
    return {'result': [list(map(scored if return_scores else entry, documents)) for documents in results]}

  # Clients keep results under it.
  known = {'corpus': backend.corpus_hash} if hasattr(backend, 'corpus_hash') else {}
  return make_app('/retrieve', retrieve, 'search', token, limits, health=lambda: known)


def evidence_app(find: Callable[[list[str]], Sequence[Evidence]], *,
                 check: Callable[[str], None] = lambda question: None, token: str | None = None,
                 limits: Limits = Limits(requests=64, texts=64)) -> Starlette:
  """Returns the application around a function that finds evidence; with a `token`, requests must bring it.

  Args:
    find: evidence for questions; called for one batch at a time, with the questions of all requests that wait
      for it.
    check: raises ValueError for a question that is too long for the policy.
  """
  batched, in_flight = DynamicBatcher(find), 0
  threads = anyio.CapacityLimiter(limits.requests)  # each waits for its batch

  async def evidence(request: dict) -> object:
    nonlocal in_flight
    question = request.get('question')
    questions = question if isinstance(question, list) else [question]
    if not questions or not all(isinstance(question, str) and question.strip() for question in questions):
      raise HTTPException(400, "'question' must be text that is not blank, or a list of such texts")
    _check_size(questions, 'questions', limits)
    try:
      for text in questions:
        check(text)
    except ValueError as error:
      raise HTTPException(413, str(error)) from error
    if in_flight + len(questions) > limits.questions:
      raise HTTPException(429, f'{in_flight} questions are in flight, of {limits.questions} at most', RETRY)
    in_flight += len(questions)
    try:
      found = await anyio.to_thread.run_sync(batched, questions, limiter=threads)
    finally:
      in_flight -= len(questions)
    found = list(map(dataclasses.asdict, found))
    return found if isinstance(question, list) else found[0]

  return make_app('/evidence', evidence, 'search for evidence', token, limits, {'/tool': SCHEMA},
                  lambda: {'questions': in_flight})


def make_app(path: str, handle: Callable[[dict], Awaitable[object]], name: str, token: str | None,
             limits: Limits, pages: Mapping[str, object] = {},
             health: Callable[[], Mapping[str, object]] = dict) -> Starlette:
  """Returns an application that answers POST requests to `path` with what `handle` makes of their JSON
  object.

  Args:
    handle: raises HTTPException to refuse a request; anything else it raises is logged, and answered with
      500.
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

  def check(request: Request, needs_token: bool = True) -> None:
    given = request.headers.get('authorization', '').encode()
    if token and hmac.compare_digest(given, f'Bearer {token}'.encode()):
      return
    if not _is_known(request.headers.get('host', ''), beyond=token is not None):
      raise HTTPException(400, 'the header Host names none of the names of this server')
    if token and needs_token:
      raise HTTPException(401, 'a bearer token is needed', {'www-authenticate': 'Bearer'})

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
    check(request, needs_token=False)
    return JSONResponse({'status': 'ok', 'requests': in_flight.borrowed_tokens, **health()})

  async def show_metrics(request: Request) -> Response:
    check(request)
    text = prometheus_client.generate_latest(registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

  async def refuse(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({'error': error.detail}, error.status_code, error.headers)

  routes = [Route(path, respond, methods=['POST']), Route('/health', show_health),
            Route('/metrics', show_metrics), *(Route(page, show_page) for page in pages)]
  return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


def _is_known(host: str, beyond: bool) -> bool:
  """Tells whether a `Host` is localhost or its address.

  If others are served too (`beyond`), any address or our name.
  """
  name = re.sub(r':\d*$', '', host).strip('[]').lower()
  try:
    return ipaddress.ip_address(name).is_loopback or beyond
  except ValueError:  # it is a name
    return name == 'localhost' or (beyond and name == socket.gethostname().lower())


def _check_size(texts: Sequence[str], name: str, limits: Limits) -> None:
  if len(texts) > limits.texts or any(len(text) > limits.text_chars for text in texts):
    raise HTTPException(413, f'at most {limits.texts} {name} of {limits.text_chars} characters')


async def _read_body(request: Request, limits: Limits) -> dict:
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
    parsed = parse_json(bytes(body))
  except (ValueError, RecursionError) as error:
    raise HTTPException(400, f'bad JSON: {error}') from error
  if not isinstance(parsed, dict):
    raise HTTPException(400, 'expected a JSON object')
  return parsed


def bind(host: str, port: int, token: str | None = None) -> socket.socket:
  """Returns a bound socket that does not listen yet, so that no client waits while a model is loaded. Port 0
  takes a free one.

  Raises ValueError for an address that cannot be had, or that others reach without a `token`; says why.
  """
  if not 0 <= port < 2**16:  # getaddrinfo would take it modulo 2**16
    raise ValueError(f'cannot listen on {host}:{port}: a port is a number from 0 to 65535')
  with contextlib.ExitStack() as stack:
    try:
      family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
      if not (token or ipaddress.ip_address(address[0]).is_loopback):
        raise ValueError(f'--host {host} is reached from other machines: that needs a token (--token)')
      listener = stack.enter_context(socket.socket(family, kind, protocol))
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind(address)
    except OSError as error:
      raise ValueError(f'cannot listen on {host}:{port}: {error.strerror or error}') from error
    stack.pop_all()
  return listener


def run(app: Starlette, listener: socket.socket, name: str) -> None:
  """Prints `name` with its address, and serves the app until a signal.

  Requests in flight are answered first.
  """
  listener.listen()
  host, port = listener.getsockname()[:2]
  print(f'{name}: http://{f"[{host}]" if ":" in host else host}:{port}', flush=True)
  with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has stopped
    uvicorn.Server(make_server_config(app)).run(sockets=[listener])


class Protocol(H11Protocol):
  """Adds limits that uvicorn's lacks:

  Of connections of one address, and of the time until the next request.
  """

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
