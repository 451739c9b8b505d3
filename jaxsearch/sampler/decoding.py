"""The policy of a rollout on our engine: which request gets which row of the cache, and what is decoded when.

A `Schedule` hands its `Generate` and `Score` requests to a `Decoding`. It gives rows to those that wait and
prefills what is missing there (`place`), decodes a segment (`decode`), and returns what is finished.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsearch.sampler.driver import Episode, Pending, Schedule
from jaxsearch.sampler.kv_cache import CacheRow, Chunk
from jaxsearch.sampler.requests import END, LENGTH, Generate, Sampling
from jaxsearch.sampler.segment import Slots
from jaxsearch.sampler.stops import ENDED
from jaxsearch.trees.tree import Node, Role, Stop

POLL_STEPS = 8  # non-deterministic: steps of a segment while a slot is idle and a tool may reply at any time


@dataclasses.dataclass(eq=False)
class Path:
  """Describes the cached prefix and the slot that a request needs.

  The last token of the path is the first input of the next program and not in the cache yet.
  """
  tokens: np.ndarray
  slot: Slots | None = None  # of Generate: what the first segment knows of it
  row: CacheRow | None = None


class Decoding:
  """One rollout on an `engine.Engine` with parameters; a context that leaves the engine ready for the next.

  `busy`: whether any request waits for a row or is decoded, `decodes`: is decoded. `room`: whether a slot is
  idle.
  `key` is a JAX random key on the device.
  """

  def __init__(self, engine, key, sampling: Sampling, schedule: Schedule):
    self.engine, self.key, self.sampling, self.schedule = engine, key, sampling, schedule
    self.length, self.deterministic = engine.length, engine.deterministic
    self.tool_patience, self.episode_deadline = engine.tool_patience, engine.episode_deadline
    self.ready: list[Pending] = []  # for a row of the cache
    # What is decoded: a number for each, at most engine.slots. What is known of them is in arrays over the
    # numbers, so that the host has nothing to do for those that go on.
    self.running: dict[int, Pending] = {}
    self.numbers = list(range(engine.slots))[::-1]  # that are not taken
    self.slots = Slots(*(np.zeros(engine.slots, np.asarray(value).dtype) for value in Slots(0)))
    self.tokens = np.zeros((engine.slots, engine.length + engine.segment_steps), np.int32)  # generated so far
    self.sampler_logprobs = np.zeros(self.tokens.shape, np.float32)
    self.generated = np.zeros(engine.slots, int)
    # In each lane: slots that decode; requests in `ready`.
    self.decoding, self.claimed = np.zeros((2, engine.lanes), int)
    self.active = np.zeros(engine.lanes, int)  # episodes under way
    self._evicted, self._on_device = engine.rows.evicted, engine.seconds_on_device

  def __enter__(self):
    self.engine.start_rollout()
    return self

  def __exit__(self, kind, *_):
    if kind is not None:
      self.engine.forget()  # what a row holds is uncertain in the middle of a step
    self.engine.clear_front()

  @property
  def busy(self) -> bool:
    return bool(self.ready or self.running)

  @property
  def decodes(self) -> bool:
    return bool(self.running)

  @property
  def room(self) -> bool:
    return self._idle().max() > 0

  @property
  def evicted(self) -> int:
    """Rows taken from episodes that still ran."""
    return self.engine.rows.evicted - self._evicted

  @property
  def seconds_waited(self) -> float:
    """Seconds in which the host waited for the device."""
    return self.engine.seconds_on_device - self._on_device

  def _idle(self) -> np.ndarray:
    """Returns how many slots of each lane nothing decodes in and no request in `ready` will take."""
    return self.engine.slots // self.engine.lanes - self.decoding - self.claimed

  def claim(self, episode: Episode) -> bool:
    """Gives an episode a lane with an idle slot; False if no lane can take one more."""
    room = np.where(self.active < self.engine.rows.count, self._idle(), 0)
    if room.max() <= 0:
      return False
    episode.lane = int(room.argmax())
    self.active[episode.lane] += 1
    return True

  def release(self, episode: Episode) -> None:
    """Frees the rows of an episode that has ended."""
    self.active[episode.lane] -= 1
    self.engine.rows.release(episode.number)

  # Requests.

  def generate(self, pending: Pending) -> None:
    """Puts a request in line; replies at once where there is no room or no time."""
    request, episode, engine, tokens = pending.request, pending.episode, self.engine, _path(pending)
    room = engine.length - len(tokens)
    if room <= 0 or self.schedule.seconds_left(episode) == 0:
      stop = Stop.CONTEXT_FULL if room <= 0 else Stop.DEADLINE
      return self.schedule.set_reply(pending, _span(pending, stop, [], []))
    episode.requests += 1
    pending.path = Path(tokens, Slots(
      rows=-1, tokens=int(tokens[-1]), lengths=len(tokens) - 1, remaining=min(request.max_tokens, room),
      episodes=episode.number, requests=episode.requests, states=engine.first_state(request.stop),
      forbidden=engine.forbidden_row(request.forbid), **vars(request.sampling(self.sampling))))
    self._queue(pending)

  def score(self, pending: Pending) -> None:
    """Puts a request in line; replies at once where the path does not fit."""
    tokens = _path(pending, self.engine.tokenizer.encode(pending.request.cue) if pending.request.cue else ())
    if len(tokens) > self.engine.length:
      return self.schedule.set_reply(pending, [None] * len(pending.request.continuations))
    pending.episode.requests += 1
    pending.path = Path(tokens)
    self._queue(pending)

  def _queue(self, pending: Pending) -> None:
    self.ready.append(pending)
    self.claimed[pending.episode.lane] += 1

  # The device.

  def place(self) -> list[tuple[Pending, list]]:
    """Gives waiting requests as many rows of the cache as slots are idle, and prefills what is missing.

    Returns the finished scores.
    """
    idle, left, waiting, finished = self._idle() + self.claimed, [], [], []
    for pending in self.ready:
      (left if idle[pending.episode.lane] > 0 else waiting).append(pending)
      idle[pending.episode.lane] -= 1
    while left:
      episodes = [pending.episode for pending in left]
      placements = self.engine.rows.place(
        [pending.path.tokens[:-1] for pending in left], [episode.number for episode in episodes],
        [episode.lane for episode in episodes])
      if not placements:  # the only free row is one to copy from
        break
      placed = self._prefill(left, placements)
      finished += self._score([pending for pending in placed if pending.path.slot is None])
      self._start([pending for pending in placed if pending.path.slot is not None])
      left = [pending for pending in left if pending.path.row is None]
    self.ready = left + waiting
    return finished

  def _prefill(self, left: Sequence[Pending], placements: Sequence) -> list[Pending]:
    """Copies and computes what the placed paths lack; returns their requests."""
    counts, engine = self.schedule.counts, self.engine
    placed = [left[placement.item] for placement in placements]
    copies = [(placement.source, placement.row, placement.shared) for placement in placements
              if placement.source is not None]
    engine.fork(copies)
    missing = [Chunk(placement.row, placement.shared, pending.path.tokens[placement.shared:-1])
               for placement, pending in zip(placements, placed)]
    engine.prefill(missing)
    for placement, pending in zip(placements, placed):
      pending.path.row = placement.row
      engine.rows.hold(placement.row, pending.path.tokens[:-1])
      self.claimed[placement.row.lane] -= 1
    counts['tokens_forked'] += sum(size for *_, size in copies)
    counts['tokens_reused'] += sum(placement.shared for placement in placements)
    counts['tokens_prefilled'] += sum(len(chunk.tokens) for chunk in missing)
    return placed

  def _score(self, scored: Sequence[Pending]) -> list[tuple[Pending, list]]:
    """Scores the first continuation of each request together, then the second, and so on."""
    replies = [[None] * len(pending.request.continuations) for pending in scored]
    for turn in range(max(map(len, replies), default=0)):
      chunks = []
      for pending, reply in zip(scored, replies):
        if turn < len(reply):
          given, path = pending.request.continuations[turn], pending.path.tokens
          ids = np.asarray(self.engine.tokenizer.encode(given) if isinstance(given, str) else given, np.int32)
          if len(path) + len(ids) <= self.engine.length:
            inputs = np.append(path[-1:], ids)[:len(ids)]
            temperature = self.sampling.temperature or 1.0
            chunks.append(Chunk(pending.path.row, len(path) - 1, inputs, ids, temperature))
            reply[turn] = chunks[-1].logprobs
            self.engine.rows.hold(pending.path.row, np.append(path[:-1], inputs))
      self.engine.prefill(chunks)
      self.schedule.counts['tokens_prefilled'] += sum(len(chunk.tokens) for chunk in chunks)
    for pending in scored:
      pending.path.row.busy = False
    return list(zip(scored, replies))

  def _start(self, started: Sequence[Pending]) -> None:
    """Takes requests that have their rows among those that are decoded."""
    for pending in started:
      number = self.numbers.pop()
      self.running[number], self.generated[number] = pending, 0
      self.decoding[pending.path.row.lane] += 1
      for array, value in zip(self.slots, pending.path.slot):
        array[number] = value

  def decode(self) -> list[tuple[Pending, Node]]:
    """Decodes a segment; returns the spans that ended."""
    engine, schedule, limit = self.engine, self.schedule, self.engine.segment_steps
    if schedule.calls and self.room:
      due = schedule.calls[0].step + self.tool_patience - schedule.steps
      limit = min(limit, max(1, due if self.deterministic else POLL_STEPS))
    numbers = np.array(list(self.running))
    slots = Slots(*(array[numbers] for array in self.slots))
    rows, enough = [pending.path.row for pending in self.running.values()], min(engine.enough, len(numbers))
    tokens, logprobs, counts, states, capacity = engine.decode(rows, slots, self.key, enough, limit)
    steps = int(counts.max())
    schedule.steps += steps
    schedule.capacity += steps * capacity
    schedule.counts['segments'] += 1
    schedule.counts['tokens_decoded'] += int(counts.sum())
    # Behind what a slot has is overwritten later.
    where = numbers[:, None], self.generated[numbers][:, None] + np.arange(steps)
    self.tokens[where], self.sampler_logprobs[where] = tokens[:, :steps], logprobs[:, :steps]
    self.generated[numbers] += counts
    last = tokens[np.arange(len(numbers)), counts - 1]
    for array, new in zip((self.slots.tokens, self.slots.lengths, self.slots.remaining, self.slots.states),
                          (last, slots.lengths + counts, slots.remaining - counts, states)):
      array[numbers] = new
    late = self.episode_deadline < np.inf and [
      schedule.seconds_left(pending.episode) == 0 for pending in self.running.values()]
    stopped = numbers[(states < 0) | (slots.remaining == counts) | late]
    return [self._finish(number) for number in stopped.tolist()]

  def _finish(self, number: int) -> tuple[Pending, Node]:
    """Ends the span of a slot that has stopped."""
    pending, size = self.running.pop(number), self.generated[number]
    row = pending.path.row
    self.numbers.append(number)
    self.decoding[row.lane] -= 1
    pending.episode.counts['tokens_decoded'] += int(size)
    tokens, logprobs = self.tokens[number, :size], self.sampler_logprobs[number, :size]
    self.engine.rows.hold(row, np.concatenate([pending.path.tokens, tokens[:-1]]))
    row.busy = False
    return pending, _span(pending, self._stop(number, pending.request), tokens.tolist(), logprobs.tolist())

  def _stop(self, number: int, request: Generate) -> str:
    """Returns why the span of a slot ends."""
    if (state := self.slots.states[number]) < 0:
      return END if state == ENDED else request.stop[ENDED - 1 - state]
    if self.slots.remaining[number]:
      return Stop.DEADLINE
    return LENGTH if self.generated[number] == request.max_tokens else Stop.CONTEXT_FULL


def _path(pending: Pending, cue: Sequence[int] = ()) -> np.ndarray:
  tokens = np.asarray([*pending.request.node.path_tokens(), *cue], np.int32)
  if not len(tokens):
    name = type(pending.request).__name__
    raise ValueError(f'{name} after a path without a token: nothing predicts the first one')
  return tokens


def _span(pending: Pending, stop: str, tokens: Sequence[int], logprobs: Sequence[float]) -> Any:
  node = pending.request.node.append(tokens, Role.POLICY, sampler_logprobs=logprobs)
  node.stop = stop
  return node
