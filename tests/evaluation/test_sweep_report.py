"""Tables and curves of made-up run folders, against numbers worked out by other means."""

import json

import ml_collections
import numpy as np
import pytest
from scipy import stats

from jaxsearch.config_check import to_saved
from jaxsearch.evaluation import sweep, sweep_report

SAMPLED = {'Full': (0.40, 0.50, 0.45), 'Auto': (0.52, 0.58, 0.60)}  # EM after training of each seed
STEPS = 4


@pytest.fixture
def config(tmp_path):
  config = ml_collections.ConfigDict(convert_dict=False)
  config.title, config.base, config.baseline = 'Depth first?', 'configs/base.py', 'Full'
  config.common = {'steps': STEPS, 'eval': {'every': 2}}
  config.variants = {'Full': {}, 'Auto': {'loss.kl_coef': 0.5}}
  config.seeds, config.out, config.parallel = (0, 1, 2), str(tmp_path), 0
  return config.lock()


def write_run(run, em, tokens, compiled=(1,)):
  """EM goes from 0.2 to `em` (a tenth less when greedy); step s makes 2 s thousand tokens and trains on
  `tokens`."""
  (run.out / 'checkpoints' / str(STEPS)).mkdir(parents=True)
  rows = [{'step': step, 'em': em * step / STEPS, 'tokens_generated': 2000 * step, 'tokens_trained': tokens,
           'tokens_prefilled': 3000 * step, 'seconds': 30.0 if step in compiled else 6.0,
           'compilations': int(step in compiled)} for step in range(1, STEPS + 1)]
  tests = [{'step': step, 'temperature': temperature, 'em': value - 0.1 * (temperature == 0),
            'f1': value + 0.05, 'searches': 1 + value, 'n': 50, 'samples': []}
           for step, value in ((0, 0.2), (2, (0.2 + em) / 2), (STEPS, em)) for temperature in (1.0, 0.0)]
  (run.out / 'config.json').write_text(json.dumps(to_saved(run.config)))
  for name, lines in (('metrics', rows), ('evaluations', tests)):
    (run.out / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


@pytest.fixture
def runs(config):
  runs = sweep.plan(config)
  for run in runs:
    write_run(run, SAMPLED[run.variant][run.seed], tokens=1000 if run.variant == 'Full' else 500 + run.seed)
  return runs


def rewrite(runs, change, name='metrics', variant=None):
  """Replaces each row of a file of the runs by `change(run, row)`, those of None are dropped."""
  for run in runs:
    if variant in (None, run.variant):
      path = run.out / f'{name}.jsonl'
      rows = [change(run, json.loads(line)) for line in path.read_text().splitlines()]
      path.write_text(''.join(json.dumps(row) + '\n' for row in rows if row is not None))


def run_of(runs, variant):
  return next(run for run in runs if run.variant == variant)


def test_means_differences_and_their_intervals(config, runs):
  found = sweep_report.summary(config, runs)
  full, auto = (found['variants'][name] for name in SAMPLED)
  for name, values in SAMPLED.items():
    of = found['variants'][name]['figures']['em@1.0']
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert of['mean'] == pytest.approx(np.mean(values)) and (of['low'], of['high']) == pytest.approx(expected)
  paired = stats.ttest_rel(SAMPLED['Auto'], SAMPLED['Full'])
  difference, ends = auto['differences']['em@1.0'], paired.confidence_interval(0.95)
  assert difference['mean'] == pytest.approx(np.mean(SAMPLED['Auto']) - np.mean(SAMPLED['Full']))
  assert (difference['low'], difference['high']) == pytest.approx((ends.low, ends.high))
  assert full['differences'] == {} and full['seeds'] == [0, 1, 2]
  means = {name: full['figures'][name]['mean'] for name in ('em@0.0', 'f1@1.0', 'searches@0.0', 'seconds')}
  assert means == pytest.approx({'em@0.0': 0.35, 'f1@1.0': 0.50, 'searches@0.0': 1.45,
                                 'seconds': 24.0})  # the step that compiled counts as the others do
  assert auto['figures']['tokens_trained']['values'] == [2000, 2004, 2008]
  assert found['before']['em@1.0'] == pytest.approx(0.2)
  assert (found['questions'], found['steps'], found['not_finished']) == ([50], [STEPS], [])


def test_the_table_as_it_is_read(config, runs):
  page = sweep_report.write(config, runs)
  lines = page.read_text().splitlines()
  assert lines[0] == '# Depth first?'
  for number, start in ((2, '| variant (seeds) | EM, T=1 | F1, T=1 | searches, T=1 | EM, greedy |'),
                        (4, '| before training | 20.0 | 25.0 | 1.20 | 10.0 |'),
                        (5, '| Full (3) | 45.0 ± 12.4 | 50.0 ± 12.4 | 1.45 ± 0.12 | 35.0 ± 12.4 |'),
                        # 0.12, 0.08 and 0.15: a standard error of 0.0203 and t(2) = 4.303
                        (12, '| Auto | **+11.7 [+2.9, +20.4]** |')):
    assert lines[number].startswith(start)
  assert lines[5].endswith('| 20 ± 0 | 30 ± 0 | 4 ± 0 | 24 ± 0 |') and lines[4].endswith('|  |  |  |')
  assert json.loads((page.parent / 'table.json').read_text()) == sweep_report.summary(config, runs)
  for name in ('curves.png', 'steps.png'):
    assert (page.parent / name).read_bytes().startswith(b'\x89PNG') and f']({name})' in lines[-1] + lines[-3]


def test_unfinished_runs_are_left_out_and_named(config, runs):
  for run in runs:
    if (run.variant, run.seed) in {('Full', 1), ('Auto', 2)}:
      (run.out / 'checkpoints' / str(STEPS)).rmdir()
  found = sweep_report.summary(config, runs)
  difference = found['variants']['Auto']['differences']['em@1.0']
  assert difference['values'] == pytest.approx([0.12]) and difference['low'] is None  # seed 0 has both
  text = sweep_report.table(found)
  for part in ('| Full (2) |', '| Auto | +12.0 |', 'Not finished: Full, seed 1; Auto, seed 2.'):
    assert part in text
  alone = sweep_report.table(sweep_report.summary(config, [run for run in runs if run.variant == 'Auto']))
  assert '| Auto (2) |' in alone and 'Differences' not in alone  # before the baseline is finished


def test_runs_of_another_config_are_refused(config, runs):
  config.common['loss.clip_low'] = 0.3
  with pytest.raises(ValueError, match='loss.clip_low was 0.2, now it is 0.3'):
    sweep_report.summary(config, sweep.plan(config))


def test_curves(runs):
  lines, nan = sweep_report.curves(runs[0]), np.nan
  for name, expected in {
      sweep_report.TOKENS: [0, 1000, 2000, 3000, 4000], sweep_report.MINUTES: [0, 0.1, 0.2, 0.3, 0.4],
      'held-out EM, T=1 (%)': [20, nan, 30, nan, 40],
      'held-out EM, greedy (%)': [10, nan, 20, nan, 30]}.items():
    np.testing.assert_allclose(lines[name], expected)
  np.testing.assert_allclose(lines[sweep_report.TRAINING_EM][:2], [nan, 10])


def test_what_a_row_does_not_tell_is_left_out_and_not_guessed(config, runs):
  lacking = {(2, 'tokens_trained'), (1, 'compilations'), (3, 'seconds')}
  rewrite(runs, lambda run, row: {
    name: None if (row['step'], name) == (2, 'em') else value for name, value in row.items()
    if run.variant == 'Full' or (row['step'], name) not in lacking})
  sweep_report.write(config, runs)
  found = sweep_report.summary(config, runs)['variants']
  assert found['Full']['figures'].keys() - found['Auto']['figures'].keys() == {'tokens_trained', 'seconds'}
  lines = sweep_report.curves(run_of(runs, 'Auto'))
  assert np.isnan(lines[sweep_report.TOKENS][2]) and lines[sweep_report.MINUTES][2] == pytest.approx(0.6)
  training = lines[sweep_report.TRAINING_EM]
  assert training[2] == training[1] < training[3]


@pytest.mark.parametrize('name', ['searches', 'depth_mean'])
def test_em_reward_and_searches_over_the_steps(config, runs, drawn, name):
  """CuSearch's figure 3: the mean over seeds; the capped depth where all rows have it."""
  rewrite(runs, lambda run, row: row | {
    'reward': 0.1 * run.seed, 'searches': 9.0, name: 1 + 3 * run.seed + (run.variant == 'Auto')})
  if name == 'searches':  # a depth that only some runs have is not mixed with the searches of others
    rewrite(runs, lambda run, row: row | {'depth_mean': 7.0}, variant='Auto')
  sweep_report.write(config, runs)
  em, reward, depth = drawn[1].axes
  assert [line.get_label() for line in em.lines] == ['Full (3)', 'Auto (3)']
  np.testing.assert_allclose([line.get_xdata() for line in em.lines], [[0, 2, 4]] * 2)
  last = [line.get_ydata()[-1] for line in em.lines]
  np.testing.assert_allclose(last, [45.0, 100 * np.mean(SAMPLED['Auto'])])
  np.testing.assert_allclose([line.get_xydata() for line in reward.lines],
                             [[[step, 0.1] for step in (1, 2, 3, 4)]] * 2)
  np.testing.assert_allclose([line.get_ydata() for line in depth.lines], [[4] * 4, [5] * 4])


def test_with_few_evaluations_the_curve_is_that_of_the_training(config, runs, drawn):
  sweep_report.write(config, runs)
  labels = [axes.get_ylabel() for axes in drawn[0].axes[::2]]
  assert labels == ['held-out EM, T=1 (%)', 'held-out EM, greedy (%)']
  rewrite(runs, lambda run, row: None if row['step'] == 2 else row, 'evaluations')
  sweep_report.write(config, runs)
  assert [axes.get_ylabel() for axes in drawn[2].axes] == [sweep_report.TRAINING_EM] * 2


def test_figures_that_only_some_variants_have_are_blank_in_the_others(config, runs, monkeypatch):
  monkeypatch.setattr(sweep_report, 'MAX_COLUMNS', 99)
  rewrite(runs, lambda run, row: row | {'tool_rate_tier_2': 0.25, 'em_of_nq': 0.5}
          | ({'auc': 0.9} if run.variant == 'Auto' else {}), 'evaluations')
  text = sweep_report.table(sweep_report.summary(config, runs))
  head, full, auto = (next(line for line in text.splitlines() if line.startswith(start)).split(' | ')
                      for start in ('| variant (seeds)', '| Full (3)', '| Auto (3)'))
  column = {name.strip(' |'): place for place, name in enumerate(head)}
  assert full[column['tool use tier 2, T=1']] == '25.0 ± 0.0' and auto[column['AUC, greedy']] == '0.90 ± 0.00'
  assert full[column['AUC, greedy']].strip() == '' and column['seconds'] == len(head) - 1
  assert full[column['EM nq, greedy']] == '50.0 ± 0.0'  # Search-R2's table 7


def test_what_training_noted_and_what_time_bought(config, runs):
  """Search-R2's terms are means over the steps that have them; EM and time are shares of the baseline's
  (table 5)."""
  rewrite(runs, lambda run, row: row | {
    'seconds': 1.5 * row['seconds'], 'em_draft_per_tree': 0.1 * row['step'],
    'a_prec': 0.1 if row['step'] == 2 else None}, variant='Auto')
  found = sweep_report.summary(config, runs)
  auto, full = found['variants']['Auto'], found['variants']['Full']
  assert auto['figures']['em_draft_per_tree']['mean'] == pytest.approx(0.25)
  assert auto['figures']['a_prec']['mean'] == pytest.approx(0.1)
  assert 'em_draft_per_tree' not in full['figures'] and 'relative' not in full
  em = np.mean(SAMPLED['Auto']) / np.mean(SAMPLED['Full']) - 1
  assert auto['relative'] == pytest.approx(auto['relative'] | {
    'seconds': 0.5, 'em@1.0': em, 'em@1.0/seconds': em / 0.5})
  text = sweep_report.table(found)
  for part in ('| variant | EM, T=1 | EM, greedy | seconds | EM, T=1 / seconds | EM, greedy / seconds |',
               f'| Auto | {100 * em:+.1f} |', f'| +50.0 | {em / 0.5:.2f} |', 'EM of drafts'):
    assert part in text
  rewrite(runs, lambda run, row: row | {'seconds': 1.0}, variant='Auto')  # less time buys nothing
  assert not any('/' in name for name in sweep_report.summary(config, runs)['variants']['Auto']['relative'])


def test_changes_against_the_baseline_are_of_common_seeds(config, runs):
  (run_of(runs, 'Full').out / 'metrics.jsonl').unlink()
  found = sweep_report.summary(config, runs)['variants']
  left, right = (np.mean([SAMPLED[name][seed] for seed in found['Full']['seeds']]) for name in ('Auto', 'Full'))
  assert len(found['Full']['seeds']) == 2 < len(found['Auto']['seeds'])
  assert found['Auto']['relative']['em@1.0'] == pytest.approx(left / right - 1)


def test_a_run_with_probes_has_no_costs(config, runs):
  rewrite(runs, lambda run, row: row | {'probed': 7}, variant='Auto')
  found = sweep_report.summary(config, runs)['variants']
  assert found['Full']['figures'].keys() - found['Auto']['figures'].keys() == {
    'tokens_generated', 'tokens_prefilled', 'seconds'}
  assert found['Auto']['relative'].keys() == {'em@1.0', 'em@0.0'}  # table 5 has no time of it
  rewrite(runs, lambda run, row: row | {'em_each': [0, 1]}, 'evaluations')
  rewrite(runs, lambda run, row: row | {'tokens_decoded': 1000})
  assert sweep_report.summary(config, runs)['verdicts']['1.0']['variants'].keys() == {'Full'}


def test_verdicts_compare_areas_at_equal_tokens(config, runs):
  """Two questions, of which Auto gets the first right from step 2 on, Full both at the end."""
  each = {'Full': ([0, 0], [0, 0], [1, 1]), 'Auto': ([0, 0], [1, 0], [1, 0])}
  rewrite(runs, lambda run, row: row | {'tokens_decoded': 1000 * (1 + (run.variant == 'Auto'))})
  rewrite(runs, lambda run, row: row | {'em_each': each[run.variant][row['step'] // 2]}, 'evaluations')
  found = sweep_report.summary(config, runs)['verdicts']['1.0']
  full, auto = (found['variants'][name] for name in SAMPLED)
  assert found['budget'] == 4 * 1000 + 3000 * (1 + 2 + 3 + 4)  # what the cheaper variant spends
  # Full has spent 11 k after step 2 and 34 k after step 4; Auto 13 k and 38 k.
  assert full['area']['mean'] == pytest.approx(100 * (34 - 11) / 2 / 34)
  assert auto['area']['mean'] == pytest.approx(100 * (13 / 2 + 21) / 34 / 2)
  assert (full['end']['mean'], auto['end']['mean'], auto['end']['difference']['mean']) == (100, 50, -50)
  assert 'difference' not in full['area'] and auto['area']['verdict'] == 'undecided'  # of two questions
  page = sweep_report.table(sweep_report.summary(config, runs))
  assert 'up to 34 k tokens' in page and '| undecided |' in page
  assert page.index('Nothing here is corrected') < page.index('corrected over the variants')
  rewrite(runs[:1], lambda run, row: row | {'samples': [{'id': 'of another set'}]}, 'evaluations')
  assert sweep_report.summary(config, runs)['verdicts'].keys() == set()
  rewrite(runs, lambda run, row: row | {'samples': []}, 'evaluations')
  rewrite(runs[:1], lambda run, row: {name: row[name] for name in row if name != 'em_each'}, 'evaluations')
  assert sweep_report.summary(config, runs)['verdicts'].keys() == set()


def test_one_question_has_an_interval_over_seeds(config, runs):
  right = lambda run: int(run.variant == 'Auto' and run.seed > 0)
  rewrite(runs, lambda run, row: row | {'tokens_decoded': 1000})
  rewrite(runs, lambda run, row: row | {'em_each': [right(run) * (row['step'] > 0)]}, 'evaluations')
  end = sweep_report.summary(config, runs)['verdicts']['1.0']['variants']['Auto']['end']
  low, high = stats.t.interval(0.95, 2, 200 / 3, stats.sem([0, 100, 100]))
  assert (end['difference']['low'], end['difference']['high']) == pytest.approx((low, high))
  assert end['seeds_needed'] is None
