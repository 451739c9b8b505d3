"""CuSearch: which trajectories are trained on, by the number of searches in them.

In the order of a step: `advance_phase` (only 'phase'), `depth_plan`, `depth_greedy`, `select_by_depth`. After
that the advantages are computed among the selected only: `group_relative(..., mask=selected)`.

S: the deepest search count that is told apart, buckets are 0 … S; K: how many trajectories to select;
k: the phase, from 0 to S-1. Counts are integers.
"""

import jax
import jax.numpy as jnp


def depth_plan(strategy: str, budget: jax.Array, max_depth: int,
               phase: jax.Array = 0) -> tuple[jax.Array, jax.Array]:
  """Plans what `depth_greedy` makes feasible: the whole budget in one bucket, and the order of the others.

    'auto'   (eqs. 5-7)    target S; then S-1, …, 0.
    'phase'  (eqs. 9-11)   target k+1; then deeper ones, k+2, …, S; then shallower ones, k, …, 0.
    'anti'   (eqs. 19-21)  target 0; then 1, …, S. The ablation that should hurt.

  `budget` is K, `max_depth` is S (a Python int) and `phase` is k, which 'phase' alone reads.
  Returns (targets [S+1], priorities [S+1]), int32; a smaller priority goes first. Raises ValueError for
  another strategy.
  """
  targets = {'auto': max_depth, 'phase': jnp.minimum(jnp.asarray(phase, jnp.int32) + 1, max_depth), 'anti': 0}
  if strategy not in targets:
    raise ValueError(f'depth_plan: strategy {strategy!r} is none of {", ".join(map(repr, targets))}')
  depth, target = jnp.arange(max_depth + 1, dtype=jnp.int32), targets[strategy]
  priorities = jnp.where(depth >= target, depth - target + 1, max_depth + 1 - depth)
  return jnp.where(depth == target, jnp.asarray(budget, jnp.int32), 0), priorities


@jax.jit
def depth_greedy(capacities: jax.Array, targets: jax.Array, priorities: jax.Array) -> jax.Array:
  """Repairs `targets` until no bucket holds more than its capacity (CuSearch, algorithm 3), for any targets.

  Buckets are visited by rising priority value (equal ones by index). The overflow of a bucket goes to the
  buckets after it in that order as far as they have room, then to those before it, nearest first.

  Args:
    capacities: [S+1] integers >= 0, how many trajectories each bucket has.
    targets: [S+1] integers >= 0, how many are wanted of each.
    priorities: [S+1] numbers.
  Returns:
    [S+1] int32, `0 <= allocation <= capacities`; the sum is that of `targets`, or of `capacities` if that is
    smaller.
  """
  capacities, targets = (jnp.asarray(x).astype(jnp.int32) for x in (capacities, targets))
  order = jnp.argsort(jnp.asarray(priorities), stable=True)
  buckets = capacities.shape[0]
  rank = jnp.arange(buckets)
  # Visiting rank i, its overflow is offered to i itself (full by then), i+1, …, S, and then to i-1, …, 0.
  offers = jnp.where(rank < buckets - rank[:, None], rank[:, None] + rank, buckets - 1 - rank)
  capacities = capacities[order]

  def visit(allocation, here):
    rank, offered = here
    overflow = jnp.maximum(allocation[rank] - capacities[rank], 0)
    allocation = allocation.at[rank].add(-overflow)

    def place(state, receiver):
      allocation, overflow = state
      moved = jnp.clip(capacities[receiver] - allocation[receiver], 0, overflow)
      return (allocation.at[receiver].add(moved), overflow - moved), None

    (allocation, _), _ = jax.lax.scan(place, (allocation, overflow), offered)
    return allocation, None

  allocation, _ = jax.lax.scan(visit, targets[order], (rank, offers))
  return jnp.zeros_like(allocation).at[order].set(allocation)


def advance_phase(phase: jax.Array, capacities: jax.Array, budget: jax.Array) -> jax.Array:
  """Advances the phase by one if the buckets deeper than the target, k+1, hold the budget.

  CuSearch, eq. 12, strictly deeper. It never goes back and never passes S-1. `capacities` [S+1] are the
  trajectories of each depth in this batch, `budget` is K; the phase is an int32 scalar.
  """
  phase, capacities = jnp.asarray(phase, jnp.int32), jnp.asarray(capacities).astype(jnp.int32)
  buckets = capacities.shape[0]
  deeper = jnp.sum(jnp.where(jnp.arange(buckets) > phase + 1, capacities, 0))
  return jnp.where((deeper >= budget) & (phase < buckets - 2), phase + 1, phase)


def select_by_depth(key: jax.Array, depths: jax.Array, allocation: jax.Array) -> jax.Array:
  """Draws `allocation[s]` of the trajectories of each depth s, uniformly and without replacement.

  Args:
    key: a jax.random key.
    depths: [N] integers. Deeper than S counts as S; a negative depth is never selected, which serves padding.
    allocation: [S+1] integers; where a bucket has fewer, all of it is selected.
  Returns:
    [N] bool, True for the selected.
  """
  depths, allocation = jnp.asarray(depths), jnp.asarray(allocation)
  buckets = allocation.shape[0]
  bucket = jnp.where(depths < 0, buckets, jnp.minimum(depths, buckets - 1))  # padding has a bucket of its own
  # One sort puts each bucket in random order; two equal 32-bit draws, the only bias, are too rare to matter.
  order = jnp.lexsort((jax.random.bits(key, depths.shape), bucket))
  ends = jnp.cumsum(jnp.bincount(bucket, length=buckets))
  first = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
  place = jnp.zeros_like(order).at[order].set(jnp.arange(depths.shape[0]) - first[bucket[order]])
  return place < jnp.append(allocation, 0)[bucket]
