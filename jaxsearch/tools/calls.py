"""Calls of tools: what a growing tree may ask of the host, and the tools that serve it.

A tool is a file of this room: a function for `Call`, or a subclass of `ToolCall` where it takes more
(`Search`, `RunPython`). A call says how it is served, read and described; whatever runs, counts and shows
calls knows no tool by name.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node

# What goes wrong with a tool: no reply in time, no connection, a refusal (4xx), a server at its end (5xx,
# 429), a reply of another shape, one that is too long, anything else. An exception says which in its
# attribute `fault`.
FAULTS = ('timeout', 'connection', 'refused', 'server', 'malformed', 'too_long', 'error')


@dataclasses.dataclass(frozen=True)
class ToolFailure:
  """The reply to a request that failed; `fault` is its kind: one of `FAULTS`, for counting."""
  reason: str
  fault: str = 'error'


def failure_of(error: BaseException, tool: str = '') -> ToolFailure:
  """Returns the reply for a tool that raised; its name, if given, begins the reason. Gives an error its kind,
  here alone."""
  fault = getattr(error, 'fault', None)
  if fault not in FAULTS:
    kinds = {TimeoutError: 'timeout', ConnectionError: 'connection', BaseException: 'error'}
    fault = next(name for kind, name in kinds.items() if isinstance(error, kind))
  return ToolFailure(f'{tool + ": " if tool else ""}{type(error).__name__}: {error}', fault)


@dataclasses.dataclass(frozen=True)
class Tools:
  """The tools of a rollout.

  Attributes:
    search: a search back end; None if no tree searches.
    topk: documents that a search returns.
    python: sandbox with `run(code, functions) -> text`; None if no tree runs programs.
    services: other models that a tree may `Ask`, by name.
    deadline: seconds until a call counts as failed, in the deterministic mode too, so that no tool can hang
      the run: results are the same to the bit as long as no call exceeds it.
    workers: calls that run at a time.
    max_observation: tokens of one observation at most.
    answer_reserve: tokens that an observation leaves free for an answer.
    words: of a passage that a search shows, the first; 0 is all.
  """
  search: Any = None
  topk: int = 3
  python: Any = None
  services: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
  deadline: float = 60.0
  workers: int = 16
  max_observation: int = 512
  answer_reserve: int = 32
  words: int = 0

  def for_call(self, question: Question | None, number: int, call: int) -> 'Tools':
    """Returns the tools for call `call` of tree `number`: a simulated search draws anew for each, and hears
    the question."""
    if not hasattr(self.search, 'for_call'):
      return self
    return dataclasses.replace(self, search=self.search.for_call(question, number, call))

  def find(self, node: Node, query: str, topk: int) -> list[list[Document]]:
    """Searches, in the passages of the question's own source where the back end has them apart; a list for
    the one query."""
    search = self.search
    if hasattr(search, 'of'):
      search = search.of(node.tree.question.metadata.get('source'))
    return search.search([query], topk)


class Request:
  """What a growing tree may yield.

  Attributes:
    node: the span that it follows, or None.
    tool: the name by which it is counted and shown.
    query: what was asked, for people; `about` says of what, where that is not plain.
  """
  node: Node | None
  tool: str
  query: str
  about = ''

  def submit(self, schedule: Any, pending: Any) -> None:
    """Has the schedule serve it."""
    raise NotImplementedError

  def summary(self, reply: Any) -> Any:
    """Returns what is kept of a reply, as JSON holds it."""
    if isinstance(reply, int):  # a judge's score with its reason
      return int(reply)
    return reply if isinstance(reply, (str, float, list)) else str(reply)

  def describe(self, reply: Any) -> dict[str, Any]:
    """Returns what was asked, and `reply`, `documents` or `failure` and its kind `fault`; of a judge also its
    `reason`."""
    asked = {'tool': self.tool} | ({'about': self.about} if self.about else {}) | {'query': self.query}
    if isinstance(reply, ToolFailure):
      return asked | {'failure': reply.reason, 'fault': reply.fault}
    if is_documents(reply):
      return asked | {'documents': [dataclasses.asdict(document) for document in reply]}
    reason = getattr(reply, 'reason', '')
    return asked | {'reply': self.summary(reply)} | ({'reason': reason} if reason else {})


class ToolCall(Request):
  """A request that runs on the tools' threads while other slots decode."""
  show: Callable[[Any], str] | None = None

  def submit(self, schedule, pending):
    schedule.call(pending)

  def check(self, tools: Tools) -> None:
    """Raises ValueError if the rollout lacks what the call needs: a mistake, not a failure of a tool."""

  def run(self, tools: Tools, searches: list[Exception | None]) -> Any:
    """Runs the tool. `searches` gets an entry for each search of a back end in it: its error, or None."""
    raise NotImplementedError

  def searched(self, reply: Any, searches: Sequence[Exception | None]) -> list[Any]:
    """Returns an entry for each search that it made: a ToolFailure, or anything else where one succeeded."""
    return [error and failure_of(error) for error in searches]

  def read(self, result: Any, tools: Tools, room: int, tokenizer: Any) -> Any:
    """Returns the reply from what the tool returned: text or documents cut so that what `show` writes of them
    fits.

    Args:
      room: tokens that are left behind `node`; `tools.answer_reserve` of them stay free.
    """
    room = min(tools.max_observation, room - tools.answer_reserve)
    if isinstance(result, str):
      return shorten_text(result, room, self.show or str, tokenizer)
    if is_documents(result):
      return shorten(result, room, self.show or grammar.listed, tokenizer)
    return result


@dataclasses.dataclass(frozen=True)
class Call(ToolCall):
  """Runs any host function; the reply is what it returned, or a ToolFailure where it raised.

  Attributes:
    function: called with the `Tools` of the rollout.
    node: the span that asks. Text or documents are cut to the room behind it.
    tool: its name in counts (`calls_NAME`), records and viewers.
    query: what it was asked, for people.
    show: the text that the method will write for a reply, by which the reply is measured.
  """
  function: Callable[[Tools], Any]
  node: Node | None = None
  tool: str = 'call'
  query: str = ''
  show: Callable[[Any], str] | None = None

  def run(self, tools, searches):
    return self.function(tools)


def is_documents(reply: Any) -> bool:
  """Tells whether a reply is a list of documents, [] included."""
  return isinstance(reply, list) and all(isinstance(one, Document) for one in reply)


def texts_of(reply: Any) -> list[str]:
  """Returns the texts that a tool found: that of a reply, or those of its documents with their titles."""
  if isinstance(reply, str):
    return [reply]
  return [f'{document.title}\n{document.text}' for document in reply] if is_documents(reply) else []


def shorten_text(text: str, budget: int, show: Callable[[str], str], tokenizer: Any) -> str:
  """Cuts a text so that what `show` writes of it has at most `budget` tokens; '' where nothing fits."""
  shown = lambda documents: show(''.join(document.text for document in documents))
  return ''.join(document.text for document in shorten([Document('', '', text)], budget, shown, tokenizer))


def shorten(documents: Sequence[Document], budget: int, show: Callable[[Sequence[Document]], str],
            tokenizer) -> list[Document]:
  """Cuts the texts of documents so that all of them together, as `show` writes them, have at most `budget`
  tokens.

  All texts are cut at one common number of characters, such that one more would not fit. (Where a longer text
  may have fewer tokens, there may be further such numbers.) If titles alone are too long, documents are left
  out from the end, down to none.

  What is tokenised does not grow with the texts: what is longer than `budget` of the longest tokens is cut
  off first, then the rest is tokenised once as a whole, which tells about where to cut, and cuts around there
  are tried.

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
  too_long = lambda count: measure(titles[:count]) > budget
  kept = bisect.bisect_right(range(1, len(titles) + 1), False, key=too_long)
  if kept < len(documents):
    return shorten(documents[:kept], budget, show, tokenizer)
  regions, end = [], 0  # of texts in `whole`, about: a beginning that was neutralised there is not found
  for document in cut(high):
    start = max(end, whole.find(document.text[:50].strip(), end))
    regions.append((start, end := start + len(document.text)))
  before = lambda place: bisect.bisect_left(starts, place)
  tokens = lambda size: sum(before(min(start + size, end)) - before(start) for start, end in regions)  # about
  low, beside = 0, measure(titles)  # fits; tokens that are not of texts
  for probe in itertools.count():
    if high - low <= 1:
      return cut(low)
    size = low + max(1, bisect.bisect_right(range(low + 1, high), budget - beside, key=tokens))
    size = size if probe < 8 else (low + high) // 2  # the estimate is no help here
    measured = measure(cut(size))
    beside = measured - tokens(size)
    low, high = (size, high) if measured <= budget else (low, size)


def one_line(text: str, most: int = 200) -> str:
  """The text on one line of at most `most` characters, without what would steer a terminal."""
  text = ' '.join(''.join(letter if letter.isprintable() else ' ' for letter in text).split())
  return text if len(text) <= most else text[:most - 1] + '…'
