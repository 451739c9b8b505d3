"""The verdicts of training grids: what is made of made-up runs, and that every name is that of a run."""

import json
import pathlib

import numpy as np
import pytest

from jaxsearch.config_check import to_saved
from jaxsearch.evaluation import verdicts
from studies import common, trained

QUESTIONS = 30


@pytest.fixture
def finish(tmp_path, monkeypatch):
  """Returns a function that writes the folder of a run of CuSearch's grid, and whose EM it had at the end."""
  monkeypatch.chdir(tmp_path)
  plans = dict(zip(trained.GRIDS['cusearch'].tables, trained.plans_of('cusearch')))

  def finish(table, variant, seed, right, spent=(100, 200), **metrics):
    run = next(run for run in plans[table] if (run.variant, run.seed) == (variant, seed))
    steps = run.config.steps
    (run.out / 'checkpoints' / str(steps)).mkdir(parents=True)
    (run.out / 'config.json').write_text(json.dumps(to_saved(run.config)))
    write = lambda name, rows: (run.out / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    total = np.interp(np.arange(steps + 1), (0, steps // 2, steps), (0, *spent))
    write('metrics.jsonl', [{'step': step, 'tokens_decoded': tokens, 'tokens_prefilled': 0, **metrics}
                            for step, tokens in enumerate(np.diff(total).tolist(), 1)])
    write('evaluations.jsonl', [
      {'step': step, 'temperature': 0.0, 'em': float(np.mean(em)), 'f1': 0.0, 'searches': 2.0,
       'em_each': [float(of) for of in em]}
      for step, em in ((0, [0] * QUESTIONS), (steps // 2, [0] * QUESTIONS), (steps, right))])
    return np.array(right)

  return finish


def test_a_gain_is_the_area_above_the_start():
  row = {'each': ['10', '11', '11'], 'tokens': [0, 100, 200]}
  assert [trained.value(row, of, 200).tolist() for of in ('area', 'gain')] == [[100, 75], [0, 75]]


@pytest.mark.parametrize('grid', trained.GRIDS)
def test_every_contrast_has_rows_in_the_repository(grid, tmp_path, monkeypatch):
  monkeypatch.setattr(verdicts, 'DRAWS', 10)
  path = pathlib.Path(common.__file__).parents[1] / common.RUNS / f'{grid}_trained.jsonl'
  monkeypatch.chdir(tmp_path)  # no run folder adds any
  runs = trained.collect(grid, path)
  assert all(trained.contrast(runs, names, 'end') for names in trained.GRIDS[grid].contrasts.values())


def test_a_contrast_is_of_areas_at_equal_tokens_paired_by_seed_and_question(finish, tmp_path):
  rng = np.random.default_rng(0)
  draw = lambda: rng.integers(0, 2, QUESTIONS).tolist()
  auto = [finish('', 'Auto, zero', seed, draw()) for seed in (0, 1, 2)]
  random = [finish('', 'Random, zero', seed, draw(), spent=(100, 300)) for seed in (0, 1)]
  runs = trained.collect('cusearch', tmp_path / 'rows.jsonl')
  estimate, gaps = trained.contrast(runs, (trained.AUTO, trained.RANDOM), 'area')
  # Up to 200 tokens: Auto's curve rises over the second half, Random's to half of its height.
  wanted = 100 * (np.stack(auto[:2]) / 4 - np.stack(random) / 2 / 4)
  np.testing.assert_allclose(gaps, wanted)
  assert estimate == verdicts.estimate(wanted)
  end, _ = trained.contrast(runs, (trained.AUTO, trained.RANDOM), 'end')
  assert end.mean == pytest.approx(100 * (np.mean(auto[:2]) - np.mean(random)))
  assert trained.contrast(runs, (trained.PHASE, trained.RANDOM), 'area') is None


def test_a_difference_of_differences_crosses_the_tables_of_a_grid(finish, tmp_path):
  for seed in (0, 1):
    for table in ('', 'enough'):
      for variant in ('Auto, zero', 'Random, zero'):
        finish(table, variant, seed, [int((table, variant) == ('', 'Auto, zero'))] * QUESTIONS)
  runs = trained.collect('cusearch', tmp_path / 'rows.jsonl')
  (names,) = (names for label, names in trained.GRIDS['cusearch'].contrasts.items() if 'enough' in label)
  assert trained.contrast(runs, names, 'end')[0].mean == 100


def test_rows_outlive_the_run_folders_and_a_figure_of_a_run_is_averaged_over_steps(finish, tmp_path):
  finish('', 'Auto, zero', 0, [1] * QUESTIONS)
  path = tmp_path / 'rows.jsonl'
  before = trained.collect('cusearch', path)
  for folder in sorted(pathlib.Path('runs').rglob('*'), reverse=True):
    folder.rmdir() if folder.is_dir() else folder.unlink()
  assert trained.collect('cusearch', path) == before
  row = before[trained.AUTO][0]
  assert trained.value(row, 'searches', 0) == pytest.approx([200])
  assert trained.value(row, 'em', 0) == pytest.approx([25])


def test_tool_rates_are_compared_where_both_have_the_same_em():
  slow = {'em_tier_2': [0.8, 0.7, 0.9], 'tool_rate_tier_2': [0.7, 0.6, 0.2]}
  fast = {'em_tier_2': [0.8, 1.0, 0.9], 'tool_rate_tier_2': [0.7, 0.5, 0.1]}
  assert trained.at_matched_em(slow, fast) == pytest.approx([0.2, 0.6])  # 0.9, half way up
  assert trained.at_matched_em(fast, slow) == pytest.approx([0.6, 0.2])
  falls = {'em_tier_2': [0.8, 0.6, 0.5], 'tool_rate_tier_2': [0.7, 0.6, 0.2]}
  assert trained.at_matched_em(falls, fast) == pytest.approx([0.7, 0.7])  # where both begin
  runs = {'a': {0: slow, 1: falls}, 'b': {0: fast, 1: fast}}
  estimate, gaps = trained.contrast(runs, ('a', 'b'), trained.MATCHED)
  assert gaps[:, 0] == pytest.approx([-40, 0]) and estimate.mean == pytest.approx(-20)


@pytest.mark.parametrize('others, said', [(4, 'passes'), (5, 'fails')])
def test_a_control_fails_that_learns_half_as_much_from_the_answers_of_others(finish, tmp_path, others, said):
  finish('', 'Random, zero', 0, [1] * 10 + [0] * 20)
  finish('', 'answers exchanged', 0, [1] * others + [0] * (QUESTIONS - others))
  assert f'the control {said}' in trained.study('cusearch', tmp_path / 'rows.jsonl')


def test_what_a_critic_explains_is_said_where_there_is_one(finish, tmp_path):
  finish('', 'Random, zero', 0, [1] * QUESTIONS)
  finish('', 'Auto, zero', 0, [1] * QUESTIONS, value_explained=0.25)
  text = trained.study('cusearch', tmp_path / 'rows.jsonl')
  assert 'The critic of auto-zero explains 0.25' in text and 'random-zero explains' not in text


def test_a_bed_at_its_end_or_a_critic_that_explains_little_leaves_a_contrast_undecided():
  row = lambda end, **more: {0: {'em': [0.2, end], 'each': ['01', '11'], 'tokens': [0, 9]} | more}
  grid = trained.Grid({}, ('own', 'other'), explains=0.3)
  runs = {'own': row(0.7), 'other': row(0.3), 'high': row(0.76), 'explains': row(0.5, value_explained=[0.0, 0.31]),
          'guesses': row(0.5, value_explained=[0.4, 0.29])}
  assert trained.withheld(grid, runs, ('own', 'explains')) == ''
  assert trained.withheld(grid, runs, ('own', 'high')) == 'undecided, high ends at 76.0 %'
  assert trained.withheld(grid, runs, ('guesses', 'own')) == 'undecided, the critic of guesses explains 0.29'
  runs['harms'] = row(0.5, value_explained=[-0.02])
  assert trained.withheld(trained.Grid({}, grid.control), runs, ('harms', 'own')) == ''
  for control in (('own', 'guesses'), ('own', 'none')):  # learns as much as with right answers; was not run
    assert trained.withheld(grid._replace(control=control), runs, ('own', 'explains')) == 'undecided, no control passed'


def test_a_plot_has_a_line_for_each_variant(finish, tmp_path):
  for variant in ('Auto, zero', 'Random, zero'):
    finish('', variant, 0, [1] * QUESTIONS)
  trained.draw(trained.collect('cusearch', tmp_path / 'rows.jsonl'), tmp_path / 'plot.png')
  assert (tmp_path / 'plot.png').stat().st_size > 10_000


@pytest.mark.parametrize('grid', trained.GRIDS)
def test_contrasts_name_runs_of_the_grid(grid):
  of, plans = trained.GRIDS[grid], trained.plans_of(grid)
  known = {trained.name_of(run, plans[0][0]) for plan in plans for run in plan}
  known |= {'rejection-sft'}  # of studies/rejection.py
  assert {name for names in of.contrasts.values() for name in names} <= known
  assert set(of.control) <= known | {''}
  assert all(len(names) in (2, 4) for names in of.contrasts.values())
