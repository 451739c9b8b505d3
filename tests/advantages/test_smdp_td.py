"""CARL's segment advantages: against a NumPy loop, the telescoping identity, the two ends of lambda."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.advantages import smdp_td

B, K = 4, 5
QUICK = hypothesis.settings(max_examples=30, deadline=None)
compute = jax.jit(smdp_td)
values_of = hnp.arrays(np.float32, (B, K), elements=st.integers(0, 32).map(lambda x: x / 32))
rewards_of = hnp.arrays(np.float32, B, elements=st.sampled_from([0.0, 1.0, 0.4]))
lengths_of = hnp.arrays(np.int32, B, elements=st.integers(0, K))


def by_hand(values, reward, num_segments, gamma=1.0, lam=0.0):
  """CARL, eqs. 1 and 6, segment after segment."""
  advantages = np.zeros(values.shape)
  for row, n in enumerate(num_segments):
    deltas = [reward[row] - values[row, k] if k == n - 1 else gamma * values[row, k + 1] - values[row, k]
              for k in range(n)]
    for k in range(n):
      advantages[row, k] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, n))
  return advantages


@QUICK
@hypothesis.given(
    values_of, rewards_of, lengths_of, st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.5, 1.0]))
def test_equals_a_numpy_loop(values, reward, num_segments, gamma, lam):
  got = compute(values, reward, num_segments, gamma=gamma, lam=lam)
  np.testing.assert_allclose(got, by_hand(values, reward, num_segments, gamma, lam), atol=1e-5)


@QUICK
@hypothesis.given(values_of, rewards_of, lengths_of)
def test_telescopes(values, reward, num_segments):
  got = np.asarray(compute(values, reward, num_segments))
  expected = np.where(num_segments > 0, reward - values[:, 0], 0)
  np.testing.assert_allclose(got.sum(axis=1), expected, atol=1e-5)


def test_the_example_of_the_figure():
  # A good search and a bad extraction get opposite signs although the outcome is one number.
  got = compute(np.float32([[0.32, 0.71, 0.45]]), np.float32([0.0]), np.array([3]))
  np.testing.assert_allclose(got, [[0.39, -0.26, -0.45]], atol=1e-6)


def test_entries_past_the_end_are_neither_read_nor_written():
  values, lengths = np.float32([[0.2, 0.5, np.nan], [np.nan, np.inf, np.nan]]), np.array([2, 0])
  got = compute(values, np.float32([1.0, np.nan]), lengths)
  np.testing.assert_allclose(got, [[0.3, 0.5, 0], [0, 0, 0]], atol=1e-6)
  gradient = jax.jit(jax.grad(lambda v: (smdp_td(v, jnp.ones(2), lengths) ** 2).sum()))(values)
  assert np.isfinite(gradient).all() and np.array_equal(gradient != 0, [[True, True, False], [False] * 3])
