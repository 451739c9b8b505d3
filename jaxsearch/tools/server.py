"""Serves a search back end over the retrieval protocol of Search-R1; many trainers can share one index.

  python -m jaxsearch.tools.server --corpus corpus.jsonl --port 8000

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}`; see `jaxsearch.tools.http` for the
answer and for the client. It listens to this machine alone unless told otherwise, limits what a request may
ask for and how many are served at once, and asks for a bearer token where the environment variable
JAXSEARCH_TOKEN holds one. Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
from dataclasses import dataclass

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxsearch.data.corpus import join_contents
from jaxsearch.tools import SearchBackend, open_search
from jaxsearch.tools.documents import Document

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
  body_bytes: int = 2**20
  body_seconds: float = 10.0   # for a request to arrive whole
  queries: int = 512
  query_chars: int = 8192
  topk: int = 100
  requests: int = 64           # accepted at once, the others get 503 and may come again
  threads: int = 4             # searching at once


def make_app(backend: SearchBackend, *, token: str | None = None, limits: Limits = Limits()) -> Starlette:
  """The application around any search back end; with a `token`, requests must bring it."""
  in_flight = 0
  threads = anyio.CapacityLimiter(limits.threads)

  async def retrieve(request: Request) -> JSONResponse:
    nonlocal in_flight
    given = request.headers.get('authorization', '').encode()
    if token and not hmac.compare_digest(given, f'Bearer {token}'.encode()):
      raise HTTPException(401, 'a bearer token is needed', {'www-authenticate': 'Bearer'})
    if in_flight >= limits.requests:
      raise HTTPException(503, f'{limits.requests} requests are being served', {'retry-after': '1'})
    in_flight += 1
    try:
      queries, topk, return_scores = _parse_request(await _read_body(request, limits), limits)
      results = await anyio.to_thread.run_sync(_search, backend, queries, topk, limiter=threads)
    finally:
      in_flight -= 1
    return JSONResponse({'result': [[_as_json(d, return_scores) for d in found] for found in results]})

  async def refuse(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({'error': error.detail}, error.status_code, error.headers)

  return Starlette(routes=[Route('/retrieve', retrieve, methods=['POST'])],
                   exception_handlers={HTTPException: refuse})


def _search(backend: SearchBackend, queries: list[str], topk: int) -> list[list[Document]]:
  try:
    return backend.search(queries, topk)
  except Exception as error:  # whatever a back end raises, the client gets an answer and the log the cause
    _log.exception('a search for %d queries failed', len(queries))
    raise HTTPException(500, f'the search failed ({type(error).__name__})') from error


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


def _parse_request(body: bytes, limits: Limits) -> tuple[list[str], int, bool]:
  try:
    request = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise HTTPException(400, f'bad JSON: {error}') from error
  if not isinstance(request, dict):
    raise HTTPException(400, 'expected a JSON object')
  queries, return_scores = request.get('queries'), request.get('return_scores', False)
  topk = 3 if request.get('topk') is None else request['topk']
  if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
    raise HTTPException(400, "'queries' must be a list of strings")
  if len(queries) > limits.queries or any(len(query) > limits.query_chars for query in queries):
    raise HTTPException(413, f'at most {limits.queries} queries of {limits.query_chars} characters')
  if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= limits.topk:
    raise HTTPException(400, f"'topk' must be a whole number from 1 to {limits.topk}")
  if not isinstance(return_scores, bool):
    raise HTTPException(400, "'return_scores' must be true or false")
  return queries, topk, return_scores


def _as_json(document: Document, return_scores: bool) -> dict:
  entry = {'id': document.id, 'contents': join_contents(document.title, document.text)}
  return {'document': entry, 'score': document.score} if return_scores else entry


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
      prog='python -m jaxsearch.tools.server', description='Serves BM25 search over a corpus.')
  parser.add_argument('--corpus', required=True, help='passages as Search-R1 JSONL, .gz too')
  parser.add_argument('--engine', default='rank_bm25', help='rank_bm25, or bm25s for larger corpora')
  parser.add_argument('--host', default='127.0.0.1', help='default: this machine alone')
  parser.add_argument('--port', type=int, default=8000)
  args = parser.parse_args(argv)
  backend = open_search('bm25', corpus=args.corpus, engine=args.engine)
  app = make_app(backend, token=os.environ.get('JAXSEARCH_TOKEN'))
  uvicorn.run(app, host=args.host, port=args.port, log_level='warning', limit_concurrency=512)


if __name__ == '__main__':
  main()
