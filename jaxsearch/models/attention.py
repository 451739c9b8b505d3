"""Attention over rows in the tree layout (training) and over a KV cache (sampling). Scores and softmax in float32.

`tree_attention` is the reference: dense, except that no block of queries looks at later keys. Its mask is a function of one
integer per key, so a blockwise kernel can take its place: it skips a block of keys where every `visible_until` ends before the
block of queries begins.

Letters as in decoder.py; G = H / K query heads share a key/value head.
"""

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # not -inf: a row of padding sees nothing and must stay finite
BLOCK = 128       # queries at a time: the scores of a block stay in a CPU's cache (3x faster there than all of 512 at once)
MAX_BLOCKS = 16   # blocks are unrolled, so longer rows get longer blocks


def tree_mask(visible_until, first: int = 0):
  """[B,T] -> [B,T-first,T] bool: token i (from `first` on) sees token j iff j <= i < visible_until[j]."""
  keys = jnp.arange(visible_until.shape[-1])
  queries = keys[first:, None]
  return (keys <= queries) & (queries < visible_until[:, None, :])


def tree_attention(q, k, v, visible_until):
  """Attention in the tree layout, a block of queries at a time; no block looks at keys behind its own end.

  Args:
    q: [B,T,H,h]; k, v: [B,T,K,h]; visible_until: [B,T] int.
  Returns:
    [B,T,H,h].
  """
  T = q.shape[1]
  size = max(BLOCK, -(-T // MAX_BLOCKS))
  blocks = []
  for start in range(0, T, size):
    end = min(start + size, T)
    blocks.append(_attend(q[:, start:end], k[:, :end], v[:, :end], tree_mask(visible_until[:, :end], start)))
  return jnp.concatenate(blocks, axis=1)


def _attend(q, k, v, mask):
  """q: [B,n,H,h]; k, v: [B,m,K,h]; mask: [B,n,m] bool -> [B,n,H,h]."""
  B, n, H, h = q.shape
  K = k.shape[2]
  q = q.reshape(B, n, K, H // K, h)
  scores = jnp.einsum('btkgh,bskh->bkgts', q, k, preferred_element_type=jnp.float32) * h**-0.5
  scores = jnp.where(mask[:, None, None], scores, NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum('bkgts,bskh->btkgh', weights, v).reshape(B, n, H, h)


TIME_AXES = 3, 2  # of keys [R,K,h,length] and values [R,K,length,h]: with keys transposed both products read rows


def write_cache(cache, k, v, starts, rows):
  """Writes k, v [S,n,K,h] into (keys, values) at entries starts..starts+n of the given `rows`; starts, rows: [S]."""
  return put_windows(cache, (jnp.transpose(k, (0, 2, 3, 1)), jnp.transpose(v, (0, 2, 1, 3))), starts, rows)


def put_windows(cache, windows, starts, rows):
  """Writes windows of n entries, in the layout of the cache, at starts..starts+n of `rows`; starts, rows: [S].

  One block a sequence, not one index a token: XLA turns it into S copies into the donated buffer. Needs
  starts + n <= length, otherwise the block is shifted to fit and overwrites what is valid.
  """
  where = jnp.stack([rows, starts], axis=1)

  def put(part, window, axis):
    numbers = jax.lax.ScatterDimensionNumbers(
      update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis))
    return jax.lax.scatter(part, where, window.astype(part.dtype), numbers, mode=jax.lax.GatherScatterMode.CLIP)

  return tuple(put(*each) for each in zip(cache, windows, TIME_AXES))


def get_windows(cache, starts, rows, n: int):
  """(keys [S,K,h,n], values [S,K,n,h]): entries starts..starts+n of `rows`; starts, rows: [S]."""
  def get(part, axis):
    sizes = [1, *part.shape[1:]]
    sizes[axis] = n
    at = lambda row, start: [row, 0, *((0, start) if axis == 3 else (start, 0))]
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice(part, at(row, start), sizes)[0])(rows, starts)

  return tuple(get(*each) for each in zip(cache, TIME_AXES))


def cached_attention(q, cache, positions):
  """q: [S,n,H,h] at `positions` [S,n] attends to entries 0..position of keys [S,K,h,window], values [S,K,window,h]."""
  keys, values = cache
  S, n, H, h = q.shape
  K, window = values.shape[1], values.shape[2]
  q = jnp.transpose(q.reshape(S, n, K, H // K, h), (0, 2, 3, 1, 4)).reshape(S, K, -1, h)
  scores = jnp.einsum('skqh,skht->skqt', q, keys, preferred_element_type=jnp.float32) * h**-0.5
  seen = jnp.arange(window) <= positions[:, :, None]
  scores = jnp.where(seen[:, None, None], scores.reshape(S, K, H // K, n, window), NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  attended = jnp.einsum('skqt,skth->skqh', weights.reshape(S, K, -1, window), values)
  return jnp.transpose(attended.reshape(S, K, H // K, n, h), (0, 3, 1, 2, 4)).reshape(S, n, H, h)
