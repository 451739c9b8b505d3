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
LONG_BLOCK = 512  # the same elsewhere: an H100's compiler takes seconds for each block
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
  on_cpu = (ambient_platform() or jax.default_backend()) == 'cpu'
  size = max(BLOCK if on_cpu else LONG_BLOCK, -(-T // MAX_BLOCKS))
  blocks = []
  for start in range(0, T, size):
    end = start + size
    scores = jnp.einsum('btkgh,bskh->bkgts', q[:, start:end], k[:, :end], preferred_element_type=jnp.float32)
    seen = tree_mask(visible_until[:, :end], start)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * h**-0.5, NEGATIVE), axis=-1)
    blocks.append(product('bkgts,bskh->btkgh', weights.astype(v.dtype), v[:, :end]))
  return jnp.concatenate(blocks, axis=1).reshape(B, T, H, h)


def attend_to_front(q, k, v, front, starts):
  """Appends n tokens to each sequence and attends from them to it up to themselves.

  Args:
    q: [S,n,H,h]; k, v: [S,n,K,h].
    front: (keys [S,K,h,T], values [S,K,T,h]): with keys transposed both products read rows.
    starts: [S] tokens that each sequence has already; starts + n <= T.
  Returns:
    ([S,n,H,h], front with k, v).
  """
  where = jnp.stack([jnp.arange(len(starts)), starts], axis=1)

  def put(part, block, axis):  # a block a sequence, not an index a token: S copies into the donated buffer
    numbers = jax.lax.ScatterDimensionNumbers(
      update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis))
    clip = jax.lax.GatherScatterMode.CLIP
    return jax.lax.scatter(part, where, block.astype(part.dtype), numbers, mode=clip)

  front = put(front[0], jnp.transpose(k, (0, 2, 3, 1)), 3), put(front[1], jnp.transpose(v, (0, 2, 1, 3)), 2)
  return _attend(q, *front, starts), front


def attend_to_pages(q, k, v, pool, starts, table):
  """Attends as `attend_to_front` to sequences in pages: table [S,P] are those of each.

  Two may go on in one sequence: each sees what the others wrote. `pool` is as `append` takes it.
  """
  pool = append(pool, k, v, starts, table)
  return _attend(q, *read_pages(pool, table, q.shape[-1]), starts), pool


def _attend(q, keys, values, starts):
  S, n, H, h = q.shape
  K, T = values.shape[1:3]
  q = jnp.transpose(q.reshape(S, n, K, H // K, h), (0, 2, 3, 1, 4)).reshape(S, K, -1, h)
  scores = jnp.einsum('skqh,skht->skqt', q, keys, preferred_element_type=jnp.float32) * h**-0.5
  seen = jnp.arange(T) <= (starts[:, None] + jnp.arange(n))[:, :, None]
  scores = jnp.where(seen[:, None, None], scores.reshape(S, K, H // K, n, T), NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  attended = jnp.einsum('skqt,skth->skqh', weights.reshape(S, K, -1, T), values)
  return jnp.transpose(attended.reshape(S, K, H // K, n, h), (0, 3, 1, 2, 4)).reshape(S, n, H, h)


def append(pool, k, v, starts, table):
  """Writes k, v [S,n,K,h] behind `starts` [S] tokens of sequences in the pages of table [S,P].

  `pool` is (keys, values), each [K,N,page,h], or wider than h, with zeros. What has no page in the table goes
  to page 0, in which nothing is kept.
  """
  page, width = pool[0].shape[2:]
  places = entries(starts, k.shape[1], table, page)

  def write(part, new):
    new = jnp.pad(new, [(0, 0)] * 3 + [(0, width - new.shape[-1])])
    heads = jnp.arange(part.shape[0])[:, None, None]  # indexed: else TPUs lay the pool out anew, and copy it
    return part.at[heads, *places].set(jnp.moveaxis(new, 2, 0).astype(part.dtype))

  return write(pool[0], k), write(pool[1], v)


def entries(starts, n: int, table, page: int):
  """Returns (pages, entries in them), each [S,n], of the n tokens behind `starts` [S], see `append`."""
  places = starts[:, None] + jnp.arange(n)
  numbers = jnp.take_along_axis(table, jnp.minimum(places // page, table.shape[1] - 1), axis=1)
  return jnp.where(places < table.shape[1] * page, numbers, 0), places % page


def read_pages(pool, table, head_dim: int):
  """Returns the pages of table [S,P] as a front: (keys [S,K,h,P*page], values [S,K,P*page,h])."""
  keys, values = (part[:, table, :, :head_dim] for part in pool)  # [K,S,P,page,h]
  K, S, _, _, h = keys.shape
  return (jnp.transpose(keys, (1, 0, 4, 2, 3)).reshape(S, K, h, -1),
          jnp.transpose(values, (1, 0, 2, 3, 4)).reshape(S, K, -1, h))


def read_front(front, starts, n: int):
  """Returns entries starts..starts+n of each sequence of a front: keys and values, each [S,n,K,h]."""
  entries = lambda axis: jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=n, axis=axis))
  keys, values = entries(2)(front[0], starts), entries(1)(front[1], starts)
  return jnp.transpose(keys, (0, 3, 1, 2)), jnp.transpose(values, (0, 2, 1, 3))
