"""What our servers share: who may ask, how much, JSON in and out, and the address to listen on.

A server is a function from the JSON object of a request to what is sent back, which `endpoint` puts behind its checks;
`make_app` makes the application, `bind` and `run` serve it. Whatever is refused is answered with `{"error": …}`: 400 what
is not of the protocol, 401 a missing token, 408 and 413 what takes too long or is too large, 429 and 503 what may come
again later. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

CONNECTIONS = 512  # open at once; a backstop behind `Limits.requests`


@dataclass(frozen=True)
class Limits:
  body_bytes: int = 2**20
  body_seconds: float = 10.0   # for a request to arrive whole
  requests: int = 64           # accepted at once, the others get 503 and may come again


def endpoint(handle: Callable[[dict], Awaitable[object]], token: str | None,
             limits: Limits) -> Callable[[Request], Awaitable[JSONResponse]]:
  """An endpoint for POST that hands the JSON object of a request to `handle` and sends back what that returns.

  With a `token`, requests must bring it.
  """
  in_flight = 0

  async def respond(request: Request) -> JSONResponse:
    nonlocal in_flight
    check_token(request, token)
    if in_flight >= limits.requests:
      raise HTTPException(503, f'{limits.requests} requests are being served', {'retry-after': '1'})
    in_flight += 1
    try:
      return JSONResponse(await handle(_parse(await _read_body(request, limits))))
    finally:
      in_flight -= 1

  return respond


def check_token(request: Request, token: str | None) -> None:
  """Raises HTTPException if a token is wanted that the request does not bring."""
  given = request.headers.get('authorization', '').encode()
  if token and not hmac.compare_digest(given, f'Bearer {token}'.encode()):
    raise HTTPException(401, 'a bearer token is needed', {'www-authenticate': 'Bearer'})


def make_app(*routes: BaseRoute) -> Starlette:
  """The application of these routes; an HTTPException is answered in JSON."""
  async def refuse(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({'error': error.detail}, error.status_code, error.headers)

  return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


def bind(host: str, port: int) -> socket.socket:
  """A socket that is bound and does not listen yet: nobody is kept waiting while a model is loaded. Port 0 takes a free one.

  Raises:
    ValueError: the address cannot be had; says why.
  """
  if not 0 <= port < 2**16:  # getaddrinfo would take it modulo 2**16
    raise ValueError(f'cannot listen on {host}:{port}: a port is a number from 0 to 65535')
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind(address)
    except BaseException:
      listener.close()
      raise
  except OSError as error:
    raise ValueError(f'cannot listen on {host}:{port}: {error.strerror or error}') from error
  return listener


def run(app: Starlette, listener: socket.socket, what: str) -> None:
  """Says where `what` is served, and serves it until a signal asks to stop; requests under way are answered first."""
  listener.listen()
  host, port = listener.getsockname()[:2]
  print(f'{what}: http://{f"[{host}]" if ":" in host else host}:{port}', flush=True)
  server = uvicorn.Server(make_server_config(app))
  with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has stopped
    server.run(sockets=[listener])


def make_server_config(app: Starlette) -> uvicorn.Config:
  """uvicorn without its configuration of `logging`, which would close the handlers of every other library."""
  return uvicorn.Config(app, log_config=None, log_level='warning', lifespan='off', limit_concurrency=CONNECTIONS)


async def _read_body(request: Request, limits: Limits) -> bytes:
  body = bytearray()
  try:
    async with asyncio.timeout(limits.body_seconds):
      async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body_bytes:
          raise HTTPException(413, f'the request is longer than {limits.body_bytes} bytes')
  except TimeoutError as error:
    raise HTTPException(408, f'the request took longer than {limits.body_seconds:g} s to arrive') from error
  return bytes(body)


def _parse(body: bytes) -> dict:
  try:
    request = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise HTTPException(400, f'bad JSON: {error}') from error
  if not isinstance(request, dict):
    raise HTTPException(400, 'expected a JSON object')
  return request
