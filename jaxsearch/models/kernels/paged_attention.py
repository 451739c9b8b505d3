"""Attention of new tokens over a paged KV cache, by the kernels that come with JAX.

On TPUs ragged paged attention, which prefills and decodes; a page has the keys and values of all heads of a
token side by side. On GPUs paged attention decodes, one new token a sequence. For a prefill there is none:
pages are gathered, and two kernels attend, one to the tokens before a chunk and one to the chunk. All read no
further than the length of each sequence, in the dtype of the cache.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import next_power_of_2
from jax.experimental.pallas.ops.gpu import attention, decode_attention, paged_attention as for_gpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as for_tpu
from jax.sharding import Mesh, PartitionSpec

from jaxsearch.models.attention import append, entries

NAMES = 'paged_attention', 'ragged_paged_attention', 'gqa'  # of kernels in a traced program
MULTIPLE = 16  # pages in a block of keys on TPUs, in a split of the keys on GPUs; tables are multiples of it
QUERIES = 32  # tokens of a block of queries in a prefill on TPUs, as in most of the kernel's tuned sizes
KERNELS = {'tpu': 'tpu', 'gpu': 'gpu'}  # by platform
# Of the kernel that decodes on GPUs, beside parts of MULTIPLE pages: on an H100 the fastest, or nearly, for
# 512 to 4,096 tokens a slot. benchmarks/accelerator.py times others.
DECODING = dict(pages_per_compute_block=2, num_warps=4, num_stages=1)


def pool_shapes(platform: str | None, heads: int, pages: int, page: int, head_dim: int, split: int = 1):
  """Returns the shapes of the cache's arrays in a layer, heads split over `split` devices by the first axis.

  Widths, and on TPUs heads, are padded with zeros to what the kernels take.
  """
  if platform == 'tpu':
    own = heads // split
    own = next_power_of_2(own) if own < 8 else -(-own // 8) * 8
    return ((split, pages, page, 2 * own, -(-head_dim // 128) * 128),)
  width = max(16, next_power_of_2(head_dim)) if platform == 'gpu' else head_dim
  return ((heads, pages, page, width),) * 2


def arranged(platform: str, keys, values, split: int = 1) -> tuple:
  """Returns keys and values [K,N,page,h] as the arrays of `pool_shapes`."""
  shapes = pool_shapes(platform, *keys.shape, split)
  if platform == 'tpu':
    keys, values = (x.reshape(split, -1, *x.shape[1:]) for x in (keys, values))
    return (_padded(jnp.moveaxis(_side_by_side(keys, values, 1), 1, 3), shapes[0]),)
  return tuple(map(_padded, (keys, values), shapes))


def _side_by_side(keys, values, axis: int):
  """Returns the key and the value of each head in turn along the axis of heads."""
  both = jnp.stack([keys, values], axis + 1)
  return both.reshape(*keys.shape[:axis], -1, *keys.shape[axis + 1:])


def _padded(x, shape):
  return jnp.pad(x, [(0, size - old) for size, old in zip(shape, x.shape)])


def attend(q, k, v, pool, starts, table, *, platform: str, mesh: Mesh | None = None, interpret: bool = False):
  """Appends n tokens to each sequence; each of them attends to its sequence up to and including itself.

  Args:
    q: [S,n,H,h]; k, v: [S,n,K,h].
    pool: arrays of `pool_shapes`; written to in place where they are donated.
    starts: [S] int32, tokens of each sequence before the new ones.
    table: [S,P] int32, its pages, P a multiple of 16. Sequences may write to one page only if nobody wants
      what is in it, or to different entries of it.
    platform: 'tpu' | 'gpu'.
    mesh: of the program, if it runs on several devices; its axis `tensor` splits the key/value heads, and
      with them the query heads. The compiler does not split kernels, so this function splits the call, over
      the axes that are not manual yet.
  Returns:
    ([S,n,H,h] in the dtype of q, the pool with k, v).
  """
  if mesh is not None:
    around = jax.sharding.get_abstract_mesh()
    heads, cached, whole = PartitionSpec(None, None, 'tensor'), PartitionSpec('tensor'), PartitionSpec()
    part = functools.partial(attend, platform=platform, interpret=interpret)
    split = jax.shard_map(part, mesh=mesh if around.empty else around, check_vma=False,
                          axis_names=set(mesh.axis_names) - set(around.manual_axes),
                          in_specs=(heads, heads, heads, cached, whole, whole), out_specs=(heads, cached))
    return split(q, k, v, pool, starts, table)
  if platform == 'tpu':
    return _attend_on_tpu(q, k, v, pool, starts, table)
  pool, (n, _, h), width = append(pool, k, v, starts, table), q.shape[1:], pool[0].shape[-1]
  if n > 1:
    given = (jnp.pad(x, ((0, 0), (0, -n % 16), (0, 0), (0, width - h))) for x in (q, k, v))
    return _prefill_on_gpu(*given, pool, starts, table, h**-0.5, interpret)[:, :n, :, :h], pool
  q = jnp.pad((q[:, 0] * h**-0.5).astype(q.dtype), ((0, 0), (0, 0), (0, width - h)))  # it does not scale
  out = for_gpu.paged_attention(q, *pool, table, starts + 1, k_splits=table.shape[1] // MULTIPLE,
                                interpret=interpret, **DECODING)
  return out[:, None, :, :h], pool


def _prefill_on_gpu(q, k, v, pool, starts, table, scale: float, interpret: bool):
  """Attends to what is before each chunk and to the chunk, and joins both by the sums of their weights."""
  (S, n, H, width), K = q.shape, k.shape[2]
  keys, values = (jnp.moveaxis(part[:, table], 0, 3).reshape(S, -1, K, width) for part in pool)
  rows = jnp.swapaxes(q.reshape(S, n, K, H // K, width), 1, 2)  # all see the same: as if they were heads
  before, (total, highest) = decode_attention.gqa(
    rows.reshape(S, -1, width), keys, values, None, starts, scale, block_h=64, block_k=64, k_splits=1,
    return_residuals=True, interpret=interpret)
  by_token = lambda x: jnp.swapaxes(x.reshape(S, K, n, H // K, -1), 1, 2).reshape(S, n, H, -1)
  size = min(128, n & -n)
  k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
  own, normaliser = attention.mha(q, k, v, None, scale, True, attention.BlockSizes(size, min(size, 64)),
                                  return_residuals=True, interpret=interpret)
  normaliser = math.log(2) * jnp.swapaxes(normaliser, 1, 2)[..., None]  # it was to the base of 2
  share = jax.nn.sigmoid(by_token(highest + jnp.log(total)) - normaliser)
  return (share * by_token(before) + (1 - share) * own).astype(q.dtype)


def _attend_on_tpu(q, k, v, pool, starts, table):
  """Attends by ragged paged attention; its own table of block sizes is of the device that traces."""
  (S, n, H, h), K, (pages,) = q.shape, k.shape[2], pool
  _, N, page, heads, width = pages.shape
  new = _padded(_side_by_side(k, v, 2), (S, n, heads, width))
  pages = pages.at[0, *entries(starts, n, table, page)].set(new.astype(pages.dtype))
  queries = _padded(q.reshape(S * n, K, H // K, h), (S * n, heads // 2, H // K, width))
  out = for_tpu.ragged_paged_attention(
    queries.reshape(S * n, -1, width), pages.reshape(N, page, heads, width), starts + n, table,
    jnp.arange(S + 1, dtype=jnp.int32) * n, jnp.array([S], jnp.int32), sm_scale=h**-0.5,
    num_kv_pages_per_block=MULTIPLE, num_queries_per_block=1 if n == 1 else min(QUERIES, S * n))
  return out.reshape(S, n, heads // 2, H // K, width)[:, :, :K, :, :h].reshape(S, n, H, h), (pages,)


def cost(q, *arrays) -> tuple[int, int]:
  """Returns (FLOPs, bytes) of a call of a kernel from its arguments, where all pages are full."""
  cache, table = [x for x in arrays if x.ndim == 4], next((x for x in arrays if x.ndim == 2), None)
  size, moved = sum(x.size * x.dtype.itemsize for x in cache), 2 * q.size * q.dtype.itemsize
  if table is None:  # gathered, [S,T,K,h]
    return 4 * q.size * cache[0].shape[1], size + moved
  N, page = cache[0].shape[1:3] if len(cache) == 2 else cache[0].shape[:2]
  return 4 * q.size * page * table.shape[1], table.size * size // N + moved
