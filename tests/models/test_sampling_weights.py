"""Matrices as sampling keeps them: what they multiply to, and what the compiler makes of it."""

import re

import jax
import numpy as np

from jaxsearch.models.sampling_weights import transpose


def test_a_transposed_layer_multiplies_as_before_with_its_matrices_as_left_factors():
  rng = np.random.default_rng(0)
  layer = {'o': rng.normal(size=(4, 3, 7)), 'down': rng.normal(size=(20, 7)), 'attn_norm': np.ones(7)}
  layer = {name: value.astype(np.float32) for name, value in layer.items()}
  turned = transpose(layer)
  assert turned['attn_norm'] is layer['attn_norm']
  for name, inputs in (('o', 12), ('down', 20)):
    x = rng.normal(size=(2, 5, inputs)).astype(np.float32)
    product = jax.jit(turned[name].multiply)
    np.testing.assert_allclose(product(x), x @ layer[name].reshape(inputs, 7), rtol=1e-5, atol=1e-5)
    (left,) = re.findall(r'f32\[(\d+),(\d+)\]\S* (?:dot|custom-call)\(', product.lower(x).compile().as_text())
    assert left == ('7', '10')  # [outputs, rows]: the compiler has not changed the order
