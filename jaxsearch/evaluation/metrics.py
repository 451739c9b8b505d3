"""Figures of finished episodes, and the confidence interval of a mean.

An episode is any mapping with `golden_answers` (strings), `documents` (all that its searches returned, in order) and
`searches` (how many it made). `jaxsearch.rewards.match` scores the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.special import stdtrit

from jaxsearch.data.corpus import Document
from jaxsearch.rewards.match import normalize_answer


def answer_found(golds: Iterable[str], documents: Iterable[Document]) -> bool:
  """Whether a title or text holds a gold answer as whole words, both normalised as for exact match."""
  needles = [f' {gold} ' for gold in map(normalize_answer, golds) if gold]
  texts = (f' {normalize_answer(f"{document.title} {document.text}")} ' for document in documents)
  return any(needle in text for text in texts for needle in needles)


def retrieval_recall(episodes: Sequence[Mapping]) -> float:
  """Share of the episodes that retrieved a document with a gold answer."""
  return _mean([answer_found(episode['golden_answers'], episode['documents']) for episode in episodes])


def searches_per_question(episodes: Sequence[Mapping]) -> float:
  return _mean([episode['searches'] for episode in episodes])


def student_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
  """Student's t interval for the mean of independent `values` [N], such as one figure over seeds; N >= 2."""
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or len(values) < 2:
    raise ValueError(f'an interval needs at least two values in one dimension, got shape {values.shape}')
  half = stdtrit(len(values) - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(len(values))
  return float(values.mean() - half), float(values.mean() + half)


def _mean(values: Sequence[float]) -> float:
  if not values:
    raise ValueError('no episodes to average over')
  return float(np.mean(values))
