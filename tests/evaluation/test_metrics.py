"""Figures over several answers and their intervals, against enumeration and against scipy."""

import itertools
import random
import tracemalloc

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, strategies as st

from jaxsearch.evaluation import metrics


@pytest.mark.parametrize('right', range(6))
def test_pass_at_k_and_pass_all_k_are_shares_of_subsets(right):
  for k in range(1, 6):
    subsets = list(itertools.combinations([True] * right + [False] * (5 - right), k))
    assert metrics.pass_at_k(5, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert metrics.pass_all_k(5, right, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


NAMES = st.sampled_from(['Rome', 'the rome', 'Oslo', 'Bern', None])


@given(st.lists(NAMES, min_size=1, max_size=7), st.data())
def test_maj_at_k_is_the_mean_over_subsets(answers, data):
  k = data.draw(st.integers(1, len(answers)))
  right = [float(answer in ('Rome', 'the rome')) for answer in answers]
  total, subsets = 0.0, list(itertools.combinations(answers, k))
  for subset in subsets:
    votes = {}
    for answer in subset:
      if answer is not None:
        name = answer.lower().removeprefix('the ')
        votes[name] = votes.get(name, 0) + 1
    first = [name for name, count in votes.items() if count == max(votes.values())]
    total += ('rome' in first) / len(first) if first else 0.0
  assert metrics.maj_at_k(answers, right, k) == pytest.approx(total / len(subsets))


def test_an_interval_is_that_of_scipys_bootstrap():
  values = np.array([random.Random(seed).random() ** 3 for seed in range(80)])
  low, high = metrics.interval(metrics.resampled(values[:, None]))
  other = scipy.stats.bootstrap((values,), np.mean, method='percentile', n_resamples=5000, rng=1)
  assert (low[0], high[0]) == pytest.approx(tuple(other.confidence_interval), abs=0.01)


def test_a_missing_figure_of_a_question_does_not_count():
  values = np.array([[1.0, np.nan], [0.0, 1.0], [1.0, np.nan]])
  assert metrics.mean(values) == pytest.approx([2 / 3, 1.0])
  low, high = metrics.interval(metrics.resampled(values))
  assert (low[1], high[1]) == (1.0, 1.0) and low[0] < 2 / 3 < high[0]


def test_paired_is_the_sign_test_for_right_and_wrong():
  a, b = (np.array([x] * 9 + [y] * 2 + [1.0] * 20 + [0.0] * 20) for x, y in ((1.0, 0.0), (0.0, 1.0)))
  found = metrics.paired(a, b)
  assert found['difference'] == pytest.approx(7 / 51)
  assert found['p'] == pytest.approx(scipy.stats.binomtest(9, 11).pvalue, abs=1e-3)  # McNemar's exact test
  ends = scipy.stats.bootstrap((a - b,), np.mean, method='percentile', n_resamples=5000, rng=1).confidence_interval
  assert (found['low'], found['high']) == pytest.approx(tuple(ends), abs=0.025)  # unpaired is 0.07 wider a side


def test_many_questions_take_little_memory():
  a, b = (np.random.default_rng(seed).random(2000) for seed in (0, 1))
  tracemalloc.start()
  metrics.paired(a, b)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 3e8  # of all signs at once 1.5e9


def test_without_differences_nothing_is_significant():
  assert metrics.paired(np.ones(4), np.ones(4))['p'] == 1.0
  assert metrics.paired(np.ones(2), np.array([0.0, 1.0]))['p'] == 1.0
