"""Generalised advantage estimation over tokens (PPO) and over segments (CARL), and whitening.

B: trajectories; T: tokens of a trajectory, observations among them; K: segments of the longest, each with a
decision state before it.
"""

import jax
import jax.numpy as jnp

from jaxsearch.advantages.group_relative import SCALE, in_units


def gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, *, gamma: float,
        lam: float) -> tuple[jax.Array, jax.Array]:
  """`A_t = delta_t + gamma lam A_next`, `delta_t = r_t + gamma V_next - V_t` (Schulman et al. 2016, eq. 16).

  "next" is the next token that is not masked, after the last one both V and A are 0: the value and the
  running sum carry over a masked token (an observation, padding) undiscounted. This is verl's
  `compute_gae_advantage_return` before it whitens.

  Args:
    rewards: [B, T]. A reward on a masked token is not seen: put the outcome on the last token that is not
      masked.
    values: [B, T], V of the state before each token.
    mask: [B, T], 1 for the tokens that the policy chose. The others may hold NaN.
    gamma: discount per unmasked token.
    lam: lambda, 0 for one-step differences, 1 for Monte Carlo.
  Returns:
    (advantages [B, T], returns [B, T]), float32: `returns = advantages + values`; both 0 where masked. Not
    whitened.
  """
  chosen = jnp.asarray(mask) != 0
  rewards, values = (jnp.where(chosen, jnp.asarray(x).astype(jnp.float32), 0.0) for x in (rewards, values))

  def backwards(following, token):
    advantage, next_value = following
    reward, value, here = token
    delta = reward + gamma * next_value - value
    advantage = jnp.where(here, delta + gamma * lam * advantage, advantage)
    return (advantage, jnp.where(here, value, next_value)), advantage

  end = jnp.zeros_like(values[:, 0])
  _, advantages = jax.lax.scan(backwards, (end, end), (rewards.T, values.T, chosen.T), reverse=True)
  advantages = jnp.where(chosen, advantages.T, 0.0)
  return advantages, advantages + values


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`(x - mean) / sqrt(var + 1e-8)` with one mean and one sample variance of everything that is not masked.

  verl's and TRL's `masked_whiten`: Bessel's correction, epsilon under the root. One token alone and equal
  values give exactly 0. `x`, `mask` (1 where x counts) and the float32 result, 0 where masked, share a shape.
  """
  counted = jnp.asarray(mask) != 0
  x = jnp.asarray(x).astype(jnp.float32)
  offsets, unit, _ = in_units(x, counted, lowest=jnp.min, highest=jnp.max)
  count = jnp.sum(counted, dtype=jnp.float32)
  centred = jnp.where(counted, offsets - jnp.sum(offsets) / jnp.maximum(count, 1.0), 0.0)
  variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
  # For a tiny range the quotient is infinite and the result 0, as it should be.
  return centred * jax.lax.rsqrt(variance + jnp.square(SCALE * 1e-4 / unit))


def smdp_td(values: jax.Array, reward: jax.Array, num_segments: jax.Array, *, gamma: float = 1.0,
            lam: float = 0.0) -> jax.Array:
  """Semi-Markov temporal differences over segments (CARL, eqs. 1, 4 and 6).

    delta_k = gamma V(s_{k+1}) - V(s_k), for the last segment R - V(s_k)
    A_k     = delta_k + gamma lam A_{k+1}             which is `gae` with a segment for a token

  With gamma = 1 and lam = 0 they telescope: their sum is `R - V(s_0)`. With lam = 1 each is `R - V(s_k)`, so
  that all segments of a trajectory share the sign of its outcome, which is why CARL has lam = 0.

  Args:
    values: [B, K], `values[:, k]` = V(state before segment k). Those past `num_segments` are not read (may be
      NaN).
    reward: [B], the outcome R, received at the end of the last segment.
    num_segments: [B] integers from 0 to K; a larger one is taken for K.
    gamma: discount per segment, not per token: the paper has gamma = 1, where the two agree.
    lam: lambda over segments.
  Returns:
    [B, K] float32, 0 past `num_segments`.
  """
  values = jnp.asarray(values)
  segments = jnp.arange(values.shape[1])
  last = jnp.minimum(jnp.asarray(num_segments), values.shape[1])[:, None] - 1
  rewards = jnp.where(segments == last, jnp.asarray(reward)[:, None], 0.0)
  return gae(rewards, values, segments <= last, gamma=gamma, lam=lam)[0]
