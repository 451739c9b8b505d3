"""Matrix products and their gradients, rounded inside and after the product."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.models.attention import dense_attention, matmul, product
from jaxsearch.parallel import mesh as meshes
from jaxsearch.parallel import targets

CPU = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
SPECS = {'bhts,bshd->bthd': ((2, 3, 5, 7), (2, 7, 3, 4)), 'xn,nm->xm': ((6, 8), (8, 5)),
         'btkgh,bskh->bkgts': ((2, 5, 3, 2, 4), (2, 7, 3, 4))}


def values(shape, seed, dtype):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize('spec', SPECS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_and_gradients_are_those_of_float64(spec, dtype):
  x, y = (values(shape, seed, dtype) for seed, shape in enumerate(SPECS[spec]))
  wide = [np.asarray(one, np.float64) for one in (x, y)]
  expected = np.einsum(spec, *wide)
  by_result = values(expected.shape, 2, dtype)
  a, b, result = re.split(',|->', spec)
  by_x = np.einsum(f'{result},{b}->{a}', np.asarray(by_result, np.float64), wide[1])
  by_y = np.einsum(f'{a},{result}->{b}', wide[0], np.asarray(by_result, np.float64))

  def everything(x, y, by_result):
    found, back = jax.vjp(lambda x, y: product(spec, x, y), x, y)
    return found, *back(by_result)

  with meshes.ambient(CPU):
    found = jax.jit(everything)(x, y, by_result)
  for one, other in zip(found, (expected, by_x, by_y), strict=True):
    assert one.dtype == dtype
    limit = 1e-5 if dtype == 'float32' else 2**-8  # half a unit in the last place of what was rounded once
    np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=limit, atol=limit * 1e-2 if dtype == 'bfloat16' else 1e-5)


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
