"""Advantages in a group, of trajectories and of the alternatives of a step: against NumPy loops, and
SLATE's variance theorem as a measurement."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.advantages import group_relative, step_reward, truncated_step

N, G = 10, 4
compute = jax.jit(group_relative, static_argnames=('num_groups', 'normalize_std', 'ddof', 'eps', 'singleton'))


def by_hand(rewards, group_ids, mask, normalize_std=True, ddof=1, eps=1e-6, singleton='raw'):
  """CuSearch, section 3.1, one group after the other, in float64."""
  advantages = np.zeros(len(rewards))
  for group in np.unique(group_ids):
    members = np.flatnonzero((group_ids == group) & mask)
    r = np.asarray(rewards, np.float64)[members]
    if len(members) == 1:
      advantages[members] = r if singleton == 'raw' else 0
    elif len(members):
      deviation = r.std(ddof=ddof) + eps if normalize_std else 1
      advantages[members] = (r - r.mean()) / deviation
  return advantages


@pytest.mark.parametrize('options', [
    {}, {'normalize_std': False}, {'ddof': 0}, {'eps': 1e-2}, {'singleton': 'zero'},
    {'singleton': 'zero', 'normalize_std': False}], ids=str)
def test_equals_a_numpy_loop(options):
  rng = np.random.default_rng(0)
  for _ in range(20):
    rewards, group_ids, mask = rng.normal(size=N), rng.integers(0, G, N), rng.random(N) < 0.7
    got = compute(rewards, group_ids, G, mask=mask, **options)
    np.testing.assert_allclose(got, by_hand(rewards, group_ids, mask, **options), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize('value', [1.4, 0.1, -3.3, 1e30, 1e-30])
def test_equal_rewards_are_exactly_zero(value):
  # torch's float32 mean of eight times 1.4 is off by one bit; divided by eps, that is an advantage of 0.106.
  got = compute(np.full(8, value, np.float32), np.zeros(8, int), 1)
  assert np.array_equal(got, np.zeros(8))


def test_nothing_masked_is_read():
  rewards, group_ids = np.float32([1, 0, np.nan, np.inf, 3]), np.array([0, 0, 0, 1, 1])
  mask = np.array([1, 1, 0, 0, 1])
  clean = np.where(mask, rewards, 0).astype(np.float32)
  assert np.array_equal(compute(rewards, group_ids, 2, mask=mask), compute(clean, group_ids, 2, mask=mask))
  weigh = jnp.arange(1.0, 6.0)
  gradient = jax.jit(jax.grad(lambda r: (group_relative(r, group_ids, 2, mask=mask) * weigh).sum()))(rewards)
  assert np.isfinite(gradient).all()
  assert np.array_equal(gradient[2:4], [0, 0])
  assert np.abs(gradient[:2]).min() > 0


def test_a_nan_that_counts_is_seen():
  got = compute(np.float32([1, np.nan, 0, 1, 2]), np.array([0, 0, 0, 1, 1]), 2)
  assert np.isnan(got[:3]).all() and np.isfinite(got[3:]).all()


def test_ids_outside_the_groups_are_padding():
  rewards, group_ids = np.float32([1, 0, 9, -9]), np.array([0, 0, -1, 1])
  expected = [*compute(rewards[:2], group_ids[:2], 1), 0, 0]
  np.testing.assert_array_equal(compute(rewards, group_ids, 1), expected)


@pytest.mark.parametrize('rewards', [
    [3.4e38, -3.4e38, 0], [1e30, 1e30 + 1e24, 1e30], [1e-38, 0, 1e-38], [1e-44, 0, 0]])
def test_extreme_rewards_give_finite_advantages(rewards):
  for normalize_std in (True, False):
    got = compute(np.float32(rewards), np.zeros(3, int), 1, normalize_std=normalize_std)
    assert np.isfinite(got).all()


compute_steps = jax.jit(truncated_step, static_argnames=('normalize_std', 'ddof', 'eps'))


@pytest.mark.parametrize('options', [{}, {'normalize_std': False}, {'ddof': 0}, {'eps': 0.1}], ids=str)
def test_the_alternatives_of_a_step_are_a_group(options):
  """SLATE, eq. 4."""
  rewards = np.random.default_rng(0).integers(-1, 2, (3, 2, 5)).astype(np.float32)
  flat = by_hand(rewards.ravel(), np.repeat(np.arange(6), 5), np.ones(30, bool), **options)
  np.testing.assert_allclose(compute_steps(rewards, **options).ravel(), flat, atol=1e-4)


def test_equal_scores_are_exactly_zero_and_a_single_alternative_gets_its_reward():
  assert np.array_equal(compute_steps(np.full((2, 8), 1.4, np.float32)), np.zeros((2, 8)))
  # REINFORCE, appendix A.9
  assert np.array_equal(compute_steps(np.float32([[1.0], [0.3]])), np.float32([[1.0], [0.3]]))


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
  full = compute_steps(rewards.sum(axis=-1), normalize_std=False)
  truncated = compute_steps(rewards[:, :, 0], normalize_std=False)
  assert abs(truncated.var() / full.var() * steps - 1) < 0.05
