"""Optimizer and schedule against optax and NumPy written out; layouts of the state."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import cusearch
from jaxsearch.models import hub
from jaxsearch.models.architecture import initial_params, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import learner, state as states

EVERY_ROUNDING = jax.jit(lambda x: states.round_to_bfloat16(
  jnp.full(1 << 16, x), jnp.arange(1 << 16, dtype=jnp.uint16)).astype(jnp.float32))


def test_warm_up_is_linear_from_the_first_update(tiny):
  schedule = states.learning_rate_schedule(tiny.optim_config(learning_rate=0.5, lr_warmup_updates=4), 100)
  np.testing.assert_allclose([schedule(i) for i in range(7)], [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5])


def test_cosine_ends_at_zero(tiny):
  schedule = states.learning_rate_schedule(
    tiny.optim_config(learning_rate=1.0, lr_warmup_updates=2, schedule='cosine'), 10)
  expected = [0.5, 1.0] + [0.5 * (1 + np.cos(np.pi * i / 8)) for i in range(9)]
  np.testing.assert_allclose([schedule(i) for i in range(11)], expected, atol=1e-6)


@pytest.mark.parametrize('strategy, mini_batch, updates', [
  ('full', 0, 40), ('full', 24, 80), ('auto', 0, 40), ('auto', 24, 40), ('auto', 5, 200)])
def test_the_updates_of_a_run_are_those_of_the_chains_that_are_selected(strategy, mini_batch, updates):
  config = cusearch.get_config()
  config.update(steps=40, questions_per_step=6, group_size=8)
  config.credit.update(strategy=strategy, keep=24)
  config.train.mini_batch = mini_batch
  assert learner.total_updates(config) == updates


def test_decay_spares_norms_and_biases(tiny):
  params = initial_params(tiny.decoder, jax.random.key(0))
  decays = states.decays(params)
  assert decays['embedding'] and decays['layers']['q'] and decays['layers']['down']
  assert not decays['final_norm']
  assert not any(decays['layers'][name] for name in ('attn_norm', 'mlp_norm', 'q_bias', 'k_bias', 'v_bias'))
  assert not any(jax.tree.leaves(states.decays({'value_head': {'kernel': 0}, 'head': {'kernel': 0}})))


def test_an_update_is_clipped_adamw(tiny):
  """Two updates written out in NumPy: clip by the global norm, Adam with bias correction, decoupled decay."""
  optim = tiny.optim_config(learning_rate=0.1, weight_decay=0.3, clip_norm=0.5)
  optimizer = states.make_optimizer(optim, states.learning_rate_schedule(optim, 10))
  params = {'q': jnp.array([1.0, -2.0, 0.5]), 'norm': jnp.array([1.0])}
  state = states.initial_state(params, optimizer)
  expected = {name: np.asarray(value, np.float64) for name, value in params.items()}
  m = v = {name: 0.0 for name in params}
  for t in (1, 2):
    grads = {'q': jnp.array([3.0, 0.1, -1.0]) * t, 'norm': jnp.array([0.7])}
    state, norm = states.update(state, grads, jnp.float32(1.0), optimizer)
    raw = {name: np.asarray(g, np.float64) for name, g in grads.items()}
    length = np.sqrt(sum((g**2).sum() for g in raw.values()))
    np.testing.assert_allclose(norm, length, rtol=1e-6)
    g = {name: value * min(1, 0.5 / length) for name, value in raw.items()}
    m = {name: 0.9 * m[name] + 0.1 * g[name] for name in g}
    v = {name: 0.99 * v[name] + 0.01 * g[name]**2 for name in g}
    for name in g:
      step = (m[name] / (1 - 0.9**t)) / (np.sqrt(v[name] / (1 - 0.99**t)) + 1e-8)
      expected[name] = expected[name] - 0.1 * (step + (0.3 * expected[name] if name == 'q' else 0))
      np.testing.assert_allclose(state.params[name], expected[name], rtol=1e-5)
  assert state.updates == 2


def test_moments_stay_in_float32_and_lie_with_their_parameter(tiny):
  mesh = meshes.make_mesh(1, 4, 2)
  placed = meshes.shardings(parameter_axes(tiny.decoder), parameter_shapes(tiny.decoder), mesh)
  params = states.place_params(initial_params(tiny.decoder, jax.random.key(0)), placed, jnp.bfloat16)
  optim = tiny.optim_config()
  optimizer = states.make_optimizer(optim, states.learning_rate_schedule(optim, 10))
  state = states.create_state(params, optimizer, mesh)
  moments = optax.tree.get(state.opt_state, 'mu')
  assert state.params['layers']['gate'].dtype == jnp.bfloat16
  assert moments['layers']['gate'].dtype == jnp.float32
  jax.tree.map(lambda p, m: p.sharding.is_equivalent_to(m.sharding, p.ndim) or pytest.fail(f'{p.shape}'),
               state.params, moments)
  assert moments['layers']['gate'].sharding.shard_shape((2, 24, 32)) == (2, 6, 16)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.floats(-2.0**127, 2.0**127, width=32, allow_subnormal=False))
def test_rounding_at_random_is_a_neighbour_and_on_average_exact(x):
  """Over all 65,536 values of the bits, counted."""
  found = np.asarray(EVERY_ROUNDING(jnp.float32(x))).astype(np.float64)
  below, above = found.min(), found.max()
  assert below <= x <= above and set(found) <= {below, above}
  assert found.mean() == x  # exact: the sum of 65,536 numbers of 8 bits fits into a float64
  special = jnp.array([jnp.inf, -jnp.inf, jnp.nan])
  kept = states.round_to_bfloat16(special, jnp.full(3, 65535, jnp.uint16))
  np.testing.assert_array_equal(np.asarray(kept, np.float32), special)
  if below < above:
    after = np.nextafter(np.asarray(below, jnp.bfloat16), np.asarray(np.inf, jnp.bfloat16))
    assert float(after) == above or (below < 0 and above == 0)


def test_small_updates_of_bfloat16_weights_add_up(tiny):
  """200 updates of 1e-4, a fortieth of the spacing at 1; rounded to the nearest they would all be lost."""
  optim = tiny.optim_config(learning_rate=1e-4)
  optimizer = states.make_optimizer(optim, states.learning_rate_schedule(optim, 10))
  grads = {'q': jnp.ones((64, 64)), 'norm': -jnp.ones(64)}
  start = jax.tree.map(lambda x: 0.75 * jnp.ones_like(x, jnp.bfloat16), grads)
  assert (start['q'] - jnp.bfloat16(1e-4) == start['q']).all()
  update = jax.jit(lambda state, seed: states.update(state, grads, jnp.float32(1), optimizer, (seed,))[0])

  @jax.jit
  def run(seed, state, number=200):
    return jax.lax.fori_loop(0, number, lambda _, state: update(state, seed), state)

  state = jax.device_get(run(0, states.initial_state(start, optimizer)))
  for name, sign in (('q', -1), ('norm', 1)):
    moved = np.asarray(state.params[name], np.float64) - 0.75
    spread = 1 / 256 / np.sqrt(moved.size)  # of the mean: a weight ends within a few spacings
    assert np.mean(moved) == pytest.approx(sign * 0.02, abs=0.1 * 0.02 + 5 * spread)
    assert state.params[name].dtype == jnp.bfloat16 and moved.std() > 0
  half = run(0, states.initial_state(start, optimizer), 120)
  resumed = jax.device_get(run(0, jax.tree.map(jnp.asarray, jax.device_get(half)), 80))
  jax.tree.map(np.testing.assert_array_equal, resumed, state)
  other = jax.device_get(run(1, states.initial_state(start, optimizer)))
  assert not np.array_equal(other.params['q'], state.params['q'])


def test_the_bits_of_rounding_are_made_where_the_parameters_lie(tiny):
  placed = meshes.shardings(parameter_axes(tiny.decoder), parameter_shapes(tiny.decoder), meshes.make_mesh(1, 4, 2))
  params = jax.device_get(initial_params(tiny.decoder, jax.random.key(0)))
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
  store = lambda params: states.stored(params, like, jax.random.key(1))
  compiled = jax.jit(store, out_shardings=placed).lower(states.place_params(params, placed)).compile()
  assert not any(word in compiled.as_text() for word in ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute'))
  spread, alone = compiled(states.place_params(params, placed)), jax.jit(store)(params)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(spread), jax.device_get(alone))
  assert not np.array_equal(alone['layers']['gate'][0, :, :24], alone['layers']['gate'][1, :, :24])


def test_the_fingerprint_knows_parameters_on_any_mesh(tiny):
  params = initial_params(tiny.decoder, jax.random.key(0))
  other = initial_params(tiny.decoder, jax.random.key(1))
  placed = meshes.shardings(parameter_axes(tiny.decoder), parameter_shapes(tiny.decoder), meshes.make_mesh(2, 2, 2))
  own = hub.fingerprint(params)
  np.testing.assert_allclose(hub.fingerprint(states.place_params(params, placed)), own, rtol=1e-5)
  assert not np.allclose(hub.fingerprint(other), own, rtol=1e-5)
