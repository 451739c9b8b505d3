"""The ratio of benchmarks/variance.py against the paper's sums."""

import importlib.util
import pathlib

import numpy as np

_FILE = pathlib.Path(__file__).parents[1] / 'benchmarks' / 'variance.py'
_SPEC = importlib.util.spec_from_file_location('benchmarks_variance', _FILE)
variance = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(variance)


def rewards(questions, k, steps, seed=0):
  """Ternary rewards of a policy that is better at some questions, and at later steps the noisier."""
  rng = np.random.default_rng(seed)
  spread = rng.normal(size=(questions, 1, 1)) + rng.normal(size=(questions, k, steps)) * np.arange(1, steps + 1)
  return np.clip(spread.round(), -1, 1)


def test_ratios_against_the_papers_sums():
  whole, siblings = rewards(7, 5, 3), rewards(7, 5, 3, seed=1).transpose(0, 2, 1)
  full, truncated = 0.0, np.zeros(3)
  for q in range(7):
    totals = [sum(whole[q, i]) for i in range(5)]
    full += sum((total - sum(totals) / 5) ** 2 for total in totals) / 5 / 7
    for t in range(3):
      truncated[t] += sum((r - sum(siblings[q, t]) / 5) ** 2 for r in siblings[q, t]) / 5 / 7
  np.testing.assert_allclose(variance.step_ratios(whole, siblings), truncated / full)
