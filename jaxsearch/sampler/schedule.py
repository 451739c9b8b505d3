"""Growing many trees at once: which episode is started, resumed, given a row of the cache, decoded.

A `Schedule` repeats four steps until nothing is left: start episodes and apply the replies of tools while slots are idle
(`_fill`), give rows to the requests that wait and prefill what is missing there (`_place`), decode a segment (`_decode`), and
hand what has stopped to its generator, which then yields its next request. The device is driven through the `Engine`.

In the deterministic mode every decision is a function of tokens and decode steps: replies of tools are applied in the
order in which they were asked for, and only where a slot is idle, no new episode can be started, and the call is
`tool_patience` decode steps old or nothing is left to decode; if the reply is not there by then, the host waits for it.
Otherwise replies are applied as they arrive.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import numpy as np

from jaxsearch.sampler.engine import Chunk, Engine, found_stop
from jaxsearch.sampler.requests import (
  END,
  LENGTH,
  Ask,
  Call,
  Caller,
  Generate,
  Request,
  RunPython,
  Sampling,
  Score,
  Search,
  ToolCall,
  ToolFailure,
  Tools,
)
from jaxsearch.sampler.segment import Slots
from jaxsearch.trees.tree import Role, Stop, Tree

POLL_STEPS = 8  # non-deterministic: steps of a segment while a slot is idle and a tool may reply at any time


class GrowthError(RuntimeError):
  """A generator raised; the cause is chained, the message names the question."""


@dataclasses.dataclass(eq=False)
class Episode:
  """A generator that grows a tree, and the replies it waits for."""
  number: int  # with the key it decides what is sampled
  growth: Iterator
  tree: Tree
  lane: int = 0  # of the sampler; its rows of the cache are all there
  replies: Any = None
  several: bool = False  # whether it asked with a list
  waiting: int = 0  # replies that are missing
  requests: int = 0  # spans and scores it has asked for so far
  started: float = 0.0

  @property
  def name(self) -> str:
    return str(self.number) if self.tree.question is None else self.tree.question.id


@dataclasses.dataclass(eq=False)
class Job:
  """A request that needs a row of the cache: a span to generate, or continuations to score one after the other.

  `context` is the path up to its last token, which is the first input of the next program and not in the cache yet.
  """
  episode: Episode
  place: int  # of the reply among the replies of its episode
  request: Generate | Score
  number: int  # of the request in its episode
  context: np.ndarray
  last: int
  row: Any = None
  remaining: int = 0
  clipped: bool = False  # `remaining` ends where the room does
  profile: int = 0
  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)

  @property
  def length(self) -> int:
    """Tokens of the path."""
    return len(self.context) + 1 + len(self.tokens)

  def slot(self) -> Slots:
    """What a segment knows of it."""
    return Slots(rows=self.row.place, tokens=self.tokens[-1] if self.tokens else self.last, lengths=self.length - 1,
                 remaining=self.remaining, episodes=self.episode.number, requests=self.number,
                 temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, profile=self.profile)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingCall:
  """A tool request that has no reply yet."""
  episode: Episode
  place: int  # of the reply among the replies of its episode
  request: Search | RunPython | Call
  call: ToolCall


@dataclasses.dataclass(frozen=True, eq=False)
class QueuedQuery:
  """An `Ask` that its service has not been given yet."""
  episode: Episode
  place: int
  item: Any


class Schedule:
  """One rollout of many episodes: what each of them waits for, and the counts.

  Args:
    engine: with parameters loaded.
    growths: (number, generator, its tree) of each episode. The tokens of an episode depend on its number, on `key`, and on
      nothing else.
    key: a JAX random key.
    sampling: where a request names none of its own.
    on_progress: called with (episodes done, episodes, metrics so far) whenever one ends.
  """

  def __init__(self, engine: Engine, growths: Sequence[tuple[int, Iterator, Tree]], key, sampling: Sampling, tools: Tools,
               on_progress: Callable[[int, int, dict], None] | None = None):
    self.engine, self.key, self.sampling, self.tools, self.on_progress = engine, key, sampling, tools, on_progress
    self.total = len(growths)
    self.queue = collections.deque(Episode(*growth) for growth in growths)
    self.ready: collections.deque[Job] = collections.deque()
    self.running: list[Job] = []  # at most engine.slots
    self.pending_calls: collections.deque[PendingCall] = collections.deque()
    self.caller = Caller(tools.workers)
    self.queued_queries: dict[str, list[QueuedQuery]] = {}  # by service
    self.active = np.zeros(engine.lanes, int)  # episodes under way
    self.steps = 0  # decode steps so far: the clock of the deterministic mode
    self.counts = collections.Counter()
    self.evicted_before = engine.rows.evicted
    self.started = time.monotonic()

  def run(self) -> dict[str, float]:
    """Runs all episodes to their ends, `engine.slots` paths at a time, in order; returns `metrics`.

    Raises:
      GrowthError: a generator raised; the message names its question.
    """
    self.engine.start_rollout()
    try:
      while True:
        self._fill()
        self._place()
        if self.running:
          self._decode()
        elif self.queued_queries:
          self._ask()
        elif not (self.queue or self.ready or self.pending_calls):
          return self.metrics()
    except BaseException:
      self.engine.rows.forget()  # what a row holds is uncertain in the middle of a step
      raise

  def metrics(self) -> dict[str, float]:
    """Counts of this run so far.

    tokens_decoded, tokens_prefilled (computed as context), tokens_reused (context that was cached), tokens_forked (those
    of it that were copied); episodes; segments, steps; idle_share (of what the segments could have decoded); tool_calls,
    tool_failures; service_calls, seconds_services; seconds in all, seconds_tools (inside tools, added up),
    seconds_waiting (for replies of tools); rows_evicted (from episodes that still ran); stop_X: episodes that ended with
    stop X.
    """
    names = ('tokens_decoded', 'tokens_prefilled', 'tokens_reused', 'tokens_forked', 'episodes', 'segments', 'tool_calls',
             'tool_failures', 'seconds_tools', 'seconds_waiting', 'service_calls', 'seconds_services')
    seconds = time.monotonic() - self.started
    decoded = self.counts['tokens_decoded']
    return {name: self.counts[name] for name in names} | {f'stop_{stop}': self.counts[stop] for stop in Stop} | {
      'steps': self.steps, 'seconds': seconds, 'tokens_per_second': decoded / seconds if seconds else 0.0,
      'idle_share': 1 - decoded / self.counts['capacity'] if self.steps else 0.0,
      'rows_evicted': self.engine.rows.evicted - self.evicted_before,
    }  # fmt: skip

  # Starting and resuming episodes.

  def _idle(self, *taken: Iterable[Job]) -> np.ndarray:
    """Slots of each lane that these jobs leave."""
    idle = np.full(self.engine.lanes, self.engine.slots // self.engine.lanes)
    for job in itertools.chain(*taken):
      idle[job.episode.lane] -= 1
    return idle

  def _fill(self) -> None:
    while (idle := self._idle(self.running, self.ready)).max() > 0:
      room = np.where(self.active < self.engine.rows.count, idle, 0)
      if self.queue and room.max() > 0:
        episode = self.queue.popleft()
        episode.lane, episode.started = int(room.argmax()), time.monotonic()
        self.active[episode.lane] += 1
        self._advance(episode)
      elif not self._apply_reply():
        return

  def _advance(self, episode: Episode) -> None:
    """Hands the replies to the generator and takes its requests, until it has to wait for one or ends."""
    while not episode.waiting:
      replies = episode.replies if episode.several else episode.replies and episode.replies[0]
      try:
        requests = episode.growth.send(replies)
        episode.several = isinstance(requests, (list, tuple))
        requests = requests if episode.several else [requests]
        episode.replies, episode.waiting = [None] * len(requests), len(requests)
        for place, request in enumerate(requests):
          self._serve(episode, place, request)
      except StopIteration:
        return self._end(episode)
      except Exception as error:
        raise GrowthError(f'question {episode.name}: {type(error).__name__}: {error}') from error

  def _end(self, episode: Episode) -> None:
    self.active[episode.lane] -= 1
    self.engine.rows.release(episode.number)
    self.counts['episodes'] += 1
    if episode.tree.stop is not None:
      self.counts[episode.tree.stop] += 1
    if self.on_progress:
      self.on_progress(self.counts['episodes'], self.total, self.metrics())

  def _reply(self, episode: Episode, place: int, value: Any) -> None:
    episode.replies[place] = value
    episode.waiting -= 1

  def _seconds_left(self, episode: Episode) -> float | None:
    """Until the deadline of the episode; None without one."""
    deadline = self.engine.episode_deadline
    return None if deadline is None else max(0.0, episode.started + deadline - time.monotonic())

  # Requests.

  def _serve(self, episode: Episode, place: int, request: Request) -> None:
    match request:
      case Generate():
        self._generate(episode, place, request)
      case Score() if request.node.length > self.engine.length:
        self._reply(episode, place, [None] * len(request.continuations))
      case Score():
        self.ready.append(self._job(episode, place, request))
      case Search() if self.tools.search is None:
        raise ValueError('a Search, but the rollout has no search back end')
      case Search():
        self._call(episode, place, request, functools.partial(self.tools.run_search, request))
      case RunPython() if self.tools.python is None:
        raise ValueError('a RunPython, but the rollout has no sandbox')
      case RunPython():
        self._call(episode, place, request, functools.partial(self.tools.run_python, request))
      case Ask() if request.service not in self.tools.services:  # an agent that only answers goes without
        self._reply(episode, place, ToolFailure(f'there is no {request.service}'))
      case Ask():
        self.queued_queries.setdefault(request.service, []).append(QueuedQuery(episode, place, request.item))
      case Call():
        self._call(episode, place, request, request.function)
      case _:
        raise TypeError(f'{request!r} is no request')

  def _job(self, episode: Episode, place: int, request: Generate | Score, **settings) -> Job:
    path = np.asarray(request.node.path_tokens(), np.int32)
    if not len(path):
      raise ValueError(f'{type(request).__name__} after a path without a token: nothing predicts the first one')
    episode.requests += 1
    return Job(episode, place, request, episode.requests, path[:-1], int(path[-1]), **settings)

  def _generate(self, episode: Episode, place: int, request: Generate) -> None:
    engine = self.engine
    room = engine.length - request.node.length
    if room <= 0 or self._seconds_left(episode) == 0:
      return self._finish_span(episode, place, request, [], [], Stop.CONTEXT_FULL if room <= 0 else Stop.DEADLINE)
    self.ready.append(self._job(
      episode, place, request, remaining=min(request.max_tokens, room), clipped=room < request.max_tokens,
      profile=engine.profile(request.stop, request.forbid),
      **{name: default if (own := getattr(request, name)) is None else own for name, default in vars(self.sampling).items()}))

  def _finish_span(self, episode, place, request, tokens, logprobs, stop) -> None:
    node = request.node.append(tokens, Role.POLICY, logprobs=logprobs)
    node.stop = stop
    self._reply(episode, place, node)

  # Tools.

  def _call(self, episode, place, request, function) -> None:
    limits = [seconds for seconds in (self.tools.deadline, self._seconds_left(episode)) if seconds is not None]
    self.counts['tool_calls'] += 1
    call = self.caller.start(function, self.steps, min(limits, default=None))
    self.pending_calls.append(PendingCall(episode, place, request, call))

  def _apply_reply(self) -> bool:
    """Applies one reply if one is due, waiting for it if that is the rule; whether it did."""
    due = self._due()
    if due is None:
      return False
    pending = self.pending_calls[due]
    del self.pending_calls[due]
    start = time.monotonic()
    seconds, result = pending.call.outcome()
    self.counts['seconds_waiting'] += time.monotonic() - start
    self.counts['seconds_tools'] += seconds
    if isinstance(pending.request, (Search, RunPython)):
      room = self.engine.length - pending.request.node.length
      result = self.tools.observation(pending.request, result, room, self.engine.tokenizer)
    self.counts['tool_failures'] += isinstance(result, ToolFailure)
    self._reply(pending.episode, pending.place, result)
    self._advance(pending.episode)
    return True

  def _due(self) -> int | None:
    """Index of the request whose reply is to be applied now; None if there is something better to do."""
    if not self.pending_calls:
      return None
    nothing_else = not self.ready and not self.running
    if self.engine.deterministic:
      waited = self.steps - self.pending_calls[0].call.step
      return 0 if nothing_else or waited >= self.engine.tool_patience else None
    calls = [pending.call for pending in self.pending_calls]
    if nothing_else:
      start = time.monotonic()
      soonest = min((left for call in calls if (left := call.seconds_left()) is not None), default=None)
      wait([call.future for call in calls], timeout=soonest, return_when=FIRST_COMPLETED)
      self.counts['seconds_waiting'] += time.monotonic() - start
    return next((i for i, call in enumerate(calls) if call.future.done() or call.seconds_left() == 0), None)

  def _ask(self) -> None:
    """Gives every service all that waits for it; a service that fails is a failed tool to each of them."""
    queued, self.queued_queries = self.queued_queries, {}
    for name, waiting in queued.items():
      start = time.monotonic()
      try:
        replies = list(self.tools.services[name]([one.item for one in waiting]))
        if len(replies) != len(waiting):
          raise ValueError(f'{len(replies)} replies to {len(waiting)} items')
      except Exception as error:
        replies = [ToolFailure(f'{name}: {type(error).__name__}: {error}')] * len(waiting)
      self.counts['service_calls'] += len(waiting)
      self.counts['seconds_services'] += time.monotonic() - start
      self.counts['tool_failures'] += sum(isinstance(reply, ToolFailure) for reply in replies)
      for one, reply in zip(waiting, replies):
        self._reply(one.episode, one.place, reply)
        self._advance(one.episode)

  # The device.

  def _place(self) -> None:
    """Gives waiting requests rows of the cache, as many as there are idle slots, and caches what is missing there."""
    rows, idle, jobs, waiting = self.engine.rows, self._idle(self.running), [], collections.deque()
    for job in self.ready:
      (jobs if idle[job.episode.lane] > 0 else waiting).append(job)
      idle[job.episode.lane] -= 1
    self.ready = waiting
    while jobs:
      placements = rows.place([job.context for job in jobs], [job.episode.number for job in jobs],
                              [job.episode.lane for job in jobs])
      if not placements:  # the only free row is one to copy from
        self.ready.extendleft(reversed(jobs))
        return
      copies = [(p.source, p.row, p.shared) for p in placements if p.source is not None]
      self.engine.fork(copies)
      placed = [dataclasses.replace(jobs[p.item], row=p.row) for p in placements]
      missing = [job.context[p.shared:] for p, job in zip(placements, placed)]
      self.engine.prefill([Chunk(p.row, p.shared, tokens) for p, tokens in zip(placements, missing)])
      for job in placed:
        job.row.tokens = job.context
      self.counts['tokens_forked'] += sum(size for *_, size in copies)
      self.counts['tokens_reused'] += sum(p.shared for p in placements)
      self.counts['tokens_prefilled'] += sum(map(len, missing))
      self._score([job for job in placed if isinstance(job.request, Score)])
      self.running += [job for job in placed if isinstance(job.request, Generate)]
      taken = {p.item for p in placements}
      jobs = [job for item, job in enumerate(jobs) if item not in taken]

  def _score(self, jobs: Sequence[Job]) -> None:
    """Scores the first continuation of each job together, then the second behind the same context, and so on."""
    replies = [[None] * len(job.request.continuations) for job in jobs]
    for turn in range(max((len(reply) for reply in replies), default=0)):
      batch, chunks = [], []
      for job, reply in zip(jobs, replies):
        if turn < len(reply):
          given = job.request.continuations[turn]
          ids = np.asarray(self.engine.tokenizer.encode(given) if isinstance(given, str) else given, np.int32)
          if job.length + len(ids) <= self.engine.length:
            inputs = np.append(np.int32(job.last), ids)[:len(ids)]
            batch.append((job, reply))
            chunks.append(Chunk(job.row, len(job.context), inputs, targets=ids))
            job.row.tokens = np.concatenate([job.context, inputs])
      for (job, reply), chunk, logprobs in zip(batch, chunks, self.engine.score(chunks)):
        reply[turn] = logprobs
        self.counts['tokens_prefilled'] += len(chunk.tokens)
    for job, reply in zip(jobs, replies):
      job.row.busy = False
      self._reply(job.episode, job.place, reply)
    for job in jobs:
      self._advance(job.episode)

  def _decode(self) -> None:
    engine, limit = self.engine, self.engine.segment_steps
    if self.pending_calls and self._idle(self.running, self.ready).max() > 0:
      due = self.pending_calls[0].call.step + engine.tool_patience - self.steps if engine.deterministic else POLL_STEPS
      limit = min(limit, max(1, due))
    tokens, logprobs, counts, slots = engine.decode(
      [(job.row.lane, job.slot()) for job in self.running], self.key, min(engine.enough, len(self.running)), limit)
    steps = int(counts.max())
    self.steps += steps
    self.counts['segments'] += 1
    self.counts['capacity'] += steps * slots
    stopped, going = [], []
    for job, new, new_logprobs, count in zip(self.running, tokens.tolist(), logprobs.tolist(), counts.tolist()):
      inputs = [job.tokens[-1] if job.tokens else job.last, *new[:count - 1]]
      job.row.tokens = np.concatenate([job.row.tokens, np.asarray(inputs, np.int32)])
      job.tokens += new[:count]
      job.logprobs += new_logprobs[:count]
      job.remaining -= count
      self.counts['tokens_decoded'] += count
      stop = self._stop(job)
      if stop is None:
        going.append(job)
      else:
        job.row.busy = False
        self._finish_span(job.episode, job.place, job.request, job.tokens, job.logprobs, stop)
        stopped.append(job.episode)
    self.running = going
    for episode in dict.fromkeys(stopped):
      self._advance(episode)

  def _stop(self, job: Job) -> str | None:
    """Why the span of a paused job ends here; None if it goes on."""
    if job.tokens and job.tokens[-1] in self.engine.tokenizer.eos_ids:
      return END
    found = found_stop(self.engine.pieces, job.tokens, job.request.stop)
    if found is not None:
      return found
    if not job.remaining:
      return Stop.CONTEXT_FULL if job.clipped else LENGTH
    return Stop.DEADLINE if self._seconds_left(job.episode) == 0 else None
