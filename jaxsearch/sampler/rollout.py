"""The one rollout driver: questions in, grown trees out. Training, evaluation, critic warm-up, readers and judges call it.

`rollout` hands its trees to a `Schedule`, which repeats four steps until nothing is left: start episodes and apply the replies
of tools while slots are idle (`_fill`), give rows to the requests that wait and prefill what is missing there (`_place`), decode
a segment (`_decode`), and hand finished spans to their generators, which then yield their next requests. The `Engine` drives the
device.

In the deterministic mode every decision is a function of tokens and decode steps: replies of tools are applied in the
order of their requests, and only where a slot is idle, no new episode can be started, and the call is `tool_patience` decode
steps old or nothing is left to decode; if the reply is not there by then, the host waits for it. Otherwise replies are applied
as they arrive.
"""

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import jax
import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.parallel import memory
from jaxsearch.sampler import requests
from jaxsearch.sampler.cache import CacheRow
from jaxsearch.sampler.engine import Chunk, Engine
from jaxsearch.sampler.requests import END, LENGTH, Ask, Call, Generate, RunPython, Sampling, Score, Search, ToolFailure, Tools
from jaxsearch.sampler.segment import Slots
from jaxsearch.sampler.stops import ENDED
from jaxsearch.tools import paid
from jaxsearch.trees.tree import Role, Stop, Tree

POLL_STEPS = 8  # non-deterministic: steps of a segment while a slot is idle and a tool may reply at any time
COUNTS = ('tokens_decoded', 'tokens_prefilled', 'tokens_reused', 'tokens_forked', 'episodes', 'segments', 'tool_calls',
          'tool_calls_failed', 'searches_asked', 'searches_failed', 'seconds_tools', 'seconds_waiting', 'service_calls',
          'service_calls_failed', 'seconds_services', *(f'stop_{stop}' for stop in Stop))
Grow = Callable[[Question, Tree], Iterator[requests.Request]]
Observer = Callable[[Tree, requests.Request | None, Any], None]


@dataclasses.dataclass(frozen=True)
class Agent:
  """A policy with its method and tools.

  Attributes:
    engine: the policy, with its parameters loaded.
    grow: a method's `grow` with its settings bound, see jaxsearch/methods.
    tools: search, sandbox, other models.
    sampling: temperature, top-p and top-k where a request names none.
  """
  engine: Engine
  grow: Grow
  tools: Tools
  sampling: Sampling


@memory.named('sampling', memory.SAMPLER)
def rollout(agent: Agent, questions: Sequence[Question], key, *, sampling: Sampling | None = None, tools: Tools | None = None,
            numbers: Sequence[int] | None = None, on_progress: Callable[[int, int, dict], None] | None = None,
            observer: Observer | None = None,
            cancelled: Callable[[], bool] = lambda: False) -> tuple[list[Tree], dict[str, float]]:
  """Grows one tree for each of `questions` to its end.

  Args:
    questions: one for each tree; repeat a question to roll it out several times.
    key: a JAX random key. A tree's tokens, and its `rng`, are a function of the key and of the tree's number alone.
    sampling, tools: replace the agent's.
    numbers: of the trees, their places in the global batch; 0, 1, 2, … by default.
    on_progress, observer, cancelled: see `Schedule`.
  Returns:
    (trees in the order of `questions`, metrics: see `Schedule.metrics`).
  Raises:
    GrowthError: a `grow` raised; the message names its question.
    Cancelled: `cancelled()` became true.
  """
  numbers = range(len(questions)) if numbers is None else numbers
  words = np.asarray(jax.random.key_data(key)).ravel().tolist()
  trees = [Tree(agent.engine.tokenizer, question, np.random.default_rng([*words, number]))
           for question, number in zip(questions, numbers, strict=True)]
  growths = [(number, agent.grow(tree.question, tree), tree) for number, tree in zip(numbers, trees)]
  schedule = Schedule(agent.engine, growths, agent.engine.put(key), sampling or agent.sampling, tools or agent.tools,
                      on_progress, observer, cancelled)
  return trees, schedule.run()


@dataclasses.dataclass(frozen=True)
class Assistant:
  """A frozen model that replies to prompts, a service for `Ask`: R-Search's reader, a judge. Batched on a sampler of its own.

  Attributes:
    engine: with parameters loaded.
    max_tokens: of a reply.
    stop: stop strings; a reply ends before the first of them.
    chat: whether a prompt is wrapped into the chat template of the tokenizer.
    temperature: of the replies; 0 is greedy.
  """
  engine: Engine
  max_tokens: int = 64
  stop: tuple[str, ...] = ()
  chat: bool = False
  temperature: float = 0.0

  def __call__(self, prompts: Sequence[str], seeds: Sequence[int] | None = None) -> list[str]:
    """The replies, stripped; a prompt that leaves no room for one gets an empty reply.

    Above temperature 0 a reply depends on its prompt and on its seed (0 to 2**31 - 1), by default its place.
    """
    agent = Agent(self.engine, self._grow, Tools(), Sampling(self.temperature))
    trees, _ = rollout(agent, [Question(str(i), prompt, ()) for i, prompt in enumerate(prompts)], jax.random.key(0),
                       numbers=seeds)
    return [tree.answer for tree in trees]

  def _grow(self, question: Question, tree: Tree):
    tokenizer, prompt = tree.tokenizer, question.question
    if self.chat:
      prompt = tokenizer.chat([{'role': 'user', 'content': prompt}])
    node = yield Generate(tree.root.append(prompt, Role.PROMPT), stop=self.stop, max_tokens=self.max_tokens)
    text = tokenizer.decode(node.tokens[:-1] if node.stop == END else node.tokens)
    ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
    tree.answer = text[:min(ends, default=None)].strip()


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A frozen model with the policy's tokenizer that serves `Score` requests, a service for `Ask`: Search-R2's frozen refiner.

  It has a cache of its own, so it prefills the whole path of every request.
  """
  engine: Engine

  def __call__(self, scores: Sequence[Score]) -> list[list[list[float] | None]]:
    def grow(question: Question, tree: Tree):
      score = scores[int(question.id)]
      tree.answer = yield Score(tree.root.append(score.node.path_tokens(), Role.PROMPT), score.continuations)

    agent = Agent(self.engine, grow, Tools(), requests.GREEDY)
    return [tree.answer for tree in rollout(agent, [Question(str(i), '', ()) for i in range(len(scores))], jax.random.key(0))[0]]


class Cancelled(Exception):
  """Nobody wants the trees of this rollout any more."""


class GrowthError(RuntimeError):
  """A generator raised; the cause is chained, the message names the question."""


@dataclasses.dataclass(eq=False)
class Episode:
  """A generator that grows a tree, and the replies it waits for."""
  number: int  # with the key it decides what is sampled
  growth: Iterator
  tree: Tree
  lane: int = 0  # of the sampler; its rows of the cache are all there
  asked: Sequence[requests.Request] = ()
  replies: list | None = None
  several: bool = False  # whether it yielded a list
  waiting: int = 0  # replies that are missing
  requests: int = 0  # spans and scores it has requested so far
  calls: int = 0  # of a simulated search so far
  started: float = 0.0
  counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # its own part of the schedule's


@dataclasses.dataclass(eq=False)
class Pending:
  """A request that has no reply yet."""
  episode: Episode
  place: int  # of the reply among the replies of its episode
  request: requests.Request
  call: requests.ToolCall | None = None  # of a tool
  searches: list[Exception | None] = dataclasses.field(default_factory=list)  # of a program: the error of each, or None
  # Of Generate and Score, which need a row of the cache. The last token of the path is the first input of the next program and
  # not in the cache yet.
  path: np.ndarray | None = None
  row: CacheRow | None = None
  slot: Slots | None = None  # of Generate: what the first segment knows of it


class Schedule:
  """One rollout of many episodes: what each of them waits for, and the counts. The engine has parameters loaded.

  Args:
    growths: (number, generator, its tree) of each episode. The tokens of an episode depend on its number, on `key`, and on
      nothing else.
    on_progress: called with (episodes done, episodes, metrics so far) whenever one ends.
    observer: called with (tree, request, reply) for every reply that a generator gets, and with (tree, None, counts) when its
      episode ends; the counts are its own part of `metrics`: tokens decoded, and what was asked and failed.
    cancelled: asked in every round; once true, the rollout raises Cancelled.
  """

  def __init__(self, engine: Engine, growths: Sequence[tuple[int, Iterator, Tree]], key, sampling: Sampling,
               tools: Tools, on_progress: Callable[[int, int, dict], None] | None = None,
               observer: Observer | None = None, cancelled: Callable[[], bool] = lambda: False):
    self.engine, self.key, self.sampling, self.tools = engine, key, sampling, tools
    self.on_progress, self.observer, self.cancelled = on_progress, observer or (lambda *_: None), cancelled
    self.total = len(growths)
    self.queue = collections.deque(Episode(*growth) for growth in growths)
    self.ready: list[Pending] = []  # for a row of the cache
    # What is decoded: a number for each, at most engine.slots. What is known of them is in arrays over the numbers, so that the
    # host has nothing to do for those that go on.
    self.running: dict[int, Pending] = {}
    self.numbers = list(range(engine.slots))[::-1]  # that are not taken
    self.slots = Slots(*(np.zeros(engine.slots, np.asarray(value).dtype) for value in Slots(0)))
    self.tokens = np.zeros((engine.slots, engine.length + engine.segment_steps), np.int32)  # generated so far
    self.logprobs = np.zeros(self.tokens.shape, np.float32)
    self.generated = np.zeros(engine.slots, int)
    self.decoding, self.claimed = np.zeros((2, engine.lanes), int)  # in each lane: slots that decode; requests in `ready`
    self.calls: list[Pending] = []
    self.queries: dict[str, list[Pending]] = {}  # by service
    self.caller = requests.Caller(tools.workers)
    self.callers: dict[str, requests.Caller] = {}  # of the services that are asked on threads
    self.lost = collections.Counter()  # by service: how many of its calls in a row, the last ones, got no reply
    self.active = np.zeros(engine.lanes, int)  # episodes under way
    self.steps = self.capacity = 0  # decode steps so far, the clock of the deterministic mode; tokens they could have decoded
    self.counts, self.last_failures = collections.Counter(dict.fromkeys(COUNTS, 0)), {}
    self.evicted_before, self.paid_before = engine.rows.evicted, getattr(tools.search, 'paid', 0)
    self.started, self.device_before, self.seconds_asking = time.monotonic(), engine.seconds_on_device, 0.0

  def run(self) -> dict[str, float]:
    """Runs all episodes to their ends, `engine.slots` paths at a time, in order; returns `metrics`. Raises GrowthError."""
    self.engine.start_rollout()
    try:
      while True:
        if self.cancelled():
          raise Cancelled
        self._fill()
        self._place()
        if self.running:
          self._decode()
        elif self.queries:
          self._ask()
        elif not (self.queue or self.ready or self.calls):
          return self.metrics()
    except BaseException:
      self.engine.forget()  # what a row holds is uncertain in the middle of a step
      raise
    finally:
      self.engine.clear_front()

  def metrics(self) -> dict[str, float | str]:
    """Counts of this run so far.

    tokens_decoded, tokens_prefilled (computed as context), tokens_reused (context that was cached), tokens_forked (those of it
    that were copied); episodes, stop_X (those that ended with stop X); segments, steps, idle_share (of what the segments could
    have decoded); seconds_tools (inside tools, added up), seconds_waiting (for their replies), seconds_services, seconds_host
    (neither in services nor waiting for the device or a reply); seconds, tokens_per_second (in all); rows_evicted (from episodes
    that still ran).

    Where searches cost money, searches_paid and searches_cost: see `tools.paid`.

    Of replies: tool_calls and service_calls (of other models); tool_calls_failed, service_calls_failed, and of these
    …_failed_KIND for the KINDs of `requests.FAULTS` that occurred; searches_asked, searches_failed, searches_failed_share (of
    trees and of programs). last_failure (of a tool) and last_service_failure are the reasons of the last ones, if there are any.
    """
    seconds, decoded = time.monotonic() - self.started, self.counts['tokens_decoded']
    waited = self.counts['seconds_waiting'] + self.engine.seconds_on_device - self.device_before
    return dict(self.counts) | {
      'steps': self.steps, 'seconds': seconds, 'tokens_per_second': decoded / seconds if seconds else 0.0,
      'idle_share': 1 - decoded / self.capacity if self.steps else 0.0,
      'seconds_host': seconds - waited - self.seconds_asking, 'rows_evicted': self.engine.rows.evicted - self.evicted_before,
      'searches_failed_share': self.counts['searches_failed'] / max(self.counts['searches_asked'], 1),
    } | paid(self.tools.search, self.paid_before) | self.last_failures  # fmt: skip

  # Starting and resuming episodes.

  def _idle(self) -> np.ndarray:
    """Slots of each lane that nothing decodes in and no request in `ready` will take."""
    return self.engine.slots // self.engine.lanes - self.decoding - self.claimed

  def _fill(self) -> None:
    while (idle := self._idle()).max() > 0:
      room = np.where(self.active < self.engine.rows.count, idle, 0)
      if self.queue and room.max() > 0:
        episode = self.queue.popleft()
        episode.lane, episode.started = int(room.argmax()), time.monotonic()
        self.active[episode.lane] += 1
        self._advance([episode])
      elif not self._apply_reply():
        return

  def _advance(self, episodes: Iterable[Episode]) -> None:
    """Hands replies to the generators and takes their requests, until each has to wait for a reply or ends."""
    for episode in dict.fromkeys(episodes):
      try:
        while not episode.waiting:
          reply = episode.replies if episode.several else episode.replies and episode.replies[0]
          for request, one in zip(episode.asked, episode.replies or ()):
            self.observer(episode.tree, request, one)
          yielded = episode.growth.send(reply)
          episode.several = isinstance(yielded, (list, tuple))
          episode.asked = yielded if episode.several else [yielded]
          episode.replies, episode.waiting = [None] * len(episode.asked), len(episode.asked)
          for place, request in enumerate(episode.asked):
            self._serve(Pending(episode, place, request))
      except StopIteration:
        self._finish_episode(episode)
      except Exception as error:
        name = episode.tree.question.id if episode.tree.question else episode.number
        raise GrowthError(f'question {name}: {type(error).__name__}: {error}') from error

  def _finish_episode(self, episode: Episode) -> None:
    self.active[episode.lane] -= 1
    self.engine.rows.release(episode.number)
    self._add(episode, episodes=1)
    if episode.tree.stop is not None:
      self._add(episode, **{f'stop_{episode.tree.stop}': 1})
    self.observer(episode.tree, None, dict(episode.counts))
    if self.on_progress:
      self.on_progress(self.counts['episodes'], self.total, self.metrics())

  def _add(self, episode: Episode, **counts: int) -> None:
    """Adds to the counts of an episode and of the schedule."""
    episode.counts.update(counts)
    self.counts.update(counts)

  def _reply(self, pending: Pending, value: Any) -> None:
    pending.episode.replies[pending.place] = value
    pending.episode.waiting -= 1

  def _seconds_left(self, episode: Episode) -> float:
    """Until the deadline of the episode."""
    return max(0.0, episode.started + self.engine.episode_deadline - time.monotonic())

  # Requests.

  def _serve(self, pending: Pending) -> None:
    """Starts or queues a request; replies at once where it can."""
    request, tools = pending.request, self.tools
    match request:
      case Generate() | Score():
        self._queue(pending)
      case Search() if tools.search is None:
        raise ValueError('a Search, but the rollout has no search back end')
      case Search():
        topk = tools.topk if request.topk is None else request.topk
        self._call(pending, functools.partial(self._tools(pending.episode).find, request.node, request.query, topk))
      case RunPython() if tools.python is None:
        raise ValueError('a RunPython, but the rollout has no sandbox')
      case RunPython():
        self._call(pending, functools.partial(self._tools(pending.episode).run_python, request, pending.searches))
      case Call():
        self._call(pending, request.function)
      case Ask() if request.service not in tools.services:  # an agent that only answers goes without
        self._reply(pending, ToolFailure(f'there is no {request.service}'))
      case Ask() if getattr(tools.services[request.service], 'concurrency', 0):
        self._ask_at_once(pending)
      case Ask():
        self.queries.setdefault(request.service, []).append(pending)
      case _:
        raise TypeError(f'{request!r} is no request')

  def _queue(self, pending: Pending) -> None:
    """Puts a request in line for a row of the cache; replies at once where there is no room or no time."""
    request, episode, engine = pending.request, pending.episode, self.engine
    pending.path = path = np.asarray(request.node.path_tokens(), np.int32)
    if not len(path):
      raise ValueError(f'{type(request).__name__} after a path without a token: nothing predicts the first one')
    room = engine.length - len(path)
    if isinstance(request, Score) and room < 0:
      return self._reply(pending, [None] * len(request.continuations))
    if isinstance(request, Generate) and (room <= 0 or self._seconds_left(episode) == 0):
      return self._finish_span(pending, Stop.CONTEXT_FULL if room <= 0 else Stop.DEADLINE, [], [])
    episode.requests += 1
    if isinstance(request, Generate):
      pending.slot = Slots(
        rows=-1, tokens=int(path[-1]), lengths=len(path) - 1, remaining=min(request.max_tokens, room), episodes=episode.number,
        requests=episode.requests, states=engine.first_state(request.stop), forbidden=engine.forbidden_row(request.forbid),
        **vars(request.sampling(self.sampling)))
    self.ready.append(pending)
    self.claimed[episode.lane] += 1

  def _finish_span(self, pending: Pending, stop: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    node = pending.request.node.append(tokens, Role.POLICY, logprobs=logprobs)
    node.stop = stop
    self._reply(pending, node)

  # Tools.

  def _tools(self, episode: Episode) -> Tools:
    """The tools for the next call of an episode: a simulated search draws for each call anew, and hears the question."""
    if not hasattr(self.tools.search, 'for_call'):
      return self.tools
    episode.calls += 1
    search = self.tools.search.for_call(episode.tree.question, episode.number, episode.calls)
    return dataclasses.replace(self.tools, search=search)

  def _call(self, pending: Pending, function: Callable[[], Any]) -> None:
    pending.call = self.caller.start(function, self.steps, min(self.tools.deadline, self._seconds_left(pending.episode)))
    self.calls.append(pending)

  def _apply_reply(self) -> bool:
    """Applies the reply of a call that is due, waiting for it if that is the rule; False if there is something better to do."""
    start, nothing_else = time.monotonic(), not self.ready and not self.running
    if self.engine.deterministic:
      due = [pending for pending in self.calls[:1]
             if nothing_else or self.steps - pending.call.step >= self.engine.tool_patience]
    else:
      calls = [pending.call for pending in self.calls]
      if nothing_else and calls:
        wait([call.future for call in calls], timeout=min(call.seconds_left() for call in calls), return_when=FIRST_COMPLETED)
      due = (pending for pending in self.calls if pending.call.future.done() or pending.call.seconds_left() == 0)
    pending = next(iter(due), None)
    if pending is None:
      return False
    self.calls.remove(pending)
    seconds, result = pending.call.outcome()
    self.counts['seconds_waiting'] += time.monotonic() - start
    if isinstance(pending.request, Ask):
      self.counts['seconds_services'] += seconds
      self._apply_service([pending], [result])
      return True
    self.counts['seconds_tools'] += seconds
    if isinstance(pending.request, (Search, RunPython)):
      room = self.engine.length - pending.request.node.length
      result = self.tools.observation(pending.request, result, room, self.engine.tokenizer)
    searches = [error and requests.failure_of(error) for error in pending.searches]
    self._count(requests.SEARCHES, pending.episode, [result] if isinstance(pending.request, Search) else searches)
    self._count(requests.TOOLS, pending.episode, [result])
    self._reply(pending, result)
    self._advance([pending.episode])
    return True

  def _count(self, names: requests.Names, episode: Episode, replies: Sequence[Any]) -> None:
    """Counts replies and the failures among them, those of tools and services by kind too."""
    failures = [reply for reply in replies if isinstance(reply, ToolFailure)]
    self._add(episode, **{names.asked: len(replies), names.failed: len(failures)})
    if names is not requests.SEARCHES:  # which are tool calls
      self._add(episode, **collections.Counter(f'{names.failed}_{failure.fault}' for failure in failures))
    if failures:
      self.last_failures[names.last] = requests.one_line(failures[-1].reason)

  def _ask_at_once(self, pending: Pending) -> None:
    """Starts a call of a service that has a `concurrency`."""
    name, item = pending.request.service, pending.request.item
    service = self.tools.services[name]

    def ask():
      if self.lost[name] >= service.concurrency:  # the rest would take its timeout each
        return ToolFailure(f'{name}: not asked, since {self.lost[name]} requests in a row got no reply', 'connection')
      try:
        reply, = service([item])
        if isinstance(reply, Exception):
          raise reply
      except Exception as error:
        reply = requests.failure_of(error, name)
      gone = isinstance(reply, ToolFailure) and reply.fault in ('timeout', 'connection', 'server')
      self.lost[name] = self.lost[name] + 1 if gone else 0
      return reply

    caller = self.callers.setdefault(name, requests.Caller(service.concurrency))
    pending.call = caller.start(ask, self.steps, min(threading.TIMEOUT_MAX, self._seconds_left(pending.episode)))
    self.calls.append(pending)

  def _ask(self) -> None:
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
    """Hands on the replies of a service: an exception where it failed for one item, None where a reply could not be read."""
    name = waiting[0].request.service
    replies = [ToolFailure(f'{name}: a reply that cannot be read', 'malformed') if reply is None
               else requests.failure_of(reply, name) if isinstance(reply, Exception) else reply for reply in replies]
    for pending, reply in zip(waiting, replies):
      self._count(requests.SERVICES, pending.episode, [reply])
      self._reply(pending, reply)
    self._advance(pending.episode for pending in waiting)

  # The device.

  def _place(self) -> None:
    """Gives waiting requests rows of the cache, as many as there are idle slots; what is missing there is prefilled."""
    rows, idle, left, waiting = self.engine.rows, self._idle() + self.claimed, [], []
    for pending in self.ready:
      (left if idle[pending.episode.lane] > 0 else waiting).append(pending)
      idle[pending.episode.lane] -= 1
    self.ready = waiting
    while left:
      episodes = [pending.episode for pending in left]
      placements = rows.place([pending.path[:-1] for pending in left], [episode.number for episode in episodes],
                              [episode.lane for episode in episodes])
      if not placements:  # the only free row is one to copy from
        break
      copies = [(p.source, p.row, p.shared) for p in placements if p.source is not None]
      self.engine.fork(copies)
      placed = [left[p.item] for p in placements]
      missing = [Chunk(p.row, p.shared, pending.path[p.shared:-1]) for p, pending in zip(placements, placed)]
      self.engine.prefill(missing)
      for p, pending in zip(placements, placed):
        pending.row = p.row
        rows.hold(p.row, pending.path[:-1])
        self.claimed[p.row.lane] -= 1
      self.counts['tokens_forked'] += sum(size for *_, size in copies)
      self.counts['tokens_reused'] += sum(p.shared for p in placements)
      self.counts['tokens_prefilled'] += sum(len(chunk.tokens) for chunk in missing)
      self._score([pending for pending in placed if isinstance(pending.request, Score)])
      self._start([pending for pending in placed if isinstance(pending.request, Generate)])
      left = [pending for pending in left if pending.row is None]
    self.ready = left + self.ready

  def _score(self, scored: Sequence[Pending]) -> None:
    """Scores the first continuation of each request together, then the second behind the same context, and so on."""
    replies = [[None] * len(pending.request.continuations) for pending in scored]
    for turn in range(max(map(len, replies), default=0)):
      chunks = []
      for pending, reply in zip(scored, replies):
        if turn < len(reply):
          given, path = pending.request.continuations[turn], pending.path
          ids = np.asarray(self.engine.tokenizer.encode(given) if isinstance(given, str) else given, np.int32)
          if len(path) + len(ids) <= self.engine.length:
            inputs = np.append(path[-1:], ids)[:len(ids)]
            chunks.append(Chunk(pending.row, len(path) - 1, inputs, ids, self.sampling.temperature or 1.0))
            reply[turn] = chunks[-1].logprobs
            self.engine.rows.hold(pending.row, np.append(path[:-1], inputs))
      self.engine.prefill(chunks)
      self.counts['tokens_prefilled'] += sum(len(chunk.tokens) for chunk in chunks)
    for pending, reply in zip(scored, replies):
      pending.row.busy = False
      self._reply(pending, reply)
    self._advance(pending.episode for pending in scored)

  def _start(self, started: Sequence[Pending]) -> None:
    """Takes requests that have their rows among those that are decoded."""
    for pending in started:
      number = self.numbers.pop()
      self.running[number], self.generated[number] = pending, 0
      self.decoding[pending.row.lane] += 1
      for array, value in zip(self.slots, pending.slot):
        array[number] = value

  def _decode(self) -> None:
    engine, limit = self.engine, self.engine.segment_steps
    if self.calls and self._idle().max() > 0:
      due = self.calls[0].call.step + engine.tool_patience - self.steps if engine.deterministic else POLL_STEPS
      limit = min(limit, max(1, due))
    numbers = np.array(list(self.running))
    slots = Slots(*(array[numbers] for array in self.slots))
    tokens, logprobs, counts, states, capacity = engine.decode(
      [pending.row for pending in self.running.values()], slots, self.key, min(engine.enough, len(numbers)), limit)
    steps = int(counts.max())
    self.steps += steps
    self.capacity += steps * capacity
    self.counts['segments'] += 1
    self.counts['tokens_decoded'] += int(counts.sum())
    where = numbers[:, None], self.generated[numbers][:, None] + np.arange(steps)  # behind what a slot has: overwritten later
    self.tokens[where], self.logprobs[where] = tokens[:, :steps], logprobs[:, :steps]
    self.generated[numbers] += counts
    last = tokens[np.arange(len(numbers)), counts - 1]
    for array, new in zip((self.slots.tokens, self.slots.lengths, self.slots.remaining, self.slots.states),
                          (last, slots.lengths + counts, slots.remaining - counts, states)):
      array[numbers] = new
    late = engine.episode_deadline < np.inf and [self._seconds_left(pending.episode) == 0 for pending in self.running.values()]
    self._finish(numbers[(states < 0) | (slots.remaining == counts) | late])

  def _finish(self, numbers: np.ndarray) -> None:
    """Ends the spans of slots that have stopped, and lets their episodes go on."""
    stopped = []
    for number in numbers.tolist():
      pending, size = self.running.pop(number), self.generated[number]
      self.numbers.append(number)
      self.decoding[pending.row.lane] -= 1
      pending.episode.counts['tokens_decoded'] += int(size)
      tokens = self.tokens[number, :size]
      self.engine.rows.hold(pending.row, np.concatenate([pending.path, tokens[:-1]]))
      pending.row.busy = False
      self._finish_span(pending, self._stop(number, pending), tokens.tolist(), self.logprobs[number, :size].tolist())
      stopped.append(pending.episode)
    self._advance(stopped)

  def _stop(self, number: int, pending: Pending) -> str:
    """Why the span of a slot ends."""
    if (state := self.slots.states[number]) < 0:
      return END if state == ENDED else pending.request.stop[ENDED - 1 - state]
    if self.slots.remaining[number]:
      return Stop.DEADLINE
    return LENGTH if self.generated[number] == pending.request.max_tokens else Stop.CONTEXT_FULL
