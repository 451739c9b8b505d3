"""The study of reviews in training: its table tells skill from chance, and it runs."""

import types

import numpy as np
import pytest

from jaxsearch.evaluation import sweep
from studies import common, trimming


def test_a_reviewer_that_cuts_where_it_helps_has_skill():
  rng = np.random.default_rng(0)
  best = rng.integers(0, 4, 60)
  drafts = [{'texts': [], 'right': 0, 'values': np.eye(4)[place].tolist()} for place in best]
  finds = {'reviews': [[0, np.eye(4)[place].tolist()] for place in best]}
  guesses = {'reviews': [[0, [0.25] * 4] for _ in best]}
  rows = {f'{variant}, seed {seed}, step 12': finds if variant == trimming.JOINT else guesses
          for variant in trimming.ROWS for seed in (0, 1)}
  said = trimming.report(drafts, {'at the start': guesses} | rows)
  assert '| at the start, step 0' in said and 'holds' in said
  assert '+0.0 [+0.0, +0.0]' in next(line for line in said.splitlines() if 'process reward' in line)
  assert 'no difference larger than 1 |' in trimming.report(drafts, dict.fromkeys(['at the start', *rows], guesses))


def test_differences_are_paired_by_seed_in_whatever_order_they_were_measured():
  drafts = [{'texts': [], 'right': 0, 'values': np.eye(4)[place % 4].tolist()} for place in range(60)]
  reviews = [{'reviews': [[0, (share * np.eye(4)[place % 4] + (1 - share) / 4).tolist()] for place in range(60)]}
             for share in (0.1, 0.5, 0.9)]
  rows = {f'{variant}, seed {seed}, step 12': reviews[seed]
          for variant, seeds in ((trimming.JOINT, (0, 1, 2)), (trimming.APART, (2, 0))) for seed in seeds}
  said = trimming.report(drafts, rows)
  assert '| **S_trim, joint - not joint** | +0.0 [+0.0, +0.0] |' in said


@pytest.mark.slow
def test_it_runs(tmp_path, capsys, monkeypatch):
  class Run(types.SimpleNamespace):
    def __str__(self):
      return f'{self.variant}, seed 0'

  for variant in trimming.ROWS:
    (tmp_path / variant / 'checkpoints' / '12').mkdir(parents=True)
  opened = common.open_bed
  monkeypatch.setattr(common, 'open_bed', lambda config, asked, checkpoint: opened(config, asked))
  runs = [Run(variant=name, out=tmp_path / name) for name in trimming.ROWS]
  monkeypatch.setattr(sweep, 'plan', lambda _: runs)
  common.main('trimming', trimming.study, trimming.SIZES, ['--size', 'tiny', '--out', str(tmp_path)],
              actor='world-review')
  said = capsys.readouterr().out
  assert 'Search-R2, step 12' in said and 'S_trim, joint - not joint' in said
