"""Numbers for reports: what finished episodes found, and how sure a mean is.

An episode is any mapping with `golden_answers` (strings), `documents` (all that its searches returned, in
order) and `searches` (how many it made). Whether the answers were right is scored by
`jaxsearch.rewards.match`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.special import stdtrit

from jaxsearch.data.corpus import Document
from jaxsearch.rewards.match import normalize_answer


def answer_found(golds: Iterable[str], documents: Iterable[Document]) -> bool:
  """Whether a gold, normalised as for exact match, stands in a title or text as whole words."""
  needles = [f' {gold} ' for gold in map(normalize_answer, golds) if gold]
  texts = (f' {normalize_answer(f"{document.title} {document.text}")} ' for document in documents)
  return any(needle in text for text in texts for needle in needles)


def retrieval_recall(episodes: Sequence[Mapping]) -> float:
  """Share of the episodes that retrieved a document in which a gold answer stands."""
  return _mean([answer_found(episode['golden_answers'], episode['documents']) for episode in episodes])


def searches_per_question(episodes: Sequence[Mapping]) -> float:
  return _mean([episode['searches'] for episode in episodes])


def student_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
  """Student's interval for the mean of independent `values` [N], such as one figure over seeds; N >= 2."""
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or len(values) < 2:
    raise ValueError(f'an interval needs at least two values in one dimension, got shape {values.shape}')
  half = stdtrit(len(values) - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(len(values))
  return float(values.mean() - half), float(values.mean() + half)


def paired_bootstrap(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95,
                     draws: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
  """Mean of `second - first` and its percentile bootstrap interval.

  Args:
    first: [N] scores of one system.
    second: [N] scores of another on the same questions, in the same order.
    confidence: the share of the resampled means that the interval holds.
    draws: how often the N questions are drawn again with replacement.
    seed: of the draws.

  Returns:
    The mean difference, the lower and the upper end.
  """
  first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
  if first.shape != second.shape or first.ndim != 1 or not len(first):
    raise ValueError(f'scores of the same questions are needed, got shapes {first.shape} and {second.shape}')
  differences = second - first
  rng = np.random.default_rng(seed)
  means = [differences[rng.integers(len(differences), size=len(differences))].mean() for _ in range(draws)]
  lower, upper = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
  return float(differences.mean()), float(lower), float(upper)


def _mean(values: Sequence[float]) -> float:
  if not values:
    raise ValueError('no episodes to average over')
  return float(np.mean(values))
