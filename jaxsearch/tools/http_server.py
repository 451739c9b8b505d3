"""HTTP servers: a search back end that many trainers share, and a policy that finds evidence for other models
(RSTool).

  search_app    POST /retrieve   {"queries": [...], "topk": 3, "return_scores": true}, see
                tools/search_http.py
  evidence_app  POST /evidence   {"question": "…"} or a list of questions
                GET /tool        the tool's function schema in OpenAI's format
  both          GET /health      requests in flight, and the hash of an index's corpus; needs no token
                GET /metrics     counts, times and memory for Prometheus

`make_app` has the checks around these, `bind` and `run` serve them. Refusals are `{"error"}` with 400 for
what is not of the protocol, 401 for a missing token, 413 for what is too large, 415 for what is not sent as
JSON, 503 for what may be retried. Needs the extra `serve`.

Web pages in a browser on this machine can send requests, too. `Host` refuses those that use DNS rebinding,
the content type all others: a browser sends JSON to another origin only after a preflight request.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import anyio
import prometheus_client
import uvicorn
from pydantic import BaseModel, Field, StrictBool, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxsearch.data.corpus import join_contents
from jaxsearch.tools import SearchBackend
from jaxsearch.tools.dynamic_batcher import DynamicBatcher

CONNECTIONS = 1024  # open ones
OURS = ['localhost', '127.0.0.1', '::1', '[::1]']  # a `Host` of this machine
RETRY = {'retry-after': '1'}
# Of the tool, to a model that calls functions.
SCHEMA = {'type': 'function', 'function': {
  'name': 'search_evidence',
  'description': (
    'Searches a corpus in as many steps as a question needs, and returns the passages that answer it, in '
    'their own words. Ask it the whole question, not keywords.'),
  'parameters': {
    'type': 'object',
    'properties': {
      'question': {'type': 'string', 'description': 'The question, complete and in plain words.'}},
    'required': ['question'],
    'additionalProperties': False}}}


@dataclasses.dataclass(frozen=True)
class Limits:
  body_bytes: int = 2**20
  requests: int = 256          # in flight; further ones get 503 and may be retried
  texts: int = 4096            # queries or questions of one request
  text_chars: int = 8192       # of each
  topk: int = 100              # of a search
  threads: int = 4             # that serve; more of BM25 would only take the processor from each other
  seconds: float = 60.0        # of a request, its arrival and waiting for a thread included; then 503


def search_app(backend: SearchBackend, *, token: str | None = None, limits: Limits = Limits()) -> Starlette:
  """Returns the application around any search back end; with a `token`, requests must bring it."""
  query = Annotated[str, Field(max_length=limits.text_chars)]

  class Retrieve(BaseModel):
    queries: Annotated[list[query], Field(max_length=limits.texts)]
    topk: Annotated[StrictInt, Field(ge=1, le=limits.topk)] | None = 3
    return_scores: StrictBool = False

  def retrieve(asked: Retrieve) -> dict:
    results = backend.search(asked.queries, asked.topk or 3)
    if len(results) != len(asked.queries):
      raise ValueError(f'{len(results)} lists of documents for {len(asked.queries)} queries')
    entry = lambda document: {'id': document.id, 'contents': join_contents(document.title, document.text)}
    scored = lambda document: {'document': entry(document), 'score': document.score}
    shown = scored if asked.return_scores else entry
    return {'result': [list(map(shown, documents)) for documents in results]}

  # GET /health reports it; clients use it as the key of their caches.
  known = getattr(backend, 'known', {})
  return make_app('/retrieve', Retrieve, retrieve, 'search', token, limits, health=known)


def evidence_app(find: Callable[[list[str]], Sequence[dict]], *,
                 check: Callable[[str], None] = lambda question: None, token: str | None = None,
                 limits: Limits = Limits(requests=64, texts=64, threads=64, seconds=600.0)) -> Starlette:
  """Returns the application around a function that finds evidence; with a `token`, requests must bring it.

  Args:
    find: returns for each question {"evidence", "answer", "searches", "forfeited"}: '' if none was found or
      well written, the policy's own answer or None, the number of searches, and whether evidence is withheld
      since it came before any documents. Called for one batch at a time, with the questions of all requests
      that wait.
    check: raises ValueError for a question that is too long for the policy.
  """
  batched, text = DynamicBatcher(find), Annotated[str, Field(pattern=r'\S', max_length=limits.text_chars)]

  class Ask(BaseModel):
    question: text | Annotated[list[text], Field(min_length=1, max_length=limits.texts)]

  def evidence(asked: Ask) -> object:
    questions = asked.question if isinstance(asked.question, list) else [asked.question]
    try:
      for question in questions:
        check(question)
    except ValueError as error:
      raise HTTPException(413, str(error)) from error
    answers = batched(questions)
    return answers if isinstance(asked.question, list) else answers[0]

  return make_app('/evidence', Ask, evidence, 'search for evidence', token, limits, pages={'/tool': SCHEMA})


def make_app(path: str, model: type[BaseModel], handle: Callable[[Any], object], name: str,
             token: str | None, limits: Limits, *, pages: Mapping[str, object] = {},
             health: Mapping[str, object] = {}) -> Starlette:
  """Returns an application that answers POST requests to `path` with the JSON that `handle` returns.

  Args:
    model: of a request.
    handle: called with one on a thread. It refuses a request by HTTPException; anything else it raises is
      logged, and answered with 500.
    name: of what it does, for that answer.
    pages: JSON for GET requests, by path.
    health: what GET /health says besides the number of requests in flight.
  """
  in_flight, registry = anyio.CapacityLimiter(limits.requests), prometheus_client.CollectorRegistry()
  threads = ThreadPoolExecutor(limits.threads)  # a request that is given up keeps its thread until it ends
  prometheus_client.ProcessCollector(registry=registry)
  seconds = prometheus_client.Histogram(
    'jaxsearch_request_seconds', 'Time of a request, by status', ['status'], registry=registry,
    buckets=[0.001 * 2**n for n in range(17)])
  waiting = prometheus_client.Gauge(
    'jaxsearch_requests_in_flight', 'Requests that have no response yet', registry=registry)
  waiting.set_function(lambda: in_flight.borrowed_tokens)

  def check_token(request: Request) -> None:
    given = request.headers.get('authorization', '').encode()
    if token and not hmac.compare_digest(given, f'Bearer {token}'.encode()):
      raise HTTPException(401, 'a bearer token is needed', {'www-authenticate': 'Bearer'})

  async def respond(request: Request) -> Response:
    start, status = time.perf_counter(), 200
    try:
      check_token(request)
      if request.headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
        raise HTTPException(415, 'the content-type must be application/json')
      if in_flight.available_tokens < 1:
        raise HTTPException(503, f'{limits.requests} requests are in flight', RETRY)
      async with in_flight, asyncio.timeout(limits.seconds):
        asked = model.model_validate_json(await _read_body(request, limits.body_bytes))
        return JSONResponse(await asyncio.wrap_future(threads.submit(handle, asked)))
    except HTTPException as error:
      status = error.status_code
      raise
    except ValidationError as error:
      errors = error.errors(include_url=False, include_input=False)
      first = next((one for one in errors if one['type'] != 'string_type'), errors[0])  # of a text or a list
      status = 413 if 'too_long' in first['type'] else 400
      place = '.'.join(map(str, first['loc'])) or 'the body'
      raise HTTPException(status, f'{place}: {first["msg"]}') from error
    except TimeoutError as error:
      status = 503
      raise HTTPException(503, f'the {name} took longer than {limits.seconds:g} s', RETRY) from error
    except ClientDisconnect:  # nobody is left to answer
      status = 499
      return Response(status_code=status)
    except Exception as error:  # the client gets an answer and the log the cause
      status = 500
      logging.getLogger(__name__).exception('the %s failed', name)
      raise HTTPException(500, f'the {name} failed ({type(error).__name__})') from error
    finally:
      seconds.labels(status).observe(time.perf_counter() - start)

  async def show_page(request: Request) -> JSONResponse:
    check_token(request)
    return JSONResponse(pages[request.url.path])

  async def show_health(request: Request) -> JSONResponse:
    return JSONResponse({'status': 'ok', 'requests': in_flight.borrowed_tokens, **health})

  async def show_metrics(request: Request) -> Response:
    check_token(request)
    text = prometheus_client.generate_latest(registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

  async def refuse(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({'error': error.detail}, error.status_code, error.headers)

  routes = [Route(path, respond, methods=['POST']), Route('/health', show_health),
            Route('/metrics', show_metrics), *(Route(page, show_page) for page in pages)]
  no_other_site = [] if token else [Middleware(TrustedHostMiddleware, allowed_hosts=OURS)]
  return Starlette(routes=routes, middleware=no_other_site, exception_handlers={HTTPException: refuse})


async def _read_body(request: Request, most: int) -> bytes:
  body = b''
  async for chunk in request.stream():
    body += chunk
    if len(body) > most:
      raise HTTPException(413, f'the request is longer than {most} bytes')
  return body


def bind(host: str, port: int, token: str | None = None) -> socket.socket:
  """Returns a listening socket. Port 0 takes a free one.

  Raises ValueError for an address that cannot be had, or that others reach without a `token`; says why.
  """
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
  except OSError as error:
    raise ValueError(f'cannot listen on {host}:{port}: {error.strerror or error}') from error
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


def make_server_config(app: Starlette) -> uvicorn.Config:
  """Configures uvicorn without its configuration of `logging`, which would close the handlers of every other
  library. On SIGTERM it accepts no more, and requests in flight have a minute left."""
  return uvicorn.Config(app, ws='none', log_config=None, log_level='warning', lifespan='off',
                        limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=60)
