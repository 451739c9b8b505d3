"""Group-relative advantages: against a NumPy loop, figures of verl, the properties that a comparison has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.advantages import group_relative

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


def test_equals_verl():
  # The formula of compute_grpo_outcome_advantage (verl/trainer/ppo/core_algos.py), epsilon=1e-6, in torch.
  got = compute(np.float32([1, 0, 0, 1, 0.7, 0.3, 0.3, 0.5]), np.array([0, 0, 0, 0, 1, 2, 2, 2]), 3)
  expected = [0.8660239, -0.8660239, -0.8660239, 0.8660239, 0.6999993, -0.5773454, -0.5773454, 1.1546906]
  np.testing.assert_allclose(got, expected, rtol=2e-6)


@pytest.mark.parametrize('value', [1.4, 0.1, -3.3, 1e30, 1e-30])
def test_equal_rewards_are_exactly_zero(value):
  # torch's float32 mean of eight times 1.4 is off by one bit; divided by eps, that is an advantage of 0.106.
  got = compute(np.full(8, value, np.float32), np.zeros(8, int), 1)
  assert np.array_equal(got, np.zeros(8))


def test_one_retained_member_is_raw_or_zero():
  rewards, group_ids, mask = np.float32([0.7, 5, 2, 4]), np.array([0, 0, 1, 1]), np.array([1, 0, 1, 1])
  raw = compute(rewards, group_ids, 2, mask=mask)
  assert raw[0] == np.float32(0.7) and raw[1] == 0
  zero = compute(rewards, group_ids, 2, mask=mask, singleton='zero')
  assert zero[0] == 0
  assert np.array_equal(raw[2:], zero[2:])


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


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, jnp.int32, bool])
def test_float32_inside_whatever_comes_in(dtype):
  rewards = jnp.array([1, 0, 0, 1, 1]).astype(dtype)
  got = compute(rewards, jnp.zeros(5, int), 1)
  assert got.dtype == jnp.float32
  expected = by_hand(np.array([1, 0, 0, 1, 1]), np.zeros(5), np.ones(5, bool))
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_gradient_is_that_of_the_formula():
  group_ids, weigh = np.array([0, 0, 0, 1, 1, 1]), np.arange(6.0)
  rewards = np.array([0.3, 1.0, -0.4, 2.0, 1.0, 0.0])
  got = jax.jit(jax.grad(lambda r: (group_relative(r, group_ids, 2) * weigh).sum()))(jnp.float32(rewards))

  def value(r):
    return by_hand(r, group_ids, np.ones(6, bool)) @ weigh
  expected = [(value(rewards + h) - value(rewards - h)) / 2e-6 for h in 1e-6 * np.eye(6)]
  np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize('rewards', [
    [3.4e38, -3.4e38, 0], [1e30, 1e30 + 1e24, 1e30], [1e-38, 0, 1e-38], [1e-44, 0, 0]])
def test_extreme_rewards_give_finite_advantages(rewards):
  for normalize_std in (True, False):
    got = compute(np.float32(rewards), np.zeros(3, int), 1, normalize_std=normalize_std)
    assert np.isfinite(got).all()


def test_vmap_over_batches():
  rewards = np.random.default_rng(1).normal(size=(3, N)).astype(np.float32)
  group_ids = np.random.default_rng(2).integers(0, G, (3, N))
  got = jax.jit(jax.vmap(functools.partial(group_relative, num_groups=G)))(rewards, group_ids)
  np.testing.assert_allclose(got, [compute(r, g, G) for r, g in zip(rewards, group_ids)], rtol=1e-6)
