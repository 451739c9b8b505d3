"""Matrix products, and dense attention over rows in the tree layout and over a KV cache.

The attention serves CPUs, and is the reference of the kernels. Products have the dtype of their operands.
XLA's compiler for CPUs has kernels for bfloat16 operands, twice as fast as those for float32 where the
processor has AVX512-BF16, but uses them only where the result is float32. So in a program that is traced for
CPUs (`parallel.mesh.ambient`) results are rounded after the product, in both gradients too. TPUs and GPUs
round inside it. Letters as in decoder.py.
"""

import functools

import jax
import jax.numpy as jnp

from jaxsearch.parallel.mesh import ambient_platform

NEGATIVE = -1e30  # not -inf: a row of padding sees nothing and must stay finite
BLOCK = 128       # queries at a time, whose scores stay in a CPU's cache: 3x faster than all of 512 at once
LONG_BLOCK = 512  # the same elsewhere: an H100's compiler takes seconds for each block
MAX_BLOCKS = 16   # blocks are unrolled, so longer rows get longer blocks


def matmul(x, w):
  """Multiplies x [..., n] by w -> [..., m]; w's leading axes hold n entries, its other axes merge into m."""
  return _times(x, w.reshape(x.shape[-1], -1), _product_dtype(x))  # two axes: else `o` is often transposed


def adapted_matmul(x, w, a, b):
  """Multiplies as `matmul` by w, which includes a @ b; only x, `a` [n,r] and `b` [r,m] get gradients."""
  n, r = x.shape[-1], b.shape[0]
  return _times_adapted(x, w.reshape(n, -1), a.reshape(n, r), b.reshape(r, -1), _product_dtype(x))


def _product_dtype(x):
  return jnp.float32 if x.dtype == jnp.bfloat16 and ambient_platform() == 'cpu' else x.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _times(x, w, dtype):
  return jnp.matmul(x, w, preferred_element_type=dtype).astype(x.dtype)


def _by_factor(gradient, w, dtype):  # not @ w.T: XLA would compute that of bfloat16 in float32
  return jnp.einsum('...m,nm->...n', gradient, w, preferred_element_type=dtype).astype(gradient.dtype)


def _by_matrix(x, gradient, dtype):  # JAX's own rule has XLA transpose the gradient, which is large
  axes = tuple(range(x.ndim - 1))
  return jnp.tensordot(x, gradient, (axes, axes), preferred_element_type=dtype).astype(x.dtype)


def _gradients(dtype, operands, gradient):
  x, w = operands
  return _by_factor(gradient, w, dtype), _by_matrix(x, gradient, dtype)


_times.defvjp(lambda x, w, dtype: (_times(x, w, dtype), (x, w)), _gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _times_adapted(x, w, a, b, dtype):
  return _times(x, w, dtype)


def _gradients_of_adapter(dtype, operands, gradient):
  x, w, a, b = operands
  by_a = _by_matrix(x, _by_factor(gradient, b, dtype), dtype)
  return _by_factor(gradient, w, dtype), None, by_a, _by_matrix(_times(x, a, dtype), gradient, dtype)


_times_adapted.defvjp(lambda x, w, a, b, dtype: (_times(x, w, dtype), (x, w, a, b)), _gradients_of_adapter)


_wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def tree_mask(visible_until, first: int = 0):
  """Returns [B,T-first,T] bool: token i, from `first` on, sees token j iff j <= i < visible_until[j]."""
  keys = jnp.arange(visible_until.shape[-1])
  queries = keys[first:, None]
  return (keys <= queries) & (queries < visible_until[:, None, :])


def dense_attention(q, k, v, visible_until):
  """Attends from each token to what it sees: softmax in float32, no block of queries looks at later keys.

  The backward pass computes the weights of each block again (FlashAttention, Dao et al. 2022, algorithm 4):
  1.8 times as fast on CPUs as keeping them, which takes T * T / 2 numbers a head and layer.

  Args:
    q: [B,T,H,h]; k, v: [B,T,K,h]; visible_until: [B,T] int, see `tree_mask`.
  Returns:
    [B,T,H,h].
  """
  B, T, H, h = q.shape
  on_cpu = (ambient_platform() or jax.default_backend()) == 'cpu'
  size = max(BLOCK if on_cpu else LONG_BLOCK, -(-T // MAX_BLOCKS))
  q = jnp.transpose(q.reshape(B, T, k.shape[2], -1, h), (0, 2, 3, 1, 4))
  k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k, v))
  attended = _attend_in_row(q, k, v, visible_until, size)
  return jnp.transpose(attended, (0, 3, 1, 2, 4)).reshape(B, T, H, h)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_in_row(q, k, v, visible_until, size):
  """Attends from q [B,K,G,T,h] to k, v [B,K,T,h] in blocks of `size` queries."""
  return _attend_and_keep(q, k, v, visible_until, size)[0]


def _attend_and_keep(q, k, v, visible_until, size):
  blocks, sums = [], []
  for start in range(0, q.shape[3], size):
    scores = _scores(q, k, visible_until, start, size)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    blocks.append(_wide('bkgts,bksh->bkgth', weights.astype(v.dtype), v[:, :, :start + size]) / total)
    sums.append(top + jnp.log(total))
  attended = jnp.concatenate(blocks, axis=3).astype(q.dtype)
  return attended, (q, k, v, visible_until, attended, sums)


def _attend_back(size, kept, gradient):
  q, k, v, visible_until, attended, sums = kept
  by_q, by_k, by_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  shares = _wide('bkgth,bkgth->bkgt', gradient, attended)[..., None]
  for start, total in zip(range(0, q.shape[3], size), sums, strict=True):
    queries, own = slice(start, start + size), gradient[:, :, :, start:start + size]
    keys, values = k[:, :, :start + size], v[:, :, :start + size]
    weights = jnp.exp(_scores(q, k, visible_until, start, size) - total)
    by_score = weights * (_wide('bkgth,bksh->bkgts', own, values) - shares[:, :, :, queries])
    by_score = (by_score * q.shape[-1]**-0.5).astype(q.dtype)
    by_q.append(_wide('bkgts,bksh->bkgth', by_score, keys))
    by_k = by_k.at[:, :, :start + size].add(_wide('bkgts,bkgth->bksh', by_score, q[:, :, :, queries]))
    by_v = by_v.at[:, :, :start + size].add(_wide('bkgts,bkgth->bksh', weights.astype(q.dtype), own))
  by_q = jnp.concatenate(by_q, axis=3)
  return *(x.astype(q.dtype) for x in (by_q, by_k, by_v)), None


def _scores(q, k, visible_until, start, size):
  """Returns [B,K,G,size,start+size] float32 scores of a block of queries, NEGATIVE where one does not see."""
  end = start + size
  seen = tree_mask(visible_until[:, :end], start)[:, None, None]
  scores = _wide('bkgth,bksh->bkgts', q[:, :, :, start:end], k[:, :, :end])
  return jnp.where(seen, scores * q.shape[-1]**-0.5, NEGATIVE)


_attend_in_row.defvjp(_attend_and_keep, _attend_back)


def attend_to_front(q, k, v, front, starts):
  """Appends n tokens to each sequence; each of them attends to its sequence up to and including itself.

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
  """Attends as `attend_to_front`, to sequences that lie in pages; table [S,P] lists the pages of each.

  Two of the S may continue one sequence: each sees what the others wrote. `pool` is as `append` takes it.
  """
  pool = append(pool, k, v, starts, table)
  return _attend(q, *read_pages(pool, table, q.shape[-1]), starts), pool


def _attend(q, keys, values, starts):
  S, n, H, h = q.shape
  K, T = values.shape[1:3]
  q = jnp.transpose(q.reshape(S, n, K, H // K, h), (0, 2, 3, 1, 4)).reshape(S, K, -1, h)
  scores = _wide('skqh,skht->skqt', q, keys) * h**-0.5
  seen = jnp.arange(T) <= (starts[:, None] + jnp.arange(n))[:, :, None]
  scores = jnp.where(seen[:, None, None], scores.reshape(S, K, H // K, n, T), NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  attended = _wide('skqt,skth->skqh', weights.reshape(S, K, -1, T), values).astype(values.dtype)
  return jnp.transpose(attended.reshape(S, K, H // K, n, h), (0, 3, 1, 2, 4)).reshape(S, n, H, h)


def append(pool, k, v, starts, table):
  """Writes k, v [S,n,K,h] behind `starts` [S] tokens of sequences in the pages of table [S,P].

  `pool` is (keys, values), each [K,N,page,h], or zero-padded to more than h. Tokens without a page in the
  table go to page 0, in which nothing is kept.
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
