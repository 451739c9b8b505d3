"""Matrices as sampling keeps them: what they multiply to, and what the compiler makes of it."""

import pathlib
import re

import jax
import numpy as np

from jaxsearch.models.sampling_weights import Transposed, dtype_on_cpu, transpose


def test_a_transposed_layer_multiplies_as_before_with_its_matrices_as_left_factors():
  rng = np.random.default_rng(0)
  layer = {'o': rng.normal(size=(4, 3, 7)), 'down': rng.normal(size=(20, 7)), 'attn_norm': np.ones(7)}
  layer = {name: value.astype(np.float32) for name, value in layer.items()}
  turned = transpose(layer, 'float32')
  assert turned['attn_norm'] is layer['attn_norm']
  for name, inputs in (('o', 12), ('down', 20)):
    x = rng.normal(size=(2, 5, inputs)).astype(np.float32)
    product = jax.jit(turned[name].multiply)
    np.testing.assert_allclose(product(x), x @ layer[name].reshape(inputs, 7), rtol=1e-5, atol=1e-5)
    (left,) = re.findall(r'f32\[(\d+),(\d+)\]\S* (?:dot|custom-call)\(', product.lower(x).compile().as_text())
    assert left == ('7', '10')  # [outputs, rows]: the compiler has not changed the order


def test_a_transposed_matrix_of_bfloat16_rounds_the_other_factor_and_adds_up_in_float32():
  rng = np.random.default_rng(0)
  w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((7, 300), (5, 300)))
  rounded = lambda a: np.asarray(a.astype('bfloat16').astype(np.float32))
  wide = Transposed(jax.numpy.asarray(w, 'bfloat16')).multiply(x)
  assert wide.dtype == np.float32
  np.testing.assert_allclose(wide, rounded(x) @ rounded(w).T, rtol=1e-4, atol=1e-4)
  assert Transposed(jax.numpy.asarray(w)).multiply(x.astype('bfloat16'), np.float32).dtype == np.float32


def test_a_cpu_keeps_bfloat16_only_where_it_multiplies_it(monkeypatch):
  def kept(dtype, flags):
    monkeypatch.setattr(pathlib.Path, 'read_text', lambda path: flags)
    dtype_on_cpu.cache_clear()
    return dtype_on_cpu(dtype)

  monkeypatch.setattr(pathlib.Path, 'exists', lambda path: True)
  assert kept('bfloat16', 'flags : avx512f avx512_bf16') == 'bfloat16'
  assert kept('bfloat16', 'flags : avx2') == kept('float32', 'avx512_bf16') == 'float32'
  dtype_on_cpu.cache_clear()
