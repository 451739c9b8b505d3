"""Calls of tools: what a growing tree may ask of the host, and the tools that serve it.

A tool is a file of this folder: a function for `Call`, or a subclass of `ToolCall` if it needs more. A call
says how it is served, cut and described; whatever runs, counts and shows calls knows no tool by name.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxsearch.data.corpus import Document, first_words, indexed
from jaxsearch.data.questions import Question
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node

# What goes wrong with a tool: no reply in time, no connection, a refusal (4xx), a server at its end (5xx,
# 429), a reply of another shape, one that is too long, anything else. An exception says which in its
# attribute `fault`.
FAULTS = ('timeout', 'connection', 'refused', 'server', 'malformed', 'too_long', 'error')


@dataclasses.dataclass(frozen=True)
class ToolFailure:
  """Replies to a request that failed; `fault` is its kind, one of `FAULTS`, for counting."""
  reason: str
  fault: str = 'error'


class Refused(ValueError):
  """Raised in a `grow` for what the user has to mend: it is shown as it is, and ends the rollout."""


def failure_of(error: BaseException, tool: str = '') -> ToolFailure:
  """Returns the reply for a tool that raised; its name, if given, begins the reason."""
  fault = getattr(error, 'fault', None)
  if fault not in FAULTS:
    fault = ('timeout' if isinstance(error, TimeoutError) else
             'connection' if isinstance(error, ConnectionError) else 'error')
  reason = f'{tool + ": " if tool else ""}{type(error).__name__}: {error}'
  return ToolFailure(one_line(reason, 500), fault)  # the policy reads it: an error can be of several pages


class MalformedReply(RuntimeError):
  """A search back end that returned something else than documents."""
  fault = 'malformed'


@dataclasses.dataclass(frozen=True)
class Kind:
  """Names the metrics of one kind of requests (asked, failed, the last reason), and what people call it."""
  asked: str
  failed: str
  last: str
  what: str
  faults: bool = True  # whether failures are counted by their faults too


SEARCHES = Kind('searches_asked', 'searches_failed', 'last_failure', 'searches', faults=False)  # tool calls
TOOLS = Kind('tool_calls', 'tool_calls_failed', 'last_failure', 'tool calls')


@dataclasses.dataclass(frozen=True)
class Tools:
  """The tools of a rollout."""
  search: Any = None          # a search back end; None if no tree searches
  topk: int = 3               # documents that a search returns
  python: Any = None          # sandbox with `run(code, functions) -> text`; None if no tree runs programs
  services: Mapping[str, Callable] = dataclasses.field(default_factory=dict)  # models that a tree may `Ask`
  # Seconds until a call counts as failed, in the deterministic mode too, so that no tool can hang the run:
  # results are the same to the bit as long as no call exceeds it.
  deadline: float = 60.0
  workers: int = 16           # calls that run at a time
  max_observation: int = 512  # tokens of one observation at most
  answer_reserve: int = 32    # tokens that an observation leaves free for an answer
  words: int = 0              # of a passage a search shows, from its beginning; 0 is all
  # In the tools of one call: the error of each of its searches, or None.
  searches: list[Exception | None] = dataclasses.field(default_factory=list)
  offered: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by name, see tool.py

  def for_call(self, question: Question | None, number: int, call: int,
               searches: list[Exception | None]) -> 'Tools':
    """Returns the tools for call `call` of tree `number`: a simulated search draws anew for each, and hears
    the question."""
    search = self.search
    if hasattr(search, 'for_call'):
      search = search.for_call(question, number, call)
    return dataclasses.replace(self, search=search, searches=searches)

  def find(self, node: Node, query: str, topk: int | None = None) -> list[Document]:
    """Searches and counts it; a back end that is split by source searches that of the question alone."""
    self.searches.append(TimeoutError('no reply to a search'))  # until there is one
    try:
      results = self._back_end(node).search([query], self.topk if topk is None else topk)
      if not (isinstance(results, list) and len(results) == 1 and is_documents(results[0])):
        raise MalformedReply('malformed reply of the search back end')
    except Exception as error:
      self.searches[-1] = error
      raise
    self.searches[-1] = None
    return [dataclasses.replace(document, text=first_words(document.text, self.words))
            for document in results[0]]

  def open(self, node: Node, name: str) -> list[Document]:
    """Returns the whole documents with this id, else with this title; LookupError where none are opened."""
    back_end = self._back_end(node)
    if not hasattr(back_end, 'open'):
      raise LookupError('the search of this run opens no documents: take bm25 or index')
    return back_end.open(name)

  def _back_end(self, node: Node) -> Any:
    of_source = getattr(self.search, 'of', None)
    return of_source(node.tree.question.metadata.get('source')) if of_source else self.search


class Request:
  """Asks for a reply: a growing tree yields it."""
  node: Node | None  # the span that it follows
  tool: str          # the name by which it is counted and shown
  query: str         # what was asked, for people
  about = ''         # says of what, where that is not plain

  def submit(self, schedule: Any, pending: Any) -> None:
    """Has a `sampler.driver.Schedule` serve it: by its policy, by `start`, `join` or `set_reply`."""
    raise NotImplementedError

  def finish(self, schedule: Any, pending: Any, result: Any, seconds: float) -> Any:
    """Returns the reply, and counts it, where `start` or `join` served it in `seconds`: `result` is what the
    function returned or raised."""
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
      return asked | {'documents': [
        {name: getattr(document, name) for name in document.__slots__} for document in reply]}
    reason = getattr(reply, 'reason', '')
    return asked | {'reply': self.summary(reply)} | ({'reason': reason} if reason else {})


class ToolCall(Request):
  """A request that runs on the tools' threads while other slots decode."""
  show: Callable[[Any], str] | None = None  # a reply as the method will write it; None: `written`

  def submit(self, schedule, pending):
    tools, episode = schedule.tools, pending.episode
    episode.calls += 1
    own = tools.for_call(episode.tree.question, episode.number, episode.calls, pending.searches)
    schedule.start(pending, functools.partial(self.run, own), 'tools', tools.workers, tools.deadline)

  def finish(self, schedule, pending, result, seconds):
    """Splits room and `max_observation` evenly among the calls of one list that follow the same span."""
    episode = pending.episode
    if isinstance(result, BaseException):
      result = failure_of(result)
    elif self.node is not None:
      sharing = sum(other.node is self.node for other in episode.asked if isinstance(other, ToolCall))
      room = min(schedule.policy.length - self.node.length, episode.tree.room(self.node)) // sharing
      tools = dataclasses.replace(schedule.tools, max_observation=schedule.tools.max_observation // sharing)
      result = self.cut(result, tools, room, episode.tree.tokenizer)
    schedule.counts['seconds_tools'] += seconds
    schedule.count(SEARCHES, episode, [error and failure_of(error) for error in pending.searches])
    schedule.count(TOOLS, episode, [result])
    schedule.add(episode, **{f'calls_{self.tool}': 1})
    return result

  def run(self, tools: Tools) -> Any:
    """Runs the tool and returns the reply, before it is cut."""
    raise NotImplementedError

  def written(self, reply: str | list[Document], special_tokens: Sequence[str]) -> str:
    """Returns the text that methods usually write for a reply."""
    return reply if isinstance(reply, str) else grammar.listed(reply)

  def cut(self, reply: Any, tools: Tools, room: int, tokenizer: Any) -> Any:
    """Cuts text or documents, as the method writes them, to the `room` tokens that fit after `node`, of which
    `tools.answer_reserve` stay free; other replies stay."""
    room = min(tools.max_observation, room - tools.answer_reserve)
    show = self.show or functools.partial(self.written, special_tokens=tokenizer.special_tokens)
    if isinstance(reply, str):
      joined = lambda documents: ''.join(document.text for document in documents)
      show_text = lambda documents: show(joined(documents))
      return joined(shorten([Document('', '', reply)], room, show_text, tokenizer))
    if not is_documents(reply):
      return reply
    return shorten(reply, room, show, tokenizer) or (NoRoom() if reply else [])


@dataclasses.dataclass(frozen=True)
class Call(ToolCall):
  """Runs any host function; the reply is what it returned, text or documents cut to the room after `node`, or
  a ToolFailure where it raised."""
  function: Callable[[Tools], Any]
  node: Node | None = None
  tool: str = 'call'  # counted as `calls_NAME`
  query: str = ''
  show: Callable[[Any], str] | None = None

  def run(self, tools):
    return self.function(tools)


@dataclasses.dataclass(frozen=True)
class Search(ToolCall):
  """Asks the search back end; the reply is a list of documents, best first, cut to the room after `node`."""
  node: Node
  query: str
  show: Callable[[list[Document]], str] | None = None
  tool = 'search'

  def run(self, tools):
    return tools.find(self.node, self.query)

  def finish(self, schedule, pending, result, seconds):
    if isinstance(result, ToolFailure) and not pending.searches:  # its time was up before it had a thread
      pending.searches.append(TimeoutError(result.reason))
    return super().finish(schedule, pending, result, seconds)

  def written(self, reply, special_tokens):
    return grammar.information(reply, special_tokens)


def is_documents(reply: Any) -> bool:
  """Tells whether a reply is a list of documents, [] included."""
  return isinstance(reply, list) and all(isinstance(one, Document) for one in reply)


class NoRoom(list):
  """Stands in place of documents that were found, none of which fits."""


def texts_of(reply: Any) -> list[str]:
  """Returns the texts that a tool found: that of a reply, or those of its documents with their titles."""
  if isinstance(reply, str):
    return [reply]
  return list(map(indexed, reply)) if is_documents(reply) else []


def shorten(documents: Sequence[Document], budget: int, show: Callable[[Sequence[Document]], str],
            tokenizer: Any) -> list[Document]:
  """Cuts the texts of documents so that all of them together, as `show` writes them, have at most `budget`
  tokens.

  All texts are cut at one common number of characters, such that one more would not fit. (Where a longer text
  may have fewer tokens, there may be further such numbers.) If titles alone are too long, documents are left
  out from the end, down to none.

  Args:
    documents: best first.
    show: the text that shows documents, tags or prompt included.
  """
  cut = lambda size: [dataclasses.replace(document, text=document.text[:size]) for document in documents]
  tokens = lambda size: len(tokenizer.encode(show(documents if size == longest else cut(size))))
  if not documents:
    return []
  longest = max(len(document.text) for document in documents)
  fits, size = 0, min(4 * max(budget, 1), longest)  # a first guess: megabytes are never tokenised
  while tokens(size) <= budget:
    if size == longest:
      return list(documents)
    fits, size = size, min(2 * size, longest)
  if not fits and tokens(0) > budget:
    return shorten(documents[:-1], budget, show, tokenizer)
  return cut(fits + bisect.bisect_right(range(fits + 1, size), budget, key=tokens))


def paid(search: Any, before: int = 0) -> dict[str, float]:
  """Returns searches_paid (credits since `before`) and searches_cost (money); {} where searches are free."""
  if not hasattr(search, 'paid'):
    return {}
  credits = search.paid - before
  return {'searches_paid': credits, 'searches_cost': credits * search.price}


def one_line(text: str, most: int = 200) -> str:
  """Returns the text on one line of at most `most` characters, without what would steer a terminal."""
  text = ' '.join(''.join(letter if letter.isprintable() else ' ' for letter in text).split())
  return text if len(text) <= most else text[:most - 1] + '…'
