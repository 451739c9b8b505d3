"""CuSearch: the paper's worked examples, the repair against a Python loop, what the phase may do."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.advantages import advance_phase, depth_greedy, depth_plan, select_by_depth

S, K = 5, 96
QUICK = hypothesis.settings(max_examples=60, deadline=None)
repair = jax.jit(depth_greedy)
advance = jax.jit(advance_phase)
select = jax.jit(select_by_depth)

counts = st.lists(st.integers(0, 12), min_size=S + 1, max_size=S + 1).map(np.int32)
huge = st.lists(st.integers(0, 2**31 - 1), min_size=S + 1, max_size=S + 1).map(np.int32)
orders = st.permutations(range(1, S + 2)).map(np.int32)


def by_hand(capacities, targets, priorities):
  """CuSearch, algorithm 3 as it is printed, with Python's integers."""
  capacities, allocation = [int(c) for c in capacities], [int(t) for t in targets]
  order = sorted(range(len(allocation)), key=lambda s: priorities[s])
  for place, s in enumerate(order):
    overflow = allocation[s] - capacities[s]
    if overflow <= 0:
      continue
    allocation[s] = capacities[s]
    for r in order[place + 1:] + order[:place][::-1]:
      spare = capacities[r] - allocation[r]
      if spare > 0:
        moved = min(spare, overflow)
        allocation[r] += moved
        overflow -= moved
  return allocation


# CuSearch, appendix C, S_max = 5: equations 8, 13 to 17 and 22.
EXAMPLES = [
    ('auto', 0, [0, 0, 0, 0, 0, K], [6, 5, 4, 3, 2, 1]),
    ('phase', 0, [0, K, 0, 0, 0, 0], [6, 1, 2, 3, 4, 5]),
    ('phase', 1, [0, 0, K, 0, 0, 0], [6, 5, 1, 2, 3, 4]),
    ('phase', 2, [0, 0, 0, K, 0, 0], [6, 5, 4, 1, 2, 3]),
    ('phase', 3, [0, 0, 0, 0, K, 0], [6, 5, 4, 3, 1, 2]),
    ('phase', 4, [0, 0, 0, 0, 0, K], [6, 5, 4, 3, 2, 1]),
    ('anti', 0, [K, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize('strategy, phase, targets, priorities', EXAMPLES)
def test_the_plans_of_the_paper(strategy, phase, targets, priorities):
  got = jax.jit(depth_plan, static_argnums=(0, 2))(strategy, K, S, phase)
  np.testing.assert_array_equal(got, [targets, priorities])
  assert all(x.dtype == jnp.int32 for x in got)


@QUICK
@hypothesis.given(counts | huge, counts | huge, orders)
def test_repair_equals_the_printed_algorithm_for_all_int32(capacities, targets, priorities):
  got = np.asarray(repair(capacities, targets, priorities))
  assert got.tolist() == by_hand(capacities, targets, priorities)


@pytest.mark.parametrize('strategy', ['deep', 'Auto', ''])
def test_unknown_strategy_is_an_error(strategy):
  with pytest.raises(ValueError, match="'auto', 'phase', 'anti'"):
    depth_plan(strategy, K, S)


@QUICK
@hypothesis.given(counts, st.integers(0, S - 1), st.integers(1, 40))
def test_the_phase_advances_by_one_or_stays(capacities, phase, budget):
  got = int(advance(phase, capacities, budget))
  assert got == phase + (capacities[phase + 2:].sum() >= budget and phase < S - 1)
  assert phase <= got <= S - 1


def test_selects_as_many_of_each_depth_as_allocated():
  rng = np.random.default_rng(0)
  for seed in range(10):
    depths = rng.integers(0, S + 1, 40)
    allocation = rng.integers(0, 9, S + 1)
    chosen = np.asarray(select(jax.random.key(seed), depths, allocation))
    assert chosen.shape == (40,) and set(np.unique(chosen)) <= {0, 1}
    for depth in range(S + 1):
      bucket = depths == depth
      assert chosen[bucket].sum() == min(allocation[depth], bucket.sum())


def test_selection_is_uniform_and_without_replacement():
  depths = np.array([1, 0, 1, 1, 0, 1, 2])
  keys = jax.random.split(jax.random.key(0), 4000)
  chosen = jax.vmap(select, in_axes=(0, None, None))(keys, depths, np.array([1, 3, 0]))
  rates = np.asarray(chosen).mean(axis=0)
  np.testing.assert_allclose(rates, [0.75, 0.5, 0.75, 0.75, 0.5, 0.75, 0], atol=0.03)
  # Place in the batch does not matter: all four of a bucket are left out equally often.
  left_out = np.argmin(np.asarray(chosen)[:, [0, 2, 3, 5]], axis=1)
  np.testing.assert_allclose(np.bincount(left_out) / 4000, 0.25, atol=0.03)


def test_deeper_than_the_deepest_bucket_counts_as_that_and_negative_is_padding():
  chosen = select(jax.random.key(0), np.array([9, 5, -1, -7, 0]), np.array([9, 9, 9, 9, 9, 9]))
  np.testing.assert_array_equal(chosen, [True, True, False, False, True])
