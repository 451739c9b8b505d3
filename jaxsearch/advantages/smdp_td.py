"""CARL: the credit of a segment is the change of the critic's value across it.

B: trajectories; K: segments of the longest; a trajectory of n segments has decision states s_0 … s_{n-1}.
"""

import jax
import jax.numpy as jnp

from jaxsearch.advantages.gae import gae


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
