"""Critic calibration: against loops over pairs and bins, and the published table of CARL."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxsearch.evaluation import calibration

N = 12
QUICK = hypothesis.settings(max_examples=30, deadline=None)
auc, brier = jax.jit(calibration.auc), jax.jit(calibration.brier)
ece = jax.jit(calibration.ece, static_argnames='bins')
explained_variance = jax.jit(calibration.explained_variance)
sign_accuracy = jax.jit(calibration.sign_accuracy)
probabilities = hnp.arrays(np.float32, N, elements=st.integers(0, 20).map(lambda x: x / 20))
labels = hnp.arrays(bool, N)
masks = hnp.arrays(bool, N)


@QUICK
@hypothesis.given(probabilities, labels, masks)
def test_auc_equals_counting_pairs(scores, label, mask):
  pairs = [(a > b) + 0.5 * (a == b) for a in scores[mask & label] for b in scores[mask & ~label]]
  np.testing.assert_allclose(auc(scores, label, mask), np.mean(pairs) if pairs else np.nan, atol=1e-6)


def test_auc_of_ties_and_infinite_scores():
  assert auc(np.ones(4), np.array([1, 0, 1, 0])) == 0.5
  assert auc(np.float32([np.inf, np.inf, 0]), np.array([1, 0, 0])) == 0.75
  assert auc(np.float32([-np.inf, 2, 1]), np.array([0, 1, 0])) == 1.0


@QUICK
@hypothesis.given(probabilities, labels, masks, st.sampled_from([5, 10]))
def test_ece_equals_a_loop_over_bins(p, outcome, mask, bins):
  which = np.minimum([round(x * 20) * bins // 20 for x in p], bins - 1)   # exact, as p are multiples of 1/20
  total = sum(abs((outcome - p)[mask & (which == b)].sum()) for b in range(bins))
  expected = total / mask.sum() if mask.any() else np.nan
  np.testing.assert_allclose(ece(p, outcome, mask, bins=bins), expected, atol=1e-6)


# CARL, table 11: success rate and count per decile of V(s_0), and the ECE printed under the column.
TABLE_11 = {
    '7B curated': (0.043, [0.120, 0.182, 0.281, 0.319, 0.381, 0.590, 0.680, 0.686, 0.817, 0.918],
                   [305, 285, 245, 225, 195, 215, 235, 270, 295, 220]),
    '7B random': (0.137, [0.304, 0.345, 0.407, 0.384, 0.431, 0.504, 0.530, 0.610, 0.610, 0.635],
                  [175, 215, 260, 290, 310, 305, 280, 240, 215, 210]),
    '3B curated': (0.059, [0.158, 0.221, 0.298, 0.355, 0.428, 0.541, 0.624, 0.692, 0.758, 0.832],
                   [320, 290, 245, 220, 195, 215, 235, 270, 285, 215]),
}


@pytest.mark.parametrize('column', TABLE_11)
def test_ece_of_the_published_table(column):
  printed, rates, counts = TABLE_11[column]
  p = np.repeat(np.arange(10) / 10 + 0.05, counts)    # the table has no means of V per bin: take the middles
  outcome = np.repeat(rates, counts)
  np.testing.assert_allclose(ece(p, outcome), printed, atol=1.5e-3)


@QUICK
@hypothesis.given(probabilities, labels, masks)
def test_brier_and_explained_variance_equal_numpy(p, outcome, mask):
  residual = (outcome - p.astype(np.float64))[mask]
  squares = (residual ** 2).mean() if mask.any() else np.nan
  np.testing.assert_allclose(brier(p, outcome, mask), squares, atol=1e-6)
  variance = outcome[mask].var() if mask.any() else 0
  expected = 1 - residual.var() / variance if variance > 0 else np.nan
  np.testing.assert_allclose(explained_variance(p, outcome, mask), expected, atol=1e-4)


def test_explained_variance_of_known_predictors():
  outcome = np.array([1, 0, 0, 1, 1])
  assert explained_variance(outcome, outcome) == 1
  assert explained_variance(outcome + 5, outcome) == 1
  assert explained_variance(np.full(5, 0.6), outcome) == pytest.approx(0, abs=1e-6)


@QUICK
@hypothesis.given(hnp.arrays(np.float32, N, elements=st.integers(-4, 4)),
                  hnp.arrays(np.int32, N, elements=st.integers(-1, 1)), masks)
def test_sign_accuracy_equals_a_loop(change, expected, mask):
  hits = [np.sign(c) == e for c, e, m in zip(change, expected, mask) if m and e]
  share = np.mean(hits) if hits else np.nan
  np.testing.assert_allclose(sign_accuracy(change, expected, mask), share, atol=1e-6)


def test_what_is_masked_is_not_read():
  mask = np.array([1, 1, 0, 1])
  p, outcome = np.float32([0.2, 0.9, np.nan, 0.4]), np.float32([0, 1, np.inf, 1])
  kept = mask == 1
  for measure in (auc, ece, brier, explained_variance, sign_accuracy):
    np.testing.assert_allclose(measure(p, outcome, mask), measure(p[kept], outcome[kept]), rtol=1e-6)


def test_an_undefined_figure_passes_no_threshold():
  assert not auc(np.ones(3), np.ones(3)) >= 0.7
  assert not explained_variance(np.ones(3), np.ones(3)) >= 0.45
  assert not sign_accuracy(np.ones(3), np.zeros(3)) >= 0.6
