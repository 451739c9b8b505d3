"""The device side of the sampler: parameters, KV cache, tables over the vocabulary, and the calls of the compiled programs with
what they need: buckets, padding, explicit transfers.

decoding.py decides which request gets which row of the cache, and when; everybody else calls `rollout.rollout`. Order of use:
`Engine(...)`, `load(params)` after every update of the policy, `compile_all()` once if nothing may compile later.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxsearch.models.decoder import DecoderConfig, fuse, parameter_axes, parameter_shapes, unstack
from jaxsearch.models.kernels import decode_attention
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import kv_cache, segment, stops
from jaxsearch.sampler.decoding import Decoding
from jaxsearch.sampler.kv_cache import Chunk
from jaxsearch.sampler.requests import Sampling
from jaxsearch.sampler.schedule import Schedule

FORBIDDEN = 16  # different sets of forbidden tokens that may be in use at a time
STATES = 64  # of all stop strings in use; where there are more, tables of twice the size take over and programs compile again
LOADED = 256  # entries that are copied at a time to where a path is decoded


def defaults(slots: int, platform: str) -> dict:
  """Segments and prefill as they suit a platform.

  An accelerator is fast only on many tokens at a time, and its steps are short beside the time that a host takes to serve a slot.
  On a CPU a step is long, and a slot that is idle costs more.
  """
  cpu = platform == 'cpu'
  return dict(segment_steps=32, enough=max(1, slots // (16 if cpu else 8)), prefill_lengths=(32, 128) if cpu else (64, 512),
              prefill_tokens=512 if cpu else 4096)


class Engine:
  """A policy that prefills, scores, forks and decodes paths of tokens on the device.

  Args:
    config: the decoder; its `dtype` is the compute dtype, of the cache too. A single CPU device computes in float32.
    tokenizer: `models.tokenizer.Tokenizer` or anything with its pieces(size), decode, eos_ids, pad_id and special_tokens.
    slots: paths decoded at a time. Where at most a quarter is left to decode in any lane, a program for that many takes over.
    length: tokens a path may have, prompt, observations and answer together.
    spare: rows of the cache beyond `slots`, for paths that wait for a tool or may be forked; `slots` by default, at
      least 1. At most slots + spare episodes are under way.
    deterministic: the schedule depends on counts of decode steps only, never on the clock.
    tool_patience: deterministic only: decode steps that slots may stay idle before the host waits for the oldest reply.
      About the time that a tool takes, counted in steps; 0 suits a search within this process.
    episode_deadline: seconds until an episode is ended with Stop.DEADLINE; only in the non-deterministic mode. None is off.
    segment_steps: tokens that a segment generates at most, in each slot.
    enough: a segment ends once this many of its slots have finished (or all): a low number leaves slots idle for a shorter
      time, a high one saves changes between device and host.
    prefill_lengths, prefill_tokens: context is prefilled in chunks of these lengths, at most `prefill_tokens` a call and lane.
      The defaults of these four are those of the platform, `defaults`.
    mesh: where the parameters given to `load` lie. Sampling has a layout of its own: as many devices as divide the
      key/value heads share a copy of the parameters, split by heads, feed-forward and vocabulary; each such group is a
      lane, with its part of the slots and of the cache. So `slots` and `spare` are rounded up to a multiple of the lanes.
  """

  @memory.named('opening the sampler', memory.SAMPLER)
  def __init__(self, config: DecoderConfig, tokenizer, *, slots: int, length: int, spare: int | None = None,
               deterministic: bool = True, tool_patience: int = 0, episode_deadline: float | None = None,
               segment_steps: int | None = None, enough: int | None = None, prefill_lengths: Sequence[int] | None = None,
               prefill_tokens: int | None = None, mesh: Mesh | None = None):
    if slots < 1 or length < 2 or (spare is not None and spare < 1):
      raise ValueError(f'slots={slots}, length={length}, spare={spare}: need at least 1, 2 and 1')
    if deterministic and episode_deadline is not None:
      raise ValueError('episode_deadline needs deterministic=False: the clock would decide what is generated')
    devices = np.array(jax.local_devices()[:1]) if mesh is None else mesh.devices
    self._rounding = config.dtype  # of the parameters, which training computes with
    # XLA would make a float32 copy of a bfloat16 cache in every step. Simulated devices compute as those they stand for.
    if devices.size == 1 and devices.flat[0].platform == 'cpu':
      config = dataclasses.replace(config, dtype='float32')
    self.config, self.tokenizer = config, tokenizer
    split = math.gcd(devices.size, config.num_kv_heads)
    self.lanes = devices.size // split
    self._mesh = Mesh(devices.reshape(self.lanes, 1, split), meshes.MESH_AXES) if devices.size > 1 else None
    per_lane = [-(-number // self.lanes) for number in (slots, slots if spare is None else spare)]
    self.slots, self.length = per_lane[0] * self.lanes, length
    self.deterministic, self.tool_patience = deterministic, tool_patience
    self.episode_deadline = math.inf if episode_deadline is None else episode_deadline
    given = dict(segment_steps=segment_steps, enough=enough, prefill_lengths=prefill_lengths, prefill_tokens=prefill_tokens)
    chosen = defaults(self.slots, devices.flat[0].platform) | {name: value for name, value in given.items() if value}
    self.segment_steps, self.enough, prefill_lengths, prefill_tokens = (chosen[name] for name in given)
    self.rows = None  # of the cache, from `load` on
    self._scratch = sum(per_lane)  # place of the row behind them in each lane
    self.seconds_on_device = 0.0  # in which the host waited for results
    # Buckets of all that varies. `_counts`: by length n of a chunk in tokens, the longest last, the chunks P of a call.
    self._widths = [width for width in (-(-per_lane[0] // 4), per_lane[0]) if width >= 4 or width == per_lane[0]]
    self._counts = {n: [4**i for i in range(16) if 4**i * n <= max(n, prefill_tokens)] for n in sorted(prefill_lengths)}
    self._kernel = decode_attention.platform_of(devices.flat[0].platform, config.head_dim)  # then there is no front
    multiple = decode_attention.PAGE if self._kernel else 64
    row_length = -(-(length + max(self.segment_steps, *prefill_lengths)) // multiple) * multiple
    sizes = [128, 256] + [size for i in range(24) for size in (384 << i, 512 << i)]  # few programs, little wasted attention
    self._windows = *(size for size in sizes if size < row_length), row_length
    self._whole = meshes.replicated(self._mesh) if self._mesh else SingleDeviceSharding(devices.item())
    self._split = NamedSharding(self._mesh, PartitionSpec(segment.LANES, 'tensor')) if self._mesh else self._whole
    self._allocate = functools.partial(kv_cache.allocate, config, self.lanes * (self._scratch + 1), row_length,
                                       together=self._kernel is not None)
    self._params = self._cache = self._device_tables = None
    self.clear_front()
    self._forbidden: dict[tuple, int] = {}
    self._stops: dict[tuple, int] = {}  # the first state of the automaton of each set
    self._tables = segment.Tables(np.zeros((STATES, config.vocab_size), np.int16), np.zeros((FORBIDDEN, config.vocab_size), bool))
    self._states = 0  # in use

  @memory.named('opening the sampler', memory.SAMPLER)
  def load(self, params: dict) -> None:
    """Takes new parameters (nested as `parameter_shapes`, any dtype and sharding) and empties the cache.

    On a mesh give them in the compute dtype: they are laid out anew, and what is cast before is half the traffic.
    """
    devices = set().union(*(leaf.devices() for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)))
    if self._mesh is None and len(devices) > 1:
      raise ValueError(f'the parameters lie on {len(devices)} devices: give the Engine their mesh')
    self.unload()  # never two copies
    self._params = _prepare(self.config, self._rounding, self._mesh, self._whole)(params)
    self._cache = self._allocate(sharding=self._split) if self._cache is None else self._cache
    self.rows = self.rows or kv_cache.CacheRows(self._scratch, self.lanes)
    self.forget()

  def unload(self, *, cache: bool = False) -> None:
    """Frees the parameters, and with `cache` the cache too, until the next `load`."""
    self._params, self._cache = None, None if cache else self._cache
    self.clear_front()

  def largest_programs(self) -> tuple[dict[str, tuple], dict, list]:
    """The largest prefill and decode, with shapes in place of arrays: the mesh may be of devices that are not there.

    Returns:
      (name -> (jitted program, arguments, static arguments), the sampler's parameters, what it keeps between calls).
    """
    struct = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    given = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, self.config.dtype), parameter_shapes(self.config),
                         is_leaf=lambda shape: isinstance(shape, tuple))
    placed = sampling_layout(self.config, self._mesh, self._whole)
    params = jax.eval_shape(_prepare(self.config, self._rounding, self._mesh, self._whole), given)
    params = jax.tree.map(struct, params, placed) if self._mesh else jax.tree.map(lambda x: struct(x, placed), params)
    width, window = self._widths[-1], self._windows[-1]
    cache, front = (jax.tree.map(lambda x: struct(x, self._split), jax.eval_shape(make)) for make in (
      lambda: self._allocate(sharding=None),
      lambda: None if self._kernel else kv_cache.allocate(self.config, self.lanes * width, window, None)))
    whole = lambda *arrays: jax.tree.map(lambda x: struct(x, self._whole), arrays)
    n, counts = list(self._counts.items())[-1]
    tokens, chunk = np.zeros((self.lanes * counts[-1], n), np.int32), np.zeros(self.lanes * counts[-1], np.int32)
    slots, uniforms = _idle_slots(self.slots, 0), np.zeros((self.slots, self.segment_steps), np.float32)
    return {
      'prefill': (segment.prefill, (self.config, params, cache, *whole(tokens, chunk, chunk)),
                  dict(window=window, mesh=self._mesh)),
      'decode': (segment.decode, (self.config, params, cache, front, *whole(
        slots, self._tables, uniforms, np.int32(1), np.int32(1))), dict(mesh=self._mesh, kernel=self._kernel)),
    }, params, (cache, front)

  def decoding(self, key: jax.Array, sampling: Sampling, schedule: Schedule) -> Decoding:
    """Returns the policy of one rollout."""
    return Decoding(self, self.put(key), sampling, schedule)

  def start_rollout(self) -> None:
    """Checks that there are parameters; empties the cache where the schedule is deterministic."""
    if self._params is None:
      raise ValueError('a rollout before Engine.load: there are no parameters')
    if self.deterministic:
      self.forget()  # what an earlier rollout left would be equal to rounding only

  def forget(self) -> None:
    """Drops all that is cached."""
    self.rows.forget()
    self.clear_front()

  def clear_front(self) -> None:
    """Frees the copies of the rows that are decoded; they are made again where they are needed."""
    self._front, self._width, self._window = None, 0, 0
    # By row of the cache, its place in the front of its lane, and how many of its entries are there.
    self._front_places = np.full((self.lanes, self._scratch), -1)
    self._front_sizes = np.zeros((self.lanes, self._scratch), np.int32)

  def compile_all(self, score: bool = False) -> None:
    """Compiles every program that a rollout can need (those of `Score` requests too if `score`); nothing compiles later."""
    scratch, token = kv_cache.CacheRow(0, place=self._scratch), np.zeros(1, np.int32)
    for width in self._widths:
      for window in self._windows[:1 if self._kernel else None]:
        if not self._kernel:
          self._new_front(width, window)
          self._load([])
        self._decode(_idle_slots(width * self.lanes, self._scratch), self.put(jax.random.key(0)), 0, 1)
    self.clear_front()
    for window in self._windows:
      self.fork([(scratch, scratch, window)])
      for n, counts in self._counts.items():
        for count in counts if n <= window else ():
          for targets in (None, token) if score else (None,):
            self._prefill([[Chunk(scratch, 0, token, targets)]], n, count, window)
    jax.block_until_ready(self._cache)

  def first_state(self, stop: tuple[str, ...]) -> int:
    """Where a span begins in the table of stop strings."""
    if stop not in self._stops:
      table = stops.automaton(self.tokenizer.pieces(self.config.vocab_size), stop, self.tokenizer.eos_ids)
      first, self._states = self._states, self._states + len(table)
      following = self._tables.following
      while len(following) < self._states:
        following = np.concatenate([following, np.zeros_like(following)])
      following[first:self._states] = np.where(table < 0, table, table + first)
      self._tables, self._device_tables = self._tables._replace(following=following), None
      self._stops[stop] = first
    return self._stops[stop]

  def forbidden_row(self, tokens: tuple[int, ...]) -> int:
    """Row of the table of forbidden tokens."""
    if tokens not in self._forbidden:
      index = len(self._forbidden)
      if index == FORBIDDEN:
        raise ValueError(f'more than {FORBIDDEN} different sets of forbidden tokens')
      self._tables.forbidden[index, list(tokens)] = True
      self._forbidden[tokens], self._device_tables = index, None
    return self._forbidden[tokens]

  def decode(self, rows: Sequence[kv_cache.CacheRow], slots: segment.Slots, key, enough: int,
             limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Runs a segment for the paths in `rows`, at most `self.slots`; `slots` has an entry for each (its `rows` are not read).

    Returns:
      tokens [S,steps], log-probabilities [S,steps], counts [S], states [S], and S of the program; the first four in the order
      given.
    """
    lanes, own = np.array([(row.lane, row.place) for row in rows]).T
    width = _bucket(np.bincount(lanes).max(), self._widths)
    every = _idle_slots(width * self.lanes, self._scratch)
    if self._kernel:
      places = np.zeros_like(lanes)
      for lane in range(self.lanes):
        places[lanes == lane] = np.arange(np.sum(lanes == lane))
    else:
      places = self._place_in_front(rows, lanes, own, slots.lengths, width, every)
    where = lanes * width + places
    for array, values in zip(every, slots._replace(rows=own)):
      array[where] = values
    tokens, logprobs, counts, states = (result[where] for result in self._fetch(self._decode(every, key, enough, limit)))
    self._front_sizes[lanes, own] = slots.lengths + counts
    return tokens, logprobs, counts, states, width * self.lanes

  def _place_in_front(self, rows, lanes, own, lengths, width, every) -> np.ndarray:
    """The places of rows in the front of their lanes, with what they hold copied there; sets `every.lengths` of all that are."""
    window = _bucket(lengths.max() + 1 + self.segment_steps, self._windows)
    if width != self._width or not window <= self._window <= 2 * window:  # a shorter one only where it is much shorter
      self._new_front(width, window)
    places = self._seats(lanes, own)
    missing = np.flatnonzero(self._front_sizes[lanes, own] < lengths)
    if len(missing):
      self._load([(rows[i], int(places[i]), int(self._front_sizes[lanes[i], own[i]]), int(lengths[i])) for i in missing])
    seated = self._front_places >= 0  # a path that is not decoded now stays as it is: what is written goes behind it
    every.lengths[(np.arange(self.lanes)[:, None] * width + self._front_places)[seated]] = self._front_sizes[seated]
    return places

  def _new_front(self, width: int, window: int) -> None:
    """Makes an empty front."""
    self.clear_front()  # frees the old one first
    self._width, self._window = width, window
    self._front = kv_cache.allocate(self.config, self.lanes * width, window, self._split)

  def _seats(self, lanes: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The places of rows in the front of their lanes; where one has none, it takes that of a row that is not decoded now."""
    for lane in set(lanes[self._front_places[lanes, own] < 0].tolist()):
      seats, mine = self._front_places[lane], own[lanes == lane]
      free = iter(np.setdiff1d(np.arange(self._width), seats[mine]).tolist())
      for row in mine[seats[mine] < 0].tolist():
        place = next(free)
        seats[seats == place] = -1
        seats[row], self._front_sizes[lane, row] = place, 0
    return self._front_places[lanes, own]

  def _load(self, missing: Sequence[tuple[kv_cache.CacheRow, int, int, int]]) -> None:
    """Copies entries start to end of rows, given as (row, its place in the front, start, end)."""
    size = min(LOADED, self._window)
    windows = [(row, place, min(first, self._window - size)) for row, place, start, end in missing
               for first in range(start, end, size)]
    lanes, most = self._by_lane(windows, lambda window: window[0].lane), self._width * -(-self._window // size)
    arrays = np.zeros((3, self.lanes, most), np.int32)
    for lane, part in enumerate(lanes):  # all lanes loop alike: those with less to do copy once more what is at place 0
      arrays[0, lane] = (self._front_places[lane] == 0).argmax()
      for i, (row, place, start) in enumerate(part):
        arrays[:, lane, i] = row.place, place, start
    counts = np.full(self.lanes, max(map(len, lanes)), np.int32)
    sources, targets, starts, counts = self.put((*arrays.reshape(3, -1), counts))
    with meshes.issuing():
      self._front = segment.load(self._front, self._cache, sources, targets, starts, counts, window=size, mesh=self._mesh)

  def _decode(self, slots, key, enough, limit):
    """One call of the program; its results."""
    if self._device_tables is None:
      self._device_tables = self.put(self._tables)
    slots, enough, limit = self.put((slots, np.int32(enough), np.int32(limit)))
    uniforms = segment.draws(key, slots.episodes, slots.requests, slots.lengths, steps=self.segment_steps)
    with meshes.issuing():
      self._cache, self._front, *results = segment.decode(
        self.config, self._params, self._cache, self._front, slots, self._device_tables, uniforms, enough, limit, mesh=self._mesh,
        kernel=self._kernel)
    return results

  def _fetch(self, arrays):
    """Arrays on the host, once the device has them."""
    start = time.monotonic()
    arrays = jax.device_get(arrays)
    self.seconds_on_device += time.monotonic() - start
    return arrays

  def prefill(self, chunks: Sequence[Chunk]) -> None:
    """Caches the tokens of all chunks, those of one row in order, and scores their targets: all have them or none."""
    parts = {n: [] for n in self._counts}
    for chunk in chunks:
      done = 0
      while left := len(chunk.tokens[done:]):  # the longest length that is at least three quarters full, else the shortest
        n = max((n for n in parts if 3 * n <= 4 * left), default=min(parts))
        targets = None if chunk.targets is None else chunk.targets[done:done + n]
        parts[n].append(dataclasses.replace(chunk, start=chunk.start + done, tokens=chunk.tokens[done:done + n], targets=targets))
        done += n
    for n, counts in reversed(self._counts.items()):  # longer parts first: within a row they come first
      lanes = self._by_lane(sorted(parts[n], key=lambda part: part.start), lambda part: part.row.lane)
      for first in range(0, max(map(len, lanes)), counts[-1]):
        batch = [lane[first:first + counts[-1]] for lane in lanes]
        end = max(lane[-1].start for lane in batch if lane) + n
        self._prefill(batch, n, _bucket(max(map(len, batch)), counts), _bucket(end, self._windows))

  def _prefill(self, batch, n, count, window):
    """One call of the program, for the chunks of each lane."""
    placed = [(lane * count + i, chunk) for lane, part in enumerate(batch) for i, chunk in enumerate(part)]
    tokens, targets = np.full((2, self.lanes * count, n), self.tokenizer.pad_id, np.int32)
    starts, rows = np.zeros(self.lanes * count, np.int32), np.full(self.lanes * count, self._scratch, np.int32)
    for i, chunk in placed:
      tokens[i, :len(chunk.tokens)], starts[i], rows[i] = chunk.tokens, chunk.start, chunk.row.place
      self._written(chunk.row, chunk.start)
      if chunk.targets is not None:
        targets[i, :len(chunk.tokens)] = chunk.targets
    first = placed[0][1]
    scored = (None, None) if first.targets is None else (targets, np.float32(first.temperature))
    arrays = self.put((tokens, starts, rows, *scored))
    with meshes.issuing():
      self._cache, logprobs = segment.prefill(self.config, self._params, self._cache, *arrays, window=window, mesh=self._mesh)
    if logprobs is not None:
      logprobs = self._fetch(logprobs)
      for i, chunk in placed:
        chunk.logprobs.extend(logprobs[i, :len(chunk.tokens)].tolist())

  def fork(self, copies: Sequence[tuple[kv_cache.CacheRow, kv_cache.CacheRow, int]]) -> None:
    """Copies (source, target in the same lane, number of leading tokens), one after the other."""
    lanes, width = self._by_lane(copies, lambda copy: copy[1].lane), self._widths[-1]
    for first in range(0, max(map(len, lanes)), width):
      batch, places = [lane[first:first + width] for lane in lanes], np.full((2, self.lanes, width), self._scratch, np.int32)
      for lane, part in enumerate(batch):
        for i, (source, target, _) in enumerate(part):
          places[:, lane, i] = source.place, target.place
          self._written(target, 0)
      counts = np.full(self.lanes, max(map(len, batch)), np.int32)  # the same in each, what is missing is copied in place
      window = _bucket(max(size for part in batch for *_, size in part), self._windows)
      arrays = self.put((*places.reshape(2, -1), counts))
      with meshes.issuing():
        self._cache = segment.fork(self._cache, *arrays, window=window, mesh=self._mesh)

  def _written(self, row: kv_cache.CacheRow, start: int) -> None:
    """Notes that a row has new entries from `start` on, which its copy in the front lacks."""
    if row.place < self._scratch:
      self._front_sizes[row.lane, row.place] = min(self._front_sizes[row.lane, row.place], start)

  def _by_lane(self, items, lane_of):
    """The items of each lane, in order."""
    return [[item for item in items if lane_of(item) == lane] for lane in range(self.lanes)]

  def put(self, tree):
    """Moves arrays to the device explicitly, so that implicit transfers can be forbidden."""
    return jax.device_put(tree, self._whole)


@functools.cache
def _prepare(config: DecoderConfig, rounding: str, mesh: Mesh | None, whole: Sharding):
  """The jitted cast and unstacking of parameters, laid out for sampling: fused on one device, or split over `tensor`.

  They are rounded as a cast to the dtype `rounding` would; XLA leaves out a cast there and back.
  """
  kept = jnp.finfo(rounding)

  def prepare(params):
    rounded = jax.tree.map(lambda p: jax.lax.reduce_precision(p, kept.nexp, kept.nmant).astype(config.dtype), params)
    params = unstack(rounded, config.num_layers)
    return fuse(config, params) if mesh is None else params

  return jax.jit(prepare, out_shardings=sampling_layout(config, mesh, whole))


def sampling_layout(config: DecoderConfig, mesh: Mesh | None, whole: Sharding) -> Sharding | dict:
  """Where the sampler's parameters lie: all of them whole, or split over `tensor`."""
  if mesh is None:
    return whole
  shardings = meshes.shardings(parameter_axes(config), parameter_shapes(config), mesh)
  layer = {name: NamedSharding(mesh, PartitionSpec(*stacked.spec[1:])) for name, stacked in shardings['layers'].items()}
  return shardings | {'layers': [layer] * config.num_layers}


def _idle_slots(count: int, scratch: int) -> segment.Slots:
  return segment.Slots(*(np.full(count, value, np.float32 if isinstance(value, float) else np.int32)
                         for value in segment.Slots(scratch)))


def _bucket(size: int, buckets: Sequence[int]) -> int:
  return next(bucket for bucket in buckets if bucket >= size)
