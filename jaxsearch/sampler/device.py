"""The sampler's arrays on the device and the calls of its programs: prefill, copy, decode.

Where no kernel decodes in the pages, decoding attends to a front: contiguous copies of the paths that are
decoded, a seat of `window` entries for each. A path keeps its seat from segment to segment: it is copied
once, and the decode program writes new entries to both.
"""

import dataclasses
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
from jaxsearch.sampler.pages import PAGE, SCRATCH, Chunk, Path, Pool, pages_of
from jaxsearch.sampler.requests import Sampling

STATES = 64  # of all stop strings in use; with more, the tables double and programs compile again


class Device:
  """Does what every rollout needs of the device; an `engine.Engine` sets it up.

  Sizes: `lanes`; `slots` of all lanes; `segment_steps`; and buckets of all that varies: `_widths`, slots of
  a lane in a segment; `_windows`, tokens of a path; `_counts`, by length n of a chunk in tokens, the chunks P
  of a call.
  """
  config: DecoderConfig
  lanes: int
  slots: int
  segment_steps: int
  pools: list[Pool] | None  # of pages, one a lane; from `load` on
  row_length: int  # tokens of a path's pages, and of the largest window
  _widths: Sequence[int]
  _windows: Sequence[int]
  _counts: dict[int, list[int]]
  _kernel: str | None  # the platform whose kernel decodes; then there is no front
  _seated: dict[int, Path]  # by lane * width + seat

  def __init__(self, tokenizer: Any):
    self.tokenizer, self.pools = tokenizer, None
    self._params = self._cache = self._device_following = None
    self.seconds_on_device = 0.0  # of a rollout, in which the host waited for results
    self._stops: dict[tuple, int] = {}  # the first state of the automaton of each rule
    self._states = 0  # in use
    self.clear_front()

  def put(self, tree):
    """Copies arrays to where a program takes them."""
    return jax.device_put(tree, self._whole)

  @memory.named('opening the sampler', memory.SAMPLER)
  def allocate(self) -> None:
    """Makes the cache unless it is there; not in `load`, whose caller still holds the parameters it gave."""
    with transfer.issuing():
      self._cache = self._allocate() if self._cache is None else self._cache

  def start_rollout(self) -> None:
    """Checks that there are parameters; empties the cache where the schedule is deterministic."""
    if self._params is None:
      raise ValueError('a rollout before Engine.load: there are no parameters')
    self.allocate()
    if self.deterministic:
      self.forget()  # entries of an earlier rollout would match recomputed ones only up to rounding
    self.seconds_on_device = 0.0
    for pool in self.pools:
      pool.evicted = 0

  def forget(self) -> None:
    """Drops all that is cached."""
    self.clear_front()
    for pool in self.pools:
      pool.forget()

  def clear_front(self) -> None:
    """Frees the copies of the paths that are decoded; they are made again where they are needed."""
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
    with transfer.issuing():  # the refiner's are loaded when asked, perhaps beside an update
      self._params = self._prepare(params)
    self.pools = self.pools or [Pool(self._pages) for _ in range(self.lanes)]
    self.forget()

  def unload(self, *, cache: bool = False) -> None:
    """Frees the parameters, and with `cache` the cache too, until the next `load`."""
    self._params, self._cache = None, None if cache else self._cache
    self.clear_front()

  def decoding(self, key: jax.Array, sampling: Sampling, schedule: Schedule) -> Decoding:
    """Returns the policy of one rollout."""
    return Decoding(self, self.put(key), sampling, schedule)

  def first_state(self, stop: tuple[str, ...]) -> int:
    """Returns the first state for these stop strings in the table of automata; adds them if they are new."""
    if stop not in self._stops:
      table = stops.automaton(self.tokenizer.pieces(self.config.vocab_size), stop, self.tokenizer.eos_ids)
      first, self._states = self._states, self._states + len(table)
      while len(self._following) < self._states:
        self._following = np.concatenate([self._following, np.zeros_like(self._following)])
      self._following[first:self._states] = np.where(table < 0, table, table + first)
      self._device_following = None
      self._stops[stop] = first
    return self._stops[stop]

  # Programs.

  def decode(self, paths: Sequence[Path], slots: segment.Slots, key, enough: int,
             limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Decodes a segment for `paths`, each with an entry in `slots`.

    Returns:
      tokens [S,n], log-probabilities [S,n], counts [S], states [S] of the S `paths` in order, where no
      slot got more than n tokens; then the number of slots in the program.
    """
    width = bucket(np.bincount([path.lane for path in paths]).max(), self._widths)
    batch = segment.idle_slots(width * self.lanes)
    self._seat(paths, slots.lengths, width)
    seats = [path.seat for path in paths]
    for array, values in zip(batch, slots):
      array[seats] = values
    table = np.full((width * self.lanes, self._window // PAGE), SCRATCH, np.int32)
    table[seats] = pages_of(paths, table.shape[1])
    if self._device_following is None:
      self._device_following = self.put(self._following)
    batch, table, enough, limit = self.put((batch, table, np.int32(enough), np.int32(limit)))
    uniforms = segment.draws(key, batch.episodes, batch.requests, batch.lengths, steps=self.segment_steps)
    with transfer.issuing():
      self._cache, self._front, *results = segment.decode(
        self.config, self._params, self._cache, self._front, batch, table, self._device_following, uniforms,
        enough, limit, mesh=self._mesh, kernel=self._kernel)
    tokens, logprobs, counts, states = (result[seats] for result in self._fetch(results))
    steps = self.segment_steps if self._kernel else int(counts.max())
    return tokens[:, :steps], logprobs[:, :steps], counts, states, width * self.lanes

  def _seat(self, paths: Sequence[Path], sizes: np.ndarray, width: int) -> None:
    """Gives paths seats of their lanes, and copies those that had none to the front."""
    windows = self._windows[-1:] if self._kernel else self._windows
    window = bucket(sizes.max() + 1 + self.segment_steps, windows)
    if width != self._width or not window <= self._window <= 2 * window:  # shorter only where much shorter
      self.clear_front()  # frees the old one first
      self._width, self._window = width, window
      self._front = None if self._kernel else self._allocate_front(width, window)
    fresh = [[] for _ in range(self.lanes)]
    seated = {path.seat for path in paths if self._seated.get(path.seat) is path}
    for path in paths:
      if self._seated.get(path.seat) is not path:
        fresh[path.lane].append(path)
    for lane, several in enumerate(fresh):
      free = (seat for seat in range(lane * width, (lane + 1) * width) if seat not in seated)
      for path, seat in zip(several, free):
        path.seat = seat
    self._seated = {path.seat: path for path in paths}  # what lies in idle seats is overwritten
    if any(fresh) and self._front:
      seats, counts = np.zeros((self.lanes, width), np.int32), np.array(list(map(len, fresh)), np.int32)
      tables = np.zeros((self.lanes, width, self._window // PAGE), np.int32)
      for several, own, table in zip(fresh, seats, tables):
        own[:len(several)] = [path.seat % width for path in several]
        table[:len(several)] = pages_of(several, table.shape[1])
      arrays = self.put((seats.ravel(), tables.reshape(-1, tables.shape[2]), counts))
      with transfer.issuing():
        self._front = segment.fill(self._front, self._cache, *arrays, mesh=self._mesh)

  def copy(self, paths: Sequence[Path]) -> None:
    """Copies the page that each of `paths` shares the beginning of, at most as many as there are slots."""
    pages = np.full((2, self.lanes, self.slots // self.lanes), SCRATCH, np.int32)
    placed = [0] * self.lanes
    for path in paths:
      pages[:, path.lane, placed[path.lane]] = path.source.number, path.numbers[path.shared // PAGE]
      placed[path.lane] += 1
    if paths:
      arrays = self.put(tuple(pages.reshape(2, -1)))
      with transfer.issuing():
        self._cache = segment.copy(self._cache, *arrays, mesh=self._mesh)

  def prefill(self, chunks: Sequence[Chunk]) -> None:
    """Caches the tokens of all chunks, those of one path in order, and scores their targets, if any."""
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
    for n, counts in reversed(self._counts.items()):  # longer parts first: within a path they come first
      lanes = [[] for _ in range(self.lanes)]
      for part in sorted(parts[n], key=lambda part: part.start):
        lanes[part.path.lane].append(part)
      for first in range(0, max(map(len, lanes)), counts[-1]):
        batch = [lane[first:first + counts[-1]] for lane in lanes]
        end = max(lane[-1].start for lane in batch if lane) + n
        self._prefill(batch, n, bucket(max(map(len, batch)), counts), bucket(end, self._windows))

  def _prefill(self, batch: Sequence[Sequence[Chunk]], n: int, count: int, window: int) -> None:
    """Calls the program for the chunks of each lane."""
    placed = [(lane * count + i, chunk) for lane, part in enumerate(batch) for i, chunk in enumerate(part)]
    size = self.lanes * count
    tokens, targets = np.full((2, size, n), self.tokenizer.pad_id, np.int32)
    starts, table = np.zeros(size, np.int32), np.full((size, window // PAGE), SCRATCH, np.int32)
    for i, chunk in placed:
      tokens[i, :len(chunk.tokens)], starts[i] = chunk.tokens, chunk.start
      table[i] = pages_of([chunk.path], table.shape[1])
      if chunk.targets is not None:
        targets[i, :len(chunk.tokens)] = chunk.targets
    first = placed[0][1]
    scored = (None, None) if first.targets is None else (targets, np.float32(first.temperature))
    arrays = self.put((tokens, starts, table, *scored))
    with transfer.issuing():
      self._cache, logprobs = segment.prefill(self.config, self._params, self._cache, *arrays,
                                              mesh=self._mesh, kernel=self._kernel)
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
