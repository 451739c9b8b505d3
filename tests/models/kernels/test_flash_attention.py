"""The kernels by interpretation against the dense path over rows of chains, and by the compilers of devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.models.kernels import flash_attention
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.planning import costs
from tests.models.kernels.test_tree_attention import (
  SMALL,
  arrays,
  by_dense,
  check,
  compiled,
  on_targets,
  packed_row,
  split_decoder,
  with_gradients,
)
from tests.parallel.compilers import devices_of

KERNELS = ('tpu', 'splash_mha_fwd', 'splash_mha_dq', 'splash_mha_dkv'), ('gpu', 'mha_forward', 'mha_backward')


def by_kernel(platform, until, *given):
  return with_gradients(flash_attention.over_rows(until, platform, interpret=True), *given)


# Rows that blocks divide or not, heads in groups or not, widths that GPUs have to pad.
@pytest.mark.parametrize('platform, T, H, K, h', [('tpu', 200, 4, 2, 16), ('tpu', 128, 2, 2, 8),
                                                  ('gpu', 200, 4, 2, 24), ('gpu', 128, 2, 2, 16)])
def test_equals_the_dense_path(platform, T, H, K, h):
  until = np.stack([packed_row(T, 70, 50), packed_row(T, T), packed_row(T, 1, 2, 100)])
  given = arrays(0, 3, T, H, K, h)
  check(jax.jit(functools.partial(by_kernel, platform))(until, *given), by_dense(until, *given))


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_devices_share_rows_and_heads(platform):
  mesh, until = meshes.make_mesh(2, 2, 2), np.tile(packed_row(70, 40, 20), (8, 1))
  given = arrays(0, 8, 70, 4, 2, 16)

  @jax.jit
  def run(*arguments):
    with meshes.ambient(mesh):
      return by_kernel(platform, *arguments)

  check(run(*jax.device_put((until, *given), transfer.split_over_batch(mesh, 0))), by_dense(until, *given))


@pytest.mark.parametrize('platform, products', [('tpu', 2 + 3 + 4), ('gpu', 2 + 7)])
def test_plans_count_the_kernels(platform, products):
  B, T, H, K, h = 2, 1024, 8, 2, 64
  attention = lambda until, *given: with_gradients(flash_attention.over_rows(until, platform), *given)
  shapes = [jax.ShapeDtypeStruct((B, T, n, h), jnp.bfloat16) for n in (H, K, K, H)]
  (flops, moved, _), _ = costs.count(jax.jit(attention).trace(jax.ShapeDtypeStruct((B, T), jnp.int32), *shapes).jaxpr.jaxpr)
  assert flops == pytest.approx(products * B * H * T * T * h, rel=1e-3)  # outside, one pass over the result
  assert moved > 2 * 4 * B * T * (H + K) * h


@pytest.mark.slow
@pytest.mark.parametrize('name, B, T, H, K, h, dtype', on_targets([
  (2, 4096, 28, 4, 128, 'bfloat16'), (2, 3000, 14, 2, 64, 'bfloat16'), (1, 2048, 9, 3, 64, 'bfloat16'),
  (1, 2048, 8, 2, 128, 'float32'), (1, 16384, 16, 2, 128, 'bfloat16')], 'cuda:h200:1x4'))
def test_compiles_without_an_array_of_all_scores(name, B, T, H, K, h, dtype):
  platform, *names = next(kernels for kernels in KERNELS if kernels[0] == ('tpu' if name.startswith('tpu') else 'gpu'))
  text = compiled(lambda until: flash_attention.over_rows(until, platform), devices_of(name)[0], B, T, H, K, h,
                  jnp.dtype(dtype)).as_text()
  assert all(kernel in text for kernel in names)
  sizes = [sorted(map(int, shape.split(','))) for shape in re.findall(r'\w+\[([\d,]+)\]', text)]
  assert all(size[-2:] < [T, T] for size in sizes if len(size) > 1)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['tpu:v5p:2x2x1', 'cuda:h100:1x4'])
def test_a_split_decoder_has_the_kernels(name):
  config = dataclasses.replace(SMALL, head_dim=64, dtype='bfloat16', remat='full', attention='flash')
  text = split_decoder(name, config)
  _, *names = next(kernels for kernels in KERNELS if kernels[0] == ('tpu' if name.startswith('tpu') else 'gpu'))
  assert all(kernel in text for kernel in names)
