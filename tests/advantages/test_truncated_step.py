"""SLATE's step advantages and step rewards, and its variance theorem as a measurement."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.advantages import group_relative, step_reward, truncated_step

QUICK = hypothesis.settings(max_examples=30, deadline=None)
compute = jax.jit(truncated_step, static_argnames=('normalize_std', 'ddof', 'eps'))
scores = hnp.arrays(np.float32, (4, 5), elements=st.integers(-8, 8).map(lambda x: x / 4))


def by_hand(rewards, normalize_std=True, ddof=1, eps=1e-6):
  """SLATE, eq. 4, one prefix after the other."""
  out = np.zeros(rewards.shape)
  for place in np.ndindex(rewards.shape[:-1]):
    r = rewards[place].astype(np.float64)
    out[place] = (r - r.mean()) / (r.std(ddof=ddof) + eps if normalize_std else 1)
  return out


@QUICK
@hypothesis.given(scores, st.sampled_from([{}, {'normalize_std': False}, {'ddof': 0}, {'eps': 0.1}]))
def test_equals_a_numpy_loop(rewards, options):
  np.testing.assert_allclose(compute(rewards, **options), by_hand(rewards, **options), atol=1e-4)


def test_is_the_group_relative_advantage_of_siblings():
  rewards = np.random.default_rng(0).normal(size=(3, 2, 5)).astype(np.float32)
  flat = group_relative(rewards.ravel(), np.repeat(np.arange(6), 5), 6)
  np.testing.assert_allclose(compute(rewards).ravel(), flat, rtol=1e-6)


def test_equal_scores_are_exactly_zero_and_a_single_alternative_gets_its_reward():
  assert np.array_equal(compute(np.full((2, 8), 1.4, np.float32)), np.zeros((2, 8)))
  assert np.array_equal(compute(np.float32([[1.0], [0.3]])), np.float32([[1.0], [0.3]]))  # REINFORCE, appendix A.9


@pytest.mark.parametrize('rewards', [[3.4e38, -3.4e38, 0], [1e-44, 0, 0], [1e30, 1e30, -1e30]])
def test_extremes_are_finite(rewards):
  assert np.isfinite(compute(np.float32(rewards))).all()


def test_gradient_is_zero_where_all_scored_the_same():
  gradient = jax.jit(jax.grad(lambda r: (truncated_step(r) * jnp.arange(3.0)).sum()))(jnp.ones(3))
  assert np.array_equal(gradient, np.zeros(3))


def test_step_reward_adds_the_bonus_to_answers_only():
  think = np.array([1, 1, 0, -1])
  query, answer = np.array([1, -1, np.nan, np.nan]), np.array([np.nan, np.nan, 1, -1])
  is_answer, step = np.array([0, 0, 1, 1]), np.array([1, 2, 1, 4])
  got = step_reward(think, query, answer, is_answer, step, 4, early_bonus=0.1)
  # SLATE, eqs. 5 and 6: an answer at step 1 of 4 earns 0.1 * 3/4 on top, at the last step nothing.
  np.testing.assert_allclose(got, [2, 0, 1.075, -2], rtol=1e-6)
  assert got.dtype == jnp.float32


def test_variance_theorem_as_a_measurement():
  # T independent steps with the same variance: comparing siblings of one prefix leaves 1/T of the variance
  # that comparing whole trajectories has (SLATE, theorem 1).
  steps, k = 4, 5
  rewards = jax.random.randint(jax.random.key(0), (20_000, k, steps), -1, 2).astype(jnp.float32)
  full = compute(rewards.sum(axis=-1), normalize_std=False)
  truncated = compute(rewards[:, :, 0], normalize_std=False)
  assert abs(truncated.var() / full.var() * steps - 1) < 0.05
