"""The set-up of a sampler: sizes, layout and parameters of the policy, what may be compiled beforehand.

device.py holds what every rollout runs, decoding.py decides which request gets which row of the cache, and
when; everybody else calls `driver.rollout`. Order of use: `Engine(...)`, `load(params)` after every update of
the policy, `compile_all()` once if nothing may compile later.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxsearch.models.architecture import DecoderConfig, parameter_axes, parameter_shapes
from jaxsearch.models.decoder import fuse, unstack
from jaxsearch.models.kernels import decode_attention
from jaxsearch.parallel import memory, transfer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import kv_cache, segment
from jaxsearch.sampler.device import FORBIDDEN, STATES, Device
from jaxsearch.sampler.kv_cache import Chunk


def defaults(slots: int, platform: str) -> dict:
  """Returns segments and prefill as they suit a platform.

  An accelerator is fast only on many tokens at a time, and its steps are short beside the time that a host
  takes to serve a slot. On a CPU a step is long, and a slot that is idle costs more.
  """
  cpu = platform == 'cpu'
  return dict(segment_steps=32, enough=max(1, slots // (16 if cpu else 8)),
              prefill_lengths=(32, 128) if cpu else (64, 512), prefill_tokens=512 if cpu else 4096)


class Engine(Device):
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
      a call and lane. These four are those of the platform (`defaults`) where they are 0 or ().
    mesh: where the parameters given to `load` lie. Sampling has a layout of its own: as many devices as
      divide the key/value heads and `tensor` (0: any number) share a copy of the parameters, split by heads,
      feed-forward and vocabulary; each such group is a lane, with its part of the slots and of the cache. So
      `slots` and `spare` are rounded up to a multiple of the lanes.
  """

  @memory.named('opening the sampler', memory.SAMPLER)
  def __init__(self, config: DecoderConfig, tokenizer, *, slots: int, length: int, spare: int | None = None,
               deterministic: bool = True, tool_patience: int = 0, episode_deadline: float | None = None,
               segment_steps: int = 0, enough: int = 0, prefill_lengths: Sequence[int] = (),
               prefill_tokens: int = 0, mesh: Mesh | None = None, tensor: int = 0):
    super().__init__(tokenizer)
    if slots < 1 or length < 2 or (spare is not None and spare < 1):
      raise ValueError(f'slots={slots}, length={length}, spare={spare}: need at least 1, 2 and 1')
    if deterministic and episode_deadline is not None:
      raise ValueError('episode_deadline needs deterministic=False: the clock would decide what is generated')
    devices = np.array(jax.local_devices()[:1]) if mesh is None else mesh.devices
    platform = devices.flat[0].platform
    rounding = config.dtype  # of the parameters, which training computes with
    # XLA would make a float32 copy of a bfloat16 cache in every step. Simulated devices compute as those they
    # stand for.
    if devices.size == 1 and platform == 'cpu':
      config = dataclasses.replace(config, dtype='float32')
    self.config, self.length = config, length
    self.deterministic, self.tool_patience = deterministic, tool_patience
    self.episode_deadline = math.inf if episode_deadline is None else episode_deadline
    split = math.gcd(devices.size, config.num_kv_heads, tensor)
    self.lanes = devices.size // split
    per_lane = -(-slots // self.lanes)
    self.slots = per_lane * self.lanes
    self._scratch = per_lane + (per_lane if spare is None else -(-spare // self.lanes))
    usual = defaults(self.slots, platform)
    self.segment_steps, self.enough = segment_steps or usual['segment_steps'], enough or usual['enough']
    lengths = sorted(prefill_lengths or usual['prefill_lengths'])
    most = prefill_tokens or usual['prefill_tokens']
    self._counts = {n: [4**i for i in range(16) if 4**i * n <= max(n, most)] for n in lengths}
    quarter = -(-per_lane // 4)
    self._widths = [quarter, per_lane] if 4 <= quarter < per_lane else [per_lane]
    self._kernel = decode_attention.platform_of(platform, config.head_dim)
    multiple = decode_attention.PAGE if self._kernel else 64
    row_length = -(-(length + max(self.segment_steps, *lengths)) // multiple) * multiple
    sizes = [128, 256, *(size << i for i in range(24) for size in (384, 512))]  # few programs, little waste
    self._windows = *(size for size in sizes if size < row_length), row_length
    shape = self.lanes, 1, split
    self._mesh = Mesh(devices.reshape(shape), meshes.MESH_AXES) if devices.size > 1 else None
    self._whole = transfer.replicated(self._mesh) if self._mesh else SingleDeviceSharding(devices.item())
    by_heads = PartitionSpec(segment.LANES, 'tensor')
    self._split = NamedSharding(self._mesh, by_heads) if self._mesh else self._whole
    self._allocate = functools.partial(kv_cache.allocate, config, self.lanes * (self._scratch + 1),
                                       row_length, together=bool(self._kernel))
    self._prepare = _prepare(config, rounding, self._mesh, self._whole)
    self._tables = segment.Tables(np.zeros((STATES, config.vocab_size), np.int16),
                                  np.zeros((FORBIDDEN, config.vocab_size), bool))

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
    params = jax.eval_shape(self._prepare, given)
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
    uniforms = np.zeros((self.slots, self.segment_steps), np.float32)
    numbers = whole(kv_cache.idle_slots(self.slots, 0), self._tables, uniforms, np.int32(1), np.int32(1))
    return {
      'prefill': (segment.prefill, (self.config, params, cache, *whole(tokens, chunk, chunk)),
                  dict(window=window, mesh=self._mesh)),
      'decode': (segment.decode, (self.config, params, cache, front, *numbers),
                 dict(mesh=self._mesh, kernel=self._kernel)),
    }, params, (cache, front)

  def compile_all(self, score: bool = False) -> None:
    """Compiles every program that a rollout can need, those of `Score` requests too if `score`."""
    for width in self._widths:
      rows = [row for row in self.rows.rows if row.place < width]
      for window in self._windows[:1 if self._kernel else None]:
        slots = kv_cache.idle_slots(len(rows), self._scratch)
        slots.lengths[:] = max(window - 1 - self.segment_steps, 0)
        self.decode(rows, slots, self.put(jax.random.key(0)), 0, 1)
    row, token = self.rows.rows[0], np.zeros(1, np.int32)
    self.fork([(row, row, 1)])
    for window in self._windows:
      for n, counts in self._counts.items():
        for count in counts if n <= window else ():
          for targets in (None, token) if score else (None,):
            self._prefill([[Chunk(row, 0, token, targets)]], n, count, window)
    jax.block_until_ready(self._cache)
    self.forget()


@functools.cache
def _prepare(config: DecoderConfig, rounding: str, mesh: Mesh | None, whole: Sharding) -> Callable:
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
