"""Critic calibration: against loops over pairs and bins, and the published table of CARL."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxsearch.evaluation.calibration import auc, brier, ece, explained_variance, sign_accuracy

QUICK = hypothesis.settings(max_examples=30, deadline=None)
# Up to twelve probabilities that are multiples of 1/20, with their outcomes.
predictions = st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=12).map(
  lambda pairs: (np.float32([p / 20 for p, _ in pairs]), np.array([right for _, right in pairs], bool)))


@QUICK
@hypothesis.given(predictions)
def test_auc_equals_counting_pairs(drawn):
  scores, label = drawn
  pairs = [(a > b) + 0.5 * (a == b) for a in scores[label] for b in scores[~label]]
  np.testing.assert_allclose(auc(scores, label), np.mean(pairs) if pairs else np.nan, atol=1e-6)


@QUICK
@hypothesis.given(predictions, st.sampled_from([5, 10]))
def test_ece_equals_a_loop_over_bins(drawn, bins):
  p, outcome = drawn
  which = np.array([min(round(x * 20) * bins // 20, bins - 1) for x in p])  # exact
  total = sum(abs((outcome - p)[which == b].sum()) for b in range(bins)) if len(p) else np.nan
  np.testing.assert_allclose(ece(p, outcome, bins), total / max(len(p), 1), atol=1e-6)


# CARL, table 11, 7B curated: success rate and count per decile of V(s_0); the ECE printed under the column.
RATES = [0.120, 0.182, 0.281, 0.319, 0.381, 0.590, 0.680, 0.686, 0.817, 0.918]
COUNTS = [305, 285, 245, 225, 195, 215, 235, 270, 295, 220]


def test_ece_of_the_published_table():
  p = np.repeat(np.arange(10) / 10 + 0.05, COUNTS)    # the table has no means of V per bin: take the middles
  np.testing.assert_allclose(ece(p, np.repeat(RATES, COUNTS)), 0.043, atol=1.5e-3)


@QUICK
@hypothesis.given(predictions)
def test_brier_and_explained_variance_equal_numpy(drawn):
  p, outcome = drawn
  residual = outcome - p.astype(np.float64)
  np.testing.assert_allclose(brier(p, outcome), (residual ** 2).mean() if len(p) else np.nan, atol=1e-6)
  variance = outcome.var() if len(p) else 0
  expected = 1 - residual.var() / variance if variance > 0 else np.nan
  np.testing.assert_allclose(explained_variance(p, outcome), expected, atol=1e-6)
  assert np.isnan(expected) or explained_variance(p + 5, outcome) == pytest.approx(expected, abs=1e-5)


@QUICK
@hypothesis.given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-1, 1)), max_size=12))
def test_sign_accuracy_equals_a_loop(pairs):
  hits = [np.sign(change) == expected for change, expected in pairs if expected]
  expected = np.mean(hits) if hits else np.nan
  np.testing.assert_allclose(sign_accuracy(*np.array(pairs).reshape(-1, 2).T), expected)
