"""Matrix products, and dense attention over rows in the tree layout and over a KV cache.

The attention serves CPUs, and is the reference of the kernels. Products have the dtype of their operands.
XLA's compiler for CPUs has kernels for bfloat16 operands, twice as fast as those for float32 where the
processor has AVX512-BF16, but uses them only where the result is float32. So in a program that is traced for
CPUs (`parallel.mesh.ambient`) results are rounded after the product, in both gradients too. TPUs and GPUs
round inside it. Letters as in decoder.py.
"""

import functools
import re

import jax
import jax.numpy as jnp

from jaxsearch.parallel.mesh import ambient_platform

NEGATIVE = -1e30  # not -inf: a row of padding sees nothing and must stay finite
BLOCK = 128       # queries at a time, whose scores stay in a CPU's cache: 3x faster than all of 512 at once
MAX_BLOCKS = 16   # blocks are unrolled, so longer rows get longer blocks


def product(spec: str, x, y):
  """Computes `jnp.einsum(spec, x, y)` of one dtype; an index of an operand is in the other or the result."""
  return _rounded(spec, x, y) if _rounds_after(x) else jnp.einsum(spec, x, y)


def matmul(x, w):
  """Multiplies x [..., n] by a matrix whose leading axes have n entries -> [..., m], its others as one."""
  n = x.shape[-1]
  w = w.reshape(n, -1)  # two axes: XLA would transpose `o` for every token
  if not _rounds_after(x):
    return x @ w
  return _rounded('xn,nm->xm', x.reshape(-1, n), w).reshape(*x.shape[:-1], -1)


def _rounds_after(x) -> bool:
  return x.dtype == jnp.bfloat16 and ambient_platform() == 'cpu'


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(spec, x, y):
  return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32).astype(x.dtype)


def _gradients(spec, operands, gradient):
  x, y = operands
  a, b, result = re.split(',|->', spec)
  return _rounded(f'{result},{b}->{a}', gradient, y), _rounded(f'{a},{result}->{b}', x, gradient)


_rounded.defvjp(lambda spec, x, y: (_rounded(spec, x, y), (x, y)), _gradients)


def tree_mask(visible_until, first: int = 0):
  """Returns [B,T-first,T] bool: token i, from `first` on, sees token j iff j <= i < visible_until[j]."""
  keys = jnp.arange(visible_until.shape[-1])
  queries = keys[first:, None]
  return (keys <= queries) & (queries < visible_until[:, None, :])


def dense_attention(q, k, v, visible_until):
  """Attends from each token to what it sees: softmax in float32, no block of queries looks at later keys.

  Args:
    q: [B,T,H,h]; k, v: [B,T,K,h]; visible_until: [B,T] int, see `tree_mask`.
  Returns:
    [B,T,H,h].
  """
  B, T, H, h = q.shape
  q = q.reshape(B, T, k.shape[2], -1, h)
  size = max(BLOCK, -(-T // MAX_BLOCKS))
  blocks = []
  for start in range(0, T, size):
    end = start + size
    scores = jnp.einsum('btkgh,bskh->bkgts', q[:, start:end], k[:, :end], preferred_element_type=jnp.float32)
    seen = tree_mask(visible_until[:, :end], start)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * h**-0.5, NEGATIVE), axis=-1)
    blocks.append(product('bkgts,bskh->btkgh', weights.astype(v.dtype), v[:, :end]))
  return jnp.concatenate(blocks, axis=1).reshape(B, T, H, h)


def cached_attention(q, cache, positions):
  """Attends from q [S,n,H,h] at `positions` [S,n] to entries 0..position of a cache.

  Args:
    cache: (keys [S,K,h,T], values [S,K,T,h]), or (keys and values [S,K,T,2h],).
  Returns:
    [S,n,H,h].
  """
  S, n, H, h = q.shape
  keys, values = cache if len(cache) == 2 else (jnp.swapaxes(cache[0][..., :h], 2, 3), cache[0][..., h:])
  K, T = values.shape[1:3]
  q = jnp.transpose(q.reshape(S, n, K, H // K, h), (0, 2, 3, 1, 4)).reshape(S, K, -1, h)
  scores = jnp.einsum('skqh,skht->skqt', q, keys, preferred_element_type=jnp.float32) * h**-0.5
  seen = jnp.arange(T) <= positions[:, :, None]
  scores = jnp.where(seen[:, None, None], scores.reshape(S, K, H // K, n, T), NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  attended = jnp.einsum('skqt,skth->skqh', weights.reshape(S, K, -1, T), values)
  return jnp.transpose(attended.reshape(S, K, H // K, n, h), (0, 3, 1, 2, 4)).reshape(S, n, H, h)


_TIME = {1: (2,), 2: (3, 2)}  # the axis of time in the array, or the two arrays, of a layer's cache


def put_windows(cache, windows, starts, rows):
  """Writes windows of n entries at starts..starts+n of `rows`; starts, rows: [S].

  The cache is (keys [R,K,h,length], values [R,K,length,h]): with keys transposed both products of attention
  read rows. Or it is one array [R,K,length,2h] for kernels. One block per sequence, not one index per token:
  XLA turns it into S copies into the donated buffer. Needs starts + n <= length; otherwise the block is
  shifted to fit and overwrites valid entries.
  """
  where = jnp.stack([rows, starts], axis=1)

  def put(part, window, axis):
    numbers = jax.lax.ScatterDimensionNumbers(
      update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis))
    clip = jax.lax.GatherScatterMode.CLIP
    return jax.lax.scatter(part, where, window.astype(part.dtype), numbers, mode=clip)

  return tuple(map(put, cache, windows, _TIME[len(cache)]))


def get_windows(cache, starts, rows, n: int):
  """Reads entries starts..starts+n of `rows`, in the layout of the cache; starts, rows: [S]."""
  def get(part, axis):
    def window(row, start):
      begin, sizes = [row, 0, 0, 0], [1, *part.shape[1:]]
      begin[axis], sizes[axis] = start, n
      return jax.lax.dynamic_slice(part, begin, sizes)[0]

    return jax.vmap(window)(rows, starts)

  return tuple(map(get, cache, _TIME[len(cache)]))
