"""Matrix products, attention over rows, and their gradients, rounded inside and after the product."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.models.attention import adapted_matmul, dense_attention, matmul, tree_mask
from jaxsearch.parallel import mesh as meshes, targets

CPU = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
LIMITS = {'float32': dict(rtol=1e-5, atol=1e-5),
          'bfloat16': dict(rtol=2**-8, atol=2e-4)}  # half a unit in the last place of what was rounded once


def values(shape, seed, dtype):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def with_gradients(function, dtype, *given):
  """Returns the result and the gradients for all that is given, by a random gradient of the result."""
  def everything(*given):
    found, back = jax.vjp(function, *given)
    return found, *back(values(found.shape, 9, dtype))

  with meshes.ambient(CPU):
    found = jax.jit(everything)(*given)
  assert all(one.dtype == dtype for one in found)
  return [np.asarray(one, np.float64) for one in found], np.asarray(values(found[0].shape, 9, dtype), np.float64)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_and_gradients_are_those_of_float64(dtype):
  x, w = values((2, 3, 8), 0, dtype), values((4, 2, 5), 1, dtype)  # [n] of w has two axes
  found, by_result = with_gradients(matmul, dtype, x, w)
  wide, matrix = np.asarray(x, np.float64), np.asarray(w, np.float64).reshape(8, 5)
  expected = wide @ matrix, by_result @ matrix.T, np.einsum('bti,btj->ij', wide, by_result).reshape(4, 2, 5)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, **LIMITS[dtype])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_adapted_matrix_has_the_gradients_of_its_factors(dtype):
  given = [values(shape, seed, dtype) for seed, shape in enumerate([(2, 3, 8), (8, 5), (8, 2), (2, 5)])]
  x, w, a, b = (np.asarray(one, np.float64) for one in given)
  run = lambda x, a, b: adapted_matmul(x, given[1], a, b)
  found, by_result = with_gradients(run, dtype, *given[:1], *given[2:])
  flat, of_result = x.reshape(6, 8), by_result.reshape(6, 5)
  expected = x @ w, by_result @ w.T, flat.T @ of_result @ b.T, a.T @ flat.T @ of_result
  twice = {'bfloat16': dict(rtol=2**-6, atol=0.1)}  # what is between two products is rounded too
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, **(LIMITS | twice)[dtype])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_attention_in_blocks_and_its_gradients_are_those_of_whole_rows(dtype):
  T, h = 300, 16  # no multiple of a block
  q, k, v = (values((2, T, heads, h), seed, dtype) for seed, heads in enumerate((6, 2, 2)))
  index = np.arange(T)
  siblings = np.where(index < 40, T, np.where(index < 170, 170, T))  # two branches behind a prompt
  until = jnp.asarray(np.stack([siblings, np.where(index < 200, 200, index + 1)]))  # and one chain, padding

  def whole(q, k, v):
    k, v = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    scores = jnp.where(tree_mask(until)[:, None], jnp.einsum('bthd,bshd->bhts', q, k) / 4, -jnp.inf)
    return jnp.einsum('bhts,bshd->bthd', jax.nn.softmax(scores), v)

  found, by_result = with_gradients(functools.partial(dense_attention, visible_until=until), dtype, q, k, v)
  wide = [x.astype(jnp.float32) for x in (q, k, v)]
  result, back = jax.vjp(whole, *wide)
  limits = dict(rtol=1e-4, atol=1e-5) if dtype == 'float32' else dict(rtol=2**-5, atol=0.03)
  for one, other in zip(found, (result, *back(jnp.asarray(by_result, jnp.float32))), strict=True):
    np.testing.assert_allclose(one, other, **limits)


def test_what_sees_nothing_stays_finite():
  q, k, v = (values((1, 6, 2, 4), seed, 'float32') for seed in range(3))
  found, _ = with_gradients(functools.partial(dense_attention, visible_until=jnp.zeros((1, 6), int)), 'float32', q, k, v)
  assert all(np.isfinite(one).all() for one in found)


def test_cpus_get_products_of_bfloat16_operands():
  """No operand of the product, nor of the gradient of its first operand, was turned into float32."""
  x, w = values((64, 96), 0, 'bfloat16'), values((96, 64), 1, 'bfloat16')

  def operands():
    by_first = jax.grad(lambda x, w: jnp.sum(jax.nn.silu(matmul(x, w))))
    program = jax.jit(lambda x, w: by_first(x, w)).lower(x, w).compile().as_text()
    types = dict(re.findall(r'%([\w.-]+) = (\w+)\[', program))
    dots = re.findall(r' dot\(%([\w.-]+), %([\w.-]+)\)', program)
    assert len(dots) == 2
    return {types[name] for dot in dots for name in dot}

  if jax.__version_info__ < (0, 11):  # from then on XLA does so by itself
    assert operands() == {'f32'}
  with meshes.ambient(CPU):
    assert operands() == {'bf16'}


def test_blocks_are_few_where_each_takes_seconds_to_compile():
  row = jax.ShapeDtypeStruct((1, 2048, 2, 16), 'bfloat16')
  until = jax.ShapeDtypeStruct((1, 2048), 'int32')

  def products(mesh):
    with meshes.ambient(mesh):
      return str(jax.make_jaxpr(dense_attention)(row, row, row, until)).count('dot_general')

  assert products(CPU) == 2 * 16
  assert products(meshes.make_mesh(devices=targets.parse('cuda:h100:1x1').devices())) == 2 * 4
