"""Search-R2: hybrid reward, and the decomposition of the gain on a problem known in closed form."""

import jax.numpy as jnp
import numpy as np

from jaxsearch.advantages import hybrid_reward, refinement_gain


def test_process_counts_only_with_a_right_answer():
  got = hybrid_reward(np.array([1, 1, 0]), np.array([0.5, 0.0, 1.0]))
  np.testing.assert_array_equal(got, [1.5, 1.0, 0.0])
  assert got.dtype == jnp.float32


def problem(seed, drafts=64, cuts=4):
  """Drafts with known reward and value of regenerating from each cut, any discriminator and trimmer."""
  rng = np.random.default_rng(seed)
  reward = rng.integers(0, 2, drafts).astype(np.float64)
  value = rng.random((drafts, cuts))                    # E[reward | regenerated from this cut]
  cut_probs = rng.dirichlet(np.ones(cuts), drafts)
  return rng.random(drafts), cut_probs, value, reward


def test_terms_equal_a_numpy_loop_and_recompose_the_gain():
  accept, cut_probs, value, reward = problem(0)
  gain, trimmed = value - reward[:, None], (cut_probs * value).sum(axis=1)
  terms = refinement_gain(accept, cut_probs, gain, reward, trimmed)
  def cov(x, y):
    return np.cov(x, y, ddof=0)[0, 1]
  assert set(terms) == {'a_prec', 'v_inter', 's_trim'}
  np.testing.assert_allclose(terms['a_prec'], cov(accept, reward - trimmed), atol=1e-6)
  np.testing.assert_allclose(terms['v_inter'], 1 - accept.mean(), atol=1e-6)
  skill = sum(cov(cut_probs[:, k], gain[:, k]) for k in range(4))
  np.testing.assert_allclose(terms['s_trim'], skill, atol=1e-6)
  # Search-R2, eqs. 4 and 15: every draft is equally likely, so all expectations are plain means.
  baseline = (cut_probs.mean(axis=0) * gain.mean(axis=0)).sum()
  measured = (accept * reward + (1 - accept) * trimmed).mean() - reward.mean()
  recomposed = terms['a_prec'] + terms['v_inter'] * (terms['s_trim'] + baseline)
  np.testing.assert_allclose(recomposed, measured, atol=1e-6)
