"""How good a critic is: does it rank, is it calibrated, does it explain outcomes, are its signs right.

Pure functions of NumPy arrays, importing nothing of the project: the figures of CARL's warm-up gate and of
its appendix I. All arrays are [N], one entry for each prediction. A figure that is undefined (no positives,
no variance, nothing to average) is NaN, which passes no threshold.
"""

import numpy as np

BINS = 10  # of CARL's table 11


def auc(scores, labels) -> float:
  """Returns the probability that a positive (label 1) scores above a negative (0), ties counted half."""
  scores, positive = np.asarray(scores, np.float64), np.asarray(labels) > 0.5
  negatives = np.sort(scores[~positive])
  less, less_or_equal = (np.searchsorted(negatives, scores[positive], side) for side in ('left', 'right'))
  return mean((less + less_or_equal) / (2 * len(negatives))) if len(negatives) else float('nan')


def ece(probabilities, outcomes, bins: int = BINS) -> float:
  """Returns the expected calibration error, `sum over bins n_b / n |mean outcome - mean probability|`.

  Probabilities and outcomes are in [0, 1]; bins are equally wide (Guo et al. 2017).
  """
  predicted, actual, counts = curve(probabilities, outcomes, bins)
  gaps = counts * np.abs(actual - predicted)
  return float(np.nansum(gaps) / counts.sum()) if counts.sum() else float('nan')


def root_mean_square_error(probabilities, outcomes, size: int = 100, last: bool = True) -> float:
  """Returns `sqrt(sum over bins n_b / n (mean probability - mean outcome)^2)` (Hendrycks et al. 2019).

  Bins hold `size` answers each in the order of their probability, the last one also the rest. Their published
  code, which BrowseComp-Plus uses, leaves the last bin out of the sum (`last=False`), though not out of n; 0
  for fewer than `size` answers.
  """
  gaps = np.subtract(probabilities, outcomes, dtype=float)[np.argsort(probabilities)]
  if len(gaps) < size:
    return 0.0
  bins = np.split(gaps, np.arange(size, len(gaps) // size * size, size))
  return float(np.sqrt(sum(len(of) / len(gaps) * of.mean() ** 2 for of in (bins if last else bins[:-1]))))


def brier(probabilities, outcomes) -> float:
  """Returns the mean squared difference of probability and outcome."""
  return mean(np.square(np.subtract(outcomes, probabilities, dtype=float)))


def explained_variance(predictions, targets) -> float:
  """Returns `1 - Var(targets - predictions) / Var(targets)` (CARL, appendix I.2): an offset is free."""
  targets = np.asarray(targets, np.float64)
  if not len(targets) or not targets.var():
    return float('nan')
  return float(1.0 - np.subtract(targets, predictions, dtype=float).var() / targets.var())


def sign_accuracy(changes, expected) -> float:
  """Returns the share of value changes V(after) - V(before) whose sign is that of `expected`.

  CARL, appendix I.1. A change of 0 is wrong; an expected direction of 0 does not count.
  """
  changes, expected = np.asarray(changes, np.float64), np.sign(expected)
  return mean((changes * expected > 0)[expected != 0])


def curve(probabilities, outcomes, bins: int = BINS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns mean prediction, mean outcome (both NaN in an empty bin) and count, each [bins].

  A probability on the border of two bins belongs to the upper one.
  """
  # The borders are the float32 numbers nearest to 0.1, 0.2, …; `bins * probability` would round.
  borders = (np.arange(1, bins) / bins).astype(np.float32)
  which = np.digitize(np.asarray(probabilities, np.float32), borders)
  counts = np.bincount(which, minlength=bins)
  with np.errstate(invalid='ignore'):
    predicted, actual = (np.bincount(which, np.asarray(x, np.float64), minlength=bins) / counts
                         for x in (probabilities, outcomes))
  return predicted, actual, counts


def mean(values) -> float:
  """Returns the mean, NaN of nothing."""
  return float(np.mean(values)) if len(values) else float('nan')
