"""The pilot: its grids are sweeps, and its row is what the runs say."""

import json

import numpy as np
import pytest

from jaxsearch.evaluation import sweep, verdicts
from studies import pilot

SMALL = pilot.SIZES['small']


@pytest.mark.parametrize('bed', pilot.BEDS)
def test_the_pilot_of_a_bed_is_a_sweep_of_two_variants(bed, tmp_path):
  config, variants = pilot.grid(bed, 3, pilot.SIZES['full']['changes'], tmp_path)
  runs = sweep.plan(config)
  assert len(runs) == 6 and {run.variant for run in runs} == {config.baseline, *config.primary}
  assert variants > 2 and all(run.config.search.noise == 0.1 for run in runs)


def test_a_row_is_that_of_paired_areas(tmp_path, monkeypatch):
  """EM of each question before and after one step: the area is the mean of both."""
  rng, after = np.random.default_rng(0), {}

  def train_all(runs, parallel):
    for run in runs:
      after[run.variant, run.seed] = rng.integers(0, 2, 40) * (run.variant != 'SLATE')
      (run.out / 'checkpoints' / '1').mkdir(parents=True)
      rows = [{'step': step, 'temperature': 1.0, 'em_each': em.tolist(), 'n': 40}
              for step, em in enumerate((np.zeros(40), after[run.variant, run.seed]))]
      (run.out / 'evaluations.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
      (run.out / 'metrics.jsonl').write_text(json.dumps(
        {'step': 1, 'tokens_decoded': 100, 'tokens_prefilled': 20}) + '\n')
    return []

  monkeypatch.setattr(sweep, 'train_all', train_all)
  row = pilot.measure('SLATE', 3, SMALL['changes'], tmp_path)
  gaps = 50 * np.stack([after['whole, judge', seed] - after['SLATE', seed] for seed in range(3)])
  assert row['budget'] == 120 and row['area'] == pytest.approx([gaps.mean(), 0])
  assert row['end'] == pytest.approx([2 * gaps.mean(), 0])
  assert row['seeds_needed'] == verdicts.seeds_needed(gaps, 3)
  assert row['spread'] == pytest.approx(verdicts.spread(gaps)._asdict())
  needed = max(row['seeds_needed'] or 100, 5)
  assert row['hours'] == pytest.approx(row['variants'] * needed * row['cpu_seconds'] / 3600)
