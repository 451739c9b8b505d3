"""The study of CuSearch: selections are what they say, and it runs."""

import json

import numpy as np
import pytest

from jaxsearch.world import files
from studies import common, cusearch


def test_a_start_is_the_checkpoint_before_the_row_of_its_depth(tmp_path):
  rows = [{'step': step, 'searches': depth} for step, depth in ((1, 0.6), (2, 0.9), (3, 1.2), (4, 1.6))]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  starts = [cusearch.start_of(str(tmp_path), depth) for depth in cusearch.STARTS]
  assert starts == ['', f'{tmp_path}/checkpoints/1', f'{tmp_path}/checkpoints/3']


@pytest.mark.slow
def test_it_runs(tmp_path, capsys, monkeypatch):
  for name, value in {'STARTS': (1.0,), 'HOPS': (2, 3), 'DRAWS': 2}.items():
    monkeypatch.setattr(cusearch, name, value)
  given = ['--size', 'tiny', '--start', str(files.POLICY), '--out', str(tmp_path)]
  common.main('cusearch', cusearch.study, cusearch.SIZES, given, run='', start='')
  rows = [json.loads(line) for line in (tmp_path / 'cusearch.jsonl').read_text().splitlines()]
  assert [row['part'] for row in rows] == [
    'depth 1, 2 hops', 'depth 1, 3 hops', 'gold chains', 'random documents']
  full, random = (np.array(rows[0]['figures'][name]) for name in ('full raw', 'random raw'))
  assert (full[:, 3] == 2).all() and (full[:, 1] == 0).all() and (random[:, 3] <= 2).all()
  assert 'Auto - Random, zero' in capsys.readouterr().out
