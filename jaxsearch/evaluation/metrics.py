"""Pure functions of the answers to questions: pass@k, pass^k, maj@k, bootstrap intervals, paired tests."""

import collections
import math
from collections.abc import Sequence

import numpy as np

from jaxsearch.rewards.match import normalize_answer

DRAWS, LEVEL = 1000, 0.95  # of the bootstrap
FLIPS = 9999               # of the permutation test
BATCH = 10**6              # signs that it draws at a time: all of them would take gigabytes


def pass_at_k(n: int, right: int, k: int) -> float:
  """Returns the chance that k of n answers, drawn without replacement, hold a right one.

  `1 - C(n - right, k) / C(n, k)` is the unbiased estimate of the chance for k new answers (Chen et al. 2021,
  arXiv 2107.03374, eq. 1).
  """
  return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def pass_all_k(n: int, right: int, k: int) -> float:
  """Returns the chance that k of n answers, drawn without replacement, are all right: pass^k.

  `C(right, k) / C(n, k)`, the unbiased estimate for k new answers (τ-bench, Yao et al. 2024, arXiv
  2406.12045).
  """
  return math.comb(right, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[str | None], right: Sequence[float], k: int) -> float:
  """Returns the chance that the most frequent of k answers, drawn from all n without replacement, is right.

  The unbiased estimate of the chance for k new answers (self-consistency, Wang et al. 2022, arXiv
  2203.11171). Answers are alike where their normal forms are. Ties are broken at random. None has no vote;
  without any vote the question counts as wrong. Exact: subsets are counted, not sampled. `right` has n
  numbers, 1 where the answer is right.
  """
  scored = collections.defaultdict(list)
  for answer, value in zip(answers, right, strict=True):
    if answer is not None:
      scored[normalize_answer(answer)].append(value)
  silent, total = len(answers) - sum(map(len, scored.values())), 0.0
  for winner, values in scored.items():
    if not any(values):
      continue
    others = [(len(of), True) for answer, of in scored.items() if answer != winner] + [(silent, False)]
    for most in range(1, min(len(values), k) + 1):
      # ways[drawn][ties]: of the other answers, at most `most` of each, `ties` of them exactly `most` times.
      ways = {(0, 0): 1}
      for size, may_tie in others:
        wider = collections.Counter()
        for (drawn, ties), number in ways.items():
          for taken in range(min(size, k - most - drawn, most if may_tie else size) + 1):
            wider[drawn + taken, ties + (may_tie and taken == most)] += number * math.comb(size, taken)
        ways = wider
      wins = sum(number / (1 + ties) for (drawn, ties), number in ways.items() if drawn == k - most)
      total += np.mean(values) * math.comb(len(values), most) * wins
  return float(total / math.comb(len(answers), k))


def resampled(values: np.ndarray, *, seed: int = 0) -> np.ndarray:
  """Returns [draws, ...] bootstrapped means of [questions, ...]."""
  rng = np.random.default_rng(seed)
  return np.array([mean(values[rng.integers(len(values), size=len(values))]) for _ in range(DRAWS)])


def interval(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (low, high), [...] each: the 95 % percentile interval of bootstrapped means.

  A draw in which a figure is NaN (none of its questions has it) does not count for that figure.
  """
  return tuple(np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0))


def mean(values: np.ndarray) -> np.ndarray:
  """Returns [...] means of [questions, ...] over the questions that have a figure; NaN where none has."""
  known = ~np.isnan(values)
  with np.errstate(invalid='ignore'):
    return np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)


def paired(a: np.ndarray, b: np.ndarray, *, seed: int = 0) -> dict[str, float]:
  """Returns how much larger a figure is in `a` than in `b`, both [questions], question by question.

  difference: the mean of a - b; low, high: its 95 % bootstrap interval; p: two-sided, of the sign-flip
  permutation test (Fisher 1935), exact where few questions differ.
  """
  from scipy.stats import permutation_test
  gap, p = np.asarray(a, np.float64) - np.asarray(b, np.float64), 1.0
  low, high = interval(resampled(gap, seed=seed))
  differing = gap[gap != 0.0]  # flipping a zero changes nothing, flipping a lone gap only the sign
  if len(differing) > 1:
    difference = lambda x, y, axis: np.sum(x - y, axis=axis)
    p = permutation_test((differing, np.zeros(len(differing))), difference, permutation_type='samples',
                         vectorized=True, n_resamples=FLIPS, batch=max(1, BATCH // len(differing)),
                         rng=np.random.default_rng(seed)).pvalue
  return {'difference': float(gap.mean()), 'low': float(low), 'high': float(high), 'p': float(p)}
