"""The set-up of a sampler: sizes, layout and parameters of the policy, what may be compiled beforehand.

device.py holds what every rollout runs, decoding.py decides which request gets pages of the cache, and when;
everybody else calls `driver.rollout`. Order of use: `Engine(...)`, `load(params)` after every update of the
policy, `compile_all()` once if nothing may compile later.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxsearch.models.architecture import INPUTS, DecoderConfig, parameter_axes, parameter_shapes
from jaxsearch.models.decoder import fuse, unstack
from jaxsearch.models.kernels import paged_attention
from jaxsearch.models.sampling_weights import Quantised, dtype_on_cpu, quantise, transpose
from jaxsearch.parallel import memory, mesh as meshes, transfer
from jaxsearch.sampler import segment
from jaxsearch.sampler.device import STATES, Device
from jaxsearch.sampler.pages import PAGE, SCRATCH, Chunk, Page, Path


def defaults(slots: int, platform: str) -> dict:
  """Returns segments and prefill as they suit a platform.

  An accelerator is fast only on many tokens at a time, and its steps are short beside the time that a host
  takes to serve a slot. On a CPU a step is long, and a slot that is idle costs more.
  """
  cpu = platform == 'cpu'
  return dict(segment_steps=32 if cpu else 8, enough=max(1, slots // 16),
              prefill_lengths=(32, 128) if cpu else (64, 512), prefill_tokens=512 if cpu else 4096)


class Engine(Device):
  """A policy that prefills, scores and decodes paths of tokens on the device.

  Args:
    config: the decoder; its `dtype` is also that of the cache. A single CPU device computes in float32, and
      multiplies matrices of bfloat16 where it can.
    tokenizer: a `models.tokenizer.Tokenizer`, or anything with its pieces(size), decode, eos_ids, pad_id and
      special_tokens.
    slots: paths decoded at a time. With at most a quarter left to decode in any lane, a smaller program runs.
    length: tokens a path may have, prompt, observations and answer together.
    pages: of the cache, PAGE tokens each, for paths in slots and for those that wait for a tool or may be
      branched from; enough for the longest path. 0 takes what half of the slots need at full length, on a CPU
      all of them. Paths that wait for a tool lose theirs when there are none left, and are prefilled again.
    deterministic: the schedule depends on counts of decode steps only, never on the clock.
    episode_deadline: seconds until an episode ends with Stop.DEADLINE; non-deterministic only. None is off.
    segment_steps: tokens that a segment generates at most, in each slot.
    enough: on a CPU a segment ends once this many of its slots have finished (or all): a low number leaves
      slots idle for a shorter time, a high one saves changes between device and host. Elsewhere it ends after
      `segment_steps`, so that its loop needs no host.
    prefill_lengths, prefill_tokens: context is prefilled in chunks of these lengths, at most `prefill_tokens`
      a call and lane. These four are those of the platform (`defaults`) where they are 0 or ().
    mesh: where the parameters given to `load` lie. Sampling has a layout of its own: g devices, the greatest
      common divisor of devices, key/value heads and `tensor` (0: no limit), share a copy of the parameters,
      split by heads, feed-forward and vocabulary; such a group is a lane, with its part of slots and cache.
      So `slots` and `pages` are rounded up to a multiple of the lanes.
    weights: 'same', or what the matrices of layers are for sampling, 'int8' or 'fp8': see
      models/sampling_weights.py.
  """

  @memory.named('opening the sampler', memory.SAMPLER)
  def __init__(self, config: DecoderConfig, tokenizer, *, slots: int, length: int, pages: int = 0,
               deterministic: bool = True, episode_deadline: float | None = None,
               segment_steps: int = 0, enough: int = 0, prefill_lengths: Sequence[int] = (),
               prefill_tokens: int = 0, mesh: Mesh | None = None, tensor: int = 0, weights: str = 'same'):
    super().__init__(tokenizer)
    if slots < 1 or length < 2:
      raise ValueError(f'slots={slots}, length={length}: need at least 1 and 2')
    tokenizer.check_fits(config.vocab_size)
    if deterministic and episode_deadline is not None:
      raise ValueError('episode_deadline needs deterministic=False: the clock would decide what is generated')
    devices = np.array(jax.local_devices()[:1]) if mesh is None else mesh.devices
    platform = devices.flat[0].platform
    rounding = config.dtype  # of the parameters, which training computes with
    # XLA would make a float32 copy of a bfloat16 cache in every step. Simulated devices compute as those they
    # stand for.
    if devices.size == 1 and platform == 'cpu':
      config = dataclasses.replace(config, dtype='float32')
    self.config, self.length, self.weights = config, length, weights
    self.deterministic = deterministic
    self.episode_deadline = math.inf if episode_deadline is None else episode_deadline
    split = math.gcd(devices.size, config.num_kv_heads, tensor)
    self.lanes = devices.size // split
    per_lane = -(-slots // self.lanes)
    self.slots = per_lane * self.lanes
    usual = defaults(self.slots, platform)
    self.segment_steps, self.enough = segment_steps or usual['segment_steps'], enough or usual['enough']
    lengths = sorted(prefill_lengths or usual['prefill_lengths'])
    most = prefill_tokens or usual['prefill_tokens']
    quarter = -(-per_lane // 4)
    self._kernel = paged_attention.KERNELS.get(platform)
    if self._kernel:  # few programs, whose calls are full
      self._counts = {n: [max(1, most // lengths[-1])] for n in lengths}
      self._widths, multiple = [per_lane], PAGE * paged_attention.MULTIPLE
    else:
      self._counts = {n: [4**i for i in range(16) if 4**i * n <= max(n, most)] for n in lengths}
      self._widths, multiple = ([quarter, per_lane] if 4 <= quarter < per_lane else [per_lane]), 2 * PAGE
    self.row_length = -(-(length + max(self.segment_steps, *lengths)) // multiple) * multiple
    sizes = [128, 256, *(size << i for i in range(24) for size in (384, 512))]  # few programs, little waste
    if self._kernel:
      sizes = [-(-self.row_length // 4 // multiple) * multiple]
    self._windows = *(size for size in sizes if size < self.row_length), self.row_length
    longest = -(-length // PAGE) + 2  # with the scratch page and one to copy from
    share = per_lane * self.row_length // PAGE // (2 if self._kernel else 1)
    self._pages = max(-(-pages // self.lanes) or share, longest)
    shape = self.lanes, 1, split
    self._mesh = Mesh(devices.reshape(shape), meshes.MESH_AXES) if devices.size > 1 else None
    self._whole = transfer.replicated(self._mesh) if self._mesh else SingleDeviceSharding(devices.item())
    kept = lambda *spec: NamedSharding(self._mesh, PartitionSpec(*spec)) if self._mesh else self._whole
    pool = paged_attention.pool_shapes(self._kernel, config.num_kv_heads, self.lanes * self._pages, PAGE,
                                       config.head_dim, split)
    self._pooled, self._split = kept('tensor', segment.LANES), kept(segment.LANES, 'tensor')
    self._allocate = segment.allocator(config, pool, self._pooled)
    matrices = dtype_on_cpu(rounding) if self._mesh is None and platform == 'cpu' else ''
    self._prepare = _prepare(config, rounding, matrices, weights, self._mesh, self._whole)
    self._following = np.zeros((STATES, config.vocab_size), np.int16)

  def largest_programs(self) -> tuple[dict[str, tuple], dict, list]:
    """Describes the largest prefill and decode by shapes: the mesh may be of devices that are not there.

    Returns:
      (name -> (jitted program, arguments, static arguments), the sampler's parameters, what it keeps between
      calls).
    """
    struct = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    given = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, self.config.dtype),
                         parameter_shapes(self.config), is_leaf=lambda shape: isinstance(shape, tuple))
    params = jax.eval_shape(self._prepare, given)
    placed = sampling_layout(self.config, self.weights, self._mesh, self._whole)
    params = jax.tree.map(struct, params, placed if self._mesh else jax.tree.map(lambda _: placed, params))
    width, window = self._widths[-1], self._windows[-1]
    keep = lambda make, sharding: jax.tree.map(lambda x: struct(x, sharding), jax.eval_shape(make))
    cache = keep(self._allocate, self._pooled)
    front = None if self._kernel else keep(lambda: self._allocate_front(width, window), self._split)
    whole = lambda *arrays: jax.tree.map(lambda x: struct(x, self._whole), arrays)
    n, counts = list(self._counts.items())[-1]
    chunk, pages = np.zeros(self.lanes * counts[-1], np.int32), window // PAGE
    tokens, table = np.zeros((len(chunk), n), np.int32), np.zeros((len(chunk), pages), np.int32)
    slots = self.lanes * width
    uniforms = np.zeros((slots, self.segment_steps), np.float32)
    numbers = whole(segment.idle_slots(slots), np.zeros((slots, pages), np.int32), self._following,
                    uniforms, np.int32(1), np.int32(1))
    static = dict(mesh=self._mesh, kernel=self._kernel)
    return {
      'prefill': (segment.prefill, (self.config, params, cache, *whole(tokens, chunk, table)), static),
      'decode': (segment.decode, (self.config, params, cache, front, *numbers), static),
    }, params, (cache, front)

  def _allocate_front(self, width: int, window: int) -> list:
    """Returns an empty front for `width` slots a lane."""
    heads, h, slots = self.config.num_kv_heads, self.config.head_dim, self.lanes * width
    shapes = (slots, heads, h, window), (slots, heads, window, h)
    return segment.allocator(self.config, shapes, self._split)()

  def programs(self, score: bool = False) -> list[tuple[str, Callable[[], None]]]:
    """Lists what a rollout can need, the programs of `Score` too if `score`.

    Returns:
      the name of each, and a call that compiles it; some also compile small helpers of other names.
    """
    path = lambda lane: Path(np.zeros(2, np.int32), self.length, 0, lane, numbers=np.zeros(1, np.int32),
                             source=Page(SCRATCH))

    def decode(width, window):
      paths = [path(lane) for lane in range(self.lanes) for _ in range(width)]
      slots = segment.idle_slots(len(paths))
      slots.lengths[:] = max(window - 1 - self.segment_steps, 0)
      self.decode(paths, slots, self.put(jax.random.key(0)), 0, 1)

    def prefill(window, n, count, targets):
      self._prefill([[Chunk(path(0), 0, np.zeros(1, np.int32), targets)]], n, count, window)

    calls = [('copy', lambda: self.copy([path(0)]))]
    windows = self._windows[-1:] if self._kernel else self._windows
    calls += [('decode', functools.partial(decode, *sizes))
              for sizes in itertools.product(self._widths, windows)]
    calls += [('prefill', functools.partial(prefill, window, n, count, targets))
              for window in self._windows for n, counts in self._counts.items() if n <= window
              for count in counts for targets in (None, np.zeros(1, np.int32))[:1 + score]]
    return calls

  def compile_all(self, score: bool = False) -> None:
    """Compiles every program of `programs`; needs parameters."""
    self.allocate()
    for _, compile_program in self.programs(score):
      compile_program()
    jax.block_until_ready(self._cache)
    self.forget()


@functools.cache
def _prepare(config: DecoderConfig, rounding: str, matrices: str, weights: str, mesh: Mesh | None,
             whole: Sharding) -> Callable:
  """Compiles the cast and unstacking of parameters for sampling: fused on one device, or split over `tensor`.

  They are rounded as by a cast to the dtype `rounding` and back, which XLA would optimise away. Then they
  are quantised, as `weights` says, or transposed on a CPU, in the dtype `matrices`.
  """
  kept = jnp.finfo(rounding)

  def prepare(params):
    rounded = lambda p: jax.lax.reduce_precision(p, kept.nexp, kept.nmant).astype(config.dtype)
    params = unstack(jax.tree.map(rounded, params), config.num_layers)
    params = fuse(config, params) if mesh is None else params
    layers = params['layers']
    if weights != 'same':
      layers = [quantise(layer, weights) for layer in layers]
    elif matrices:
      layers = [transpose(layer, matrices) for layer in layers]
      if matrices != config.dtype:  # for logits; once, not in every call
        params['rounded'] = params.get('unembedding', params['embedding']).astype(matrices)
    return params | {'layers': layers}

  return jax.jit(prepare, out_shardings=sampling_layout(config, weights, mesh, whole))


def sampling_layout(config: DecoderConfig, weights: str, mesh: Mesh | None,
                    whole: Sharding) -> Sharding | dict:
  """Returns where the sampler's parameters lie: all of them whole, or split over `tensor`."""
  if mesh is None:
    return whole
  shardings = meshes.shardings(parameter_axes(config), parameter_shapes(config), mesh)

  def placed(name, spec):
    if weights == 'same' or name not in INPUTS:
      return NamedSharding(mesh, PartitionSpec(*spec))
    return Quantised(NamedSharding(mesh, PartitionSpec(*spec)),
                     NamedSharding(mesh, PartitionSpec(*spec[INPUTS[name]:])))

  layer = {name: placed(name, stacked.spec[1:]) for name, stacked in shardings['layers'].items()}
  return shardings | {'layers': [layer] * config.num_layers}
