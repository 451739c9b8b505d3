"""One rollout of many episodes: what each of them waits for, and what is counted.

A `Schedule` repeats until nothing is left: start episodes and apply replies of tools while the policy has
room (`_fill`), let the policy place and decode what waits for it, and hand finished replies to their
generators, which then yield new requests.

The policy is what serves `Generate` and `Score`: `decoding.Decoding` on our engine,
`chat_policy.ChatDecoding` behind a server. It has `room`; `claim` and `release` of episodes; `generate` and
`score`, after which a request waits; `waits` and `decodes`; and `place` and `decode`, which return the
(pending, reply) that are finished.

In the deterministic mode every decision is a function of tokens and decode steps: replies of tools are
applied in the order of their requests, and only where a slot is idle, no new episode can be started, and the
call is `tool_patience` decode steps old or nothing is left to decode; if the reply is not there by then, the
host waits for it. Otherwise replies are applied as they arrive.
"""

import collections
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from jaxsearch.parallel import memory
from jaxsearch.sampler import requests
from jaxsearch.sampler.requests import Request, ToolFailure, Tools
from jaxsearch.tools import paid
from jaxsearch.tools.calls import ToolCall
from jaxsearch.trees.tree import Stop, Tree

COUNTS = ('tokens_decoded', 'tokens_prefilled', 'tokens_reused', 'tokens_forked', 'episodes', 'segments',
          'tool_calls', 'tool_calls_failed', 'searches_asked', 'searches_failed', 'seconds_tools',
          'seconds_waiting', 'service_calls', 'service_calls_failed', 'seconds_services',
          *(f'stop_{stop}' for stop in Stop))
Observer = Callable[[Tree, Request | None, Any], None]
Progress = Callable[[int, int, dict], None]


class Cancelled(Exception):
  """Ends a rollout whose trees nobody wants any more."""


class GrowthError(RuntimeError):
  """A generator raised; the cause is chained, the message names the question."""


@dataclass(eq=False)
class Episode:
  """A generator that grows a tree, and the replies it waits for."""
  number: int  # with the key it decides what is sampled
  growth: Iterator
  tree: Tree
  lane: int = 0  # of the sampler; its rows of the cache are all there
  asked: Sequence[Request] = ()
  replies: list | None = None
  several: bool = False  # whether it yielded a list
  waiting: int = 0  # replies that are missing
  requests: int = 0  # spans and scores it has requested so far
  calls: int = 0  # of tools so far
  started: float = 0.0
  counts: collections.Counter = field(default_factory=collections.Counter)  # its part of the schedule's
  failures: dict[str, str] = field(default_factory=dict)  # the last reasons, by name of the metric


@dataclass(eq=False)
class Pending:
  """A request that has no reply yet."""
  episode: Episode
  place: int  # of the reply among the replies of its episode
  request: Request
  call: 'RunningCall | None' = None  # of a tool or service
  searches: list[Exception | None] = field(default_factory=list)  # in the call: errors, or None
  path: Any = None  # the policy's own note


class Schedule:
  """Runs episodes to their ends.

  Args:
    policy: called with this schedule; returns what serves `Generate` and `Score`, see above.
    growths: (number, generator, its tree) of each episode. The tokens of an episode depend on its number, on
      the policy's key, and on nothing else.
    on_progress: called with (episodes done, episodes, metrics so far) whenever one ends.
    observer: called with (tree, request, reply) for every reply that a generator gets, and with (tree, None,
      counts) when its episode ends: its own part of `metrics` (tokens decoded, what was asked and failed),
      `requests` (spans and scores) and its `seconds`.
    cancelled: asked in every round; once true, the rollout raises Cancelled.
  """

  def __init__(self, policy: Callable[['Schedule'], Any], growths: Sequence[tuple[int, Iterator, Tree]],
               tools: Tools, on_progress: Progress | None = None, observer: Observer | None = None,
               cancelled: Callable[[], bool] = lambda: False):
    self.tools, self.on_progress = tools, on_progress
    self.observer, self.cancelled = observer or (lambda *_: None), cancelled
    self.total, self.queue = len(growths), collections.deque(Episode(*growth) for growth in growths)
    self.steps = 0  # decode steps so far, the clock of the deterministic mode
    self.capacity = 0  # tokens that they could have decoded
    self.counts = collections.Counter(dict.fromkeys(COUNTS, 0))
    self.last_failures: dict[str, str] = {}
    self.calls: list[Pending] = []
    self.queries: dict[str, list[Pending]] = {}  # by service
    self.caller = Caller(tools.workers)
    self.callers: dict[str, Caller] = {}  # of the services that are asked on threads
    self.lost = collections.Counter()  # by service: how many of its last calls in a row got no reply
    self.paid_before = getattr(tools.search, 'paid', 0)
    self.started, self.seconds_asking = time.monotonic(), 0.0
    self.policy = policy(self)

  def run(self) -> dict[str, float]:
    """Runs all episodes to their ends, in order; returns `metrics`. Raises GrowthError and Cancelled."""
    with self.policy:
      while True:
        if self.cancelled():
          raise Cancelled
        self._fill()
        while finished := self.policy.place():
          self.reply(finished)
        if self.policy.decodes:
          self.reply(self.policy.decode())
        elif self.queries:
          self._ask_all()
        elif not (self.queue or self.policy.waits or self.calls):
          return self.metrics()

  def metrics(self) -> dict[str, float | str]:
    """Returns the counts of this run so far.

    tokens_decoded, tokens_prefilled (computed as context), tokens_reused (context that was cached),
    tokens_forked (those of it that were copied); episodes, stop_X (those that ended with stop X); segments,
    steps, idle_share (of what the segments could have decoded); seconds_tools (inside tools, added up),
    seconds_waiting (for their replies), seconds_services, seconds_host (neither in services nor waiting for
    the device or a reply); seconds, tokens_per_second (in all); rows_evicted (from episodes that still ran).

    Where searches cost money, searches_paid and searches_cost: see `tools.paid`.

    Of replies: tool_calls, calls_NAME of each tool, and service_calls (of other models); tool_calls_failed,
    service_calls_failed, and of these …_failed_KIND for the KINDs of `calls.FAULTS` that occurred;
    searches_asked, searches_failed, searches_failed_share (of trees and of programs). last_failure (of a
    tool) and last_service_failure are the reasons of the last ones, if there are any.
    """
    seconds, decoded = time.monotonic() - self.started, self.counts['tokens_decoded']
    waited = self.counts['seconds_waiting'] + self.policy.seconds_waited
    return dict(self.counts) | {
      'steps': self.steps, 'seconds': seconds, 'tokens_per_second': decoded / seconds if seconds else 0.0,
      'idle_share': 1 - decoded / self.capacity if self.steps else 0.0,
      'seconds_host': seconds - waited - self.seconds_asking, 'rows_evicted': self.policy.evicted,
      'searches_failed_share': self.counts['searches_failed'] / max(self.counts['searches_asked'], 1),
    } | paid(self.tools.search, self.paid_before) | self.last_failures  # fmt: skip

  # Episodes.

  def _fill(self) -> None:
    while self.policy.room:
      if self.queue and self.policy.claim(self.queue[0]):
        episode = self.queue.popleft()
        episode.started = time.monotonic()
        self._advance([episode])
      elif not self._apply_reply():
        return

  def _advance(self, episodes: Iterable[Episode]) -> None:
    """Hands replies to the generators and takes their requests, until each has to wait or ends."""
    for episode in dict.fromkeys(episodes):
      try:
        while not episode.waiting:
          self._take(episode)
      except StopIteration:
        self._finish_episode(episode)
      except requests.NoLogprobs:
        raise
      except Exception as error:
        name = episode.tree.question.id if episode.tree.question else episode.number
        raise GrowthError(f'question {name}: {type(error).__name__}: {error}') from error

  def _take(self, episode: Episode) -> None:
    """Sends an episode its replies; serves what it requests next."""
    for request, reply in zip(episode.asked, episode.replies or ()):
      self.observer(episode.tree, request, reply)
    reply = episode.replies if episode.several else episode.replies and episode.replies[0]
    yielded = episode.growth.send(reply)
    episode.several = isinstance(yielded, (list, tuple))
    episode.asked = yielded if episode.several else [yielded]
    episode.replies, episode.waiting = [None] * len(episode.asked), len(episode.asked)
    for place, request in enumerate(episode.asked):
      if not isinstance(request, Request):
        raise TypeError(f'{request!r} is no request')
      request.submit(self, Pending(episode, place, request))

  def _finish_episode(self, episode: Episode) -> None:
    self.policy.release(episode)
    self.add(episode, episodes=1)
    if episode.tree.stop is not None:
      self.add(episode, **{f'stop_{episode.tree.stop}': 1})
    self.observer(episode.tree, None, dict(episode.counts) | episode.failures | {
      'requests': episode.requests, 'seconds': time.monotonic() - episode.started})
    if self.on_progress:
      self.on_progress(self.counts['episodes'], self.total, self.metrics())

  def add(self, episode: Episode, **counts: int) -> None:
    """Adds to the counts of an episode and of the schedule."""
    episode.counts.update(counts)
    self.counts.update(counts)

  def set_reply(self, pending: Pending, value: Any) -> None:
    """Notes a reply; its generator gets it once it has all it waits for."""
    pending.episode.replies[pending.place] = value
    pending.episode.waiting -= 1

  def reply(self, finished: Sequence[tuple[Pending, Any]]) -> None:
    """Hands replies to their generators."""
    for pending, value in finished:
      self.set_reply(pending, value)
    self._advance(pending.episode for pending, _ in finished)

  def seconds_left(self, episode: Episode) -> float:
    """Returns the seconds until the deadline of the episode."""
    return max(0.0, episode.started + self.policy.episode_deadline - time.monotonic())

  # Tools and services.

  def call(self, pending: Pending) -> None:
    """Starts the call of a tool."""
    episode, request = pending.episode, pending.request
    episode.calls += 1
    tools = self.tools.for_call(episode.tree.question, episode.number, episode.calls, pending.searches)
    seconds = min(self.tools.deadline, self.seconds_left(episode))
    pending.call = self.caller.start(functools.partial(request.run, tools), self.steps, seconds)
    self.calls.append(pending)

  def ask(self, pending: Pending) -> None:
    """Asks a service at once, or with all that waits for it once nothing is left to decode."""
    name = pending.request.service
    if name not in self.tools.services:  # an agent that only answers goes without
      self.set_reply(pending, ToolFailure(f'there is no {name}'))
    elif getattr(self.tools.services[name], 'concurrency', 0):
      self._ask_at_once(pending)
    else:
      self.queries.setdefault(name, []).append(pending)

  def _apply_reply(self) -> bool:
    """Applies the reply of a call that is due, waiting for it if that is the rule; False if none is due."""
    start, nothing_else = time.monotonic(), not self.policy.waits and not self.policy.decodes
    if self.policy.deterministic:
      due = [pending for pending in self.calls[:1]
             if nothing_else or self.steps - pending.call.step >= self.policy.tool_patience]
    else:
      calls = [pending.call for pending in self.calls]
      if nothing_else and calls:
        timeout = min(call.seconds_left() for call in calls)
        wait([call.future for call in calls], timeout=timeout, return_when=FIRST_COMPLETED)
      due = (pending for pending in self.calls
             if pending.call.future.done() or pending.call.seconds_left() == 0)
    pending = next(iter(due), None)
    if pending is None:
      return False
    self.calls.remove(pending)
    seconds, result = pending.call.outcome()
    self.counts['seconds_waiting'] += time.monotonic() - start
    if isinstance(pending.request, requests.Ask):
      self.counts['seconds_services'] += seconds
      self._apply_service([pending], [result])
    else:
      self.counts['seconds_tools'] += seconds
      self._apply_call(pending, result)
    return True

  def _apply_call(self, pending: Pending, result: Any) -> None:
    """Cuts what a tool returned; calls of one list that stand behind the same span share the room there."""
    request, episode = pending.request, pending.episode
    if not isinstance(result, ToolFailure) and request.node is not None:
      sharing = sum(other.node is request.node for other in episode.asked if isinstance(other, ToolCall))
      room = (self.policy.length - request.node.length) // sharing
      result = request.cut(result, self.tools, room, episode.tree.tokenizer)
    failures = [error and requests.failure_of(error) for error in pending.searches]
    self._count(requests.SEARCHES, episode, failures)
    self._count(requests.TOOLS, episode, [result])
    self.add(episode, **{f'calls_{request.tool}': 1})
    self.reply([(pending, result)])

  def _count(self, names: requests.Names, episode: Episode, replies: Sequence[Any]) -> None:
    """Counts replies and the failures among them, those of tools and services by kind too."""
    failures = [reply for reply in replies if isinstance(reply, ToolFailure)]
    self.add(episode, **{names.asked: len(replies), names.failed: len(failures)})
    if names is not requests.SEARCHES:  # which are tool calls
      self.add(episode, **collections.Counter(f'{names.failed}_{failure.fault}' for failure in failures))
    if failures:
      episode.failures[names.last] = self.last_failures[names.last] = requests.one_line(failures[-1].reason)

  def _ask_at_once(self, pending: Pending) -> None:
    """Starts a call of a service that has a `concurrency`."""
    name, item = pending.request.service, pending.request.item
    service = self.tools.services[name]

    def ask():
      if self.lost[name] >= service.concurrency:  # the rest would take its timeout each
        reason = f'{name}: not asked, since {self.lost[name]} requests in a row got no reply'
        return ToolFailure(reason, 'connection')
      try:
        reply, = service([item])
        if isinstance(reply, Exception):
          raise reply
      except Exception as error:
        reply = requests.failure_of(error, name)
      gone = isinstance(reply, ToolFailure) and reply.fault in ('timeout', 'connection', 'server')
      self.lost[name] = self.lost[name] + 1 if gone else 0
      return reply

    caller = self.callers.setdefault(name, Caller(service.concurrency))
    seconds = min(threading.TIMEOUT_MAX, self.seconds_left(pending.episode))
    pending.call = caller.start(ask, self.steps, seconds)
    self.calls.append(pending)

  def _ask_all(self) -> None:
    """Gives every service all that waits for it; a service that fails is a failed tool to each of them."""
    queries, self.queries = self.queries, {}
    for name, waiting in queries.items():
      start = time.monotonic()
      try:
        replies = list(self.tools.services[name]([pending.request.item for pending in waiting]))
        if len(replies) != len(waiting):
          raise ValueError(f'{len(replies)} replies to {len(waiting)} items')
      except Exception as error:
        if memory.ran_out(error):
          raise
        replies = [error] * len(waiting)
      seconds = time.monotonic() - start
      self.counts['seconds_services'] += seconds
      self.seconds_asking += seconds
      self._apply_service(waiting, replies)

  def _apply_service(self, waiting: Sequence[Pending], replies: Sequence[Any]) -> None:
    """Hands on a service's replies: an exception where it failed, None where a reply is unclear."""
    name, finished = waiting[0].request.service, []
    for pending, reply in zip(waiting, replies):
      if reply is None:
        reply = ToolFailure(f'{name}: a reply that cannot be read', 'malformed')
      elif isinstance(reply, Exception):
        reply = requests.failure_of(reply, name)
      self._count(requests.SERVICES, pending.episode, [reply])
      finished.append((pending, reply))
    self.reply(finished)


@dataclass(eq=False)
class RunningCall:
  """A call that was started: `future` will hold (seconds it took, result)."""
  future: Future
  started: float
  deadline: float  # seconds
  step: int  # decode steps of the run when it was started

  def seconds_left(self) -> float:
    """Returns the seconds until the deadline, 0 once it has passed."""
    return max(0.0, self.started + self.deadline - time.monotonic())

  def outcome(self) -> tuple[float, Any]:
    """Returns (seconds, result or ToolFailure); waits for the reply, no longer than the deadline."""
    try:
      return self.future.result(timeout=self.seconds_left())
    except FutureTimeout:
      failure = ToolFailure(f'no reply within {self.deadline:g} seconds', 'timeout')
      return time.monotonic() - self.started, failure


class Caller:
  """Starts calls, at most `workers` running at a time; the deadline of a call includes its wait for a place.

  Daemon threads rather than a `ThreadPoolExecutor`: a call that hangs must not keep the process from ending.
  """

  def __init__(self, workers: int):
    self._places = threading.Semaphore(workers)

  def start(self, function: Callable[[], Any], step: int, deadline: float) -> RunningCall:
    """Starts a call on a thread of its own."""
    future = Future()

    def serve():
      with self._places:
        start = time.monotonic()
        try:
          result = function()
        except BaseException as error:  # whatever a tool does, the run goes on
          result = requests.failure_of(error)
        future.set_result((time.monotonic() - start, result))

    threading.Thread(target=serve, daemon=True).start()
    return RunningCall(future, time.monotonic(), deadline, step)
