"""The device side of the sampler: parameters, KV cache, tables over the vocabulary, calls of programs.

decoding.py decides which request gets which row of the cache, and when; everybody else calls
`driver.rollout`. Order of use: `Engine(...)`, `load(params)` after every update of the policy,
`compile_all()` once if nothing may compile later.
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
from jaxsearch.sampler.driver import Schedule
from jaxsearch.sampler.front import Front
from jaxsearch.sampler.kv_cache import CacheRow, Chunk, by_lane
from jaxsearch.sampler.requests import Sampling

FORBIDDEN = 16  # different sets of forbidden tokens that may be in use at a time
STATES = 64  # of all stop strings in use; with more, the tables double and programs compile again


def defaults(slots: int, platform: str) -> dict:
  """Returns segments and prefill as they suit a platform.

  An accelerator is fast only on many tokens at a time, and its steps are short beside the time that a host
  takes to serve a slot. On a CPU a step is long, and a slot that is idle costs more.
  """
  cpu = platform == 'cpu'
  return dict(segment_steps=32, enough=max(1, slots // (16 if cpu else 8)),
              prefill_lengths=(32, 128) if cpu else (64, 512), prefill_tokens=512 if cpu else 4096)


class Engine:
  """A policy that prefills, scores, forks and decodes paths of tokens on the device.

  Args:
    config: the decoder; its `dtype` is also that of the cache. A single CPU device computes in float32.
    tokenizer: a `models.tokenizer.Tokenizer`, or anything with its pieces(size), decode, eos_ids, pad_id and
      special_tokens.
    slots: paths decoded at a time. With at most a quarter left to decode in any lane, a smaller program runs.
    length: tokens a path may have, prompt, observations and answer together.
    spare: rows of the cache beyond `slots`, for paths that wait for a tool or may be forked; `slots` by
      default, at least 1. At most slots + spare episodes are under way.
    deterministic: the schedule depends on counts of decode steps only, never on the clock.
    tool_patience: deterministic only: decode steps that slots may stay idle before the host waits for the
      oldest reply. About the time that a tool takes, counted in steps; 0 suits a search within this process.
    episode_deadline: seconds until an episode ends with Stop.DEADLINE; non-deterministic only. None is off.
    segment_steps: tokens that a segment generates at most, in each slot.
    enough: a segment ends once this many of its slots have finished (or all): a low number leaves slots idle
      for a shorter time, a high one saves changes between device and host.
    prefill_lengths, prefill_tokens: context is prefilled in chunks of these lengths, at most `prefill_tokens`
      a call and lane. The defaults of these four are those of the platform, `defaults`.
    mesh: where the parameters given to `load` lie. Sampling has a layout of its own: as many devices as
      divide the key/value heads share a copy of the parameters, split by heads, feed-forward and vocabulary;
      each such group is a lane, with its part of the slots and of the cache. So `slots` and `spare` are
      rounded up to a multiple of the lanes.
  """

  @memory.named('opening the sampler', memory.SAMPLER)
  def __init__(self, config: DecoderConfig, tokenizer, *, slots: int, length: int, spare: int | None = None,
               deterministic: bool = True, tool_patience: int = 0, episode_deadline: float | None = None,
               segment_steps: int | None = None, enough: int | None = None,
               prefill_lengths: Sequence[int] | None = None, prefill_tokens: int | None = None,
               mesh: Mesh | None = None):
    if slots < 1 or length < 2 or (spare is not None and spare < 1):
      raise ValueError(f'slots={slots}, length={length}, spare={spare}: need at least 1, 2 and 1')
    if deterministic and episode_deadline is not None:
      raise ValueError('episode_deadline needs deterministic=False: the clock would decide what is generated')
    devices = np.array(jax.local_devices()[:1]) if mesh is None else mesh.devices
    platform = devices.flat[0].platform
    self._rounding = config.dtype  # of the parameters, which training computes with
    # XLA would make a float32 copy of a bfloat16 cache in every step. Simulated devices compute as those they
    # stand for.
    if devices.size == 1 and platform == 'cpu':
      config = dataclasses.replace(config, dtype='float32')
    self.config, self.tokenizer = config, tokenizer
    split = math.gcd(devices.size, config.num_kv_heads)
    self.lanes = devices.size // split
    shape = self.lanes, 1, split
    self._mesh = Mesh(devices.reshape(shape), meshes.MESH_AXES) if devices.size > 1 else None
    per_lane = [-(-number // self.lanes) for number in (slots, slots if spare is None else spare)]
    self.slots, self.length = per_lane[0] * self.lanes, length
    self.deterministic, self.tool_patience = deterministic, tool_patience
    self.episode_deadline = math.inf if episode_deadline is None else episode_deadline
    given = dict(segment_steps=segment_steps, enough=enough, prefill_lengths=prefill_lengths,
                 prefill_tokens=prefill_tokens)
    chosen = defaults(self.slots, platform) | {name: value for name, value in given.items() if value}
    self.segment_steps, self.enough, prefill_lengths, prefill_tokens = (chosen[name] for name in given)
    self.rows = None  # of the cache, from `load` on
    self._scratch = sum(per_lane)  # place of the row behind them in each lane
    self.seconds_on_device = 0.0  # in which the host waited for results
    # Buckets of all that varies. `_counts`: by length n of a chunk in tokens, the chunks P of a call.
    quarter = -(-per_lane[0] // 4)
    self._widths = [quarter, per_lane[0]] if 4 <= quarter < per_lane[0] else [per_lane[0]]
    self._counts = {n: [4**i for i in range(16) if 4**i * n <= max(n, prefill_tokens)]
                    for n in sorted(prefill_lengths)}
    self._kernel = decode_attention.platform_of(platform, config.head_dim)  # then there is no front
    multiple = decode_attention.PAGE if self._kernel else 64
    row_length = -(-(length + max(self.segment_steps, *prefill_lengths)) // multiple) * multiple
    sizes = [128, 256, *(size << i for i in range(24) for size in (384, 512))]  # few programs, little waste
    self._windows = *(size for size in sizes if size < row_length), row_length
    self._whole = meshes.replicated(self._mesh) if self._mesh else SingleDeviceSharding(devices.item())
    by_heads = PartitionSpec(segment.LANES, 'tensor')
    self._split = NamedSharding(self._mesh, by_heads) if self._mesh else self._whole
    self._allocate = functools.partial(kv_cache.allocate, config, self.lanes * (self._scratch + 1),
                                       row_length, together=bool(self._kernel))
    self._params = self._cache = self._device_tables = None
    self._front = Front(config, self.lanes, self._scratch, self._split, self._whole, self._mesh)
    self._forbidden: dict[tuple, int] = {}
    self._stops: dict[tuple, int] = {}  # the first state of the automaton of each set
    self._tables = segment.Tables(np.zeros((STATES, config.vocab_size), np.int16),
                                  np.zeros((FORBIDDEN, config.vocab_size), bool))
    self._states = 0  # in use

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
    self._params = _prepare(self.config, self._rounding, self._mesh, self._whole)(params)
    self._cache = self._allocate(sharding=self._split) if self._cache is None else self._cache
    self.rows = self.rows or kv_cache.CacheRows(self._scratch, self.lanes)
    self.forget()

  def unload(self, *, cache: bool = False) -> None:
    """Frees the parameters, and with `cache` the cache too, until the next `load`."""
    self._params, self._cache = None, None if cache else self._cache
    self.clear_front()

  def largest_programs(self) -> tuple[dict[str, tuple], dict, list]:
    """Describes the largest prefill and decode by shapes: the mesh may be of devices that are not there.

    Returns:
      (name -> (jitted program, arguments, static arguments), the sampler's parameters, what it keeps between
      calls).
    """
    struct = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    given = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, self.config.dtype),
                         parameter_shapes(self.config), is_leaf=lambda shape: isinstance(shape, tuple))
    placed = sampling_layout(self.config, self._mesh, self._whole)
    params = jax.eval_shape(_prepare(self.config, self._rounding, self._mesh, self._whole), given)
    params = jax.tree.map(struct, params, placed if self._mesh else jax.tree.map(lambda _: placed, params))
    width, window = self._widths[-1], self._windows[-1]
    keep = lambda make: jax.tree.map(lambda x: struct(x, self._split), jax.eval_shape(make))
    cache = keep(lambda: self._allocate(sharding=None))
    front = None if self._kernel else keep(
      lambda: kv_cache.allocate(self.config, self.lanes * width, window, None))
    whole = lambda *arrays: jax.tree.map(lambda x: struct(x, self._whole), arrays)
    n, counts = list(self._counts.items())[-1]
    chunk = np.zeros(self.lanes * counts[-1], np.int32)
    tokens = np.zeros((len(chunk), n), np.int32)
    slots, uniforms = _idle_slots(self.slots, 0), np.zeros((self.slots, self.segment_steps), np.float32)
    numbers = whole(slots, self._tables, uniforms, np.int32(1), np.int32(1))
    return {
      'prefill': (segment.prefill, (self.config, params, cache, *whole(tokens, chunk, chunk)),
                  dict(window=window, mesh=self._mesh)),
      'decode': (segment.decode, (self.config, params, cache, front, *numbers),
                 dict(mesh=self._mesh, kernel=self._kernel)),
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
    """Frees the copies of the rows that are decoded."""
    self._front.clear()

  def compile_all(self, score: bool = False) -> None:
    """Compiles every program that a rollout can need, those of `Score` requests too if `score`."""
    scratch, token = CacheRow(0, place=self._scratch), np.zeros(1, np.int32)
    for width in self._widths:
      for window in self._windows[:1 if self._kernel else None]:
        if not self._kernel:
          self._front.resize(width, window)
          self._front.load(self._cache, [])
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
    """Returns where a span begins in the table of stop strings, with these among them."""
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
    """Returns the row of the table of forbidden tokens that has these."""
    if tokens not in self._forbidden:
      index = len(self._forbidden)
      if index == FORBIDDEN:
        raise ValueError(f'more than {FORBIDDEN} different sets of forbidden tokens')
      self._tables.forbidden[index, list(tokens)] = True
      self._forbidden[tokens], self._device_tables = index, None
    return self._forbidden[tokens]

  def decode(self, rows: Sequence[CacheRow], slots: segment.Slots, key, enough: int,
             limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Runs a segment for the paths in `rows`, at most `self.slots`, each with an entry in `slots`.

    Returns:
      tokens [S,steps], log-probabilities [S,steps], counts [S], states [S], and S of the program; the first
      four in the order given.
    """
    lanes, places = np.array([(row.lane, row.place) for row in rows]).T
    width = bucket(np.bincount(lanes).max(), self._widths)
    every = _idle_slots(width * self.lanes, self._scratch)
    if self._kernel:
      seats = np.zeros_like(lanes)
      for lane in range(self.lanes):
        seats[lanes == lane] = np.arange(np.sum(lanes == lane))
    else:
      window, front = bucket(slots.lengths.max() + 1 + self.segment_steps, self._windows), self._front
      if width != front.width or not window <= front.window <= 2 * window:  # shorter only where much shorter
        front.resize(width, window)
      seats = front.seat(self._cache, rows, slots.lengths, every.lengths)
    where = lanes * width + seats
    for array, values in zip(every, slots._replace(rows=places)):
      array[where] = values
    results = [result[where] for result in self._fetch(self._decode(every, key, enough, limit))]
    tokens, logprobs, counts, states = results
    self._front.decoded(lanes, places, slots.lengths + counts)
    return tokens, logprobs, counts, states, width * self.lanes

  def _decode(self, slots, key, enough, limit):
    """Calls the program; returns its results on the device."""
    if self._device_tables is None:
      self._device_tables = self.put(self._tables)
    slots, enough, limit = self.put((slots, np.int32(enough), np.int32(limit)))
    uniforms = segment.draws(key, slots.episodes, slots.requests, slots.lengths, steps=self.segment_steps)
    with meshes.issuing():
      self._cache, self._front.arrays, *results = segment.decode(
        self.config, self._params, self._cache, self._front.arrays, slots, self._device_tables, uniforms,
        enough, limit, mesh=self._mesh, kernel=self._kernel)
    return results

  def _fetch(self, arrays):
    """Returns arrays on the host, once the device has them."""
    start = time.monotonic()
    arrays = jax.device_get(arrays)
    self.seconds_on_device += time.monotonic() - start
    return arrays

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
      lanes = by_lane(sorted(parts[n], key=lambda part: part.start), self.lanes, lambda part: part.row.lane)
      for first in range(0, max(map(len, lanes)), counts[-1]):
        batch = [lane[first:first + counts[-1]] for lane in lanes]
        end = max(lane[-1].start for lane in batch if lane) + n
        self._prefill(batch, n, bucket(max(map(len, batch)), counts), bucket(end, self._windows))

  def _prefill(self, batch, n, count, window):
    """Calls the program for the chunks of each lane."""
    placed = [(lane * count + i, chunk) for lane, part in enumerate(batch) for i, chunk in enumerate(part)]
    size = self.lanes * count
    tokens, targets = np.full((2, size, n), self.tokenizer.pad_id, np.int32)
    starts, rows = np.zeros(size, np.int32), np.full(size, self._scratch, np.int32)
    for i, chunk in placed:
      tokens[i, :len(chunk.tokens)], starts[i], rows[i] = chunk.tokens, chunk.start, chunk.row.place
      self._front.written(chunk.row, chunk.start)
      if chunk.targets is not None:
        targets[i, :len(chunk.tokens)] = chunk.targets
    first = placed[0][1]
    scored = (None, None) if first.targets is None else (targets, np.float32(first.temperature))
    arrays = self.put((tokens, starts, rows, *scored))
    with meshes.issuing():
      self._cache, logprobs = segment.prefill(self.config, self._params, self._cache, *arrays, window=window,
                                              mesh=self._mesh)
    if logprobs is not None:
      logprobs = self._fetch(logprobs)
      for i, chunk in placed:
        chunk.logprobs.extend(logprobs[i, :len(chunk.tokens)].tolist())

  def fork(self, copies: Sequence[tuple[CacheRow, CacheRow, int]]) -> None:
    """Copies (source, target in the same lane, number of leading tokens), one after the other."""
    lanes, width = by_lane(copies, self.lanes, lambda copy: copy[1].lane), self._widths[-1]
    for first in range(0, max(map(len, lanes)), width):
      batch = [lane[first:first + width] for lane in lanes]
      places = np.full((2, self.lanes, width), self._scratch, np.int32)
      for lane, part in enumerate(batch):
        for i, (source, target, _) in enumerate(part):
          places[:, lane, i] = source.place, target.place
          self._front.written(target, 0)
      counts = np.full(self.lanes, max(map(len, batch)), np.int32)  # alike: the rest is copied in place
      window = bucket(max(size for part in batch for *_, size in part), self._windows)
      arrays = self.put((*places.reshape(2, -1), counts))
      with meshes.issuing():
        self._cache = segment.fork(self._cache, *arrays, window=window, mesh=self._mesh)

  def put(self, tree):
    """Moves arrays to the device explicitly, so that implicit transfers can be forbidden."""
    return jax.device_put(tree, self._whole)


@functools.cache
def _prepare(config: DecoderConfig, rounding: str, mesh: Mesh | None, whole: Sharding):
  """Compiles the cast and unstacking of parameters for sampling: fused on one device, or split over `tensor`.

  They are rounded as a cast to the dtype `rounding` would; XLA leaves out a cast there and back.
  """
  kept = jnp.finfo(rounding)

  def prepare(params):
    rounded = lambda p: jax.lax.reduce_precision(p, kept.nexp, kept.nmant).astype(config.dtype)
    params = unstack(jax.tree.map(rounded, params), config.num_layers)
    return fuse(config, params) if mesh is None else params

  return jax.jit(prepare, out_shardings=sampling_layout(config, mesh, whole))


def sampling_layout(config: DecoderConfig, mesh: Mesh | None, whole: Sharding) -> Sharding | dict:
  """Returns where the sampler's parameters lie: all of them whole, or split over `tensor`."""
  if mesh is None:
    return whole
  shardings = meshes.shardings(parameter_axes(config), parameter_shapes(config), mesh)
  layer = {name: NamedSharding(mesh, PartitionSpec(*stacked.spec[1:]))
           for name, stacked in shardings['layers'].items()}
  return shardings | {'layers': [layer] * config.num_layers}


def _idle_slots(count: int, scratch: int) -> segment.Slots:
  return segment.Slots(*(np.full(count, value, np.float32 if isinstance(value, float) else np.int32)
                         for value in segment.Slots(scratch)))


def bucket(size: int, buckets: Sequence[int]) -> int:
  """Returns the smallest of ascending `buckets` that holds `size`."""
  return next(bucket for bucket in buckets if bucket >= size)
