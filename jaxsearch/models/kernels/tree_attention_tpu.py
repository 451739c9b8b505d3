"""The kernels of tree_attention.py for TPUs.

The last dimension of the grid walks a row's list of visited blocks. The scalar core has the list in advance,
so it fetches just what the next block needs; the number of steps is the length of the longest list among the
device's rows. The G query heads of a key/value head are one matrix of G * bq queries, so that keys and
values are fetched once for all of them.

Numbers per query lie along the lanes in memory, [1, G * bq] for a block; where a kernel needs them as a
column it turns them once for a block of queries. For dK and dV the scores are transposed, and it is
`visible_until` that is turned, once for a block of keys. q, bk: queries and keys of a block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxsearch.models.kernels import NEGATIVE, visit

LANES = 128


def block_sizes(group: int, width: int) -> tuple[int, int]:
  """Returns (queries, keys): about 1,024 queries of all heads by 256 keys, 1 MiB of float32 scores."""
  return min(512, max(128, 1 << (1024 // group).bit_length() - 1)), 256


def forward(q, k, v, blocks, sizes, interpret):
  """Returns (attended [B,T,H,h], logarithms of the normalisers as of `_per_query`) for whole blocks."""
  B, T, H, h = q.shape
  K = k.shape[2]
  rows = H // K * sizes.q
  q, k, v = _by_head(q, K), _by_head(k), _by_head(v)
  results = (jax.ShapeDtypeStruct(q.shape, v.dtype),
             jax.ShapeDtypeStruct((B, K, T // sizes.q, 1, rows), jnp.float32))
  out, normaliser = _call(
    _forward_kernel, 'tree_attention_forward', blocks, sizes, interpret,
    (q, k, v, blocks.visible_until[:, None]), results, by_query=True, products=2,
    scratch=[(rows, 1), (rows, 1), (rows, h)])
  return _by_token(out), normaliser


def backward(q, k, v, gradient, subtracted, normaliser, blocks, sizes, interpret):
  """Returns gradients of q, k, v from that of the result [B,T,H,h] and `subtracted` [B,T,H] (by softmax)."""
  H, h, K = *q.shape[2:], k.shape[2]
  q, k, v, gradient = _by_head(q, K), _by_head(k), _by_head(v), _by_head(gradient, K)
  given = q, k, v, blocks.visible_until[:, None], gradient, normaliser, _per_query(subtracted, K, sizes)

  def part(name, by_query, *results):
    own, number = H // K * sizes.q if by_query else sizes.k, len(results)
    return _call(
      functools.partial(_backward_kernel, by_query), name, blocks, sizes, interpret, given, results,
      by_query=by_query, products=2 + number, scratch=[(own, 1)] * (3 - number) + [(own, h)] * number)

  results = *part('tree_attention_by_query', True, q), *part('tree_attention_by_key', False, k, v)
  return tuple(map(_by_token, results))


def _by_head(x, K=None):
  """Turns [B,T,N,h] into [B,N,T,h], queries into [B,K,G,T,h]."""
  x = jnp.swapaxes(x, 1, 2)
  return x if K is None else x.reshape(x.shape[0], K, -1, *x.shape[2:])


def _by_token(x):
  """Inverts `_by_head`."""
  return jnp.swapaxes(x.reshape(x.shape[0], -1, *x.shape[-2:]), 1, 2)


def _per_query(x, K, sizes):
  """Turns [B,T,H] into [B,K,n,1,G*bq]: the numbers of a block of queries along the lanes."""
  B, T, H = x.shape
  blocks = x.reshape(B, T // sizes.q, sizes.q, K, H // K)
  return jnp.transpose(blocks, (0, 3, 1, 4, 2)).reshape(B, K, T // sizes.q, 1, -1)


def _specs(sizes, group, h, *, by_query: bool):
  """Returns blocks of queries, keys, `visible_until` and numbers per query, at the pair that a step has."""
  at = lambda *step: pair_at(*step) if by_query else pair_at(*step)[::-1]

  return (
    pl.BlockSpec((None, None, group, sizes.q, h), lambda b, n, *step: (b, n, 0, at(b, *step)[0], 0)),
    pl.BlockSpec((None, None, sizes.k, h), lambda b, n, *step: (b, n, at(b, *step)[1], 0)),
    pl.BlockSpec((None, 1, sizes.k), lambda b, n, *step: (b, 0, at(b, *step)[1])),
    pl.BlockSpec((None, None, None, 1, group * sizes.q), lambda b, n, *step: (b, n, at(b, *step)[0], 0, 0)),
  )


def _call(kernel, name, blocks, sizes, interpret, given, results, *, by_query, products, scratch):
  """Calls a kernel that takes `products` for a block of scores; its results are like `results`."""
  pairs, starts = blocks.by_query if by_query else blocks.by_key
  B, K, group, _, h = given[0].shape
  queries, keys, until, numbers = _specs(sizes, group, h, by_query=by_query)
  inputs = (queries, keys, keys, until, queries, numbers, numbers)[:len(given)]
  outputs = (queries, numbers)[:len(results)] if by_query else (keys, keys)
  scores = B * K * group * pairs.shape[1] * sizes.q * sizes.k
  size = lambda x: math.prod(x.shape) * x.dtype.itemsize
  # Blocks of the side that the list is sorted by are fetched once, those of the other side for every pair.
  often = pairs.shape[1] * (sizes.k if by_query else sizes.q) / given[1].shape[2]
  fetched = sum(size(x) * (often if (spec is keys) == by_query else 1) for spec, x in zip(inputs, given))
  cost = pl.CostEstimate(flops=2 * h * products * scores, transcendentals=scores,
                         bytes_accessed=int(fetched) + sum(map(size, results)))
  spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=2, grid=(B, K, jnp.max(starts[:, -1])), in_specs=inputs, out_specs=outputs,
    scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch])
  return pl.pallas_call(
    functools.partial(kernel, sizes, scale=h**-0.5), name=name, grid_spec=spec, cost_estimate=cost,
    interpret=interpret, out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
  )(pairs.reshape(-1), starts[:, -1], *given)


def pair_at(b, step, pairs, counts):
  """Returns high and low number of the pair of a row's step."""
  pair = pairs[b * (pairs.shape[0] // counts.shape[0]) + step]
  return pair >> 16, pair & 0xFFFF


def step(pairs, counts):
  """Returns high and low number of the pair; if it is visited; if it is first, last of its high number."""
  b, number, most = pl.program_id(0), pl.program_id(2), pairs.shape[0] // counts.shape[0]
  at = lambda step: pair_at(b, jnp.clip(step, 0, most - 1), pairs, counts)
  high, low = at(number)
  visited = number < counts[b]
  first = (number == 0) | (at(number - 1)[0] != high)
  last = (number + 1 == counts[b]) | (at(number + 1)[0] != high)
  return high, low, visited, visited & first, visited & last


def _column(row):
  """Turns [1,n] into [n,1]."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _row(column):
  """Turns [n,1] into [1,n]."""
  return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _product(x, y, *, over=(1, 0)):
  """Multiplies two matrices over the given dimensions, summed in float32."""
  return jax.lax.dot_general(x, y, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def _hidden(until, i, j, sizes, group, *, queries_in):
  """Returns what is added to scores: NEGATIVE where a query does not see a key, else 0.

  Args:
    until: `visible_until` of the keys, along their dimension.
    i, j: the blocks of queries and keys.
    queries_in: their dimension; the scores of all heads lie along it, one head after the other.
  """
  shape = (sizes.q, sizes.k) if queries_in == 0 else (sizes.k, sizes.q)
  queries = i * sizes.q + jax.lax.broadcasted_iota(jnp.int32, shape, queries_in)
  keys = j * sizes.k + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - queries_in)
  hidden = jnp.where((keys <= queries) & (queries < until), 0.0, NEGATIVE)
  return jnp.concatenate([hidden] * group, axis=queries_in)


def _forward_kernel(sizes, pairs, counts, q, k, v, until, out, normaliser, *carry, scale):
  i, j, visited, first, last = step(pairs, counts)
  group, _, h = q.shape

  @pl.when(first)
  def _():
    for x, value in zip(carry, (NEGATIVE, 0, 0)):
      x[...] = jnp.full_like(x, value)

  @pl.when(visited)
  def _():
    scores = scale * _product(q[...].reshape(-1, h), k[...], over=(1, 1))
    scores += _hidden(until[...], i, j, sizes, group, queries_in=0)
    for x, value in zip(carry, visit([x[...] for x in carry], scores, v[...], _product)):
      x[...] = value

  @pl.when(last)
  def _():
    highest, total, sums = carry
    out[...] = (sums[...] / total[...]).reshape(out.shape).astype(out.dtype)
    normaliser[...] = _row(highest[...] + jnp.log(total[...]))


def _backward_kernel(by_query, sizes, pairs, counts, q, k, v, until, gradient, normaliser, subtracted, *refs,
                     scale):
  """Adds up dQ of a block of queries, or dK and dV of a block of keys, whose scores are transposed.

  refs: the results; one column each for the numbers of the block's queries (normaliser, subtracted) or keys
  (until); the sums.
  """
  high, low, visited, first, last = step(pairs, counts)
  i, j = (high, low) if by_query else (low, high)
  group, _, h = q.shape
  number = 1 if by_query else 2
  results, columns, sums = refs[:number], refs[number:3], refs[3:]

  @pl.when(first)
  def _():
    for column, row in zip(columns, (normaliser, subtracted) if by_query else (until,)):
      column[...] = _column(row[...].astype(jnp.float32))  # exact below 2^24
    for total in sums:
      total[...] = jnp.zeros_like(total)

  @pl.when(visited)
  def _():
    refs = (q, gradient, k, v) if by_query else (k, v, q, gradient)
    own_x, own_y, x, y = (ref[...].reshape(-1, h) for ref in refs)
    if by_query:
      hidden = _hidden(until[...], i, j, sizes, group, queries_in=0)
      normalisers, subtract = columns
    else:
      hidden = _hidden(columns[0][...].astype(jnp.int32), i, j, sizes, group, queries_in=1)
      normalisers, subtract = normaliser, subtracted
    weights = jnp.exp(scale * _product(own_x, x, over=(1, 1)) + hidden - normalisers[...])
    by_score = weights * (_product(own_y, y, over=(1, 1)) - subtract[...])
    sums[0][...] += _product(by_score.astype(x.dtype), x)
    if not by_query:
      sums[1][...] += _product(weights.astype(y.dtype), y)

  @pl.when(last)
  def _():
    for result, total, factor in zip(results, sums, (scale, 1)):
      result[...] = (factor * total[...]).reshape(result.shape).astype(result.dtype)
