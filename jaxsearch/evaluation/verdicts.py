"""Decides claims by grids of runs: intervals over seeds and questions together, power, and the rule.

Pure functions. Values are [seeds, questions]: what each held-out question got in the run of each seed, EM at
the end or the area under it; a difference of two variants is taken cell by cell, so it is paired by both.
`estimate` also takes values of one axis.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

DRAWS = 4000  # of the bootstrap
POWER = 0.8


class Estimate(NamedTuple):
  """A mean; of a single seed, or unit, it has neither an interval nor p."""
  mean: float
  low: float | None  # of the 95 % interval
  high: float | None
  p: float | None  # two-sided, that the mean is 0


class Spread(NamedTuple):
  """Variances of values: between seeds, between questions, and of what is left in a cell."""
  seeds: float
  questions: float
  cells: float


def draws(values: np.ndarray, *, seed: int = 0) -> np.ndarray:
  """Returns [DRAWS] means of values [S,Q] with seeds and questions drawn anew, each with replacement.

  The bootstrap for crossed factors (Owen 2007, "The pigeonhole bootstrap"); its variance errs on the large
  side.
  """
  rng = np.random.default_rng(seed)
  again = lambda count: rng.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count
  return np.einsum('ds,sq,dq->d', again(len(values)), values, again(values.shape[1]), optimize=True)


def estimate(values: Sequence[float] | np.ndarray, *, seed: int = 0) -> Estimate:
  """Estimates the mean of values [S,Q], or of independent units, [N] or [N,1], by Student's t.

  The interval of the former is the middle 95 % of `draws`, stretched: a bootstrap of few seeds spreads too
  little. Its spread becomes the standard error by the analysis of variance times Student's t over the normal
  quantile, with Satterthwaite's degrees of freedom (1946). p is that of Student's t.
  """
  values = np.asarray(values, float)
  mean, single = float(values.mean()), values.size == len(values)
  if len(values) < 2:
    return Estimate(mean, None, None, None)
  error, freedom = ((stats.sem(values, axis=None), len(values) - 1) if single
                    else standard_error(spread(values), *values.shape))
  if error == 0:
    return Estimate(mean, mean, mean, float(mean == 0))
  ends = stats.t.ppf([0.025, 0.975], freedom) * error
  if not single:
    away = draws(values, seed=seed) - mean
    ends = np.quantile(away, [0.025, 0.975]) * ends[1] / (away.std() * stats.norm.ppf(0.975))
  low, high = (mean + ends).tolist()
  return Estimate(mean, low, high, float(2 * stats.t.sf(abs(mean) / error, freedom)))


def area(values: np.ndarray, tokens: Sequence[float], budget: float) -> np.ndarray:
  """Returns [Q] areas under the curves of values [T,Q] at `tokens` [T] spent, up to `budget`, over it.

  A curve is straight between two evaluations. ValueError if it does not begin at 0 tokens and reach `budget`.
  """
  tokens = np.asarray(tokens, float)
  if tokens[0] != 0 or not 0 < budget <= tokens[-1]:
    raise ValueError(f'a curve from {tokens[0]:g} to {tokens[-1]:g} tokens has no area from 0 to {budget:g}')
  inside = np.append(tokens[tokens < budget], budget)
  at = np.stack([np.interp(inside, tokens, of) for of in values.T], axis=1)
  return np.trapezoid(at, inside, axis=0) / budget


def holm(p: Sequence[float]) -> list[float]:
  """Returns p values corrected for how many there are (Holm 1979)."""
  p, adjusted = np.asarray(p, float), np.empty(len(p))
  order = np.argsort(p)
  adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))), 1)
  return adjusted.tolist()


def verdict(of: Estimate, margin: float, p: float | None = None) -> str:
  """Says what a difference decides: holds, does not hold, no difference larger than `margin`, or undecided.

  It holds where the interval lies above 0 and `p`, corrected, is at most 5 %; it does not where the interval
  lies below 0. There is no larger difference where the interval lies within the margin (equivalence; at 95 %
  a stricter test than two one-sided ones of 5 %).

  Args:
    margin: the smallest difference that matters, in the units of the values.
    p: corrected, by default that of the estimate.
  """
  if of.low is None:
    return 'undecided'
  if of.low > 0 and (of.p if p is None else p) <= 0.05:
    return 'holds'
  if of.high < 0:
    return 'does not hold'
  return f'no difference larger than {margin:g}' if -margin < of.low and of.high < margin else 'undecided'


def spread(values: np.ndarray) -> Spread:
  """Estimates the variances of values [S,Q], one a cell, by the analysis of variance of two crossed random
  factors; negative estimates are 0."""
  (S, Q), by_seed, by_question = values.shape, values.mean(axis=1), values.mean(axis=0)
  cells = ((values - by_seed[:, None] - by_question + values.mean()) ** 2).sum() / ((S - 1) * (Q - 1))
  return Spread(max(0.0, float(by_seed.var(ddof=1) - cells / Q)),
                max(0.0, float(by_question.var(ddof=1) - cells / S)), float(cells))


def standard_error(of: Spread, seeds: int, questions: int) -> tuple[float, float]:
  """Returns the standard error of a mean over [seeds, questions] and its degrees of freedom."""
  squares = np.array([questions * of.seeds + of.cells, seeds * of.questions + of.cells, -of.cells])
  freedom = np.array([seeds - 1, questions - 1, (seeds - 1) * (questions - 1)])
  total = squares.sum()
  approximate = total**2 / (squares**2 / freedom).sum() if total else 1.0
  return float(np.sqrt(total / (seeds * questions))), float(approximate)


def power(difference: float, of: Spread, seeds: int, questions: int) -> float:
  """Returns the chance that `estimate` finds a difference at 5 %, two-sided."""
  error, freedom = standard_error(of, seeds, questions)
  if not error:
    return float(difference != 0)
  away, limit = difference / error, stats.t.ppf(0.975, freedom)
  return float(stats.nct.sf(limit, freedom, away) + stats.nct.cdf(-limit, freedom, away))


def seeds_needed(values: np.ndarray, difference: float, most: int = 100) -> int | None:
  """Returns the fewest seeds that find a mean of `difference` with 80 % power, for as many questions and the
  spread of values [S,Q]; None if `most` are too few, or for values of one seed or one question."""
  if min(values.shape) < 2:
    return None
  of, questions = spread(values), values.shape[1]
  return next((n for n in range(2, most + 1) if power(difference, of, n, questions) >= POWER), None)
