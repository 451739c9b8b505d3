"""Search-R2: the reward with its process factor, and the three terms that a refiner's gain consists of.

N: drafts; K: places where a draft may be cut.
"""

import jax
import jax.numpy as jnp


def hybrid_reward(outcome: jax.Array, process: jax.Array) -> jax.Array:
  """`outcome * (1 + process)`: the process counts only where the answer is right (Search-R2, section 3.3).

  In the paper `outcome` is the exact match and `process` the share of useful ones among the M retrieved
  collections. Both have the same shape, which the result has too, in float32.
  """
  outcome, process = (jnp.asarray(x).astype(jnp.float32) for x in (outcome, process))
  return outcome * (1.0 + process)


def refinement_gain(accept: jax.Array, cut_probs: jax.Array, regeneration_gain: jax.Array, reward: jax.Array,
                    trimmed_reward: jax.Array) -> dict[str, jax.Array]:
  """Splits the gain of a discriminator and a trimmer over the plain actor (Search-R2, appendix D).

  With expectations over the N drafts and `Cov(X, Y) = E[XY] - E[X] E[Y]`:

    a_prec  = Cov(accept, reward - trimmed_reward)       the discriminator keeps what cutting would harm
    v_inter = 1 - E[accept]                              how much is cut at all
    s_trim  = sum over k of Cov(cut_probs_k, gain_k)     the trimmer cuts where regenerating gains most

  The gain is then exactly `a_prec + v_inter (s_trim + g)` with `g = sum over k of E[cut_probs_k] E[gain_k]`,
  the baseline gain of cutting without looking (about 0 in the paper, which leaves it out of eq. 3), if each
  draft's `trimmed_reward - reward` is its `sum over k of cut_probs_k gain_k`.

  Args:
    accept: [N], probability (or 0/1) that the discriminator keeps the draft.
    cut_probs: [N, K], the trimmer's probability of each cut, for every draft, accepted or not.
    regeneration_gain: [N, K], expected reward after regenerating from that cut, minus the draft's reward.
    reward: [N], the draft's reward.
    trimmed_reward: [N], the expected reward after trimming it.
  Returns:
    {'a_prec', 'v_inter', 's_trim'}, float32 scalars.
  """
  given = accept, cut_probs, regeneration_gain, reward, trimmed_reward
  accept, cut_probs, regeneration_gain, reward, trimmed_reward = (
    jnp.asarray(x).astype(jnp.float32) for x in given)
  return dict(a_prec=_covariance(accept, reward - trimmed_reward), v_inter=1.0 - jnp.mean(accept),
              s_trim=jnp.sum(_covariance(cut_probs, regeneration_gain)))


def _covariance(x, y):  # centred first: E[XY] - E[X]E[Y] as it stands cancels in float32
  return jnp.mean((x - jnp.mean(x, axis=0)) * (y - jnp.mean(y, axis=0)), axis=0)
