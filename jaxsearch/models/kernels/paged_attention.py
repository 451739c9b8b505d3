"""Attention of one new token a sequence over a paged KV cache, by the kernels that come with JAX for TPUs and
GPUs. Both read pages up to the length of each sequence from arrays [K,N,page,h]."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import next_power_of_2
from jax.experimental.pallas.ops.gpu import paged_attention as for_gpu
from jax.experimental.pallas.ops.tpu import paged_attention as for_tpu
from jax.sharding import Mesh, PartitionSpec

from jaxsearch.models.attention import append

NAME = 'paged_attention'  # of both kernels in a traced program
MULTIPLE = 16  # pages in the table of a sequence
KERNELS = {'tpu': 'tpu', 'gpu': 'gpu'}  # by platform


def padded(platform: str | None, head_dim: int) -> int:
  """Returns the width of keys and values in the cache: the kernels take no other, and what is added is 0."""
  return {'tpu': -(-head_dim // 128) * 128, 'gpu': max(16, next_power_of_2(head_dim))}.get(platform, head_dim)


def attend(q, k, v, pool, starts, table, *, platform: str, mesh: Mesh | None = None, interpret: bool = False):
  """Appends one token to each sequence and attends from it to all of the sequence.

  Args:
    q: [S,1,H,h]; k, v: [S,1,K,h].
    pool: (keys, values), each [K,N,page,h'], h' of `padded`; written to in place where it is donated.
    starts: [S] int32, tokens of each sequence before the new one.
    table: [S,P] int32, its pages, P a multiple of 16. Sequences may write to one page only if nobody wants
      what is in it.
    platform: 'tpu' | 'gpu'.
    mesh: of the program, if it runs on several devices; its axis `tensor` splits the key/value heads, and
      with them the query heads. No compiler splits a kernel: what the program is not split over by hand yet
      is split here.
  Returns:
    ([S,1,H,h] in the dtype of q, the pool with k, v).
  """
  if mesh is not None:
    around = jax.sharding.get_abstract_mesh()
    heads, cached, whole = PartitionSpec(None, None, 'tensor'), PartitionSpec('tensor'), PartitionSpec()
    part = functools.partial(attend, platform=platform, interpret=interpret)
    split = jax.shard_map(part, mesh=mesh if around.empty else around, check_vma=False,
                          axis_names=set(mesh.axis_names) - set(around.manual_axes),
                          in_specs=(heads, heads, heads, cached, whole, whole), out_specs=(heads, cached))
    return split(q, k, v, pool, starts, table)
  pool, (h, width) = append(pool, k, v, starts, table), (q.shape[-1], pool[0].shape[-1])
  q = jnp.pad((q[:, 0] * h**-0.5).astype(q.dtype), ((0, 0), (0, 0), (0, width - h)))  # kernels do not scale
  if platform == 'tpu':
    out = for_tpu.paged_attention(q, *pool, starts + 1, table, pages_per_compute_block=MULTIPLE)
  else:
    out = for_gpu.paged_attention(q, *pool, table, starts + 1, pages_per_compute_block=2, k_splits=8,
                                  interpret=interpret)
  return out[:, None, :, :h], pool


def cost(q, keys, values, *numbers) -> tuple[int, int]:
  """Returns (FLOPs, bytes) of a call of a kernel from its arguments, where all pages of the table are
  full."""
  (S, H, h), (K, _, page, _) = q.shape, keys.shape
  tokens = page * next(table.shape[1] for table in numbers if table.ndim == 2)
  return 4 * S * H * h * tokens, 2 * S * K * h * tokens * keys.dtype.itemsize + 2 * q.size * q.dtype.itemsize
