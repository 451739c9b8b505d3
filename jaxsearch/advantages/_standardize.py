"""The one way in which rewards are compared inside a group, whatever a group is.

`group_relative` (groups named by ids) and `truncated_step` (groups along the last axis) differ only in how a
sum, a minimum and a maximum over a member's group are taken, so they hand these three in; `whiten` has one
group. The arithmetic is arranged so that

  * equal rewards give exactly 0. The mean of eight times 1.4 is not 1.4 in float32, and the remainder
    divided by `eps` would be credit out of nothing; the differences to the group's smallest member are 0;
  * nothing overflows or underflows: the differences are measured in units of the group's range before they
    are squared.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

OverGroup = Callable[[jax.Array], jax.Array]

# The difference of two finite numbers may overflow, and the reciprocal of a very large one, which XLA
# multiplies with instead of dividing, may be flushed to 0. Scaling by this power of two avoids both.
SCALE = 1 / 16


def standardize(
    rewards: jax.Array,
    retained: jax.Array,
    *,
    total: OverGroup,
    lowest: OverGroup,
    highest: OverGroup,
    normalize_std: bool,
    ddof: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns `(r - mean) / (std + eps)` within each group, and how many retained members each group has.

  Args:
    rewards: [...] float32; those that are not retained may hold anything.
    retained: [...] bool, the members that count; the others get 0.
    total: sum over each member's group of an array [...], given back to every member: [...].
    lowest: the same for the minimum.
    highest: the same for the maximum.
    normalize_std: False leaves out the division.
    ddof: the variance is the sum of squares over `max(members - ddof, 1)`, so that one member alone has
      variance 0.
    eps: added to the standard deviation, as in verl.

  Returns:
    ([...] advantages, [...] the count of each member's group), both float32.
  """
  count = total(retained.astype(jnp.float32))
  offsets, unit, varied = in_units(rewards, retained, lowest=lowest, highest=highest)
  centred = jnp.where(retained, offsets - total(offsets) / jnp.maximum(count, 1.0), 0.0)
  if not normalize_std:
    return jnp.where(retained & varied, (unit * centred) / SCALE, 0.0), count
  variance = total(jnp.square(centred)) / jnp.maximum(count - ddof, 1.0)
  deviation = jnp.sqrt(jnp.where(varied, variance, 1.0))
  return jnp.where(retained & varied, centred / (deviation + SCALE * eps / unit), 0.0), count


def in_units(
    x: jax.Array, retained: jax.Array, *, lowest: OverGroup, highest: OverGroup
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Measures x in units of its group's range, from its group's smallest member.

  What is computed from these offsets must depend neither on the unit nor on the smallest member, as a mean
  removed and a standard deviation do; then `stop_gradient` on both is exact, and keeps the ties of min and
  max out of gradients.

  Args:
    x: [...] float32; where it is not retained it may hold anything.
    retained: [...] bool.
    lowest: minimum over each member's group, given back to every member.
    highest: the same for the maximum.

  Returns:
    ([...] offsets in [0, 1], 0 where not retained; [...] SCALE times the unit, positive and finite, whatever
    x is; [...] bool, whether the group's members differ).
  """
  scaled = SCALE * jnp.where(retained, x, 0.0)
  floor = jax.lax.stop_gradient(lowest(jnp.where(retained, scaled, jnp.inf)))
  offsets = jnp.where(retained, scaled - floor, 0.0)
  unit = jax.lax.stop_gradient(highest(offsets))
  varied = unit != 0  # NaN counts as varied, so that a reward of NaN is seen and not taken for "all equal"
  unit = jnp.where(varied, unit, 1.0)
  return offsets / unit, unit, varied
