"""The policy of a rollout on our engine: which request gets pages of the cache, and what is decoded when.

A `Schedule` hands its `Generate` and `Score` requests to a `Decoding`. It gives pages to those that wait and
prefills what is missing there (`place`), decodes a segment (`decode`), and returns what is finished.
"""

import collections
from collections.abc import Sequence

import numpy as np

from jaxsearch.sampler.driver import Episode, Pending, Schedule
from jaxsearch.sampler.pages import Chunk, Path
from jaxsearch.sampler.requests import END, LENGTH, Sampling
from jaxsearch.sampler.segment import Slots, idle_slots
from jaxsearch.sampler.stops import ENDED
from jaxsearch.trees.tree import Node, Stop

ACTIVE = 2  # episodes under way for every slot: some wait for tools
POLL_STEPS = 8  # non-deterministic: steps of a segment while a slot is idle and a tool may reply at any time


class Decoding:
  """One rollout on an `engine.Engine` with parameters; a context that leaves the engine ready for the next.

  `busy`: whether any request waits for pages or is decoded, `decodes`: is decoded. `room`: whether a slot is
  idle. `key` is a JAX random key on the device.
  """

  def __init__(self, engine, key, sampling: Sampling, schedule: Schedule):
    self.engine, self.key, self.sampling, self.schedule = engine, key, sampling, schedule
    self.length, self.deterministic = engine.length, engine.deterministic
    self.episode_deadline = engine.episode_deadline
    self.ready: list[Path] = []  # for pages of the cache
    # Paths being decoded, each by a number below engine.slots. Their state is in arrays indexed by that
    # number, so the host does no work for a path that goes on.
    self.running: dict[int, Path] = {}
    self.figures = {}
    self.numbers = list(range(engine.slots))[::-1]  # that are not taken
    self.slots = idle_slots(engine.slots)
    self.tokens = np.zeros((engine.slots, engine.length + engine.segment_steps), np.int32)
    self.logprobs = np.zeros(self.tokens.shape, np.float32)
    self.generated = np.zeros(engine.slots, int)
    # In each lane: slots that nothing decodes in; requests in `ready`; episodes under way.
    self.free = np.full(engine.lanes, engine.slots // engine.lanes)
    self.queued, self.active = np.zeros((2, engine.lanes), int)
    self.homes: dict[str | int, int] = {}  # the lane of a question's trees

  def __enter__(self):
    self.engine.start_rollout()
    return self

  def __exit__(self, kind, *_):
    if kind is not None:
      self.engine.forget()  # what pages hold is uncertain in the middle of a step
    self.engine.clear_front()

  decodes = property(lambda self: bool(self.running))
  busy = property(lambda self: bool(self.ready) or self.decodes)
  room = property(lambda self: self.idle.max() > 0)

  @property
  def idle(self) -> np.ndarray:
    """Returns the slots [lanes] that no request in `ready` will take."""
    return self.free - self.queued

  @property
  def evicted(self) -> int:
    """Counts the pages taken from episodes that still ran."""
    return sum(pool.evicted for pool in self.engine.pools)

  @property
  def seconds_waited(self) -> float:
    """Returns the seconds in which the host waited for the device."""
    return self.engine.seconds_on_device

  def claim(self, waiting: collections.deque[Episode]) -> Episode | None:
    """Takes an episode out of `waiting` and gives it a lane with an idle slot; None if no lane can take one.

    The trees of a question go to one lane, which computes their prompt once, unless another would be idle.
    """
    room = np.where(self.active < ACTIVE * self.engine.slots // self.engine.lanes, self.idle, 0)
    if room.max() <= 0:
      return None
    lane, home = int(room.argmax()), lambda episode: self.homes.get(_question(episode), lane)
    at_home = (place for place, episode in enumerate(waiting) if room[home(episode)] > 0)
    episode = waiting[place := next(at_home, 0)]
    del waiting[place]
    episode.lane = home(episode) if room[home(episode)] > 0 else lane
    self.homes.setdefault(_question(episode), lane)
    self.active[episode.lane] += 1
    return episode

  def release(self, episode: Episode) -> None:
    """Gives up the pages of an episode that has ended."""
    self.active[episode.lane] -= 1
    self.engine.pools[episode.lane].release(episode.number)

  # Requests.

  def generate(self, pending: Pending, most: int) -> None:
    """Puts a request for at most `most` tokens in line."""
    request, engine, path = pending.request, self.engine, _path(pending)
    if request.forgets:
      engine.pools[path.lane].release(path.owner)
    self._queue(path)
    path.most += most
    path.slot = Slots(
      tokens=path.tokens[-1], lengths=len(path.context), remaining=most,
      episodes=path.owner, requests=pending.episode.requests, states=engine.first_state(request.stop),
      temperature=self.sampling.temperature)

  def score(self, pending: Pending) -> None:
    """Puts a request in line; replies at once where the path does not fit."""
    engine, cue = self.engine, pending.request.cue
    path = _path(pending, engine.tokenizer.encode(cue) if cue else ())
    if len(path.tokens) > engine.length:
      return self.schedule.set_reply(pending, [None] * len(pending.request.continuations))
    encode = lambda given: engine.tokenizer.encode(given) if isinstance(given, str) else given
    path.targets = [np.asarray(encode(given), np.int32) for given in pending.request.continuations]
    path.most = min(path.most + max(map(len, path.targets), default=0), engine.length)
    self._queue(path)

  def _queue(self, path: Path) -> None:
    path.pending.episode.requests += 1
    self.ready.append(path)
    self.queued[path.lane] += 1

  # The device.

  def place(self) -> list[tuple[Pending, list]]:
    """Gives pages to as many waiting requests as slots are idle, and prefills what is missing.

    Returns the finished scores.
    """
    room, left, waiting, finished = self.free.copy(), [], [], []
    for path in self.ready:
      (left if room[path.lane] > 0 else waiting).append(path)
      room[path.lane] -= 1
    pools = self.engine.pools
    shared = lambda path: pools[path.lane].shared(path.context)  # those choose first that share most
    while placed := [path for path in sorted(left, key=shared, reverse=True) if pools[path.lane].place(path)]:
      np.subtract.at(self.queued, [path.lane for path in placed], 1)
      self._prefill(placed)
      finished += self._score([path for path in placed if path.slot is None])
      self._start([path for path in placed if path.slot is not None])
      left = [path for path in left if path.pages is None]
    self.ready = left + waiting
    return finished

  def _prefill(self, placed: Sequence[Path]) -> None:
    """Copies and computes what the pages of paths lack."""
    counts, engine = self.schedule.counts, self.engine
    missing = [Chunk(path, path.shared, path.context[path.shared:]) for path in placed]
    engine.copy([path for path in placed if path.source is not None])
    engine.prefill(missing)
    for path in placed:
      engine.pools[path.lane].filled(path)
    counts['tokens_reused'] += sum(path.shared for path in placed)
    counts['tokens_prefilled'] += sum(len(chunk.tokens) for chunk in missing)

  def _score(self, paths: Sequence[Path]) -> list[tuple[Pending, list]]:
    """Scores the first continuation of each request together, then the second, and so on."""
    replies = [[None] * len(path.targets) for path in paths]
    for turn in range(max(map(len, replies), default=0)):
      chunks = []
      for path, reply in zip(paths, replies):
        ids = path.targets[turn] if turn < len(reply) else None
        if ids is not None and len(path.tokens) + len(ids) <= self.engine.length:
          inputs = np.append(path.tokens[-1:], ids)[:len(ids)]
          chunks.append(Chunk(path, len(path.context), inputs, ids, self.sampling.temperature or 1.0))
          reply[turn] = chunks[-1].logprobs
      self.engine.prefill(chunks)
      self.schedule.counts['tokens_prefilled'] += sum(len(chunk.tokens) for chunk in chunks)
    for path in paths:
      self.engine.pools[path.lane].leave(path, path.context)
    return [(path.pending, reply) for path, reply in zip(paths, replies)]

  def _start(self, paths: Sequence[Path]) -> None:
    """Starts decoding paths that have their pages."""
    for path in paths:
      number = self.numbers.pop()
      self.running[number], self.generated[number] = path, 0
      self.free[path.lane] -= 1
      for array, value in zip(self.slots, path.slot):
        array[number] = value

  def decode(self) -> list[tuple[Pending, Node]]:
    """Decodes a segment; returns the spans that ended."""
    engine, schedule, limit = self.engine, self.schedule, self.engine.segment_steps
    if schedule.calls and self.room:
      limit = min(limit, 1 if self.deterministic else POLL_STEPS)
    paths, numbers = list(self.running.values()), np.array(list(self.running))
    slots = Slots(*(array[numbers] for array in self.slots))
    tokens, logprobs, counts, states, capacity = engine.decode(
      paths, slots, self.key, min(engine.enough, len(paths)), limit)
    steps = tokens.shape[1]
    schedule.steps += steps
    schedule.capacity += steps * capacity
    schedule.counts['segments'] += 1
    schedule.counts['tokens_decoded'] += int(counts.sum())
    # What lies behind a slot's own tokens is overwritten later.
    where = numbers[:, None], self.generated[numbers][:, None] + np.arange(steps)
    self.tokens[where], self.logprobs[where] = tokens, logprobs
    self.generated[numbers] += counts
    last = tokens[np.arange(len(numbers)), counts - 1]
    for array, new in zip((self.slots.tokens, self.slots.lengths, self.slots.remaining, self.slots.states),
                          (last, slots.lengths + counts, slots.remaining - counts, states)):
      array[numbers] = new
    late = self.episode_deadline < np.inf and [
      schedule.seconds_left(path.pending.episode) == 0 for path in paths]
    stopped = numbers[(states < 0) | (slots.remaining == counts) | late]
    return [self._finish(number) for number in stopped.tolist()]

  def _finish(self, number: int) -> tuple[Pending, Node]:
    """Ends the span of a slot that has stopped."""
    path, size = self.running.pop(number), self.generated[number]
    self.numbers.append(number)
    self.free[path.lane] += 1
    path.pending.episode.counts['tokens_decoded'] += int(size)
    tokens, logprobs = self.tokens[number, :size], self.logprobs[number, :size]
    self.engine.pools[path.lane].leave(path, np.concatenate([path.tokens, tokens[:-1]]))
    span = path.pending.request.span(tokens.tolist(), self._stop(number, path), logprobs.tolist())
    return path.pending, span

  def _stop(self, number: int, path: Path) -> str:
    """Returns why the span of a slot ends."""
    request = path.pending.request
    if (state := self.slots.states[number]) < 0:
      return END if state == ENDED else request.stop[ENDED - 1 - state]
    if self.slots.remaining[number]:
      return Stop.DEADLINE
    return LENGTH if self.generated[number] == request.max_tokens else Stop.CONTEXT_FULL


def _question(episode: Episode) -> str | int:
  return episode.tree.question.id if episode.tree.question else episode.number


def _path(pending: Pending, cue: Sequence[int] = ()) -> Path:
  tokens = np.asarray([*pending.request.node.path_tokens(), *cue], np.int32)
  if not len(tokens):
    name = type(pending.request).__name__
    raise ValueError(f'{name} after a path without a token: nothing predicts the first one')
  return Path(tokens, len(tokens), pending.episode.number, pending.episode.lane, pending)
