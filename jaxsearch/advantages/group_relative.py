"""The one way in which rewards are compared inside a group: the trajectories of a question (GRPO) or the
alternatives of a step (SLATE).

`group_relative` (groups named by ids) and `truncated_step` (groups along the last axis) hand a sum, a minimum
and a maximum over a member's group to `standardize`; `gae.whiten` has one group. Equal rewards give exactly
0: the mean of eight times 1.4 is not 1.4 in float32, and the remainder divided by `eps` would be credit out
of nothing, but the differences to the group's smallest member are 0. Nothing overflows or underflows:
differences are measured in units of the group's range before they are squared.

N: trajectories, in any order; G: groups (questions).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

OverGroup = Callable[[jax.Array], jax.Array]

# The difference of two finite numbers may overflow, and the reciprocal of a very large one, which XLA
# multiplies with instead of dividing, may be flushed to 0. Scaling by this power of two avoids both.
SCALE = 1 / 16


def group_relative(rewards: jax.Array, group_ids: jax.Array, num_groups: int, *,
                   mask: jax.Array | None = None, normalize_std: bool = True, ddof: int = 1,
                   eps: float = 1e-6, singleton: str = 'raw') -> jax.Array:
  """`A_i = (r_i - mean) / (std + eps)` over the retained members of i's group (GRPO; CuSearch section 3.1).

  The defaults are those of verl's `compute_grpo_outcome_advantage`, which Search-R1, Search-R2 and CuSearch
  run on: sample standard deviation, and a single member's reward as it is.

  Args:
    rewards: [N], any float or integer type.
    group_ids: [N] integers in [0, num_groups). Another id is treated as masked, which serves padding.
    num_groups: G, a Python int.
    mask: [N], 1 for the members that were retained. The others get 0 and do not count; they may hold NaN.
      None: all.
    normalize_std: False gives `r_i - mean` (Dr. GRPO, Liu et al. 2025).
    ddof: 1 for the sample, 0 for the population standard deviation.
    eps: added to the standard deviation, not under the root.
    singleton: the advantage of the only retained member of a group: 'raw' its reward as it is, 'zero' 0.
  Returns:
    [N] float32. A group whose retained rewards are all equal gets exactly 0.
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
    rewards, retained, total=over_group(jax.ops.segment_sum), lowest=over_group(jax.ops.segment_min),
    highest=over_group(jax.ops.segment_max), normalize_std=normalize_std, ddof=ddof, eps=eps)
  return jnp.where(retained & (count == 1), rewards, advantages) if singleton == 'raw' else advantages


def standardize(rewards: jax.Array, retained: jax.Array, *, total: OverGroup, lowest: OverGroup,
                highest: OverGroup, normalize_std: bool, ddof: int,
                eps: float) -> tuple[jax.Array, jax.Array]:
  """Returns `(r - mean) / (std + eps)` within each group, and each member's group size, both float32 [...].

  Args:
    rewards: [...] float32; those that are not retained may hold anything.
    retained: [...] bool, the members that count; the others get 0.
    total, lowest, highest: sum, minimum and maximum of an array [...] over each member's group, given back to
      every member.
    ddof: the variance is the sum of squares over `max(members - ddof, 1)`, so one member alone has variance
      0.
  """
  count = total(retained.astype(jnp.float32))
  offsets, unit, varied = in_units(rewards, retained, lowest=lowest, highest=highest)
  centred = jnp.where(retained, offsets - total(offsets) / jnp.maximum(count, 1.0), 0.0)
  if not normalize_std:
    return jnp.where(retained & varied, (unit * centred) / SCALE, 0.0), count
  variance = total(jnp.square(centred)) / jnp.maximum(count - ddof, 1.0)
  deviation = jnp.sqrt(jnp.where(varied, variance, 1.0))
  return jnp.where(retained & varied, centred / (deviation + SCALE * eps / unit), 0.0), count


def in_units(x: jax.Array, retained: jax.Array, *, lowest: OverGroup,
             highest: OverGroup) -> tuple[jax.Array, ...]:
  """Measures x [...] float32 in units of its group's range, from its smallest member; see `standardize`.

  The result must depend neither on the unit nor on the smallest member; then `stop_gradient` on both is
  exact, and keeps the ties of min and max out of gradients.

  Returns:
    [...] offsets in [0, 1], 0 where not retained; [...] SCALE times the unit, positive and finite; [...]
    bool, whether the group's members differ.
  """
  scaled = SCALE * jnp.where(retained, x, 0.0)
  floor = jax.lax.stop_gradient(lowest(jnp.where(retained, scaled, jnp.inf)))
  offsets = jnp.where(retained, scaled - floor, 0.0)
  unit = jax.lax.stop_gradient(highest(offsets))
  varied = unit != 0  # NaN counts as varied, so that a reward of NaN is seen and not taken for "all equal"
  unit = jnp.where(varied, unit, 1.0)
  return offsets / unit, unit, varied


def truncated_step(rewards: jax.Array, *, normalize_std: bool = True, ddof: int = 1,
                   eps: float = 1e-6) -> jax.Array:
  """Credits each of k alternatives for a step against the others: `(r - mean) / (std + eps)` (SLATE, eq. 4).

  With k = 1 there is nothing to compare with: the advantage is the reward itself, as in REINFORCE (appendix
  A.9).

  Args:
    rewards: [..., k], the judged score of every alternative grown from the same prefix.
    normalize_std, ddof, eps: as in `group_relative`.
  Returns:
    [..., k] float32; exactly 0 where all of several alternatives scored the same.
  """
  rewards = jnp.asarray(rewards).astype(jnp.float32)
  if rewards.shape[-1] == 1:
    return rewards

  def over_group(reduce):
    return lambda x: jnp.broadcast_to(reduce(x, axis=-1, keepdims=True), x.shape)

  return standardize(
    rewards, jnp.ones(rewards.shape, bool), total=over_group(jnp.sum), lowest=over_group(jnp.min),
    highest=over_group(jnp.max), normalize_std=normalize_std, ddof=ddof, eps=eps)[0]


def step_reward(think: jax.Array, query: jax.Array, answer: jax.Array, is_answer: jax.Array, step: jax.Array,
                budget: jax.Array, *, early_bonus: float) -> jax.Array:
  """Returns the reward of one step from scores of a judge, each in {-1, 0, 1} (SLATE, eqs. 5 and 6).

    a search:   think + query
    an answer:  think + answer + early_bonus (budget - step) / budget

  Args:
    think: [...], score of the reasoning.
    query: [...], score of the query with its documents; not read (may be NaN) where the step answers.
    answer: [...], score of the answer; not read (may be NaN) where the step searches.
    is_answer: [...], 1 where the step answers, 0 where it searches.
    step: [...], counted from 1.
    budget: B, the most steps there may be; 4 in the paper.
    early_bonus: lambda, 0.1 in the paper.
  Returns:
    Same shape, float32.
  """
  given = think, query, answer, step, budget
  think, query, answer, step, budget = (jnp.asarray(x).astype(jnp.float32) for x in given)
  answer += early_bonus * (budget - step) / budget
  return think + jnp.where(jnp.asarray(is_answer) != 0, answer, query)
