"""Serves a search back end over the retrieval protocol of Search-R1; many trainers can share one index.

  jaxsearch serve --corpus corpus.jsonl --port 8000

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}`; see `jaxsearch.tools.search_client` for the
answer and for the client, and `jaxsearch.tools.http_server` for what all our servers check.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from jaxsearch.data.corpus import Document, join_contents
from jaxsearch.tools import SearchBackend, http_server

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits(http_server.Limits):
  queries: int = 512
  query_chars: int = 8192
  topk: int = 100
  threads: int = 4             # searching at once


def make_app(backend: SearchBackend, *, token: str | None = None, limits: Limits = Limits()) -> Starlette:
  """The application around any search back end; with a `token`, requests must bring it."""
  threads = anyio.CapacityLimiter(limits.threads)

  async def retrieve(request: dict) -> dict:
    queries, topk, return_scores = _parse_request(request, limits)
    results = await anyio.to_thread.run_sync(_search, backend, queries, topk, limiter=threads)
    return {'result': [[_as_json(d, return_scores) for d in found] for found in results]}

  return http_server.make_app(Route('/retrieve', http_server.endpoint(retrieve, token, limits), methods=['POST']))


def _search(backend: SearchBackend, queries: list[str], topk: int) -> list[list[Document]]:
  try:
    return backend.search(queries, topk)
  except Exception as error:  # whatever a back end raises, the client gets an answer and the log the cause
    _log.exception('a search for %d queries failed', len(queries))
    raise HTTPException(500, f'the search failed ({type(error).__name__})') from error


def _parse_request(request: dict, limits: Limits) -> tuple[list[str], int, bool]:
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
