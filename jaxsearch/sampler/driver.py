"""The one rollout driver: questions in, grown trees out.

`rollout` hands its episodes to a `Schedule`, which repeats until nothing is left: start episodes and apply
replies of calls while the policy has room (`_fill`), let the policy place and decode what waits for it, and
hand finished replies to their generators, which then yield new requests. A request serves and counts itself
(`tools.calls.Request`); the schedule knows none by name.

The policy is what serves `Generate` and `Score`: `decoding.Decoding` on our engine, `served.ServedDecoding`
behind servers. It has `room`; `claim`, which takes an episode out of those that wait, and `release` of one;
`generate` and `score`, after which a request waits; `busy` and `decodes`; `place` and `decode`, which return
the (pending, reply) that are finished; `length`, tokens of the longest path, and `episode_deadline`; and
`figures`, metrics of its own.

In the deterministic mode every decision is a function of tokens and decode steps: replies of calls are
applied in the order of their requests, where a slot is idle and no new episode can be started; the host waits
for them. Otherwise replies are applied as they arrive.

Once `enough` is true no generator gets another reply, and the rollout ends when all requests are served. Its
unfinished episodes hold those replies, and resume when given to another `run`.
"""

import collections
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError as FutureTimeout, wait
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.parallel import memory
from jaxsearch.sampler.requests import Growth, Refused, Request, Sampling, ToolFailure, Tools
from jaxsearch.tools.calls import Kind, one_line, paid
from jaxsearch.trees.tree import Stop, Tree

COUNTS = ('tokens_decoded', 'tokens_prefilled', 'tokens_reused', 'episodes', 'segments',
          'tool_calls', 'tool_calls_failed', 'searches_asked', 'searches_failed', 'seconds_tools',
          'seconds_waiting', 'service_calls', 'service_calls_failed', 'seconds_services',
          *(f'stop_{stop}' for stop in Stop))
Grow = Callable[[Question, Tree], Growth[None]]
Observer = Callable[[Tree, Request | None, Any], None]
Progress = Callable[[int, int, dict], None]


class Cancelled(Exception):
  """Ends a rollout whose trees nobody wants any more."""


class GrowthError(RuntimeError):
  """A generator raised; the cause is chained, the message names the question."""


@dataclass(frozen=True)
class Agent:
  """A policy with its method and tools."""
  engine: Any          # an `engine.Engine` with its parameters loaded, or what `served.ServedDecoding` asks
  grow: Grow           # a method's `grow` with its settings bound, see jaxsearch/methods
  tools: Tools         # search, sandbox, other models
  sampling: Sampling   # its temperature
  grammar: Any = None  # of its trees, see trees/grammars.py


def rollout(agent: Agent, questions: Sequence[Question], key: jax.Array, *, sampling: Sampling | None = None,
            tools: Tools | None = None, numbers: Sequence[int] | None = None,
            on_progress: Progress | None = None, observer: Observer | None = None,
            cancelled: Callable[[], bool] = lambda: False) -> tuple[list[Tree], dict[str, float]]:
  """Grows one tree for each of `questions` to its end.

  Args:
    questions: one for each tree; repeat a question to roll it out several times.
    key: a JAX random key. A tree's tokens, and its `rng`, are a function of the key and of the tree's number
      alone.
    sampling, tools: replace the agent's.
    numbers: of the trees, their places in the global batch; 0, 1, 2, … by default.
    on_progress, observer, cancelled: see `Schedule`.
  Returns:
    (trees in the order of `questions`, metrics: see `Schedule.metrics`).
  Raises:
    GrowthError: a `grow` raised; the message names its question. Refused: as it is.
    Cancelled: `cancelled()` became true.
  """
  numbers = range(len(questions)) if numbers is None else numbers
  episodes = [new_episode(agent, question, key, number)
              for question, number in zip(questions, numbers, strict=True)]
  metrics = run(agent, episodes, key, sampling=sampling, tools=tools, on_progress=on_progress,
                observer=observer, cancelled=cancelled)
  return [episode.tree for episode in episodes], metrics


@memory.named('sampling', memory.SAMPLER)
def run(agent: Agent, episodes: Sequence['Episode'], key: jax.Array, *, sampling: Sampling | None = None,
        tools: Tools | None = None, **options) -> dict[str, float]:
  """Runs episodes, new or held; returns the metrics. See `rollout`, and `Schedule` for `options`."""
  policy = functools.partial(agent.engine.decoding, key, sampling or agent.sampling)
  return Schedule(policy, episodes, tools or agent.tools, **options).run()


def new_episode(agent: Agent, question: Question, key: jax.Array, number: int) -> 'Episode':
  """Returns the episode of tree `number`, not begun."""
  rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), number])
  tree = Tree(agent.engine.tokenizer, question, rng, agent.grammar)
  tree.length = agent.engine.length
  return Episode(number, agent.grow(question, tree), tree)


@dataclass(eq=False)
class Episode:
  """A generator that grows a tree, and the replies it waits for."""
  number: int  # with the key it decides what is sampled
  growth: Iterator
  tree: Tree
  lane: int = 0  # of the sampler; its pages of the cache are all there
  asked: Sequence[Request] = ()
  replies: list | None = None
  several: bool = False  # whether it yielded a list
  waiting: int = 0  # replies that are missing
  requests: int = 0  # spans and scores it has requested so far
  calls: int = 0  # of tools so far
  started: float = 0.0
  done: bool = False
  counts: collections.Counter = field(default_factory=collections.Counter)  # its part of the schedule's
  failures: dict[str, str] = field(default_factory=dict)  # the last reasons, by name of the metric


@dataclass(eq=False)
class Pending:
  """A request that has no reply yet."""
  episode: Episode
  place: int  # of the reply among the replies of its episode
  request: Request
  searches: list[Exception | None] = field(default_factory=list)  # in a call: errors, or None
  # Of one that is served on a thread:
  future: Future | None = None  # will hold (seconds it took, result or error)
  started: float = 0.0
  deadline: float = 0.0  # seconds

  def seconds_left(self) -> float:
    """Returns the seconds until the deadline, 0 once it has passed."""
    return max(0.0, self.started + self.deadline - time.monotonic())

  def outcome(self) -> tuple[float, Any]:
    """Returns (seconds, result or error); waits for it, no longer than the deadline."""
    try:
      return self.future.result(timeout=self.seconds_left())
    except FutureTimeout:
      failure = ToolFailure(f'no reply within {self.deadline:g} seconds', 'timeout')
      return time.monotonic() - self.started, failure


class Schedule:
  """Runs episodes to their ends.

  Args:
    policy: called with this schedule; returns what serves `Generate` and `Score`, see above.
    episodes: their tokens depend on their numbers, on the policy's key, and on nothing else.
    on_progress: called with (episodes done, episodes, metrics so far) whenever one ends.
    observer: called with (tree, request, reply) for every reply that a generator gets, and with (tree, None,
      counts) when its episode ends: its own part of `metrics` (tokens decoded, what was asked and failed),
      `requests` (spans and scores) and its `seconds`.
    cancelled: asked in every round; once true, the rollout raises Cancelled.
    enough: once true, generators get no more replies.
  """

  def __init__(self, policy: Callable[['Schedule'], Any], episodes: Sequence[Episode], tools: Tools,
               on_progress: Progress | None = None, observer: Observer | None = None,
               cancelled: Callable[[], bool] = lambda: False, enough: Callable[[], bool] = lambda: False):
    self.tools, self.on_progress = tools, on_progress
    self.observer, self.cancelled, self.enough = observer or (lambda *_: None), cancelled, enough
    self.total, self.queue = len(episodes), collections.deque(episodes)
    self.steps = 0  # decode steps so far
    self.capacity = 0  # tokens that they could have decoded
    self.counts = collections.Counter(dict.fromkeys(COUNTS, 0))
    self.last_failures: dict[str, str] = {}
    self.calls: list[Pending] = []  # on threads
    self.workers: dict[str, tuple[queue.SimpleQueue, list]] = {}  # threads that take calls from a queue
    self.together: dict[str, tuple[Callable, list[Pending]]] = {}  # functions, and what waits for each
    self.paid_before = getattr(tools.search, 'paid', 0)
    self.started, self.seconds_together = time.monotonic(), 0.0
    self.policy = policy(self)

  def run(self) -> dict[str, float]:
    """Runs all episodes to their ends, in order; returns `metrics`. Raises GrowthError and Cancelled."""
    with self.policy, contextlib.closing(self):
      while True:
        if self.cancelled():
          raise Cancelled
        self._fill()
        while finished := self.policy.place():
          self.reply(finished)
        if self.policy.decodes:
          self.reply(self.policy.decode())
        elif self.together:
          self._serve_together()
        elif not ((self.queue and not self.enough()) or self.policy.busy or self.calls):
          return self.metrics()

  def metrics(self) -> dict[str, float | str]:
    """Returns the counts of this run so far.

    tokens_decoded, tokens_prefilled (computed as context), tokens_reused (context that was cached),
    episodes, stop_X (those that ended with stop X); segments,
    steps, idle_share (of what the segments could have decoded); seconds_tools (inside tools, added up),
    seconds_waiting (for replies), seconds_services, seconds_host (neither in services nor waiting for the
    device or a reply); seconds, tokens_per_second (in all); pages_evicted (from episodes that still ran).

    Where searches cost money, searches_paid and searches_cost: see `tools.paid`.

    Of replies: tool_calls, calls_NAME of each tool, and service_calls (of other models); tool_calls_failed,
    service_calls_failed, and of these …_failed_KIND for the KINDs of `calls.FAULTS` that occurred;
    searches_asked, searches_failed, searches_failed_share (of trees and of programs). last_failure (of a
    tool) and last_service_failure are the reasons of the last ones, if there are any.
    """
    seconds, decoded = time.monotonic() - self.started, self.counts['tokens_decoded']
    waited = self.counts['seconds_waiting'] + self.policy.seconds_waited + self.seconds_together
    return dict(self.counts) | {
      'steps': self.steps, 'seconds': seconds, 'tokens_per_second': decoded / seconds if seconds else 0.0,
      'idle_share': 1 - decoded / self.capacity if self.capacity else 0.0,
      'seconds_host': seconds - waited, 'pages_evicted': self.policy.evicted,
      'searches_failed_share': self.counts['searches_failed'] / max(self.counts['searches_asked'], 1),
    } | paid(self.tools.search, self.paid_before) | self.policy.figures | self.last_failures  # fmt: skip

  # Episodes.

  def _fill(self) -> None:
    while self.policy.room and not self.cancelled():  # behind a server there is always room
      if self.queue and not self.enough() and (episode := self.policy.claim(self.queue)):
        episode.started = time.monotonic()
        self._advance([episode])
      elif not self._apply_reply():
        return

  def _advance(self, episodes: Iterable[Episode]) -> None:
    """Hands replies to the generators and takes their requests, until each has to wait or ends."""
    for episode in dict.fromkeys(episodes):
      try:
        while not episode.waiting and not self.enough():
          self._take(episode)
      except StopIteration:
        self._finish_episode(episode)
      except Refused:
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
    episode.done = True
    self.add(episode, episodes=1)
    if episode.tree.stop is not None:
      self.add(episode, **{f'stop_{episode.tree.stop}': 1})
    self.observer(episode.tree, None, dict(episode.counts) | episode.failures | {
      'requests': episode.requests, 'seconds': time.monotonic() - episode.started})
    if self.on_progress:
      self.on_progress(self.counts['episodes'], self.total, self.metrics())

  def seconds_left(self, episode: Episode) -> float:
    """Returns the seconds until the deadline of the episode."""
    return max(0.0, episode.started + self.policy.episode_deadline - time.monotonic())

  # What requests call.

  def set_reply(self, pending: Pending, value: Any) -> None:
    """Notes a reply; its generator gets it once it has all it waits for."""
    pending.episode.replies[pending.place] = value
    pending.episode.waiting -= 1

  def reply(self, finished: Sequence[tuple[Pending, Any]]) -> None:
    """Hands replies to their generators."""
    for pending, value in finished:
      self.set_reply(pending, value)
    self._advance(pending.episode for pending, _ in finished)

  def start(self, pending: Pending, function: Callable[[], Any], kind: str, most: int,
            deadline: float = threading.TIMEOUT_MAX) -> None:
    """Serves a request on a thread: `request.finish` gets what the function returned or raised.

    Not by a `ThreadPoolExecutor`, since a call that hangs must not keep the process from ending.

    Args:
      most: calls of this kind that run at a time.
      deadline: seconds, the wait for a place included; that of the episode holds too.
    """
    calls, workers = self.workers.setdefault(kind, (queue.SimpleQueue(), []))
    pending.future, pending.started = Future(), time.monotonic()
    pending.deadline = min(deadline, self.seconds_left(pending.episode))
    calls.put((function, pending))
    if len(workers) < most:
      workers.append(threading.Thread(target=_work, args=(calls,), daemon=True))
      workers[-1].start()
    self.calls.append(pending)

  def close(self) -> None:
    """Lets the threads end once they have done what they are at."""
    for pending in self.calls:
      pending.deadline = 0.0  # no thread begins it any more
    for calls, workers in self.workers.values():
      for _ in workers:
        calls.put(None)

  def join(self, pending: Pending, kind: str, function: Callable[[list], Sequence[Any]]) -> None:
    """Serves a request with all others of its kind, once nothing is left to decode: `function` gets their
    items."""
    self.together.setdefault(kind, (function, []))[1].append(pending)

  def add(self, episode: Episode, **counts: int) -> None:
    """Adds to the counts of an episode and of the schedule."""
    for name, number in counts.items():
      episode.counts[name] += number
      self.counts[name] += number

  def count(self, kind: Kind, episode: Episode, replies: Sequence[Any]) -> None:
    """Counts replies and the failures among them, if `kind.faults` each fault of these too."""
    failures = [reply for reply in replies if isinstance(reply, ToolFailure)]
    self.add(episode, **{kind.asked: len(replies), kind.failed: len(failures)})
    if kind.faults:
      self.add(episode, **collections.Counter(f'{kind.failed}_{failure.fault}' for failure in failures))
    if failures:
      episode.failures[kind.last] = self.last_failures[kind.last] = one_line(failures[-1].reason)

  # Replies that come from elsewhere.

  def _apply_reply(self) -> bool:
    """Applies a due reply, and waits for it if deterministic or the policy is idle; False if none is due."""
    start, calls = time.monotonic(), self.calls
    if self.policy.deterministic:
      due = calls[:1]
    else:
      if calls and not self.policy.busy:
        timeout = min(call.seconds_left() for call in calls)
        wait([call.future for call in calls], timeout=timeout, return_when=FIRST_COMPLETED)
      due = [call for call in calls if call.future.done() or call.seconds_left() == 0]
    if not due:
      return False
    pending = due[0]
    calls.remove(pending)
    seconds, result = pending.outcome()
    self.counts['seconds_waiting'] += time.monotonic() - start
    self.reply([(pending, pending.request.finish(self, pending, result, seconds))])
    return True

  def _serve_together(self) -> None:
    """Gives every function the items of all that waits for it; one that raises has failed for each."""
    waiting, self.together = self.together, {}
    for function, several in waiting.values():
      start = time.monotonic()
      try:
        results = list(function([pending.request.item for pending in several]))
        if len(results) != len(several):
          raise ValueError(f'{len(results)} replies to {len(several)} items')
      except Exception as error:
        if memory.ran_out(error):
          raise
        results = [error] * len(several)
      seconds = time.monotonic() - start
      self.seconds_together += seconds
      self.reply([(pending, pending.request.finish(self, pending, result, seconds / len(several)))
                  for pending, result in zip(several, results)])


def _work(calls: queue.SimpleQueue) -> None:
  """Makes calls, one after the other, until it gets None."""
  while call := calls.get():
    function, pending = call
    if not pending.seconds_left():
      continue  # it has failed already
    start = time.monotonic()
    try:
      result = function()
    except BaseException as error:  # whatever a tool does, the run goes on
      result = error
    pending.future.set_result((time.monotonic() - start, result))
