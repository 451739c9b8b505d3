"""Budgets, intervals, verdicts and files of the studies."""

import json
import pathlib
import runpy
import shutil
import sys

import numpy as np
import pytest

from jaxsearch.evaluation import verdicts
from jaxsearch.world.files import POLICY
from studies import common, gradients, r_search, search_r2


@pytest.mark.parametrize('budget, expected', [
  (10, [0, 1]), (15, [0.5, 1]), (30, [1, 0.5]), (40, [1, 0]), (99, [1, 0])])
def test_a_curve_at_a_budget_is_straight_between_its_points(budget, expected):
  values = np.array([[0.0, 1], [1, 1], [1, 0]])
  np.testing.assert_allclose(common.at_budget([10, 20, 40], values, budget), expected)


def test_p_is_corrected_over_the_primary_contrasts_alone():
  clear, weak = common.Estimate(1, 0.5, 1.5, 0.001), common.Estimate(1, 0.1, 1.9, 0.03)
  rows = common.decide({'a': (clear, 0.1), 'b': (weak, 0.1), 'beside': (weak, None)})
  assert [row['corrected'] for row in rows] == [0.002, 0.03, None]
  assert [row['verdict'] for row in rows] == ['holds', 'holds', '']
  assert common.interval(clear, 10) == '+10.0 [+5.0, +15.0]'


def test_what_a_file_has_is_not_measured_again(tmp_path):
  path, measured = tmp_path / 'runs' / 'a.jsonl', []
  part = lambda name: lambda: measured.append(name) or {'value': len(measured)}
  common.measured(path, {'one': part('one')})
  rows = common.measured(path, {'one': part('one'), 'two': part('two')})
  assert measured == ['one', 'two'] and [row['value'] for row in rows.values()] == [1, 2]
  saved = [json.loads(line) for line in path.read_text().splitlines()]
  assert [row['part'] for row in saved] == ['one', 'two'] and all(row['jax'] and row['date'] for row in saved)


def test_a_size_sets_what_is_measured_and_the_flags_the_rest(tmp_path, capsys):
  study = lambda given, out: f'{given.number} {given.policy} {out}'
  sizes, small = {'full': {'number': 9}, 'tiny': {'number': 1}}, ['--size', 'tiny', '--policy', 'mine']
  common.main('it', study, sizes, [*small, '--out', str(tmp_path)], policy='ours')
  common.main('it', study, sizes, small, policy='ours')
  common.main('it', study, sizes, [], policy='ours')
  assert capsys.readouterr().out.splitlines() == [
    f'1 mine {tmp_path}/it.jsonl', '1 mine runs/studies/tiny_policy_mine/it.jsonl', '9 ours docs/claims/runs/it.jsonl']


@pytest.mark.slow
@pytest.mark.parametrize(('study', 'flags', 'said'), [
  (r_search, dict(reader='world-reader', policies=str(POLICY)), ('answer alone', 'evidence - raw observations')),
  (search_r2, dict(actor='world-review', reviewer='world-review'), ('taught review, its cut', 'p (Holm)'))])
def test_a_study_runs_and_is_not_measured_twice(study, flags, said, tmp_path, capsys, monkeypatch):
  run = lambda: common.main('it', study.study, study.SIZES, ['--size', 'tiny', '--out', str(tmp_path)], **flags)
  run()
  first = capsys.readouterr().out
  assert all(text in first for text in said)
  monkeypatch.setattr(common, 'grow', lambda *_, **__: pytest.fail('grown again'))
  run()
  assert capsys.readouterr().out in first


ROOT = pathlib.Path(common.__file__).parents[1]
STUDIES = sorted(path.stem for path in (ROOT / 'studies').glob('*.py'))  # other rows are of sweeps


@pytest.mark.parametrize('name', [name for name in STUDIES if (ROOT / common.RUNS / f'{name}.jsonl').exists()])
def test_the_rows_of_a_study_print_its_tables_without_its_beds(name, tmp_path, monkeypatch, capsys):
  shutil.copytree(ROOT / common.RUNS, tmp_path / common.RUNS)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'argv', [name])
  for module in gradients, verdicts:  # which tables, not their intervals
    monkeypatch.setattr(module, 'DRAWS', 50)
  monkeypatch.delitem(sys.modules, f'studies.{name}', raising=False)
  runpy.run_module(f'studies.{name}', run_name='__main__')
  last = {'speculation': 'EM where it did not', 'real_model': 'contains a gold answer'}  # these decide nothing
  assert f'| {last.get(name, "verdict")} |' in capsys.readouterr().out
  assert (common.RUNS / f'{name}.jsonl').read_bytes() == (ROOT / common.RUNS / f'{name}.jsonl').read_bytes()


def test_a_bed_that_is_missing_ends_in_a_line(tmp_path):
  def study(given, out):
    return (tmp_path / given.bed).read_text()
  with pytest.raises(SystemExit, match='(?s)nowhere.*head of studies/carl.py'):
    common.main('carl', study, {'full': {}}, ['--out', str(tmp_path)], bed='nowhere')
