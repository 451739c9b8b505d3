"""The row of rejection-sampled fine-tuning: it has the form of a trained run's."""

import pytest

from jaxsearch.training import row_files
from studies import common, rejection, trained


@pytest.mark.slow
def test_its_row_is_that_of_a_run(tmp_path, monkeypatch, capsys):
  plan = rejection.sweep.plan
  monkeypatch.chdir(tmp_path)  # where the run folders go

  def one(config):
    run = next(run for run in plan(config) if run.variant == 'Search-R1')
    with run.config.unlocked():
      run.config.train.micro_rows = 8  # for the simulated devices
    return [run]

  monkeypatch.setattr(rejection.sweep, 'plan', one)
  common.main('rejection', rejection.study, rejection.SIZES, ['--size', 'tiny', '--out', str(tmp_path)])
  assert 'rejection-sft/0' in capsys.readouterr().out
  rows = row_files.read(tmp_path / 'systems_trained.jsonl')
  assert [len(of) for of in rows[0]['each']] == [4, 4] and rows[0]['tokens'][1] > 1000
  assert trained.value(rows[0], 'area', rows[0]['tokens'][1]).shape == (4,)
