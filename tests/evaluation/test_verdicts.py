"""Statistics of grids, against values worked out by hand, by R and by scipy."""

import numpy as np
import pytest
from scipy import stats

from jaxsearch.evaluation import verdicts
from jaxsearch.evaluation.verdicts import Estimate, Spread


def test_one_source_of_spread_gives_students_t():
  x = np.array([0.1, 0.4, -0.1, 0.3])
  of_test, ends = stats.ttest_1samp(x, 0), stats.t.interval(0.95, 3, x.mean(), stats.sem(x))
  for values in (np.tile(x[:, None], 50), np.tile(x, (50, 1))):  # seeds differ alone, questions alone
    of = verdicts.estimate(values)
    assert (of.mean, of.p) == pytest.approx((x.mean(), of_test.pvalue))
    assert of.high - of.low == pytest.approx(ends[1] - ends[0], rel=0.1)  # the shape is the bootstrap's
  assert verdicts.estimate(np.zeros((3, 4))) == (0, 0, 0, 1)
  assert verdicts.estimate(np.ones((1, 4))) == (1, None, None, None)


@pytest.mark.parametrize('shape', [(20,), (20, 1)])
def test_units_are_judged_by_students_t(shape):
  values = np.random.default_rng(0).normal(0.3, 1, shape)
  of, test = verdicts.estimate(values), stats.ttest_1samp(values.ravel(), 0)
  assert of == pytest.approx((values.mean(), *test.confidence_interval(0.95), test.pvalue))
  assert verdicts.estimate([1.0]).low is None and verdicts.estimate([2.0, 2.0]) == (2, 2, 2, 0)


def test_spread_is_that_of_the_analysis_of_variance():
  # Means of rows 2 and 6, of columns 3, 4 and 5; by hand: squares 24, 2 and 1 over 1, 2 and 2 degrees of freedom.
  values = np.array([[1, 2, 3], [5, 6, 7]]) + np.array([[0.5, -0.5, 0], [-0.5, 0.5, 0]])
  assert verdicts.spread(values) == pytest.approx(Spread((24 - 0.5) / 3, (2 - 0.5) / 2, 0.5))


def test_the_standard_error_is_the_sum_of_three_variances():
  error, freedom = verdicts.standard_error(Spread(0.4, 0.3, 0.2), 4, 10)
  assert error**2 == pytest.approx(0.4 / 4 + 0.3 / 10 + 0.2 / 40)
  assert freedom == pytest.approx(5.4**2 / (4.2**2 / 3 + 1.4**2 / 9 + 0.2**2 / 27))


def test_intervals_hold_the_truth():
  rng, held = np.random.default_rng(0), 0
  for number in range(60):
    values = rng.normal(0, 0.05, (4, 1)) + rng.normal(0, 0.2, (1, 40)) + rng.normal(0, 0.4, (4, 40))
    of = verdicts.estimate(values, seed=number)
    held += of.low <= 0 <= of.high
  assert held >= 53  # of 57 expected


def test_draws_vary_with_seeds_and_questions():
  seeds, questions = np.array([[0.0], [1.0]]) * np.ones((2, 300)), np.arange(2.0) * np.ones((300, 1))
  for values in (seeds, questions):  # the mean of two draws of 0 or 1
    assert verdicts.draws(values).std() == pytest.approx(np.sqrt(1 / 8), rel=0.05)


def test_area_is_that_of_trapezoids_up_to_the_budget():
  values, tokens = np.array([[0, 1], [1, 1], [1, 0]]), [0, 10, 30]
  assert verdicts.area(values, tokens, 30) == pytest.approx([25 / 30, 20 / 30])
  assert verdicts.area(values, tokens, 20) == pytest.approx([15 / 20, (10 + 7.5) / 20])
  with pytest.raises(ValueError, match='no area from 0 to 40'):
    verdicts.area(values, tokens, 40)


def test_corrected_p_values_are_those_of_r():
  # p.adjust(c(0.01, 0.04, 0.03, 0.005), 'holm')
  assert verdicts.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
  assert verdicts.holm([]) == []


def test_power_is_that_of_the_t_test():
  # power.t.test(n = 20, delta = 0.5, sd = 1, type = 'one.sample'); 34 give 0.8078, 33 0.7954
  assert verdicts.power(0.5, Spread(1, 0, 0), 20, 100) == pytest.approx(0.5645, abs=1e-4)
  by_seed = np.array([[-1.0], [0], [1]]) * np.ones(100)
  assert verdicts.seeds_needed(by_seed, 0.5) == 34
  assert verdicts.seeds_needed(by_seed.T, 0.01) is None  # more seeds do not help where questions differ
  assert verdicts.seeds_needed(0 * by_seed, 0.5) == 2  # nothing spreads
  assert verdicts.seeds_needed(by_seed[:, :1], 0.5) is None  # nor can one question tell


@pytest.mark.parametrize('of, p, said', [
  ((4, 1, 7, 0.01), 0.03, 'holds'), ((4, 1, 7, 0.03), 0.06, 'undecided'), ((-4, -7, -1, 0.01), 0.2, 'does not hold'),
  ((0.5, -1, 2, 0.5), None, 'no difference larger than 3'), ((0.5, -4, 5, 0.8), None, 'undecided'),
  ((5, None, None, None), None, 'undecided')])
def test_the_rule(of, p, said):
  assert verdicts.verdict(Estimate(*of), 3, p) == said
