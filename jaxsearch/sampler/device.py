"""The sampler's arrays on the device and the calls of its programs: prefill, fork, decode.

Where no kernel decodes in the cache itself, decoding attends to a front: contiguous copies of the rows that
are decoded, a seat of `window` entries for each. A row keeps its seat from segment to segment: only what was
written to it since is copied, and the decode program writes new entries to both.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.parallel import memory, transfer
from jaxsearch.sampler import segment, stops
from jaxsearch.sampler.decoding import Decoding
from jaxsearch.sampler.driver import Schedule
from jaxsearch.sampler.kv_cache import CacheRow, CacheRows, Chunk, allocate, idle_slots
from jaxsearch.sampler.requests import Sampling

FORBIDDEN = 16  # different sets of forbidden tokens that may be in use at a time
STATES = 64  # of all stop strings in use; with more, the tables double and programs compile again


class Device:
  """Does what every rollout needs of the device; an `engine.Engine` sets it up.

  Sizes: `lanes`; `slots` of all lanes; `segment_steps`; and buckets of all that varies: `_widths`, slots of a
  lane; `_windows`, tokens of a row; `_counts`, by length n of a chunk in tokens, the chunks P of a call.
  """
  config: DecoderConfig
  lanes: int
  slots: int
  segment_steps: int
  rows: CacheRows | None  # of the cache, from `load` on
  _widths: Sequence[int]
  _windows: Sequence[int]
  _counts: dict[int, list[int]]
  _kernel: str | None  # the platform whose kernel decodes; then there is no front
  _scratch: int  # place of the row behind the others in each lane

  def __init__(self, tokenizer: Any):
    self.tokenizer, self.rows = tokenizer, None
    self._params = self._cache = self._device_tables = None
    self.seconds_on_device = 0.0  # of a rollout, in which the host waited for results
    self._forbidden: dict[tuple, int] = {}
    self._stops: dict[tuple, int] = {}  # the first state of the automaton of each rule
    self._states = 0  # in use
    self._seated: dict[int, CacheRow] = {}  # by lane * width + seat
    self.clear_front()

  def put(self, tree):
    """Copies arrays to where a program takes them."""
    return jax.device_put(tree, self._whole)

  def start_rollout(self) -> None:
    """Checks that there are parameters; empties the cache where the schedule is deterministic."""
    if self._params is None:
      raise ValueError('a rollout before Engine.load: there are no parameters')
    if self.deterministic:
      self.forget()  # what an earlier rollout left would be equal to rounding only
    self.rows.evicted = self.seconds_on_device = 0

  def forget(self) -> None:
    """Drops all that is cached."""
    self.clear_front()
    self.rows.forget()

  def clear_front(self) -> None:
    """Frees the copies of the rows that are decoded; they are made again where they are needed."""
    for row in self._seated.values():
      row.seat, row.copied = -1, 0
    self._front, self._seated, self._width, self._window = None, {}, 0, 0

  @memory.named('opening the sampler', memory.SAMPLER)
  def load(self, params: dict) -> None:
    """Takes new parameters (nested as `parameter_shapes`, any dtype and sharding) and empties the cache.

    On a mesh give them in the compute dtype: they are laid out anew, and casting first halves the traffic.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    devices = set().union(*(leaf.devices() for leaf in leaves))
    if self._mesh is None and len(devices) > 1:
      raise ValueError(f'the parameters lie on {len(devices)} devices: give the Engine their mesh')
    self.unload()  # never two copies
    self._params = self._prepare(params)
    self._cache = self._allocate(sharding=self._split) if self._cache is None else self._cache
    self.rows = self.rows or CacheRows(self._scratch, self.lanes)
    self.forget()

  def unload(self, *, cache: bool = False) -> None:
    """Frees the parameters, and with `cache` the cache too, until the next `load`."""
    self._params, self._cache = None, None if cache else self._cache
    self.clear_front()

  def decoding(self, key: jax.Array, sampling: Sampling, schedule: Schedule) -> Decoding:
    """Returns the policy of one rollout."""
    return Decoding(self, self.put(key), sampling, schedule)

  # Tables over the vocabulary.

  def first_state(self, stop: tuple[str, ...]) -> int:
    """Returns where a span begins in the table of stop strings, with these among them."""
    key = type(stop), stop
    if key not in self._stops:
      automaton = getattr(stop, 'automaton', functools.partial(stops.automaton, stops=stop))
      table = automaton(self.tokenizer.pieces(self.config.vocab_size), ends=self.tokenizer.eos_ids)
      first, self._states = self._states, self._states + len(table)
      following = self._tables.following
      while len(following) < self._states:
        following = np.concatenate([following, np.zeros_like(following)])
      following[first:self._states] = np.where(table < 0, table, table + first)
      self._tables, self._device_tables = self._tables._replace(following=following), None
      self._stops[key] = first
    return self._stops[key]

  def forbidden_row(self, tokens: tuple[int, ...]) -> int:
    """Returns the row of the table of forbidden tokens that has these."""
    if tokens not in self._forbidden:
      index = len(self._forbidden)
      if index == FORBIDDEN:
        raise ValueError(f'more than {FORBIDDEN} different sets of forbidden tokens')
      self._tables.forbidden[index, list(tokens)] = True
      self._forbidden[tokens], self._device_tables = index, None
    return self._forbidden[tokens]

  # Programs.

  def decode(self, rows: Sequence[CacheRow], slots: segment.Slots, key, enough: int,
             limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Runs a segment for the paths in `rows`, at most `self.slots`, each with an entry in `slots`.

    Returns:
      tokens [S,steps], log-probabilities [S,steps], counts [S], states [S], and S of the program; the first
      four in the order given.
    """
    width = bucket(np.bincount([row.lane for row in rows]).max(), self._widths)
    batch = idle_slots(width * self.lanes, self._scratch)
    self._seat(rows, slots.lengths, width)
    if self._front:  # a path that is not decoded now stays as it is: what is written goes behind it
      batch.lengths[list(self._seated)] = [row.copied for row in self._seated.values()]
    seats = [row.seat for row in rows]
    for array, values in zip(batch, slots):
      array[seats] = values
    if self._device_tables is None:
      self._device_tables = self.put(self._tables)
    batch, enough, limit = self.put((batch, np.int32(enough), np.int32(limit)))
    uniforms = segment.draws(key, batch.episodes, batch.requests, batch.lengths, steps=self.segment_steps)
    with transfer.issuing():
      self._cache, self._front, *results = segment.decode(
        self.config, self._params, self._cache, self._front, batch, self._device_tables, uniforms, enough,
        limit, mesh=self._mesh, kernel=self._kernel)
    tokens, logprobs, counts, states = (result[seats] for result in self._fetch(results))
    for row, size in zip(rows, (slots.lengths + counts).tolist()):
      row.copied = size
    return tokens, logprobs, counts, states, width * self.lanes

  def _seat(self, rows: Sequence[CacheRow], sizes: np.ndarray, width: int) -> None:
    """Gives rows seats of their lanes; copies to the front what it lacks of their first `sizes` entries."""
    window = bucket(sizes.max() + 1 + self.segment_steps, self._windows)
    if width != self._width or not window <= self._window <= 2 * window:  # shorter only where much shorter
      self.clear_front()  # frees the old one first
      self._width, self._window = width, window
      if not self._kernel:
        self._front = allocate(self.config, self.lanes * width, window, self._split)
    taken = {row.seat for row in rows}
    free = [iter([seat for seat in range(lane * width, (lane + 1) * width) if seat not in taken])
            for lane in range(self.lanes)]
    for row in rows:
      if row.seat < 0:
        seat = next(free[row.lane])
        if seat in self._seated:  # of a row that is not decoded now
          self._seated[seat].seat = -1
        self._seated[seat], row.seat, row.copied = row, seat, 0
    missing = [(row, row.seat % width, row.copied, size) for row, size in zip(rows, sizes.tolist())
               if row.copied < size]
    if missing and self._front:
      unmoved = [getattr(self._seated.get(lane * width), 'place', 0) for lane in range(self.lanes)]
      self._front = self._copy(self._front, self._cache, missing, self._window, [(row, 0) for row in unmoved])

  def fork(self, copies: Sequence[tuple[CacheRow, CacheRow, int]]) -> None:
    """Copies (source, target in the same lane, number of leading tokens), one after the other."""
    for _, target, _ in copies:
      target.copied = 0
    if copies:
      parts = [(source, target.place, 0, size) for source, target, size in copies]
      unmoved = [(self._scratch, self._scratch)] * self.lanes
      self._cache = self._copy(self._cache, None, parts, self._windows[-1], unmoved)

  def _copy(self, to: list, given: list | None, parts: Sequence[tuple[CacheRow, int, int, int]], length: int,
            unmoved: Sequence[tuple[int, int]]) -> list:
    """Copies entries start to end of rows of `given`, or of `to` itself, to places in `to`, in small pieces.

    Args:
      parts: (row, its place in `to`, start, end), at most as many as there are slots.
      length: entries of a place in `to`.
      unmoved: of each lane (row, place) whose first entries may be copied again: all lanes loop alike.
    """
    size = self._windows[0]
    pieces = np.zeros((3, self.lanes, self._widths[-1] * -(-self._windows[-1] // size)), np.int32)
    pieces[:2] = np.array(unmoved).T[..., None]
    counts = [0] * self.lanes
    for row, place, start, end in parts:
      for first in range(start, end, size):
        pieces[:, row.lane, counts[row.lane]] = row.place, place, min(first, length - size)
        counts[row.lane] += 1
    arrays = self.put((*pieces.reshape(3, -1), np.full(self.lanes, max(counts), np.int32)))
    with transfer.issuing():
      return segment.copy(to, given, *arrays, window=size, mesh=self._mesh)

  def prefill(self, chunks: Sequence[Chunk]) -> None:
    """Caches the tokens of all chunks, those of one row in order, and scores their targets, if any."""
    parts = {n: [] for n in self._counts}
    for chunk in chunks:
      done = 0
      while left := len(chunk.tokens[done:]):
        # The longest that is at least three quarters full, else the shortest.
        n = max((n for n in parts if 3 * n <= 4 * left), default=min(parts))
        part = slice(done, done + n)
        targets = None if chunk.targets is None else chunk.targets[part]
        parts[n].append(dataclasses.replace(
          chunk, start=chunk.start + done, tokens=chunk.tokens[part], targets=targets))
        done += n
    for n, counts in reversed(self._counts.items()):  # longer parts first: within a row they come first
      lanes = [[] for _ in range(self.lanes)]
      for part in sorted(parts[n], key=lambda part: part.start):
        lanes[part.row.lane].append(part)
      for first in range(0, max(map(len, lanes)), counts[-1]):
        batch = [lane[first:first + counts[-1]] for lane in lanes]
        end = max(lane[-1].start for lane in batch if lane) + n
        self._prefill(batch, n, bucket(max(map(len, batch)), counts), bucket(end, self._windows))

  def _prefill(self, batch: Sequence[Sequence[Chunk]], n: int, count: int, window: int) -> None:
    """Calls the program for the chunks of each lane."""
    placed = [(lane * count + i, chunk) for lane, part in enumerate(batch) for i, chunk in enumerate(part)]
    size = self.lanes * count
    tokens, targets = np.full((2, size, n), self.tokenizer.pad_id, np.int32)
    starts, rows = np.zeros(size, np.int32), np.full(size, self._scratch, np.int32)
    for i, chunk in placed:
      tokens[i, :len(chunk.tokens)], starts[i], rows[i] = chunk.tokens, chunk.start, chunk.row.place
      chunk.row.copied = min(chunk.row.copied, chunk.start)
      if chunk.targets is not None:
        targets[i, :len(chunk.tokens)] = chunk.targets
    first = placed[0][1]
    scored = (None, None) if first.targets is None else (targets, np.float32(first.temperature))
    arrays = self.put((tokens, starts, rows, *scored))
    with transfer.issuing():
      self._cache, logprobs = segment.prefill(self.config, self._params, self._cache, *arrays, window=window,
                                              mesh=self._mesh)
    if logprobs is not None:
      logprobs = self._fetch(logprobs)
      for i, chunk in placed:
        chunk.logprobs.extend(logprobs[i, :len(chunk.tokens)].tolist())

  def _fetch(self, arrays):
    """Returns arrays on the host, once the device has them."""
    start = time.monotonic()
    arrays = jax.device_get(arrays)
    self.seconds_on_device += time.monotonic() - start
    return arrays


def bucket(size: int, buckets: Sequence[int]) -> int:
  """Returns the smallest of ascending `buckets` that holds `size`."""
  return next(bucket for bucket in buckets if bucket >= size)
