"""Losses: figures of verl, gradients by hand, what is masked, the papers' objectives from one `aggregate`."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch import losses
from jaxsearch.advantages import group_relative

B, T = 3, 5
QUICK = hypothesis.settings(max_examples=30, deadline=None)
MODES = ['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum']
aggregate = jax.jit(losses.aggregate, static_argnames='how')
surrogate = jax.jit(losses.clipped_surrogate, static_argnames=('clip_low', 'clip_high', 'dual_clip'))
kl = jax.jit(losses.kl, static_argnames='kind')
numbers = hnp.arrays(np.float32, (B, T), elements=st.integers(-16, 16).map(lambda x: x / 8))
masks = hnp.arrays(bool, (B, T))

# Figures of verl's formulas, evaluated in torch float32: compute_policy_loss_vanilla, kl_penalty_forward,
# compute_value_loss and agg_loss of verl/trainer/ppo/core_algos.py.
LOGP = np.float32([[-1, -0.5, -2, -0.1, -3, -1]])
OLD = np.float32([[-1.2, -0.1, -2, -2, -1, -31]])
REF = np.float32([[-1.5, -0.5, -1, -4, -28, -0.4]])
ADVANTAGES = np.float32([[1, 1, -0.5, -2, -1, 2]])
ALL = np.ones((1, 6))


def test_clipped_surrogate_equals_verl():
  got = surrogate(LOGP, OLD, ADVANTAGES, ALL, clip_low=0.2, clip_high=0.28)
  np.testing.assert_allclose(got, [[-1.22140276, -0.67032003, 0.5, 13.37178898, 0.8, -2.56]], rtol=1e-6)
  got = surrogate(LOGP, OLD, ADVANTAGES, ALL, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
  np.testing.assert_allclose(got, [[-1.22140276, -0.67032003, 0.5, 6, 0.8, -2.56]], rtol=1e-6)


@pytest.mark.parametrize('kind, expected', [
    ('k1', [0.5, 0, -1, 3.9, 25, -0.6]), ('abs', [0.5, 0, 1, 3.9, 25, 0.6]),
    ('k2', [0.125, 0, 0.5, 7.605, 312.5, 0.18]),
    ('k3', [0.10653067, 0, 0.71828175, 2.92024207, 20 - 1, 0.22211885])])
def test_kl_equals_verl(kind, expected):
  if kind == 'k3':
    expected = np.minimum(expected, 10)
  np.testing.assert_allclose(kl(LOGP, REF, kind=kind), [expected], rtol=1e-5)


def test_value_loss_equals_verl():
  values, old = np.float32([[0.5, 1, -0.2, 0.9]]), np.float32([[0.1, 0.9, 0.3, 0.9]])
  returns, mask = np.float32([[1, 0, 0.5, 0.4]]), np.ones((1, 4))
  got = losses.value_loss(values, old, returns, mask, clip=0.2)
  np.testing.assert_allclose(got, [[0.245, 0.5, 0.245, 0.125]], rtol=1e-6)
  np.testing.assert_allclose(
      losses.value_loss(values, None, returns, mask), [[0.125, 0.5, 0.245, 0.125]], rtol=1e-6)


def test_gradient_of_the_surrogate_by_hand():
  # -ratio A inside the clip range and where clipping would help the loss; 0 where the clip binds.
  logp = jnp.array([[0.1, 0.4, -0.4, 0.4, -0.4, 30.0]])
  advantages = jnp.array([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
  gradient = jax.jit(jax.grad(lambda x: losses.clipped_surrogate(
      x, jnp.zeros((1, 6)), advantages, jnp.ones((1, 6)), clip_low=0.2, clip_high=0.2).sum()))(logp)
  np.testing.assert_allclose(gradient, [[-np.exp(0.1), 0, -np.exp(-0.4), np.exp(0.4), 0, 0]], rtol=1e-5)


def test_k3_estimates_the_kl_and_keeps_its_digits():
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
  exact = (p * np.log(p / q)).sum()
  np.testing.assert_allclose((p * kl(np.log(p), np.log(q), kind='k3')).sum(), exact, rtol=1e-5)
  np.testing.assert_allclose(kl(np.float32([1e-4]), np.float32([0]), kind='k3'), [0.5e-8], rtol=1e-3)


@QUICK
@hypothesis.given(numbers, numbers, st.sampled_from([1.0, 2.0]))
def test_importance_weights_are_capped_from_above_alone_and_have_no_gradient(logp, sampler, cap):
  logp, sampler = 20 * logp, 20 * sampler  # up to 80 nats apart
  expected = np.minimum(np.exp(np.clip(logp.astype(np.float64) - sampler, -20, 20)), cap)
  np.testing.assert_allclose(losses.importance_weights(logp, sampler, cap), expected, rtol=1e-5)
  assert not jax.grad(lambda x: losses.importance_weights(x, sampler, cap).sum())(logp).any()


@QUICK
@hypothesis.given(numbers, numbers, numbers, masks, st.sampled_from([(0.2, 0.2), (1.0, 4.0)]))
def test_cispo_equals_a_numpy_loop(logp, old, advantages, mask, bounds):
  low, high = bounds
  loss = lambda logp: losses.cispo(logp, old, advantages, mask, clip_low=low, clip_high=high).sum()
  weight = np.clip(np.exp(logp.astype(np.float64) - old), 1 - low, 1 + high) * mask
  np.testing.assert_allclose(loss(logp), -(weight * advantages * logp).sum(), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(jax.grad(loss)(logp), -weight * advantages, rtol=1e-5)


@pytest.mark.parametrize('low, high, expected, gradients', [
  (0.2, 0.2, [1.35452, -1, -3.34757], [-0.8, 1, 4.8]), (1.0, 4.0, [0.846573, -1, -13.9482], [-0.5, 1, 20])])
def test_cispo_equals_the_released_code(low, high, expected, gradients):
  """verl's compute_policy_loss_cispo in torch, read with its bounds as 0.8 … 1.2 and 0 … 5."""
  new, old, advantages = np.float32([[-1.69315, -1, -0.69741]]), np.float32([[-1, -1, -3]]), np.float32([[1, -1, -4]])
  loss = lambda logp: losses.cispo(logp, old, advantages, np.ones((1, 3)), clip_low=low, clip_high=high)
  np.testing.assert_allclose(loss(new), [expected], rtol=1e-5)
  np.testing.assert_allclose(jax.grad(lambda logp: loss(logp).sum())(new), [gradients], rtol=1e-4)


def gspo(logp, old, advantages, mask, sequences, low, high):
  """GSPO over the sequences of rows, by the pure functions."""
  ratio = losses.sequence_log_ratio(logp, old, sequences, mask, T + 1)
  loss = losses.clipped_surrogate(ratio, jnp.zeros_like(ratio), advantages, mask, clip_low=low, clip_high=high)
  lengths = losses.over_sequences(mask, sequences, mask, T + 1)
  return (loss / lengths).sum() / max(len({(row, sequences[row, i]) for row, i in np.argwhere(mask)}), 1)


@QUICK
@hypothesis.given(numbers, numbers, masks, hnp.arrays(np.int32, (B, T), elements=st.integers(0, T)), st.integers(0, 99))
def test_gspo_equals_a_numpy_loop(logp, old, mask, sequences, seed):
  """The loss of each sequence has one ratio, and its gradient reaches all tokens of it alike."""
  of_sequence = np.random.default_rng(seed).normal(size=(B, T + 1)).astype(np.float32)
  logp = old + 0.1 * (logp - old)
  advantages = np.take_along_axis(of_sequence, sequences, axis=1)
  members = [(row, np.flatnonzero(mask[row] & (sequences[row] == name))) for row in range(B) for name in range(T + 1)]
  members = [(row, places) for row, places in members if len(places)]
  expected, gradients = 0.0, np.zeros((B, T))
  for row, places in members:
    s, advantage = np.exp((logp - old)[row, places].mean(dtype=np.float64)), advantages[row, places[0]]
    unclipped, clipped = -s * advantage, -np.clip(s, 0.9, 1.1) * advantage
    expected += max(unclipped, clipped) / len(members)
    inside = (s < 1.1 if advantage > 0 else s > 0.9)
    gradients[row, places] = unclipped / len(places) / len(members) * inside
  loss = lambda logp: gspo(logp, old, advantages, mask, sequences, 0.1, 0.1)
  hypothesis.assume(all(abs(abs(np.exp((logp - old)[row, places].mean()) - 1) - 0.1) > 1e-4 for row, places in members))
  np.testing.assert_allclose(loss(logp), expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(jax.grad(loss)(logp), gradients, rtol=1e-3, atol=1e-5)


def test_gspo_equals_the_released_code():
  """verl's compute_policy_loss_gspo in torch: two chains, the second clipped."""
  ahead = np.float32([[-0.001, 0.0015, 0, 0.001, -0.0006, -0.001]])
  old, sequences, mask = np.zeros((1, 6), np.float32), np.int32([[0] * 4 + [4] * 2]), np.ones((1, 6))
  loss = lambda logp: gspo(logp, old, np.float32([[1] * 4 + [-1] * 2]), mask, sequences, 3e-4, 4e-4)
  assert float(loss(ahead)) == pytest.approx(-0.0003375, abs=2e-7)
  np.testing.assert_allclose(jax.grad(loss)(ahead), [[-0.125047] * 4 + [0] * 2], rtol=1e-5)


def test_dr_grpo_is_an_average_and_advantages_without_the_deviation():
  """TRL's and verl's figures: token losses 1 2 3 4 | 10 20 | a sequence without any, rewards 1 0 0 0."""
  x, mask = np.float32([[1, 2, 3, 4], [10, 20, 0, 0], [9, 9, 9, 9]]), np.array([[1] * 4, [1, 1, 0, 0], [0] * 4])
  averages = [float(losses.aggregate(x, mask, how)) for how in MODES]
  assert averages == pytest.approx([6.666667, 8.75, 20]) and averages[2] / 8 == 2.5  # TRL's constant: length 8
  rewards, ids = np.float32([1, 0, 0, 0]), np.zeros(4, int)
  np.testing.assert_allclose(group_relative(rewards, ids, 1, normalize_std=False), [0.75, -0.25, -0.25, -0.25])


def test_importance_weights_of_tokens_and_sequences_equal_the_released_code():
  """verl's rollout_corr_helper in torch: truncated at 2, or kept where token_k1 and seq_sum_k1 are in 0.5 … 2."""
  d, sequences = np.float32([[0.5, -0.4, 0.2, -0.9, 0.1]]), np.int32([[0, 0, 0, 3, 3]])
  token, whole = d, losses.over_sequences(d, sequences, np.ones((1, 5)), 5)
  for log_ratio, floor, expected in (
      (token, None, [1.648721, 0.670320, 1.221403, 0.406570, 1.105171]),
      (token, 0.5, [1.648721, 0.670320, 1.221403, 0, 1.105171]),
      (whole, None, [1.349859] * 3 + [0.449329] * 2), (whole, 0.5, [1.349859] * 3 + [0] * 2)):
    np.testing.assert_allclose(losses.importance_weights(log_ratio, 0.0, 2.0, floor), [expected], rtol=1e-5)
  assert losses.importance_weights(np.float32([1.2]), 0.0, 2.0, 0.5)[0] == 0


def test_unknown_names_are_errors():
  with pytest.raises(ValueError, match='k4'):
    losses.kl(LOGP, REF, 'k4')
  with pytest.raises(ValueError, match='mean'):
    losses.aggregate(LOGP, ALL, 'mean')


@pytest.mark.parametrize('kind', ['k1', 'abs', 'k2', 'k3'])
def test_what_is_masked_reaches_neither_loss_nor_gradient(kind):
  mask = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]])
  rng = np.random.default_rng(0)
  logp, old, ref, advantages, values, returns = rng.normal(size=(6, B, T)).astype(np.float32)

  def total(logp, values, fill):
    old_, ref_, advantages_, returns_ = (jnp.where(mask, x, fill) for x in (old, ref, advantages, returns))
    logp, values = jnp.where(mask, logp, fill), jnp.where(mask, values, fill)

    def loss(logp, values):
      per_token = losses.clipped_surrogate(
          logp, old_, advantages_, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
      per_token += losses.value_loss(values, old_, returns_, mask, clip=0.2)
      per_token += losses.value_loss(values, None, returns_, mask)
      per_token += losses.cispo(logp, old_, advantages_, mask, clip_low=0.2, clip_high=0.2)
      ratio = losses.sequence_log_ratio(logp, old_, np.zeros((B, T), int), mask, 1)
      per_token += losses.clipped_surrogate(
          ratio, jnp.zeros_like(ratio), advantages_, mask, clip_low=0.2, clip_high=0.2)
      return losses.aggregate(per_token, mask) + losses.aggregate(
          losses.kl(logp, ref_, kind), mask, 'seq-mean-token-mean')
    return jax.value_and_grad(loss, argnums=(0, 1))(logp, values)

  run = jax.jit(total)
  clean_loss, clean = run(logp, values, 0.0)
  for fill in (np.nan, np.inf, -np.inf, 1e38):
    dirty_loss, dirty = run(logp, values, fill)
    assert dirty_loss == clean_loss and np.isfinite(clean_loss)
    for a, b in zip(dirty, clean):
      np.testing.assert_array_equal(a, b)
      assert not np.any(np.asarray(a)[mask == 0]) and np.all(np.asarray(a)[mask == 1])


def test_a_nan_that_counts_is_seen():
  assert np.isnan(aggregate(kl(np.float32([[np.nan, 0]]), np.float32([[0, 0]]), kind='k3'), np.ones((1, 2))))


@pytest.mark.parametrize('how', MODES)
@QUICK
@hypothesis.given(x=numbers, mask=masks, order=st.permutations(range(B)))
def test_aggregate_equals_a_numpy_loop_and_ignores_order_and_padding(how, x, mask, order):
  rows = [x[b, mask[b]].astype(np.float64) for b in range(B) if mask[b].any()]
  per_row = [row.sum() if how == 'seq-mean-token-sum' else row.mean() for row in rows]
  if how == 'token-mean':
    per_row = np.concatenate([[], *rows])
  expected = np.mean(per_row) if rows else 0.0
  np.testing.assert_allclose(aggregate(x, mask, how=how), expected, atol=1e-5)
  np.testing.assert_allclose(aggregate(x[order, :], mask[order, :], how=how), expected, atol=1e-5)
  padded = [np.pad(array, ((0, 2), (1, 3)), constant_values=c) for array, c in ((x, np.nan), (mask, 0))]
  np.testing.assert_allclose(aggregate(*padded, how=how), expected, atol=1e-5)
