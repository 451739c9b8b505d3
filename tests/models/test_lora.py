"""Adapters against products written out in NumPy, one formula for each matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.models import lora
from jaxsearch.models.architecture import DecoderConfig, initial_params
from jaxsearch.models.decoder import Decoder, hidden_states
from jaxsearch.models.vocabulary import target_logprobs
from jaxsearch.parallel import mesh as meshes

CONFIG = DecoderConfig(vocab_size=64, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
                       head_dim=8, qkv_bias=True)
RANK, ALPHA = 3, 12.0
SUMS = {'q': 'ldr,lrnh->ldnh', 'k': 'ldr,lrnh->ldnh', 'v': 'ldr,lrnh->ldnh', 'o': 'lnhr,lrd->lnhd',
        'gate': 'ldr,lrf->ldf', 'up': 'ldr,lrf->ldf', 'down': 'lfr,lrd->lfd'}
TARGETS = tuple(SUMS)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9))


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: 4 * x, initial_params(CONFIG, jax.random.key(0)))


def random_adapter(targets, dtype=jnp.float32):
  """Both factors of every target far from 0."""
  shapes = lora.adapter_shapes(CONFIG, RANK, targets)
  leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
  rng = np.random.default_rng(1)
  return jax.tree.unflatten(treedef, [jnp.asarray(rng.normal(0, 0.2, shape), dtype) for shape in leaves])


def by_hand(params, adapter, targets):
  """W + alpha / r * a b in float64."""
  expected = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  for name in targets:
    a, b = (np.asarray(adapter['layers'][name][factor], np.float64) for factor in 'ab')
    expected['layers'][name] += ALPHA / RANK * np.einsum(SUMS[name], a, b)
  return expected


@pytest.mark.parametrize('targets', [('q',), ('o',), TARGETS])
def test_the_merged_model_is_the_base_and_the_product(params, targets):
  adapter = random_adapter(targets)
  merged = jax.jit(lora.merge)(params, adapter, ALPHA)
  expected = by_hand(params, adapter, targets)
  jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6), merged, expected)
  scores = [Decoder(CONFIG, params=tree)(TOKENS) for tree in (merged, jax.tree.map(jnp.float32, expected), params)]
  np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-4)
  assert np.abs(scores[0] - scores[2]).max() > 1e-2


def test_a_new_adapter_is_the_base_to_the_bit(params):
  adapter = jax.jit(lambda key: lora.initial_adapter(CONFIG, RANK, TARGETS, key))(jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, jax.jit(lora.merge)(params, adapter, ALPHA), params)
  assert jax.tree.structure(adapter) == jax.tree.structure(random_adapter(TARGETS))
  for name in TARGETS:
    factors = adapter['layers'][name]
    assert not np.any(factors['b']) and np.all(factors['a'])
    inputs = {'o': 4 * 8, 'down': 32}.get(name, 24)
    assert float(np.std(factors['a'])) * (3 * inputs) ** 0.5 == pytest.approx(1, abs=0.25)


def loss_of(params):
  """A loss in which every matrix counts."""
  states = hidden_states(CONFIG, params, TOKENS)
  logprobs, entropies = target_logprobs(params, states, np.roll(TOKENS, -1, axis=1), chunk=4, with_entropy=True)
  return jnp.sum(jnp.sin(states)) + jnp.sum(jnp.cos(3 * logprobs)) + jnp.sum(entropies)


def test_the_gradient_is_that_of_the_matrix_through_both_factors(params):
  """dL/da = alpha / r * G b^T and dL/db = alpha / r * a^T G, with G the gradient of the merged matrix."""
  adapter = random_adapter(TARGETS)

  def adapted_loss(adapter):
    return loss_of(lora.adapted(lora.merge(params, jax.lax.stop_gradient(adapter), ALPHA), adapter, ALPHA))

  value, found = jax.jit(jax.value_and_grad(adapted_loss))(adapter)
  expected, whole = jax.jit(lambda params, adapter: jax.value_and_grad(loss_of)(lora.merge(params, adapter, ALPHA)))(
    params, adapter)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  for name in TARGETS:
    a, b = (np.asarray(adapter['layers'][name][factor], np.float64) for factor in 'ab')
    first, rest = SUMS[name].split(',')
    second, matrix = rest.split('->')
    G = ALPHA / RANK * np.asarray(whole['layers'][name], np.float64)
    for factor, wanted in (('a', np.einsum(f'{matrix},{second}->{first}', G, b)),
                           ('b', np.einsum(f'{matrix},{first}->{second}', G, a))):
      np.testing.assert_allclose(found['layers'][name][factor], wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
      assert np.abs(wanted).max() > 1e-2


def test_bfloat16_is_one_rounding_of_the_sum(params):
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  adapter = random_adapter(TARGETS, jnp.bfloat16)
  merged = jax.jit(lora.merge)(params, adapter, ALPHA)
  expected = by_hand(params, adapter, TARGETS)
  for found, wanted in zip(jax.tree.leaves(merged), jax.tree.leaves(expected), strict=True):
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2.0**-8, atol=1e-6)
  in_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), adapter)
  jax.tree.map(np.testing.assert_array_equal, jax.jit(lora.merge)(params, in_float32, ALPHA), merged)


def test_factors_are_split_as_their_matrix_is():
  mesh = meshes.make_mesh(1, 4, 2)
  placed = meshes.shardings(lora.adapter_axes(CONFIG, TARGETS), shapes := lora.adapter_shapes(CONFIG, RANK, TARGETS), mesh)
  split = lambda name, factor: placed['layers'][name][factor].shard_shape(shapes['layers'][name][factor])
  assert split('q', 'a') == (2, 6, RANK) and split('q', 'b') == (2, RANK, 2, 8)
  assert split('o', 'a') == (2, 2, 8, RANK) and split('o', 'b') == (2, RANK, 6)
  assert split('down', 'a') == (2, 16, RANK)


@pytest.mark.parametrize('rank, targets, words', [
  (4, ('q', 'query'), "some of .*'down'.*: got .*'query'"),
  (4, ('embedding',), 'some of'),
  (4, (), r'got \[\]'),
  (0, ('q',), 'rank 0: at least 1'),
])
def test_what_is_no_adapter_is_named(rank, targets, words):
  with pytest.raises(ValueError, match=words):
    lora.adapter_shapes(CONFIG, rank, targets)
