"""Attention of one new token a slot over a KV cache, which reads each slot's own length: kernels for TPU and
GPU.

The cache of a layer is one array [R,K,T,2h], keys in front of values: a block of tokens is one copy, and the
last two axes fill the tiles of a TPU. New keys and values are attended to as they come and written to the
cache by the kernel, in place.

TPU: the grid walks a list of the blocks that hold tokens, as in tree_attention_tpu.py, so that a short slot
costs its own blocks alone. GPU (Triton): one program a slot and key/value head.

Letters: S slots, R rows of the cache, K key/value heads, G query heads that share one, h head width, T tokens
  of a row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, PartitionSpec

from jaxsearch.models.kernels import NEGATIVE, tree_attention, tree_attention_tpu, visit

NAME = 'decode_attention'
PAGE = 128            # the length of a row is a multiple of it, for the blocks of TPUs
GPU_BLOCK = 64        # GPU: tokens attended to at once; those beyond the length are not read


def platform_of(platform: str, head_dim: int) -> str | None:
  """Returns 'tpu' or 'gpu' if there is a kernel for this platform and heads of this width, else None."""
  if platform == 'tpu':  # keys and values together fill the 128 lanes of a tile
    return 'tpu' if head_dim == 64 or head_dim % 128 == 0 else None
  fits_triton = head_dim >= 16 and head_dim.bit_count() == 1
  return 'gpu' if platform == 'gpu' and fits_triton else None


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
    part = functools.partial(decode_attention, platform=platform, interpret=interpret)
    split = jax.shard_map(part, mesh=mesh if around.empty else around, check_vma=False,
                          axis_names=set(mesh.axis_names) - set(around.manual_axes),
                          in_specs=(heads,) * 4 + (whole,) * 2, out_specs=heads)
    return split(q, keys, values, cache, rows, lengths)
  if cache.shape[2] % 16:
    raise ValueError(f'a cache of {cache.shape[2]} tokens a row: the kernel needs a multiple of 16')
  call = _on_tpu if platform == 'tpu' else _on_gpu
  new = jnp.concatenate([keys, values], axis=-1).astype(cache.dtype)
  out, cache = call(q.reshape(S, K, H // K, h), new, cache, rows, lengths, interpret)
  return out.reshape(S, H, h), cache


def _cost(q, new, cache, tile: int):
  """Estimates slots whose rows are full; plans take off what is not (`NAME` in planning/costs.py)."""
  S, K, G, h = q.shape
  T, itemsize = cache.shape[2], cache.dtype.itemsize
  moved = 2 * q.size * q.dtype.itemsize + new.size * itemsize + S * K * (T + tile) * 2 * h * itemsize
  return pl.CostEstimate(flops=4 * S * K * G * h * T, transcendentals=S * K * G * T, bytes_accessed=moved)


def _on_tpu(q, new, cache, rows, lengths, interpret):
  S, K, G, h = q.shape
  T, itemsize = cache.shape[2], cache.dtype.itemsize
  tile = 32 // itemsize
  tokens = 2**18 // (K * 2 * h * itemsize)  # 256 KiB, as fetching has to take longer than a step
  size = math.gcd(T, min(4 * PAGE, max(PAGE, 1 << tokens.bit_length() - 1)))
  cores = 2 if S % 2 == 0 else 1  # a v5p has two, which take a half of the slots each
  # The blocks to visit; a slot without tokens has one too, or nobody would write its results.
  visited = jnp.arange(0, T, size) < jnp.maximum(lengths, 1).reshape(cores, -1, 1)
  pairs, starts = tree_attention.listed(visited, visited[0].size)

  def place(core, _, step, pairs, counts, rows, lengths):
    """Returns slot, row, block and the tile of the new token."""
    slot, block = tree_attention_tpu.pair_at(core, step, pairs, counts)
    slot += core * (S // cores)
    return slot, rows[slot], block, lengths[slot] // tile

  of_slot = lambda *at: (place(*at)[0], 0, 0, 0)
  of_row = lambda which: lambda *at: (place(*at)[1], 0, place(*at)[which], 0)
  queries, numbers = (None, K, G, h), (K, G, 1)
  inputs = [pl.BlockSpec(queries, of_slot), pl.BlockSpec((None, K, 1, 2 * h), of_slot),
            pl.BlockSpec((None, K, size, 2 * h), of_row(2))]
  outputs = [pl.BlockSpec(queries, of_slot), pl.BlockSpec((None, K, tile, 2 * h), of_row(3))]
  return tree_attention_tpu.walk(
    _tpu_kernel, NAME, pairs, starts, (cores, 1), inputs, outputs, (q, cache), [numbers, numbers, (K, G, h)],
    _cost(q, new, cache, tile), interpret, (rows, lengths), input_output_aliases={6: 1})(
      q, new[:, :, None], cache)


def _tpu_kernel(pairs, counts, rows, lengths, q, new, block, out, written, *carry):
  """Visits a block [K,size,2h] of a slot, and with the last one writes its results and its new token."""
  slot, number, visited, first, last = tree_attention_tpu.step(pairs, counts)
  length = lengths[pl.program_id(0) * (lengths.shape[0] // counts.shape[0]) + slot]
  size, tile, h, scale = block.shape[1], written.shape[1], q.shape[-1], q.shape[-1]**-0.5
  batched = lambda over: functools.partial(jax.lax.dot_general, dimension_numbers=(over, ((0,), (0,))),
                                           preferred_element_type=jnp.float32)

  @pl.when(first)
  def _():
    key, value = new[..., :h].astype(jnp.float32), new[..., h:].astype(jnp.float32)
    highest, total, sums = carry
    highest[...] = jnp.sum(q[...].astype(jnp.float32) * key, axis=-1, keepdims=True) * scale
    total[...], sums[...] = jnp.ones_like(total), jnp.broadcast_to(value, sums.shape)

  @pl.when(visited & (number * size < length))
  def _():
    seen = number * size + jax.lax.broadcasted_iota(jnp.int32, (1, 1, size), 2) < length
    scores = batched(((2,), (2,)))(q[...], block[..., :h]) * scale
    result = visit([x[...] for x in carry], jnp.where(seen, scores, NEGATIVE), block[..., h:],
                   batched(((2,), (1,))))
    for x, value in zip(carry, result):
      x[...] = value

  @pl.when(last)
  def _():
    _, total, sums = carry
    out[...] = (sums[...] / total[...]).astype(out.dtype)
    # What else is live in the tile came with the last block; what is behind the token nobody reads.
    inside = jax.lax.rem(length, tile)
    old = block[:, pl.ds(pl.multiple_of(jax.lax.rem(length - inside, size), tile), tile)]
    here = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == inside
    written[...] = jnp.where(here, jnp.broadcast_to(new[...], old.shape), old)


def _on_gpu(q, new, cache, rows, lengths, interpret):
  S, K, G, h = q.shape
  block = math.gcd(GPU_BLOCK, cache.shape[2])
  padded = max(16, pl.next_power_of_2(G))  # the least that a product of matrices takes
  wide = jnp.pad(q, ((0, 0), (0, 0), (0, padded - G), (0, 0)))
  whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
  queries = pl.BlockSpec((None, None, padded, h), lambda s, k: (s, k, 0, 0))
  out, cache = pl.pallas_call(
    functools.partial(_gpu_kernel, block=block), name=NAME, grid=(S, K), interpret=interpret,
    in_specs=[whole(rows), whole(lengths), queries,
              pl.BlockSpec((None, None, 2 * h), lambda s, k: (s, k, 0)), whole(cache)],
    out_specs=[queries, whole(cache)],
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (wide, cache)],
    input_output_aliases={4: 1}, cost_estimate=_cost(q, new, cache, 1),
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3))(rows, lengths, wide, new, cache)
  return out[:, :, :G], cache


def _gpu_kernel(rows, lengths, q_ref, new_ref, cache, out, written, *, block):
  """Attends to a slot's key/value head; `cache` and `written` are one array."""
  slot, head = pl.program_id(0), pl.program_id(1)
  row, length = rows[slot], lengths[slot]
  q, h = q_ref[...], q_ref.shape[1]
  scale = h**-0.5

  def attend(number, carry):
    start = number * block
    seen = start + jnp.arange(block) < length
    load = lambda first: plgpu.load(cache.at[row, head, pl.ds(start, block), pl.ds(first, h)],
                                    mask=seen[:, None], other=0.0)
    scores = jnp.where(seen[None], plgpu.dot(q, load(0).T) * scale, NEGATIVE)
    return visit(carry, scores, load(h), plgpu.dot)

  key, value = (new_ref[pl.ds(first, h)].astype(jnp.float32) for first in (0, h))
  score = jnp.sum(q.astype(jnp.float32) * key[None], axis=-1, keepdims=True) * scale
  carry = score, jnp.ones_like(score), jnp.zeros(q.shape, jnp.float32) + value[None]
  _, total, sums = jax.lax.fori_loop(0, pl.cdiv(length, block), attend, carry)
  out[...] = (sums / total).astype(out.dtype)
  written[row, head, length, :] = new_ref[...]
