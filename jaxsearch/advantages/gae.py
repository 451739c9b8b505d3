"""Generalised advantage estimation over tokens, and whitening (PPO).

B: trajectories; T: tokens of a trajectory, observations among them.
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

  verl's and TRL's `masked_whiten`: Bessel's correction, epsilon under the root. One token alone gives 0, and
  so do equal values, exactly. `x` and `mask` (1 where x counts) have the same shape, which the result has
  too, in float32, 0 where masked.
  """
  counted = jnp.asarray(mask) != 0
  x = jnp.asarray(x).astype(jnp.float32)
  offsets, unit, _ = in_units(x, counted, lowest=jnp.min, highest=jnp.max)
  count = jnp.sum(counted, dtype=jnp.float32)
  centred = jnp.where(counted, offsets - jnp.sum(offsets) / jnp.maximum(count, 1.0), 0.0)
  variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
  # For a tiny range the quotient is infinite and the result 0, as it should be.
  return centred * jax.lax.rsqrt(variance + jnp.square(SCALE * 1e-4 / unit))
