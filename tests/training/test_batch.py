"""Packing of trained tokens, against loops."""

import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsearch.training import batch as batches
from jaxsearch.trees.layout import lay_out
from tests.processes import as_processes


def test_trained_tokens_are_packed_in_order_with_their_values(tiny):
  rows = lay_out(tiny.random_forest(0, trees=7, branch=True), 48, pad_id=0)
  batch = batches.make_batch(rows, 2)
  B, T = rows.tokens.shape
  n, R, M = batch.targets.shape
  assert n == 1 << (int(batch.count) - 1).bit_length() and batch.count == -(-B // R)
  for index in range(n * R):
    i, r = divmod(index, R)
    expected = np.flatnonzero(rows.loss_weights[index]) if index < B else []
    found = batch.targets[i, r]
    np.testing.assert_array_equal(found[:len(expected)], expected)
    assert np.all(found[len(expected):] == -1)
    for name, values in (('weights', rows.loss_weights), ('gains', rows.gains), ('losses', rows.losses),
                         ('spans', rows.spans), ('old_logprobs', rows.sampler_logprobs)):
      packed = getattr(batch, name)[i, r]
      np.testing.assert_array_equal(packed[:len(expected)], values[index, expected] if len(expected) else [])
      assert np.all(packed[len(expected):] == 0)
    if index >= B:  # padding: sees itself
      np.testing.assert_array_equal(batch.visible_until[i, r], np.arange(T) + 1)
      np.testing.assert_array_equal(batch.previous[i, r], np.arange(T))


@pytest.mark.parametrize(('trees', 'micro_rows'), [(0, 1), (2, 2), (9, 2), (30, 7)])
def test_steps_of_few_rows_have_the_shape_of_others(tiny, trees, micro_rows):
  rows = lay_out(tiny.random_forest(0, trees=3), 48, pad_id=0)
  plain, batch = batches.make_batch(rows, micro_rows), batches.make_batch(rows, micro_rows, trees=trees)
  needed = -(-max(len(rows.tokens), trees) // micro_rows)
  n = len(plain.tokens)
  assert len(batch.tokens) == 1 << (needed - 1).bit_length() >= n and batch.count == plain.count
  for field in ('tokens', 'targets', 'weights', 'spans'):
    np.testing.assert_array_equal(getattr(batch, field)[:n], getattr(plain, field))
  assert np.all(batch.targets[n:] == -1) and not batch.weights[n:].any()


@pytest.mark.parametrize('trees', [(9, 1, 2, 4), (3, 3, 3, 3), (7,)])
def test_rows_are_spread_evenly_over_processes_and_their_values_come_home(tiny, monkeypatch, trees):
  micro_rows = 2 * len(trees)
  forests = [tiny.random_forest(number, trees=number) for number in trees]

  def run():
    own = jax.process_index()
    rows = lay_out(forests[own], 48, pad_id=0)
    batch = batches.make_batch(rows, micro_rows)
    return rows, batch, batches.to_rows(batch.weights, batch, rows)

  found = as_processes(len(trees), monkeypatch, run)
  total = sum(len(rows.tokens) for rows, *_ in found)
  for rows, batch, home in found:
    assert batch.count == -(-total // micro_rows) and batch.tokens.shape[1:] == (2, 48)
    np.testing.assert_array_equal(home, rows.loss_weights)
  expected = sorted(row.tobytes() for rows, *_ in found for row in rows.tokens)
  trained = [batch.tokens.reshape(-1, 48) for _, batch, _ in found]
  assert sorted(row.tobytes() for row in np.concatenate(trained) if row.any()) == expected


@hypothesis.given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 4))
def test_rows_move_only_where_that_saves_a_micro_batch(sizes, each):
  moves = batches.row_moves(sizes, each * len(sizes))
  sent, come = (np.bincount([move[i] for move in moves], minlength=len(sizes)) for i in (0, 1))
  after = np.array(sizes) - sent + come
  count = -(-sum(sizes) // (each * len(sizes)))
  assert max(-(-after // each)) == count and after.min() >= 1
  assert bool(moves) == (-(-max(sizes) // each) > count)


def test_few_buckets_of_targets():
  buckets = [batches.target_bucket(largest, 64) for largest in (0, 8, 9, 17, 25, 33, 49, 64)]
  assert buckets == [8, 8, 16, 24, 32, 48, 64, 64]


@pytest.mark.parametrize(('questions', 'of_each', 'size', 'sizes'), [
  (64, 3, 32, [32] * 6), (512, 5, 0, [2560]), (5, 2, 4, [3, 3, 4]), (2, 1, 5, [2]), (0, 1, 5, [0])])
def test_a_mini_batch_counts_trees(questions, of_each, size, sizes):
  groups = [of_each] * questions + [0] * 3
  parts = batches.mini_batches(groups, size, np.random.default_rng(3))
  trees = [(group, member) for group in range(questions) for member in range(of_each)]
  assert sorted(map(len, parts)) == sizes
  assert sorted(itertools.chain(*parts)) == trees
  assert parts == batches.mini_batches(groups, size, np.random.default_rng(3))
  if len(parts) == 1:
    assert parts[0] == trees
  else:
    assert list(itertools.chain(*parts)) != trees
    split = [group for group in range(questions) if sum(any(found == group for found, _ in part) for part in parts) > 1]
    assert len(split) < len(parts)  # a question is cut at most at each border
