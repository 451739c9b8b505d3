"""GRPO's advantage: the reward of a trajectory against those of the other trajectories of its question.

N: trajectories, in any order; G: groups (questions).
"""

import jax
import jax.numpy as jnp

from jaxsearch.advantages._standardize import standardize


def group_relative(
    rewards: jax.Array,
    group_ids: jax.Array,
    num_groups: int,
    *,
    mask: jax.Array | None = None,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = 'raw',
) -> jax.Array:
  """`A_i = (r_i - mean) / (std + eps)` over the retained members of i's group (GRPO; CuSearch section 3.1).

  The conventions are those of verl's `compute_grpo_outcome_advantage`, which Search-R1, Search-R2 and
  CuSearch run on: sample standard deviation (ddof=1), `eps` added to it rather than under the root, and a
  group with a single member treated as if it had mean 0 and standard deviation 1.

  Args:
    rewards: [N], any float or integer type.
    group_ids: [N] integers in [0, num_groups). Another id is treated as masked, which serves padding.
    num_groups: G, a Python int.
    mask: [N], 1 for the members that were retained. The others get 0 and do not count; they may hold NaN.
      None: all.
    normalize_std: False gives `r_i - mean` (Dr. GRPO, Liu et al. 2025).
    ddof: 1 for the sample, 0 for the population standard deviation.
    eps: added to the standard deviation.
    singleton: the advantage of the only retained member of a group: 'raw' its reward as it is, 'zero' 0.

  Returns:
    [N] float32. A group whose retained rewards are all equal gets exactly 0.

  Raises:
    ValueError: if `singleton` is neither 'raw' nor 'zero'.
  """
  if singleton not in ('raw', 'zero'):
    raise ValueError(f"group_relative: singleton {singleton!r} is neither 'raw' nor 'zero'")
  rewards = jnp.asarray(rewards).astype(jnp.float32)
  group_ids = jnp.asarray(group_ids)
  retained = (group_ids >= 0) & (group_ids < num_groups)
  if mask is not None:
    retained &= jnp.asarray(mask) != 0
  ids = jnp.where(retained, group_ids, 0).astype(jnp.int32)

  def over_group(reduce):
    return lambda x: reduce(x, ids, num_groups)[ids]

  # What is not retained has id 0 and a neutral value, in maxima too: offsets are never negative.
  advantages, count = standardize(
      rewards, retained,
      total=over_group(jax.ops.segment_sum),
      lowest=over_group(jax.ops.segment_min),
      highest=over_group(jax.ops.segment_max),
      normalize_std=normalize_std, ddof=ddof, eps=eps)
  if singleton == 'raw':
    return jnp.where(retained & (count == 1), rewards, advantages)
  return advantages
