"""Sampling from logits against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.sampler import segment


def slots(count, temperature=1.0, top_p=1.0, top_k=0):
  zeros = jnp.zeros(count, jnp.int32)
  return segment.Slots(*[zeros] * 5, temperature=jnp.full(count, temperature), top_p=jnp.full(count, top_p),
                       top_k=jnp.full(count, top_k), states=zeros, forbidden=zeros)


@pytest.mark.parametrize('vocab', [5, 128, 300])
def test_equally_spaced_uniforms_draw_every_token_as_often_as_it_is_probable(vocab):
  scores = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
  forbidden = np.zeros(vocab, bool)
  forbidden[[1, 3]] = True
  n = 4096
  uniforms = (jnp.arange(n) + 0.5) / n
  tokens, logprobs = segment.sample(jnp.tile(scores, (n, 1)), uniforms, slots(n, temperature=0.7), jnp.tile(forbidden, (n, 1)))
  expected = np.where(forbidden, 0, np.exp(scores / 0.7))
  expected /= expected.sum()
  np.testing.assert_allclose(np.bincount(tokens, minlength=vocab) / n, expected, atol=1.5 / n)
  np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=1e-5)


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
  scores = jnp.full((2, 200), -jnp.inf).at[:, 150].set(1.0).at[:, 151].set(0.0)
  tokens, logprobs = segment.sample(scores, jnp.array([0.0, 1 - 2**-24]), slots(2), jnp.zeros((2, 200), bool))
  assert tokens.tolist() == [150, 151]
  assert np.isfinite(logprobs).all()


def test_greedy_ignores_truncation_and_reports_temperature_one():
  scores = jnp.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
  mixed = slots(2)._replace(temperature=jnp.array([0.0, 1.0]), top_k=jnp.array([1, 1]))
  tokens, logprobs = segment.sample(scores, jnp.array([0.99, 0.99]), mixed, jnp.zeros((2, 3), bool))
  assert tokens.tolist() == [1, 1]
  np.testing.assert_allclose(logprobs, [jax.nn.log_softmax(scores[0])[1], 0.0], atol=1e-6)


@pytest.mark.parametrize('top_k, top_p', [(1, 1.0), (7, 1.0), (0, 0.5), (0, 0.95), (20, 0.8), (10**6, 0.999)])
def test_truncation_keeps_what_sorting_keeps(top_k, top_p):
  rng = np.random.default_rng(1)
  scores = rng.normal(size=(6, 300)).astype(np.float32) * 3
  on = np.array([True] * 5 + [False])
  result = segment.truncate(scores, jnp.full(6, top_k), jnp.full(6, np.float32(top_p)), on)
  for row, kept, truncated in zip(scores, result, on):
    order = np.argsort(-row)
    if truncated and top_k:
      order = order[:top_k]
    if truncated and top_p < 1:
      mass = np.cumsum(np.exp(row[order].astype(np.float64)) / np.exp(row[order].astype(np.float64)).sum())
      order = order[:np.searchsorted(mass, top_p) + 1]
    expected = np.full_like(row, -np.inf)
    expected[order] = row[order]
    np.testing.assert_array_equal(np.isfinite(kept), np.isfinite(expected))


def test_draws_belong_to_episode_request_and_depth():
  key = jax.random.key(0)
  draw = lambda episodes, requests, lengths, steps=6: np.asarray(segment.draws(
    key, jnp.array(episodes), jnp.array(requests), jnp.array(lengths), steps=steps))
  both = draw([4, 9], [1, 2], [10, 20])
  np.testing.assert_array_equal(draw([9], [2], [20])[0], both[1])
  np.testing.assert_array_equal(draw([9, 4], [2, 1], [22, 13])[0, :4], both[1, 2:])     # a later segment
  assert len(np.unique(both)) == both.size
  assert not np.array_equal(draw([4], [2], [10])[0], both[0])
  assert ((both >= 0) & (both < 1)).all()


def test_a_token_of_probability_0_is_never_drawn_where_rounding_makes_room_for_it():
  # Of 300 tokens in 152,064 most blocks have no mass, yet their running sum may exceed the one before: it is added up in
  # another order. The uniform numbers here lie in just these gaps.
  vocab, found = 152_064, []
  place = jax.jit(lambda scores: jnp.sum(jnp.exp(scores - jnp.max(scores)).reshape(-1, segment.BLOCK), axis=-1))
  for seed in range(40):
    if len(found) > 7:
      break
    rng = np.random.default_rng(seed)
    scores = np.full(vocab, -np.inf, np.float32)
    scores[rng.choice(vocab, 300, replace=False)] = rng.normal(size=300) * 3
    masses = place(scores)
    sums = np.asarray(jnp.cumsum(masses), np.float64)
    before = np.maximum.accumulate(sums)
    for block in 1 + np.flatnonzero((np.asarray(masses)[1:] == 0) & (sums[1:] > before[:-1])):
      gap = (sums[block] + before[block - 1]) / 2, before[block - 1]
      found.append((scores, *np.float32(gap / sums[-1])))
  assert found  # else this platform adds in order, and nothing is tested
  scores = jnp.stack([scores for scores, *_ in found for _ in range(2)])
  uniforms = jnp.array([uniform for _, *own in found for uniform in own])
  tokens, logprobs = segment.sample(scores, uniforms, slots(len(uniforms)), jnp.zeros(scores.shape, bool))
  assert np.isfinite(logprobs).all()
  assert np.isfinite(np.asarray(scores)[np.arange(len(tokens)), tokens]).all()
