"""The device side of the sampler: parameters, KV cache, and the calls of the compiled programs.

Here is what the programs need: buckets, padding, explicit transfers. Which request gets which row of the cache and when is
decided in schedule.py; everybody else calls `rollout.rollout`. Order of use: `Engine(...)`, `load(params)` after every update
of the policy, `compile_all()` once if nothing may compile later.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxsearch.models.decoder import DecoderConfig, fuse, parameter_axes, parameter_shapes, unstack
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import cache as caches
from jaxsearch.sampler import segment

PROFILES = 16  # different sets of stop strings and forbidden tokens that may be in use at a time


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens to be cached behind `start` tokens of a row; `targets` is what follows each of them, where that is scored."""
  row: caches.CacheRow
  start: int
  tokens: np.ndarray
  targets: np.ndarray | None = None
  item: int = 0  # which of the chunks handed to `Engine.score` it was cut from


class Engine:
  """A policy that prefills, decodes, scores and forks paths of tokens on the device.

  Args:
    config: the decoder; its `dtype` is the compute dtype, of the cache too.
    tokenizer: `models.tokenizer.Tokenizer` or anything with its pieces(size), decode, eos_ids and special_tokens.
    slots: paths decoded at a time. Where only a quarter is left to decode in any lane, a program for that many takes over.
    length: tokens a path may have, prompt, observations and answer together.
    spare: rows of the cache beyond `slots`, for paths that wait for a tool or may be forked; `slots` by default, at
      least 1. At most slots + spare episodes are under way.
    deterministic: the schedule depends on counts of decode steps only, never on the clock.
    tool_patience: deterministic only: decode steps that slots may stay idle before the host waits for the oldest reply.
      About the time that a tool takes, counted in steps; 0 suits a search within this process.
    episode_deadline: seconds until an episode is ended with Stop.DEADLINE; only in the non-deterministic mode.
    segment_steps: tokens that a segment generates at most.
    enough: a segment ends once this many of its slots have finished (or all): a low number leaves slots idle for a shorter
      time, a high one saves changes between device and host; slots / 16 by default.
    prefill_lengths, prefill_tokens: context is prefilled in chunks of these lengths, at most `prefill_tokens` a call and lane.
    mesh: where the parameters given to `load` lie. Sampling has a layout of its own: as many devices as divide the
      key/value heads share a copy of the parameters, split by heads, feed-forward and vocabulary; each such group is a
      lane, with its part of the slots and of the cache. So `slots` and `spare` are rounded up to a multiple of the lanes.
  """

  def __init__(self, config: DecoderConfig, tokenizer, *, slots: int, length: int, spare: int | None = None,
               deterministic: bool = True, tool_patience: int = 0, episode_deadline: float | None = None,
               segment_steps: int = 32, enough: int | None = None, prefill_lengths: Sequence[int] = (32, 128),
               prefill_tokens: int = 512, mesh: Mesh | None = None):
    if slots < 1 or length < 2 or (spare is not None and spare < 1):
      raise ValueError(f'slots={slots}, length={length}, spare={spare}: need at least 1, 2 and 1')
    if deterministic and episode_deadline is not None:
      raise ValueError('episode_deadline needs deterministic=False: the clock would decide what is generated')
    self.config, self.tokenizer = config, tokenizer
    devices = np.array(jax.local_devices()[:1]) if mesh is None else mesh.devices
    split = math.gcd(devices.size, config.num_kv_heads)
    self.lanes = devices.size // split
    self._mesh = Mesh(devices.reshape(self.lanes, 1, split), meshes.MESH_AXES) if devices.size > 1 else None
    per_lane = [-(-number // self.lanes) for number in (slots, slots if spare is None else spare)]
    self.slots, self.length = per_lane[0] * self.lanes, length
    self.deterministic, self.tool_patience, self.episode_deadline = deterministic, tool_patience, episode_deadline
    self.segment_steps = segment_steps
    self.enough = max(1, self.slots // 16) if enough is None else enough
    self.pieces = tokenizer.pieces(config.vocab_size)
    self.rows = caches.CacheRows(sum(per_lane), self.lanes)
    self._widths = [width for width in (-(-per_lane[0] // 4), per_lane[0]) if width >= 4 or width == per_lane[0]]
    self._prefill_lengths, self._prefill_tokens = tuple(sorted(prefill_lengths)), prefill_tokens
    row_length = -(-(length + max(segment_steps, self._prefill_lengths[-1])) // 64) * 64
    self._windows = _windows(row_length)
    self._prefill_windows = self._windows[(len(self._windows) - 1) // 2], row_length  # here attention is a small part of the work
    self._whole = meshes.replicated(self._mesh) if self._mesh else SingleDeviceSharding(devices.item())
    self._cache = caches.allocate(config, self.lanes * (self.rows.scratch + 1), row_length, NamedSharding(
      self._mesh, PartitionSpec(segment.LANES, 'tensor')) if self._mesh else self._whole)
    self._params = None
    self._profiles: dict[tuple, int] = {}
    self._tables = np.zeros((2, PROFILES, config.vocab_size), bool)
    self._device_tables = None

  def load(self, params: dict) -> None:
    """Takes new parameters (nested as `parameter_shapes`, any dtype and sharding); what is cached is forgotten."""
    _check_devices(params, self._mesh)
    self._params = _prepare(self.config, self._mesh, self._whole)(params)
    self.rows.forget()

  def start_rollout(self) -> None:
    """Makes sure that there are parameters, and where the schedule is deterministic, that nothing is cached."""
    if self._params is None:
      raise ValueError('a rollout before Engine.load: there are no parameters')
    if self.deterministic:
      self.rows.forget()  # what an earlier rollout left would be equal to rounding only

  def compile_all(self, score: bool = False) -> None:
    """Compiles every program that a rollout can need (those of `Score` requests too if `score`); nothing compiles later."""
    scratch = [[Chunk(caches.CacheRow(0, place=self.rows.scratch), 0, np.zeros(1, np.int32), np.zeros(1, np.int32))]]
    for width in self._widths:
      for window in self._windows:
        self._decode([], self.put(jax.random.key(0)), width, window, 0, 1)
    for window in self._prefill_windows:
      self._fork([[]], window)
      for n in self._prefill_lengths:
        for count in self._counts(n) if n <= window else ():
          self._prefill(scratch, n, count, window)
          if score:
            self._score(scratch, n, count, window)
    jax.block_until_ready(self._cache)

  def profile(self, stop: tuple[str, ...], forbid: tuple[int, ...]) -> int:
    """Row of the profile tables for these stop strings and forbidden tokens."""
    found = self._profiles.get((stop, forbid))
    if found is not None:
      return found
    index = len(self._profiles)
    if index == PROFILES:
      raise ValueError(f'more than {PROFILES} different sets of stop strings and forbidden tokens')
    pause, forbidden = self._tables[:, index]
    pause[:] = stop_flags(self.pieces, stop)
    pause[list(self.tokenizer.eos_ids)] = True
    forbidden[list(forbid)] = True
    self._profiles[stop, forbid] = index
    self._device_tables = None
    return index

  def decode(self, slots: Sequence[tuple[int, segment.Slots]], key, enough: int,
             limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Runs a segment for at most `self.slots` slots, given as (lane, what the segment knows of it).

    Returns:
      tokens [S,steps], log-probabilities [S,steps], counts [S], and S of the program; the first three in the order given.
    """
    window = _bucket(max(slot.lengths for _, slot in slots) + 1 + self.segment_steps, self._windows)
    width = _bucket(max(map(len, self._by_lane(slots, lambda slot: slot[0]))), self._widths)
    results, places = self._decode(slots, key, width, window, enough, limit)
    return *(result[places] for result in jax.device_get(results)), width * self.lanes

  def prefill(self, chunks: Sequence[Chunk]) -> None:
    """Caches the tokens of all chunks; those of one row are in order."""
    for call in self._batches(chunks):
      self._prefill(*call)

  def score(self, chunks: Sequence[Chunk]) -> list[list[float]]:
    """As `prefill`; the log-probabilities of each chunk's targets."""
    chunks = [dataclasses.replace(chunk, item=item) for item, chunk in enumerate(chunks)]
    results = [[] for _ in chunks]
    for batch, n, count, window in self._batches(chunks):
      logprobs = jax.device_get(self._score(batch, n, count, window)).reshape(self.lanes, count, n)
      for part, found in zip(batch, logprobs):
        for chunk, values in zip(part, found):
          results[chunk.item].extend(values[:len(chunk.tokens)].tolist())
    return results

  def fork(self, copies: Sequence[tuple[caches.CacheRow, caches.CacheRow, int]]) -> None:
    """Copies (source, target in the same lane, leading tokens), one after the other."""
    lanes, width = self._by_lane(copies, lambda copy: copy[1].lane), self._widths[-1]
    for start in range(0, max(map(len, lanes)), width):
      part = [lane[start:start + width] for lane in lanes]
      self._fork(part, _bucket(max(size for lane in part for *_, size in lane), self._prefill_windows))

  # One call of a program each, with everything that varies as data.

  def _decode(self, given, key, width, window, enough, limit):
    slots, places = _idle_slots(width * self.lanes, self.rows.scratch), []
    used = [0] * self.lanes
    for lane, slot in given:
      places.append(lane * width + used[lane])
      used[lane] += 1
      for name, value in slot._asdict().items():
        getattr(slots, name)[places[-1]] = value
    if self._device_tables is None:
      self._device_tables = self.put(segment.Profiles(*self._tables))
    leave = segment.Leave(np.int32(enough), np.int32(limit))
    slots, leave = self.put((slots, leave))
    uniforms = segment.draws(key, slots.episodes, slots.requests, slots.lengths, steps=self.segment_steps)
    self._cache, *results = segment.decode(
      self.config, self._params, self._cache, slots, self._device_tables, uniforms, leave, window=window, mesh=self._mesh)
    return results, places

  def _prefill(self, batch, n, count, window):
    tokens, starts, rows, _ = self.put(self._arrays(batch, n, count))
    self._cache = segment.prefill(
      self.config, self._params, self._cache, tokens, starts, rows, window=window, mesh=self._mesh)

  def _score(self, batch, n, count, window):
    tokens, starts, rows, targets = self.put(self._arrays(batch, n, count))
    self._cache, logprobs = segment.score(
      self.config, self._params, self._cache, tokens, starts, rows, targets, window=window, mesh=self._mesh)
    return logprobs

  def _fork(self, copies, window):
    places = np.full((2, self.lanes, self._widths[-1]), self.rows.scratch, np.int32)
    for lane, part in enumerate(copies):
      for i, (source, target, _) in enumerate(part):
        places[:, lane, i] = source.place, target.place
    sources, targets = places.reshape(2, -1)
    counts = np.full(self.lanes, max(map(len, copies)), np.int32)  # the same in each, what is missing is copied in place
    self._cache = segment.fork(self._cache, *self.put((sources, targets, counts)), window=window, mesh=self._mesh)

  def _by_lane(self, items, lane_of):
    """The items of each lane, in order."""
    return [[item for item in items if lane_of(item) == lane] for lane in range(self.lanes)]

  def _batches(self, chunks):
    """(chunks of each lane, n, P of a lane, window) of each program call. Longer chunks first: within a row they come first."""
    parts = [part for chunk in chunks for part in self._cut(chunk)]
    for n in reversed(self._prefill_lengths):
      alike = sorted((part for size, part in parts if size == n), key=lambda part: part.start)
      lanes, counts = self._by_lane(alike, lambda part: part.row.lane), self._counts(n)
      for first in range(0, max(map(len, lanes)), counts[-1]):
        batch = [lane[first:first + counts[-1]] for lane in lanes]
        end = max(lane[-1].start for lane in batch if lane) + n
        yield batch, n, _bucket(max(map(len, batch)), counts), _bucket(end, self._prefill_windows)

  def _cut(self, chunk):
    """(n, part) of a chunk: the longest bucket that is at least three quarters full, else the shortest."""
    done = 0
    while done < len(chunk.tokens):
      left = len(chunk.tokens) - done
      n = max((n for n in self._prefill_lengths if 3 * n <= 4 * left), default=self._prefill_lengths[0])
      targets = None if chunk.targets is None else chunk.targets[done:done + n]
      yield n, dataclasses.replace(chunk, start=chunk.start + done, tokens=chunk.tokens[done:done + n], targets=targets)
      done += n

  def _counts(self, n):
    """Buckets of P, chunks in a call, for chunks of length n: 1, 4, 16, …"""
    return [4**i for i in range(16) if 4**i * n <= max(n, self._prefill_tokens)]

  def _arrays(self, batch, n, count):
    tokens, targets = np.full((2, self.lanes * count, n), self.tokenizer.pad_id, np.int32)
    starts, rows = np.zeros(self.lanes * count, np.int32), np.full(self.lanes * count, self.rows.scratch, np.int32)
    for lane, part in enumerate(batch):
      for i, chunk in enumerate(part, start=lane * count):
        size = len(chunk.tokens)
        tokens[i, :size], starts[i], rows[i] = chunk.tokens, chunk.start, chunk.row.place
        if chunk.targets is not None:
          targets[i, :size] = chunk.targets
    return tokens, starts, rows, targets

  def put(self, tree):
    """To the device, said aloud, so that a transfer nobody asked for can be forbidden."""
    return jax.device_put(tree, self._whole)


def _check_devices(params: dict, mesh: Mesh | None) -> None:
  devices = set().union(*(leaf.devices() for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)))
  if mesh is None and len(devices) > 1:
    raise ValueError(f'the parameters lie on {len(devices)} devices: give the Engine their mesh')


@functools.cache
def _prepare(config: DecoderConfig, mesh: Mesh | None, whole: Sharding):
  """The jitted cast and unstacking of parameters, laid out for sampling: fused on one device, or split over `tensor`."""
  def prepare(params):
    params = unstack(jax.tree.map(lambda p: p.astype(config.dtype), params), config.num_layers)
    return fuse(config, params) if mesh is None else params

  def layout(axes, shape):
    return NamedSharding(mesh, meshes.spec(axes, shape, mesh))

  if mesh is None:
    return jax.jit(prepare, out_shardings=whole)
  axes, shapes = parameter_axes(config), parameter_shapes(config)
  layer = {name: layout(value[1:], shapes['layers'][name][1:]) for name, value in axes['layers'].items()}
  shardings = {name: layout(value, shapes[name]) for name, value in axes.items() if name != 'layers'}
  return jax.jit(prepare, out_shardings=shardings | {'layers': [layer] * config.num_layers})


def _idle_slots(count: int, scratch: int) -> segment.Slots:
  zeros = lambda dtype=np.int32: np.zeros(count, dtype)
  return segment.Slots(
    rows=np.full(count, scratch, np.int32), tokens=zeros(), lengths=zeros(), remaining=zeros(), episodes=zeros(),
    requests=zeros(), temperature=zeros(np.float32), top_p=np.ones(count, np.float32), top_k=zeros(), profile=zeros())


def _windows(length: int) -> tuple[int, ...]:
  """128, 256, 384, 512, 768, 1024, … and `length`: few programs, yet little attention is spent on nothing."""
  sizes = [128, 256] + [size for i in range(24) for size in (384 << i, 512 << i)]
  return (*(size for size in sizes if size < length), length)


def _bucket(size: int, buckets: Sequence[int]) -> int:
  return next(bucket for bucket in buckets if bucket >= size)


# Stop strings over tokens. The device pauses a slot at any flagged token; the host then looks at the bytes of the span.


def stop_flags(pieces: Sequence[bytes], stops: Sequence[str]) -> np.ndarray:
  """[len(pieces)] bool: tokens in which one of `stops` can end: their bytes up to there are its tail, or contain all of it."""
  encoded = [stop.encode() for stop in stops]
  return np.array([any(_can_complete(piece, stop) for stop in encoded) for piece in pieces], bool)


def _can_complete(piece: bytes, stop: bytes) -> bool:
  end = piece.find(stop[-1:]) + 1
  while end:
    size = min(end, len(stop))
    if piece[end - size:end] == stop[-size:]:
      return True
    end = piece.find(stop[-1:], end) + 1
  return False


def found_stop(pieces: Sequence[bytes], tokens: Sequence[int], stops: Sequence[str]) -> str | None:
  """The stop string that ends in the last of `tokens` and lies within them, the one that ends first if several do."""
  if not stops or not tokens:
    return None
  text = b''.join(pieces[token] for token in tokens)
  before = len(text) - len(pieces[tokens[-1]])
  ends = {}
  for stop in stops:
    encoded = stop.encode()
    start = text.find(encoded, max(0, before - len(encoded) + 1))
    if start >= 0:
      ends[stop] = start + len(encoded)
  return min(ends, key=ends.get, default=None)
