"""Attention of one new token a slot over a KV cache, which reads each slot's own length: kernels for TPU and
GPU.

The cache of a layer is one array [R,K,T,2h], keys in front of values: a block of tokens is one copy, and the
last two axes fill the tiles of a TPU. New keys and values are attended to as they come and written to the
cache by the kernel, in place.

TPU (`_tpu_kernel`): one grid step a slot. Copies from the cache are under way for several blocks ahead,
across slots, so that a short slot costs its own tokens alone; nothing is copied for a slot of length 0. GPU
(`_gpu_kernel`, Triton): one program a slot and key/value head, or a few that share its blocks where there
would be too few of them to keep the device busy.

Letters: S slots, R rows of the cache, K key/value heads, G query heads that share one, h head width, T tokens
  of a row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, PartitionSpec

NAME = 'decode_attention'
NEGATIVE = -1e30
PAGE = 128            # TPU: tokens of a copy, so what a slot reads beyond its length is less than this
BLOCK_BYTES = 2**20   # TPU: of the tokens that are attended to at once, at most
BUFFER_BYTES = 2**22  # TPU: of all copies under way
GPU_BLOCK = 64        # GPU: tokens attended to at once; those beyond the length are not read
GPU_PROGRAMS = 264    # GPU: two for each multiprocessor of an H100, about


def platform_of(platform: str, head_dim: int) -> str | None:
  """Returns 'tpu' or 'gpu' if there is a kernel for this platform and heads of this width, else None."""
  if platform == 'tpu':  # keys and values together fill the 128 lanes of a tile
    return 'tpu' if head_dim == 64 or head_dim % 128 == 0 else None
  fits_triton = head_dim >= 16 and head_dim.bit_count() == 1
  return 'gpu' if platform == 'gpu' and fits_triton else None


def live_bytes(lengths, kv_heads: int, head_dim: int, itemsize: int) -> int:
  """Bytes of keys and values in a layer's cache of slots that hold `lengths` tokens each."""
  return sum(int(n) for n in lengths) * kv_heads * 2 * head_dim * itemsize


def cache_traffic(lengths, kv_heads: int, head_dim: int, itemsize: int, platform: str) -> int:
  """Returns bytes that the kernel moves from and to a layer's cache whose slots hold `lengths` tokens."""
  page, tile = (PAGE, 32 // itemsize) if platform == 'tpu' else (1, 1)
  tokens = [-(-int(n) // page) * page + tile for n in lengths]
  return live_bytes(tokens, kv_heads, head_dim, itemsize)


def decode_attention(q, keys, values, cache, rows, lengths, *, platform: str, mesh: Mesh | None = None,
                     interpret=False):
  """Appends one token to each slot and attends from it to all of the slot.

  Args:
    q: [S,H,h] queries; keys, values: [S,K,h] of the new tokens, in the dtype of the cache.
    cache: [R,K,T,2h]; its buffer is written to where it is donated. T is a multiple of 16.
    rows: [S] int32, the row of each slot; slots may share one only if nobody wants what is in it.
    lengths: [S] int32, tokens of the row that are attended to besides the new one, which is written behind
      them; below T.
    platform: 'tpu' | 'gpu'.
    mesh: of the program, if it runs on several devices; its axis `tensor` splits the key/value heads, and
      with them the query heads. No compiler splits a kernel: what the program is not split over by hand yet
      is split here.
  Returns:
    ([S,H,h] in the dtype of q, the cache with the new tokens).
  """
  S, H, h = q.shape
  K = keys.shape[1]
  if mesh is not None:
    around = jax.sharding.get_abstract_mesh()
    heads, whole = PartitionSpec(None, 'tensor'), PartitionSpec()
    own = functools.partial(decode_attention, platform=platform, interpret=interpret)
    split = jax.shard_map(own, mesh=mesh if around.empty else around, check_vma=False,
                          axis_names=set(mesh.axis_names) - set(around.manual_axes),
                          in_specs=(heads,) * 4 + (whole,) * 2, out_specs=heads)
    return split(q, keys, values, cache, rows, lengths)
  call = _on_tpu if platform == 'tpu' else _on_gpu
  new = jnp.concatenate([keys, values], axis=-1).astype(cache.dtype)
  out, cache = call(q.reshape(S, K, H // K, h), new, cache, rows, lengths, interpret)
  return out.reshape(S, H, h), cache


def _cost(q, cache, platform, *others):
  """Estimates slots whose rows are full; plans take off what is not (`NAME` in planning/costs.py)."""
  S, K, G, h = q.shape
  T = cache.shape[2]
  return pl.CostEstimate(
    flops=4 * S * K * G * h * T, transcendentals=S * K * G * T,
    bytes_accessed=cache_traffic([T] * S, K, h, cache.dtype.itemsize, platform)
    + sum(math.prod(x.shape) * x.dtype.itemsize for x in others))


def _on_tpu(q, new, cache, rows, lengths, interpret):
  S, K, G, h = q.shape
  T, itemsize = cache.shape[2], cache.dtype.itemsize
  tile = 32 // itemsize
  page = math.gcd(PAGE, T)
  if page < 16:
    raise ValueError(f'a cache of {T} tokens a row: the kernel needs a multiple of 16')
  token = K * 2 * h * itemsize
  pages = max(1, min(4, BLOCK_BYTES // (page * token)))
  depth = max(2, min(8, BUFFER_BYTES // (pages * page * token)))
  cores = 2 if S % 2 == 0 else 1  # a v5p has two, which take a half of the slots each
  of_slot = lambda core, i, *_: (core * (S // cores) + i, 0, 0, 0)
  spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=2, grid=(cores, S // cores),
    in_specs=[pl.BlockSpec((1, K, G, h), of_slot), pl.BlockSpec((1, K, 1, 2 * h), of_slot),
              pl.BlockSpec(memory_space=pl.ANY)],
    out_specs=[pl.BlockSpec((1, K, G, h), of_slot), pl.BlockSpec(memory_space=pl.ANY)],
    scratch_shapes=[pltpu.VMEM((depth, K, pages * page, 2 * h), cache.dtype),
                    pltpu.VMEM((2, K, tile, 2 * h), cache.dtype), pltpu.SemaphoreType.DMA((depth,)),
                    pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((4,), jnp.int32)])
  kernel = functools.partial(_tpu_kernel, page=page)
  return pl.pallas_call(
    kernel, name=NAME, grid_spec=spec, interpret=interpret, input_output_aliases={4: 1},
    cost_estimate=_cost(q, cache, 'tpu', q, q, new),
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')))(
      rows, lengths, q, new[:, :, None], cache)


def _tpu_kernel(rows, lengths, q_ref, new_ref, cache, out_ref, written, blocks, tiles, copied, stored, state,
                *, page):
  """A slot. `cache` and `written` are one array.

  Args:
    blocks: [depth,K,tokens,2h] what was copied, in a ring; `copied`: a semaphore for each of them.
    tiles: [2,K,tile,2h] what is written, of this slot and of the last one; `stored`: a semaphore for each of
      them.
    state: [4] the slot and the block of it to be copied next, blocks that are or were on their way, blocks
      used.
  """
  core, i, own = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  slot, end = core * own + i, (core + 1) * own
  depth, _, size, width = blocks.shape
  tile, h = tiles.shape[2], width // 2
  count = lambda slot: pl.cdiv(lengths[slot], size)

  def copies(slot, block, place, act):
    """Applies `act` to the copies of a block: one for every page in which there is a token."""
    for first in range(0, size, page):
      @pl.when(block * size + first < lengths[slot])
      def _(first=first):
        start = pl.multiple_of(block * size + first, page)
        source = cache.at[rows[slot], :, pl.ds(start, page)]
        act(pltpu.make_async_copy(source, blocks.at[place, :, pl.ds(first, page)], copied.at[place]))

  def copy_next():
    """Starts to copy the next block, of this slot or of one behind it."""
    used_up = lambda at: (at[0] < end) & (at[1] >= count(jnp.minimum(at[0], end - 1)))
    at, block = jax.lax.while_loop(used_up, lambda at: (at[0] + 1, 0), (state[0], state[1]))
    state[0], state[1] = at, block

    @pl.when(at < end)
    def _():
      copies(at, block, jax.lax.rem(state[2], depth), lambda copy: copy.start())
      state[1], state[2] = block + 1, state[2] + 1

  @pl.when(i == 0)
  def _():
    blocks[...] = jnp.zeros_like(blocks)  # what was never copied has weight 0, which times NaN would be NaN
    state[0], state[1], state[2], state[3] = slot, 0, 0, 0
    jax.lax.fori_loop(0, depth - 1, lambda *_: copy_next(), None)

  q, new, length = q_ref[0], new_ref[0], lengths[slot]  # [K,G,h], [K,1,2h]
  scale = h**-0.5
  dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
  own_score = q.astype(jnp.float32) * new[..., :h].astype(jnp.float32)
  own_score = jnp.sum(own_score, axis=-1, keepdims=True) * scale
  own_value = jnp.broadcast_to(new[..., h:].astype(jnp.float32), q.shape)

  def attend(block, carry):
    peak, total, values = carry
    copy_next()
    place = jax.lax.rem(state[3], depth)
    copies(slot, block, place, lambda copy: copy.wait())
    state[3] += 1
    seen = block * size + jax.lax.broadcasted_iota(jnp.int32, (1, 1, size), 2) < length
    scores = dot(q, blocks[place, :, :, :h], (((2,), (2,)), ((0,), (0,)))) * scale
    scores = jnp.where(seen, scores, NEGATIVE)
    higher = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
    weights, left = jnp.exp(scores - higher), jnp.exp(peak - higher)
    added = dot(weights.astype(blocks.dtype), blocks[place, :, :, h:], (((2,), (1,)), ((0,), (0,))))
    return higher, total * left + jnp.sum(weights, axis=-1, keepdims=True), values * left + added

  start = own_score, jnp.ones_like(own_score), own_value
  _, total, values = jax.lax.fori_loop(0, count(slot), attend, start)
  out_ref[0] = (values / total).astype(out_ref.dtype)

  # The tile with the new token: what else is live in it came with the last block, and what is behind the
  # token nobody reads.
  mine = jax.lax.rem(i, 2)
  put = lambda which, row, start: pltpu.make_async_copy(
    tiles.at[which], written.at[row, :, pl.ds(start, tile)], stored.at[which])

  @pl.when(i >= 2)
  def _():
    put(mine, 0, 0).wait()

  inside = jax.lax.rem(length, tile)
  first = pl.multiple_of(length - inside, tile)
  in_block = pl.ds(pl.multiple_of(jax.lax.rem(first, size), tile), tile)
  old = blocks[jax.lax.rem(state[3] + depth - 1, depth), :, in_block]
  here = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == inside
  tiles[mine] = jnp.where(here, jnp.broadcast_to(new, old.shape), old)
  put(mine, rows[slot], first).start()

  @pl.when(i == own - 1)
  def _():
    put(mine, 0, 0).wait()

    @pl.when(own > 1)
    def _():
      put(1 - mine, 0, 0).wait()


def _on_gpu(q, new, cache, rows, lengths, interpret):
  S, K, G, h = q.shape
  T = cache.shape[2]
  block = math.gcd(GPU_BLOCK, T)
  if block < 16:
    raise ValueError(f'a cache of {T} tokens a row: the kernel needs a multiple of 16')
  parts = 2 ** max(0, min(4, round(math.log2(GPU_PROGRAMS / (S * K)))))
  padded = max(16, pl.next_power_of_2(G))  # the least that a product of matrices takes
  wide = jnp.pad(q, ((0, 0), (0, 0), (0, padded - G), (0, 0)))
  whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
  shapes = (padded, h), (padded,), (padded,)
  partial = [jax.ShapeDtypeStruct((S, K, parts, *shape), jnp.float32) for shape in shapes]
  of_part = [pl.BlockSpec((None, None, None, padded, h), lambda s, k, i: (s, k, i, 0, 0)),
             *[pl.BlockSpec((None, None, None, padded), lambda s, k, i: (s, k, i, 0))] * 2]
  cache, values, peak, total = pl.pallas_call(
    functools.partial(_gpu_kernel, block=block), name=NAME, grid=(S, K, parts), interpret=interpret,
    in_specs=[whole(rows), whole(lengths),
              pl.BlockSpec((None, None, padded, h), lambda s, k, i: (s, k, 0, 0)),
              pl.BlockSpec((None, None, 2 * h), lambda s, k, i: (s, k, 0)), whole(cache)],
    out_specs=[whole(cache), *of_part], out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype), *partial],
    input_output_aliases={4: 0}, cost_estimate=_cost(q, cache, 'gpu', wide, new, *partial),
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3))(rows, lengths, wide, new, cache)
  share = jnp.exp(peak - jnp.max(peak, axis=2, keepdims=True))
  values = jnp.sum(values * share[..., None], axis=2) / jnp.sum(total * share, axis=2)[..., None]
  return values[:, :, :G].astype(q.dtype), cache


def _gpu_kernel(rows, lengths, q_ref, new_ref, cache, written, values_ref, peak_ref, total_ref, *, block):
  """Attends to a part of the blocks of a slot's key/value head; the first part has the new token too.

  `cache` and `written` are one array.
  """
  slot, head, part, parts = *(pl.program_id(axis) for axis in range(3)), pl.num_programs(2)
  row, length = rows[slot], lengths[slot]
  q, h = q_ref[...], q_ref.shape[1]
  scale = h**-0.5

  def attend(number, carry):
    peak, total, values = carry
    start = number * block
    seen = start + jnp.arange(block) < length
    load = lambda first: plgpu.load(cache.at[row, head, pl.ds(start, block), pl.ds(first, h)],
                                    mask=seen[:, None], other=0.0)
    scores = jnp.where(seen[None], plgpu.dot(q, load(0).T) * scale, NEGATIVE)
    higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
    weights, left = jnp.exp(scores - higher[:, None]), jnp.exp(peak - higher)
    added = plgpu.dot(weights.astype(cache.dtype), load(h))
    return higher, total * left + jnp.sum(weights, axis=-1), values * left[:, None] + added

  mine = part == 0
  key, value = (new_ref[pl.ds(first, h)].astype(jnp.float32) for first in (0, h))
  own = jnp.sum(q.astype(jnp.float32) * key[None], axis=-1) * scale
  one = mine.astype(jnp.float32)  # or 0: Triton broadcasts no condition
  peak = own * one + NEGATIVE * (1 - one)
  carry = peak, jnp.zeros_like(own) + one, jnp.zeros(q.shape, jnp.float32) + value[None] * one
  count = pl.cdiv(length, block)
  each = pl.cdiv(count, parts)
  peak, total, values = jax.lax.fori_loop(part * each, jnp.minimum((part + 1) * each, count), attend, carry)
  peak_ref[...], total_ref[...], values_ref[...] = peak, total, values

  @pl.when(mine)
  def _():
    written[row, head, length, :] = new_ref[...]
