"""Counts of arithmetic and traffic against counts by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jaxsearch.models.kernels import paged_attention
from jaxsearch.planning import costs

DOT = 2 * 8 * 8 * 8  # FLOPs of the product of two 8 x 8 matrices
MOVED = 3 * 8 * 8 * 4  # its bytes
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def count(function, *arguments):
  """Returns two lists of (FLOPs, bytes, bytes of the decoding kernel)."""
  once, each = costs.count(jax.jit(function).trace(*arguments).jaxpr.jaxpr)
  return once.tolist(), each.tolist()


def test_products_count_in_loops_and_branches():
  batch = jax.ShapeDtypeStruct((3, 8, 5), jnp.float32), jax.ShapeDtypeStruct((3, 5, 7), jnp.bfloat16)
  product = functools.partial(jnp.einsum, 'bij,bjk->bik', preferred_element_type=jnp.float32)
  moved = 3 * 4 * (8 * 5 + 8 * 7) + 3 * 2 * 5 * 7
  counted = count(lambda x, y: product(x.astype(jnp.bfloat16), y), *batch)
  assert counted[0][:2] == [2 * 3 * 8 * 5 * 7, moved - 2 * 3 * 8 * 5]
  scanned = count(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=6)[0], SQUARE)
  assert scanned == ([6 * DOT, 6 * MOVED, 0], [0, 0, 0])
  branches = count(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), SQUARE)
  assert branches[0][0] == 2 * DOT


def test_loops_whose_length_is_data_count_one_turn_apart():
  def loop(x, n):
    return jax.lax.fori_loop(0, n, lambda _, c: jax.lax.fori_loop(0, 4, lambda _, c: c @ c, c), x) @ x

  counted = count(loop, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
  assert counted == ([DOT, MOVED, 0], [4 * DOT, 4 * MOVED, 0])


def test_slices_move_what_they_take_and_put():
  table, rows = jax.ShapeDtypeStruct((1000, 8), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
  assert count(lambda table, rows: table[rows], table, rows)[0][1] == 2 * 3 * 8 * 4
  put = lambda table, rows: table.at[rows].set(jnp.ones((3, 8)), unique_indices=True)
  assert count(put, table, rows)[0][1] == 2 * 3 * 8 * 4


def test_reductions_read_what_they_reduce():
  assert count(lambda x: jnp.max(x, axis=1), SQUARE)[0] == [0, 8 * 8 * 4, 0]


def test_kernels_count_as_they_estimate():
  def kernel(x, out):
    out[...] = x[...]

  estimate = pl.CostEstimate(flops=77, bytes_accessed=5000, transcendentals=0)
  call = pl.pallas_call(kernel, out_shape=SQUARE, cost_estimate=estimate)
  program = lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0]
  assert count(program, SQUARE)[0] == [3 * 77, 3 * 5000, 0]


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_a_decode_step_moves_what_its_kernel_says(platform):
  """The part that follows the lengths of the slots is counted for full rows, and apart."""
  S, K, G, h, P = 64, 2, 4, 128, 64
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  attend = functools.partial(paged_attention.attend, platform=platform)
  new, pool = struct(S, 1, K, h), tuple(struct(*x) for x in paged_attention.pool_shapes(platform, K, 999, 32, h))
  once, each = count(attend, struct(S, 1, K * G, h), new, new, pool, struct(S, dtype=jnp.int32),
                     struct(S, P, dtype=jnp.int32))
  T = P * 32
  cache = S * K * T * 2 * h * 2
  assert once[0] == 4 * S * K * G * T * h and not any(each)
  assert cache < once[2] <= once[1] < 1.05 * cache
  half = costs.Cost(*once[:2], cache=once[2]).filled(0.5)
  assert (half.bytes, half.cache) == (once[1] - once[2] / 2, once[2] / 2)


def test_a_backward_pass_counts_what_it_recomputes():
  """Forward 2, backward 2 for each of them; rematerialised the first product once more (the last is not
  needed)."""
  loss = lambda x, a, b: jnp.sum(jnp.tanh(x @ a) @ b)
  plain, remat = (count(jax.grad(f, argnums=(0, 1, 2)), *[SQUARE] * 3)[0][0]
                  for f in (loss, jax.checkpoint(loss)))
  assert (plain, remat) == (6 * DOT, 7 * DOT)
