"""GAE over tokens and segments, and whitening: against a NumPy loop, CARL's identity."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.advantages import gae, smdp_td, whiten

B, T = 3, 6
QUICK = hypothesis.settings(max_examples=30, deadline=None)
compute = jax.jit(gae)
numbers = hnp.arrays(np.float32, (B, T), elements=st.integers(-16, 16).map(lambda x: x / 8))
masks = hnp.arrays(bool, (B, T))

REWARDS = np.float32([[0, 0, 0, 0, 0, 1], [0, 0.5, 0, 0, -1, 0]])
VALUES = np.float32([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.6, 0.1, 0.2, 0.9, 0.4, 0.3]])
MASK = np.array([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1, 0]])


def by_hand(rewards, values, mask, gamma, lam):
  """Schulman et al. 2016, eq. 16 as a double sum, over what is left when the masked tokens are cut out."""
  advantages = np.zeros(mask.shape)
  for row in range(len(mask)):
    kept = np.flatnonzero(mask[row])
    r, v = rewards[row, kept].astype(np.float64), np.append(values[row, kept], 0.0).astype(np.float64)
    deltas = r + gamma * v[1:] - v[:-1]
    for i in range(len(kept)):
      advantages[row, kept[i]] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(kept)))
  return advantages, np.where(mask, advantages + values, 0)


@QUICK
@hypothesis.given(numbers, numbers, masks, st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
def test_equals_cutting_masked_tokens_out(rewards, values, mask, gamma, lam):
  for got, expected in zip(compute(rewards, values, mask, gamma=gamma, lam=lam),
                           by_hand(rewards, values, mask, gamma, lam)):
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_nothing_masked_is_read_and_nothing_flows_back_to_it():
  rewards, values = np.where(MASK, REWARDS, np.nan), np.where(MASK, VALUES, np.inf)
  advantages, returns = compute(rewards, values, MASK, gamma=0.9, lam=0.7)
  assert np.isfinite(advantages).all() and np.isfinite(returns).all()
  weigh = np.random.default_rng(0).normal(size=MASK.shape)
  gradient_of = jax.jit(jax.grad(lambda v: (gae(rewards, v, MASK, gamma=0.9, lam=0.7)[0] * weigh).sum()))
  gradient = gradient_of(jnp.float32(values))
  assert np.array_equal(gradient != 0, MASK == 1)
  assert np.isfinite(gradient).all()


@QUICK
@hypothesis.given(numbers, masks, st.permutations(range(B)))
def test_whitened_has_mean_zero_and_sample_variance_one(x, mask, order):
  got = np.asarray(jax.jit(whiten)(x, mask))
  assert not np.any(got[~mask])
  inside = got[mask]
  if len(inside) > 1 and np.ptp(x[mask]) > 0:
    assert abs(inside.mean()) < 1e-4
    np.testing.assert_allclose(inside.var(ddof=1), 1.0, atol=1e-3)
  else:
    assert not np.any(inside)
  np.testing.assert_allclose(jax.jit(whiten)(x[order, :] * 4 + 3, mask[order, :]), got[order, :], atol=1e-4)


def test_a_nan_at_a_masked_position_does_not_leak_into_whitening():
  x, mask = np.float32([1, 2, 4, np.nan, np.inf]), np.array([1, 1, 1, 0, 0])
  np.testing.assert_allclose(whiten(x, mask), [-0.8728715, -0.2182179, 1.0910894, 0, 0], atol=1e-6)
  gradient = jax.jit(jax.grad(lambda x: (whiten(x, mask) * jnp.arange(5.0)).sum()))(x)
  assert np.isfinite(gradient).all() and not np.any(gradient[3:]) and np.any(gradient[:3])


@QUICK
@hypothesis.given(numbers, hnp.arrays(np.float32, B, elements=st.sampled_from([0.0, 1.0, 0.4])),
                  hnp.arrays(np.int32, B, elements=st.integers(0, T)), st.sampled_from([1.0, 0.9]),
                  st.sampled_from([0.0, 0.5, 1.0]))
def test_segments_are_credited_as_tokens_are(values, reward, num_segments, gamma, lam):
  """CARL, eqs. 1 and 6; with gamma = 1 and lambda = 0 they telescope."""
  segments = np.arange(T)
  rewards = np.where(segments == num_segments[:, None] - 1, reward[:, None], 0)
  expected, _ = by_hand(rewards, values, segments < num_segments[:, None], gamma, lam)
  np.testing.assert_allclose(smdp_td(values, reward, num_segments, gamma=gamma, lam=lam), expected, atol=1e-4)
  total = np.asarray(smdp_td(values, reward, num_segments)).sum(axis=1)
  np.testing.assert_allclose(total, np.where(num_segments > 0, reward - values[:, 0], 0), atol=1e-4)


def test_segments_past_the_end_are_neither_read_nor_written():
  values, lengths = np.float32([[0.2, 0.5, np.nan], [np.nan, np.inf, np.nan]]), np.array([2, 0])
  got = smdp_td(values, np.float32([1.0, np.nan]), lengths)
  np.testing.assert_allclose(got, [[0.3, 0.5, 0], [0, 0, 0]], atol=1e-6)
  gradient = jax.jit(jax.grad(lambda v: (smdp_td(v, jnp.ones(2), lengths) ** 2).sum()))(values)
  assert np.isfinite(gradient).all() and np.array_equal(gradient != 0, [[True, True, False], [False] * 3])
