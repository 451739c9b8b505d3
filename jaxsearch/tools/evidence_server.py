"""Serves a policy that searches, and quotes what it found, as a tool of other models (RSTool, arXiv 2506.04185).

  jaxsearch serve --as-tool --config configs/r_search.py --checkpoint runs/r_search

  POST /evidence   {"question": "…"} or a list of questions; see `jaxsearch.tools.evidence_client` for the reply and the client
  GET /tool        the tool in the words of OpenAI's protocol
  GET /health      how many questions are being answered; wants no token

The sampler grows one batch at a time; the questions of all requests that come meanwhile are its next batch.
`jaxsearch.tools.http_server` has what all our servers check.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxsearch.tools import http_server
from jaxsearch.tools.evidence_client import SCHEMA, Evidence
from jaxsearch.tools.simulated import DynamicBatcher

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits(http_server.Limits):
  questions: int = 64          # of one request
  question_chars: int = 8192
  waiting: int = 256           # questions of all requests that are being answered; more get 429 and may come again


def make_app(answer: Callable[[list[str]], Sequence[Evidence]], *, check: Callable[[str], None] = lambda question: None,
             token: str | None = None, limits: Limits = Limits()) -> Starlette:
  """The application around a function that finds evidence; with a `token`, requests must bring it.

  Args:
    answer: evidence for questions; called from one thread at a time.
    check: raises ValueError for a question that is too long for the policy.
  """
  merged, asked = DynamicBatcher(answer), 0
  threads = anyio.CapacityLimiter(limits.requests)  # each waits for its batch

  async def evidence(request: dict) -> object:
    nonlocal asked
    questions = _parse_request(request, check, limits)
    if asked + len(questions) > limits.waiting:
      raise HTTPException(429, f'{asked} questions are being answered, of {limits.waiting} at most', {'retry-after': '1'})
    asked += len(questions)
    try:
      found = await anyio.to_thread.run_sync(_find, merged, questions, limiter=threads)
    finally:
      asked -= len(questions)
    found = [dataclasses.asdict(one) for one in found]
    return found if isinstance(request['question'], list) else found[0]

  async def tool(request: Request) -> JSONResponse:
    http_server.check_token(request, token)
    return JSONResponse(SCHEMA)

  async def health(request: Request) -> JSONResponse:
    return JSONResponse({'status': 'ok', 'questions': asked})

  return http_server.make_app(Route('/evidence', http_server.endpoint(evidence, token, limits), methods=['POST']),
                          Route('/tool', tool), Route('/health', health))


def _find(merged: DynamicBatcher, questions: list[str]) -> Sequence[Evidence]:
  try:
    return merged(questions)
  except Exception as error:  # whatever the sampler raises, the client gets an answer and the log the cause
    _log.exception('a search for evidence for %d questions failed', len(questions))
    raise HTTPException(500, f'the search for evidence failed ({type(error).__name__})') from error


def _parse_request(request: dict, check: Callable[[str], None], limits: Limits) -> list[str]:
  given = request.get('question')
  questions = given if isinstance(given, list) else [given]
  if not questions or not all(isinstance(question, str) and question.strip() for question in questions):
    raise HTTPException(400, "'question' must be text that is not blank, or a list of such texts")
  if len(questions) > limits.questions or any(len(question) > limits.question_chars for question in questions):
    raise HTTPException(413, f'at most {limits.questions} questions of {limits.question_chars} characters')
  # Half a surrogate pair passes JSON and would break the tokenizer, for all questions of the batch.
  questions = [question.encode('utf-8', 'replace').decode() for question in questions]
  for question in questions:
    try:
      check(question)
    except ValueError as error:
      raise HTTPException(413, str(error)) from error
  return questions
