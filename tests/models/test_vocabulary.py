"""Log-probabilities over the vocabulary against dense float32 ones, on one device and split over eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxsearch.models import vocabulary
from jaxsearch.models.vocabulary import target_logprobs
from jaxsearch.parallel import mesh as meshes

R, V, D = 8, 64, 24


def problem(positions, seed=0, dtype=np.float32):
  """Hidden states, targets and a table far from uniform; two random weights for each position."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return (normal(R, positions, D).astype(dtype), rng.integers(0, V, (R, positions)), normal(V, D) / 2,
          normal(2, R, positions))


def dense(states, table, ids, temperature):
  """(log-probabilities, entropies) with all logits at once."""
  logprobs = jax.nn.log_softmax(states @ table.T / temperature)
  return jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0], -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def place(mesh, states, *tables):
  """As the training step has them."""
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  return put(states, ('data', 'fsdp')), *(put(x, 'tensor' if len(x) == V else None, None if x.shape[1] % D else 'fsdp')
                                          for x in tables)


def weighted(results, weights):
  return sum(jnp.sum(weight * result) for weight, result in zip(weights, results))


@pytest.mark.parametrize('sizes, positions, shape', [
  ((1, 1, 1), 5, None),
  ((2, 2, 2), 3, (2, 1, 2, 2)),   # few positions: all of fsdp shares the vocabulary
  ((1, 8, 1), 4, (1, 2, 4, 1)),   # two groups
  ((1, 8, 1), 32, (1, 8, 1, 1)),  # many: each device gathers it
  ((1, 2, 4), 9, (1, 2, 1, 4)),
])
def test_results_and_gradients_are_the_dense_ones(sizes, positions, shape):
  states, ids, table, weights = problem(positions)
  mesh = meshes.make_mesh(*sizes, devices=jax.devices()[:np.prod(sizes)])

  def loss(states, table):
    results = target_logprobs({'embedding': table}, states, ids, temperature=0.7, chunk=4, with_entropy=True)
    return weighted(results, weights), results

  def run(states, table):
    with meshes.ambient(mesh):
      split = vocabulary.best_split(R, positions, D, V)
      assert (shape is None) == (split is None) and (split is None or tuple(split.mesh.shape.values()) == shape)
      return jax.value_and_grad(loss, (0, 1), has_aux=True)(states, table)

  (_, results), grads = jax.jit(run)(*place(mesh, states, table))
  wanted = dense(states, table, ids, 0.7)
  wanted_grads = jax.grad(lambda *inputs: weighted(dense(*inputs, ids, 0.7), weights), (0, 1))(states, table)
  for found, expected in zip((*results, *grads), (*wanted, *wanted_grads), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('sizes', [(1, 1, 1), (1, 8, 1)])
def test_a_vocabulary_that_nothing_divides_and_positions_of_any_shape(sizes):
  """67 entries; the chunks of 3 do not fill 7 positions either."""
  rng = np.random.default_rng(2)
  states, table = rng.normal(size=(8, 7, D)).astype(np.float32), rng.normal(size=(67, D)).astype(np.float32)
  ids = rng.integers(0, 67, (8, 7))
  mesh = meshes.make_mesh(*sizes, devices=jax.devices()[:np.prod(sizes)])
  with meshes.ambient(mesh):
    placed, whole = place(mesh, states, table)
    found, entropies = target_logprobs({'embedding': whole}, placed, ids, temperature=1.3, chunk=3)
  wanted, _ = dense(states, table, ids, 1.3)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
  assert not np.any(entropies)
  for index in ((), (0,), (0, 0)):
    one, _ = target_logprobs({'embedding': table}, states[index], ids[index], temperature=1.3)
    np.testing.assert_allclose(one, wanted[index], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_table_is_exact_over_1024_chunks_in_bfloat16():
  rng = np.random.default_rng(3)
  states = jnp.asarray(rng.normal(size=(2, 1024, D)), jnp.bfloat16)
  table = jnp.asarray(rng.normal(size=(V, D)) / 2, jnp.bfloat16).astype(jnp.float32)
  ids, weights = rng.integers(0, V, (2, 1024)), rng.uniform(1, 2, (2, 1024))
  loss = lambda table, chunk: jnp.sum(weights * target_logprobs({'embedding': table}, states, ids, chunk=chunk)[0])
  found = np.asarray(jax.grad(loss)(table, 2), np.float64)
  x, w = np.asarray(states, np.float64).reshape(-1, D), np.asarray(table, np.float64)
  scores = x @ w.T
  probabilities = np.exp(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))
  wanted = ((np.eye(V)[ids.reshape(-1)] - probabilities) * weights.reshape(-1, 1)).T @ x
  limit = 1e-3 if jax.default_backend() == 'gpu' else 1e-5  # TF32 has 11 bits, three passes of bfloat16 16
  assert np.linalg.norm(found - wanted) < limit * np.linalg.norm(wanted)


def test_every_product_names_its_precision():
  states, ids, table, _ = problem(4)
  loss = lambda states, table: jnp.sum(target_logprobs({'embedding': table}, states, ids)[0])
  text = jax.jit(jax.grad(loss, (0, 1))).lower(states, table).as_text()
  assert text.count('stablehlo.dot_general') == text.count('precision = [HIGH, HIGH]') >= 4


def test_a_table_that_is_not_learned_costs_no_gradient():
  states, ids, table, weights = problem(16)

  def flops(inputs):
    def loss(inputs):
      return weighted(target_logprobs({'embedding': inputs.get('table', table)}, inputs['states'], ids, chunk=64), weights)
    return jax.jit(jax.grad(loss)).lower(inputs).compile().cost_analysis()['flops']

  product = 2 * 64 * V * D  # one chunk; loops count once
  assert flops({'states': states, 'table': table}) - flops({'states': states}) == pytest.approx(product, rel=0.1)
