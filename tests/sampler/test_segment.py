"""Sampling from logits against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.sampler import segment


@pytest.mark.parametrize('vocab', [5, 128, 300])
def test_equally_spaced_uniforms_draw_every_token_as_often_as_it_is_probable(vocab):
  scores = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
  scores[[1, 3]] = -np.inf
  n = 4096
  uniforms = (jnp.arange(n) + 0.5) / n
  tokens, logprobs = segment.sample(jnp.tile(scores, (n, 1)), uniforms, jnp.full(n, 0.7))
  expected = np.exp(scores / 0.7)
  expected /= expected.sum()
  np.testing.assert_allclose(np.bincount(tokens, minlength=vocab) / n, expected, atol=1.5 / n)
  np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=1e-5)


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
  scores = jnp.full((2, 200), -jnp.inf).at[:, 150].set(1.0).at[:, 151].set(0.0)
  tokens, logprobs = segment.sample(scores, jnp.array([0.0, 1 - 2**-24]), jnp.ones(2))
  assert tokens.tolist() == [150, 151]
  assert np.isfinite(logprobs).all()


def test_greedy_reports_temperature_one():
  scores = jnp.array([1.0, 3.0, 2.0])
  (token,), logprob = segment.sample(scores[None], jnp.array([0.99]), jnp.array([0.0]))
  assert token == 1
  np.testing.assert_allclose(logprob, [jax.nn.log_softmax(scores)[1]], atol=1e-6)


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
  tokens, logprobs = segment.sample(scores, uniforms, jnp.ones(len(uniforms)))
  assert np.isfinite(logprobs).all()
  assert np.isfinite(np.asarray(scores)[np.arange(len(tokens)), tokens]).all()
