"""The kernels of tree_attention.py for GPUs, through Triton.

A program has one block of queries of one head (forward, dQ), or one block of keys of one key/value head (dK,
dV), and walks its part of the list of visited blocks; for dK and dV once for every query head that shares the
key/value head. There the scores are transposed.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxsearch.models.kernels import NEGATIVE, visit


def block_sizes(group: int, width: int) -> tuple[int, int]:
  """Returns (queries, keys) of one head, twice of which have to fit into the 227 KiB of a multiprocessor."""
  return (128, 64) if width <= 256 else (64, 32)


def forward(q, k, v, blocks, sizes, interpret):
  """Returns (attended [B,T,H,h], logarithms of the normalisers [B,H,T]) for whole blocks."""
  B, T, H, h = q.shape
  q, k, v = map(_wide, (q, k, v))
  results = jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
  out, normaliser = _call(_forward_kernel, 'tree_attention_forward', blocks, sizes, h, interpret, (q, k, v),
                          results, by_query=True, products=2)
  return out[..., :h], normaliser


def backward(q, k, v, gradient, subtracted, normaliser, blocks, sizes, interpret):
  """Returns gradients of q, k, v from that of the result [B,T,H,h] and `subtracted` [B,T,H] (by softmax)."""
  h = q.shape[-1]
  q, k, v, gradient = map(_wide, (q, k, v, gradient))
  given = q, k, v, gradient, normaliser, jnp.swapaxes(subtracted, 1, 2)

  def part(name, by_query, *results):
    return _call(functools.partial(_backward_kernel, by_query), name, blocks, sizes, h, interpret, given,
                 results, by_query=by_query, products=2 + len(results))

  results = *part('tree_attention_by_query', True, q), *part('tree_attention_by_key', False, k, v)
  return tuple(x[..., :h] for x in results)


def _wide(x):
  """Pads the head width with zeros to a power of two, at least 16, as Triton needs."""
  width = max(16, pl.next_power_of_2(x.shape[-1]))
  return jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))


def _call(kernel, name, blocks, sizes, h, interpret, given, results, *, by_query, products):
  """Calls a kernel that takes `products` for a block of scores; its results are like `results`.

  A program has block i of head n of row b, and all of what it meets there.
  """
  (B, T, H, width), K = given[0].shape, given[1].shape[2]
  pairs, starts = blocks.by_query if by_query else blocks.by_key
  own_size, heads, group = (sizes.q, H, H // K) if by_query else (sizes.k, K, H // K)
  own = pl.BlockSpec((None, own_size, None, width), lambda i, n, b: (b, i, n, 0))
  if by_query:
    keys = pl.BlockSpec((None, T, None, width), lambda i, n, b: (b, 0, jax.lax.div(n, group), 0))
    numbers = pl.BlockSpec((None, None, sizes.q), lambda i, n, b: (b, n, i))
    inputs, outputs = (own, keys, keys, own, numbers, numbers), (own, numbers)
  else:
    queries = pl.BlockSpec((None, T, group, width), lambda i, n, b: (b, 0, n, 0))
    numbers = pl.BlockSpec((None, group, T), lambda i, n, b: (b, n, 0))
    inputs, outputs = (queries, own, own, queries, numbers, numbers), (own, own)
  given = starts, pairs, blocks.visible_until, *given
  of_row = [pl.BlockSpec((None, x.shape[1]), lambda i, n, b: (b, 0)) for x in given[:3]]
  scores = B * H * pairs.shape[1] * sizes.q * sizes.k
  # Every array once: what a head and its neighbours fetch again is still in the cache on the chip.
  moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*given, *results))
  cost = pl.CostEstimate(flops=2 * width * products * scores, transcendentals=scores, bytes_accessed=moved)
  return pl.pallas_call(
    functools.partial(kernel, sizes, h**-0.5), name=name, interpret=interpret, cost_estimate=cost,
    grid=(T // own_size, heads, B), in_specs=[*of_row, *inputs[:len(given) - 3]],
    out_specs=outputs[:len(results)],
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    compiler_params=triton.CompilerParams(num_warps=8 if width > 64 else 4, num_stages=2))(*given)


def _walk(starts, add, carry, times: int = 1):
  """Calls `add(place in the list, turn, carry)` for this program's part of the list, each `times` times."""
  own = pl.program_id(0)
  step = lambda n, carry: add(jax.lax.div(n, times), jax.lax.rem(n, times), carry)
  return jax.lax.fori_loop(starts[own] * times, starts[own + 1] * times, step, carry)


def _numbers(block, size):
  """Numbers the tokens of a block."""
  return block * size + jnp.arange(size)


def _weights(scores, queries, keys, until, transposed: bool = False):
  """Returns scores, NEGATIVE where a query does not see a key."""
  across = (lambda x: x[None, :], lambda x: x[:, None])
  query, key = across if transposed else across[::-1]
  return jnp.where((key(keys) <= query(queries)) & (query(queries) < key(until)), scores, NEGATIVE)


def _forward_kernel(sizes, scale, starts, pairs, until, q, k, v, out, normaliser):
  queries, own = _numbers(pl.program_id(0), sizes.q), q[...]

  def attend(place, _, carry):
    j = pairs[place] & 0xFFFF
    here = pl.ds(j * sizes.k, sizes.k)
    scores = _weights(scale * triton.dot(own, k[here, :].T), queries, _numbers(j, sizes.k), until[here])
    return visit(carry, scores, v[here, :], triton.dot)

  start = jnp.full((sizes.q, 1), NEGATIVE), jnp.zeros((sizes.q, 1)), jnp.zeros((sizes.q, q.shape[-1]))
  highest, total, sums = _walk(starts, attend, start)
  out[...] = (sums / total).astype(out.dtype)
  normaliser[...] = (highest + jnp.log(total)).reshape(sizes.q)


def _backward_kernel(by_query, sizes, scale, starts, pairs, until, q, k, v, gradient, normaliser, subtracted,
                     *results):
  """Adds up dQ of a block of queries, or dK and dV of a block of keys, whose scores are transposed."""
  own_x, own_y, *other = (q[...], gradient[...], k, v) if by_query else (k[...], v[...], q, gradient)
  own_size, size = (sizes.q, sizes.k) if by_query else (sizes.k, sizes.q)
  own = pl.program_id(0)
  if by_query:
    columns = normaliser[...][:, None], subtracted[...][:, None]
  else:
    own_until = until[pl.ds(own * own_size, own_size)]

  def add(place, head, sums):
    block = pairs[place] & 0xFFFF
    here = pl.ds(block * size, size)
    x, y = (ref[here, :] if by_query else ref[here, head, :] for ref in other)
    scores = scale * triton.dot(own_x, x.T)
    if by_query:
      scores = _weights(scores, _numbers(own, own_size), _numbers(block, size), until[here])
      normalisers, subtract = columns
    else:
      scores = _weights(scores, _numbers(block, size), _numbers(own, own_size), own_until, transposed=True)
      normalisers, subtract = normaliser[head, here][None, :], subtracted[head, here][None, :]
    weights = jnp.exp(scores - normalisers)
    by_score = weights * (triton.dot(own_y, y.T) - subtract)
    added = [triton.dot(by_score.astype(x.dtype), x)]
    if not by_query:
      added.append(triton.dot(weights.astype(y.dtype), y))
    return tuple(map(jnp.add, sums, added))

  sums = tuple(jnp.zeros(own_x.shape) for _ in results)
  sums = _walk(starts, add, sums, times=1 if by_query else q.shape[1])
  for result, total, factor in zip(results, sums, (scale, 1)):
    result[...] = (factor * total).astype(result.dtype)
