"""What a growing tree may request, what it gets, and the tools that serve it.

A `grow` is a generator. It yields a request, or a list of requests that are served together, and is sent the reply, or the list
of replies in the same order. A request that fails raises nothing: its reply says so, that of a tool by a `ToolFailure`.

  Generate   -> the new POLICY node below `node`; its `stop` says why it ends (see `Generate`)
  Search     -> list of documents, best first
  RunPython  -> what the program printed
  Call       -> what the function returned
  Ask        -> the reply of another model
  Score      -> a list of log-probabilities for each continuation
"""

import bisect
import dataclasses
import itertools
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from jaxsearch.data.corpus import Document, first_words
from jaxsearch.tools import SearchBackend
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node

END = 'end'  # the policy chose an end token, which belongs to the span
LENGTH = 'length'  # `max_tokens` were generated
# Beside these, `node.stop` is the stop string that was found, Stop.CONTEXT_FULL or Stop.DEADLINE.
NO_LOGPROBS = 'this method needs log-probabilities, which a chat server does not give: take a model folder'


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are sampled where a request does not say. Temperature 0 is greedy; top_p=1 and top_k=0 are off."""
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0

  def __post_init__(self):
    if not self.temperature >= 0:
      raise ValueError(f'temperature={self.temperature} must be 0 (greedy) or more')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p={self.top_p} must be more than 0 and at most 1 (off)')
    if not self.top_k >= 0:
      raise ValueError(f'top_k={self.top_k} must be 0 (off) or more')


GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Generate:
  """Sample a span after `node`.

  It ends with the token that completes a stop string. That token is never split, since the sampled ids are the ids to train on:
  the text may carry a few characters past the stop string. A stop string counts only if it lies in this span entirely.

  Without room for `max_tokens` the span is shorter and its `stop` is Stop.CONTEXT_FULL. Without any room, or past the deadline
  of the episode (Stop.DEADLINE), it is empty.

  Attributes:
    node: the span to follow; all tokens from the root to its end are the context, at least one.
    stop: stop strings.
    temperature, top_p, top_k: see `Sampling`; None takes the rollout's.
    forbid: token ids that are never sampled.
  """
  node: Node
  stop: tuple[str, ...] = ()
  max_tokens: int = 256
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  forbid: tuple[int, ...] = ()

  def __post_init__(self):
    if self.max_tokens < 1:
      raise ValueError(f'max_tokens={self.max_tokens}: a span has at least one token')
    if isinstance(self.stop, str) or not all(self.stop):
      raise ValueError(f'stop={self.stop!r} is no tuple of non-empty strings')
    self.sampling(Sampling())  # raises if one is out of range

  def sampling(self, default: Sampling) -> Sampling:
    """The parameters of this request, the default's where it names none."""
    own = {name: value for name in vars(default) if (value := getattr(self, name)) is not None}
    return dataclasses.replace(default, **own)


@dataclasses.dataclass(frozen=True)
class Search:
  """Ask the search back end. The documents are shortened to the room after `node`, the span with the query."""
  node: Node
  query: str
  topk: int | None = None  # None takes the rollout's


@dataclasses.dataclass(frozen=True)
class RunPython:
  """Run a program in the sandbox, on the tools' threads while other slots decode.

  It may call `search(query, k)`, which returns documents of the search back end as text, and `table()`, which returns the rows
  of `table`. The reply is shortened to the room after `node`, the span with the program.
  """
  node: Node
  code: str
  table: Sequence[Sequence[str]] = ()


@dataclasses.dataclass(frozen=True)
class Call:
  """Run any other host function (a judge, a sandbox) on the tools' threads while other slots decode."""
  function: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Ask:
  """Ask another model, `tools.services[service]`: a function from a list of items to a list of replies.

  A model on a sampler of its own gets the items of many episodes at a time, once nothing is left to decode. A service with a
  `concurrency` above 0, such as a judge behind a server, gets each item at once, on threads while other slots decode, that many
  at a time; once as many in a row found no server, the others of the rollout are not asked. It has a timeout of its own, and the
  deadline of a tool does not count.
  """
  service: str
  item: Any


@dataclasses.dataclass(frozen=True)
class Score:
  """Log-probabilities of continuations of `node`, each text or ids, at the temperature of the rollout (1 where that is greedy),
  which is the one that training has, and without truncation.

  The reply has a list for each, one number a token, or None for a continuation that does not fit.
  """
  node: Node
  continuations: tuple[str | Sequence[int], ...]


# What goes wrong with a tool: no reply in time, no connection, a refusal (4xx), a server at its end (5xx, 429), a reply of
# another shape, one that is too long, anything else. An exception says which in its attribute `fault`.
FAULTS = ('timeout', 'connection', 'refused', 'server', 'malformed', 'too_long', 'error')


@dataclasses.dataclass(frozen=True)
class ToolFailure:
  """The reply to a tool request that failed; `fault` is its kind: one of `FAULTS`, for counting."""
  reason: str
  fault: str = 'error'


def failure_of(error: BaseException, tool: str = '') -> ToolFailure:
  """The reply for a tool that raised; its name, if given, begins the reason. The one place where an error gets its kind."""
  fault = getattr(error, 'fault', None)
  if fault not in FAULTS:
    fault = 'timeout' if isinstance(error, TimeoutError) else 'connection' if isinstance(error, ConnectionError) else 'error'
  return ToolFailure(f'{tool + ": " if tool else ""}{type(error).__name__}: {error}', fault)


Request = Generate | Search | RunPython | Call | Ask | Score


# The tools.

MAX_QUERY, MAX_TOPK, MAX_FOUND = 1000, 10, 100_000  # characters, documents, and their characters, of a search in a program


@dataclasses.dataclass(frozen=True)
class Tools:
  """The tools of a rollout.

  Attributes:
    search: back end; None if no tree searches.
    topk: documents that a search returns.
    python: sandbox with `run(code, functions) -> text`; None if no tree runs programs.
    services: other models that a tree may `Ask`, by name.
    deadline: seconds until a call counts as failed, in the deterministic mode too, so that no tool can hang the run: results
      are the same to the bit as long as no call exceeds it.
    workers: calls that run at a time.
    max_observation: tokens of one observation at most.
    answer_reserve: tokens that an observation leaves free for an answer.
    words: of a passage that a search shows, the first; 0 is all.
  """
  search: SearchBackend | None = None
  topk: int = 3
  python: Any = None
  services: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
  deadline: float = 60.0
  workers: int = 16
  max_observation: int = 512
  answer_reserve: int = 32
  words: int = 0

  def find(self, node: Node, query: str, topk: int) -> list[list[Document]]:
    """Documents of the search back end, or of that of the source of the tree's question."""
    search = self.search
    if hasattr(search, 'of'):
      search = search.of(node.tree.question.metadata.get('source'))
    return search.search([query], topk)

  def run_python(self, request: RunPython, searches: list[Exception | None]) -> str:
    """What a program prints in the sandbox. If all its searches failed, raises the last one's error: then the tool failed.

    `searches` gets an entry for each search of the program: its error, or None.
    """
    end = time.monotonic() + self.deadline

    def search(query: str, k: int = self.topk) -> str:
      if not isinstance(query, str) or len(query) > MAX_QUERY:  # an error of the program's
        raise ValueError(f'a query is a text of at most {MAX_QUERY} characters')
      k = min(max(int(k), 1), MAX_TOPK)
      searches.append(TimeoutError('no reply to a search'))  # until there is one
      try:
        if self.search is None:
          raise RuntimeError('there is no search')
        if time.monotonic() > end:
          raise TimeoutError('no time left for a search')
        listed = grammar.listed(self.find(request.node, query, k)[0])
      except Exception as error:
        searches[-1] = error
        raise
      searches[-1] = None
      return listed[:MAX_FOUND] or 'No documents were found.\n'

    printed = self.python.run(request.code, {'search': search, 'table': lambda: [list(row) for row in request.table]})
    if searches and None not in searches:
      raise searches[-1]
    return printed

  def observation(self, request: Search | RunPython, result: Any, room: int, tokenizer) -> list[Document] | str | ToolFailure:
    """The reply to a request from what its tool returned, a failure if that is malformed.

    Documents or text are shortened so that their observation has at most `room` tokens less `answer_reserve`, and at most
    `max_observation`.
    """
    if isinstance(result, ToolFailure):
      return result
    room, special = min(self.max_observation, room - self.answer_reserve), tokenizer.special_tokens
    if isinstance(request, RunPython):
      if not isinstance(result, str):
        return ToolFailure('malformed reply of the sandbox', 'malformed')
      joined = lambda documents: ''.join(document.text for document in documents)  # of one, or none where it does not fit
      return joined(shorten([Document('', '', result)], room, lambda shown: grammar.output(joined(shown), special), tokenizer))
    documents = result[0] if isinstance(result, list) and len(result) == 1 else None
    if not isinstance(documents, list) or not all(isinstance(document, Document) for document in documents):
      return ToolFailure('malformed reply of the search back end', 'malformed')
    if self.words:
      documents = [dataclasses.replace(document, text=first_words(document.text, self.words)) for document in documents]
    return shorten(documents, room, lambda documents: grammar.information(documents, special), tokenizer)


def shorten(documents: Sequence[Document], budget: int, show: Callable[[Sequence[Document]], str],
            tokenizer) -> list[Document]:
  """Cuts the texts of documents so that all of them together, as `show` writes them, have at most `budget` tokens.

  All texts are cut at one common number of characters, such that one more would not fit. (Where a longer text may have fewer
  tokens, there may be further such numbers.) If titles alone are too long, documents are left out from the end, down to none.

  What is tokenised does not grow with the texts: what is longer than `budget` of the longest tokens is cut off first, then the
  rest is tokenised once as a whole, which tells about where to cut, and cuts around there are tried.

  Args:
    documents: best first.
    budget: tokens that the text may have.
    show: the text that shows documents, tags or prompt included.
    tokenizer: with `encode`, `starts` and `longest_token`, see models/tokenizer.py.
  """
  documents, characters = list(documents), max(budget, 0) * tokenizer.longest_token
  while documents and sum(len(document.title) for document in documents) > characters:
    documents.pop()
  cut = lambda size: [dataclasses.replace(document, text=document.text[:size]) for document in documents]
  measure = lambda documents: len(tokenizer.encode(show(documents)))
  held = lambda size: sum(min(size, len(document.text)) for document in documents) <= characters
  longest = max((len(document.text) for document in documents), default=0)
  high = bisect.bisect_right(range(1, longest + 1), False, key=lambda size: not held(size))
  whole = show(cut(high))
  starts = tokenizer.starts(whole)
  if len(starts) <= budget:
    return cut(high)
  titles = cut(0)
  kept = bisect.bisect_right(range(1, len(titles) + 1), False, key=lambda count: measure(titles[:count]) > budget)
  if kept < len(documents):
    return shorten(documents[:kept], budget, show, tokenizer)
  regions, end = [], 0  # of texts in `whole`, about: a beginning that was neutralised there is not found
  for document in cut(high):
    start = max(end, whole.find(document.text[:50].strip(), end))
    regions.append((start, end := start + len(document.text)))
  tokens = lambda size: sum(bisect.bisect_left(starts, min(start + size, end)) - bisect.bisect_left(starts, start)
                            for start, end in regions)  # of texts cut there, about
  low, beside = 0, measure(titles)  # fits; tokens that are not of texts
  for probe in itertools.count():
    if high - low <= 1:
      return cut(low)
    size = low + max(1, bisect.bisect_right(range(low + 1, high), budget - beside, key=tokens))
    size = size if probe < 8 else (low + high) // 2  # the estimate is no help here
    measured = measure(cut(size))
    beside = measured - tokens(size)
    low, high = (size, high) if measured <= budget else (low, size)


# Calls.


@dataclasses.dataclass(eq=False)
class ToolCall:
  """A call that was started: `future` will hold (seconds it took, result)."""
  future: Future
  started: float
  deadline: float  # seconds
  step: int  # decode steps of the run when it was started

  def seconds_left(self) -> float:
    """Until the deadline, 0 once it has passed."""
    return max(0.0, self.started + self.deadline - time.monotonic())

  def outcome(self) -> tuple[float, Any]:
    """(seconds, result or ToolFailure); waits for the reply, no longer than the deadline."""
    try:
      return self.future.result(timeout=self.seconds_left())
    except FutureTimeout:
      return time.monotonic() - self.started, ToolFailure(f'no reply within {self.deadline:g} seconds', 'timeout')


class Caller:
  """Starts calls, at most `workers` of them running at a time; the deadline of a call includes its wait for a place.

  Daemon threads rather than a `ThreadPoolExecutor`: a call that hangs must not keep the process from ending.
  """

  def __init__(self, workers: int):
    self._places = threading.Semaphore(workers)

  def start(self, function: Callable[[], Any], step: int, deadline: float) -> ToolCall:
    future = Future()

    def serve():
      with self._places:
        start = time.monotonic()
        try:
          result = function()
        except BaseException as error:  # whatever a tool does, the run goes on and the policy sees the failure
          result = failure_of(error)
        future.set_result((time.monotonic() - start, result))

    threading.Thread(target=serve, daemon=True).start()
    return ToolCall(future, time.monotonic(), deadline, step)


# What failed in a rollout.


@dataclasses.dataclass(frozen=True)
class Names:
  """The metrics of one kind of requests: how many there were, how many failed, the reason of the last; and what a person calls
  them."""
  asked: str
  failed: str
  last: str
  what: str


SEARCHES = Names('searches_asked', 'searches_failed', 'last_failure', 'searches')
TOOLS = Names('tool_calls', 'tool_calls_failed', 'last_failure', 'tool calls')
SERVICES = Names('service_calls', 'service_calls_failed', 'last_service_failure', 'calls of judge or reader')


def mostly_failed(metrics: Mapping[str, Any], names: Names = SEARCHES) -> bool:
  """Whether more than half of the searches of a rollout failed, or of its other requests."""
  return 2 * metrics.get(names.failed, 0) > metrics.get(names.asked, 0)


def any_mostly_failed(metrics: Mapping[str, Any]) -> bool:
  """Whether searches, tool calls or calls of judge and reader mostly failed."""
  return any(mostly_failed(metrics, names) for names in (SEARCHES, TOOLS, SERVICES))


def failing(metrics: Mapping[str, Any], before: Mapping[str, Any] = types.MappingProxyType({})) -> str | None:
  """What to tell a person about a rollout whose searches, tool calls or calls of judge and reader mostly failed; else None.

  Args:
    metrics: see `Schedule.metrics`; or a row that has them.
    before: those of which a person was told last; a reason that stands there is not told again.
  """
  told = []
  for names in (SEARCHES if mostly_failed(metrics) else TOOLS, SERVICES):  # searches are tool calls
    if mostly_failed(metrics, names):
      again = mostly_failed(before, names) and before[names.last] == metrics[names.last]
      reason = ', as before' if again else f'; the last: {metrics[names.last]}'
      told.append(f'{metrics[names.failed]} of {metrics[names.asked]} {names.what} failed{reason}')
  return '; '.join(told) or None


def failure_figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Those of a rollout's metrics that say what failed."""
  begin = ('tool_calls', 'searches_', 'service_calls', 'last_')
  return {name: value for name, value in metrics.items() if name.startswith(begin)}


def one_line(text: str, most: int = 200) -> str:
  """The text on one line of at most `most` characters, without what would steer a terminal."""
  text = ' '.join(''.join(letter if letter.isprintable() else ' ' for letter in text).split())
  return text if len(text) <= most else text[:most - 1] + '…'
