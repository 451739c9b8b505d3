"""Tables and curves of made-up run folders, against numbers worked out by other means."""

import json

import ml_collections
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

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
  """EM goes from 0.2 to `em` (a tenth less when greedy); step s makes 2 s thousand tokens and trains on `tokens`."""
  (run.out / 'checkpoints' / str(STEPS)).mkdir(parents=True)
  rows = [{'step': step, 'em': em * step / STEPS, 'tokens_generated': 2000 * step, 'tokens_trained': tokens,
           'tokens_prefilled': 3000 * step,
           'seconds': 30.0 if step in compiled else 6.0, 'compilations': int(step in compiled)} for step in range(1, STEPS + 1)]
  tests = [{'step': step, 'temperature': temperature, 'em': value - 0.1 * (temperature == 0), 'f1': value + 0.05,
            'searches': 1 + value, 'n': 50, 'samples': []}
           for step, value in ((0, 0.2), (2, (0.2 + em) / 2), (STEPS, em)) for temperature in (1.0, 0.0)]
  for name, lines in (('metrics', rows), ('evaluations', tests)):
    (run.out / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


@pytest.fixture
def runs(config):
  runs = sweep.plan(config)
  for run in runs:
    write_run(run, SAMPLED[run.variant][run.seed], tokens=1000 if run.variant == 'Full' else 500 + run.seed)
  return runs


def test_means_differences_and_their_intervals(config, runs):
  found = sweep_report.summary(config, runs)
  assert list(found['variants']) == ['Full', 'Auto'] and found['not_finished'] == []
  full, auto = (found['variants'][name] for name in SAMPLED)
  for of, values in ((full['figures']['em@1.0'], SAMPLED['Full']), (auto['figures']['em@1.0'], SAMPLED['Auto'])):
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert of['mean'] == pytest.approx(np.mean(values)) and (of['low'], of['high']) == pytest.approx(expected)
  paired = stats.ttest_rel(SAMPLED['Auto'], SAMPLED['Full'])
  difference, ends = auto['differences']['em@1.0'], paired.confidence_interval(0.95)
  assert difference['mean'] == pytest.approx(np.mean(SAMPLED['Auto']) - np.mean(SAMPLED['Full']))
  assert (difference['low'], difference['high']) == pytest.approx((ends.low, ends.high))
  assert full['differences'] == {} and full['seeds'] == [0, 1, 2]
  assert full['figures']['em@0.0']['mean'] == pytest.approx(0.35)
  assert full['figures']['f1@1.0']['mean'] == pytest.approx(0.50)
  assert full['figures']['searches@0.0']['mean'] == pytest.approx(1.45)
  assert full['figures']['tokens_generated']['values'] == [20_000] * 3
  assert auto['figures']['tokens_trained']['values'] == [2000, 2004, 2008]
  assert full['figures']['seconds']['mean'] == 24.0  # the step that compiled counts as the others do
  assert found['before']['em@1.0'] == pytest.approx(0.2) and found['questions'] == [50] and found['steps'] == [STEPS]


def test_the_table_as_it_is_read(config, runs):
  page = sweep_report.write(config, runs)
  lines = page.read_text().splitlines()
  assert lines[0] == '# Depth first?'
  assert lines[2].startswith('| variant (seeds) | EM, T=1 | F1, T=1 | searches, T=1 | EM, greedy |')
  assert lines[4].startswith('| before training | 20.0 | 25.0 | 1.20 | 10.0 |') and lines[4].endswith('|  |  |  |')
  assert lines[5] == ('| Full (3) | 45.0 ± 12.4 | 50.0 ± 12.4 | 1.45 ± 0.12 | 35.0 ± 12.4 | 50.0 ± 12.4 | 1.45 ± 0.12 | '
                      '20 ± 0 | 30 ± 0 | 4 ± 0 | 24 ± 0 |')
  # 0.12, 0.08 and 0.15 differ by 0.1167 on average, with a standard error of 0.0203 and t(2) = 4.303
  assert lines[12].startswith('| Auto | **+11.7 [+2.9, +20.4]** |')
  assert all(line.count('|') == lines[2].count('|') for line in lines[2:7])
  assert json.loads((page.parent / 'table.json').read_text()) == sweep_report.summary(config, runs)
  for name in ('curves.png', 'steps.png'):
    assert (page.parent / name).read_bytes().startswith(b'\x89PNG') and f']({name})' in lines[-1] + lines[-3]


def test_unfinished_runs_are_left_out_and_named(config, runs):
  for run in runs:
    if (run.variant, run.seed) in {('Full', 1), ('Auto', 2)}:
      (run.out / 'checkpoints' / str(STEPS)).rmdir()
  found = sweep_report.summary(config, runs)
  auto = found['variants']['Auto']
  assert auto['seeds'] == [0, 1] and auto['differences']['em@1.0']['values'] == pytest.approx([0.12])  # seed 0 has both
  assert auto['differences']['em@1.0']['low'] is None
  text = sweep_report.table(found)
  assert '| Full (2) |' in text and '| Auto | +12.0 |' in text and 'Not finished: Full, seed 1; Auto, seed 2.' in text


def test_names_and_texts_of_runs_are_no_markup(config, runs):
  found = sweep_report.summary(config, runs)
  found |= {'title': 'T\n![x](e.org)', 'questions': ['8|<b>\x1b[2J'], 'variants': {'A|<i>': found['variants']['Full']}}
  text = sweep_report.table(found)
  assert text.startswith('# T ![x]\\(e.org)\n') and '| A\\|\\<i> (3) |' in text and 'on 8\\|\\<b> [2J held-out' in text


def test_a_sweep_without_a_baseline_yet_and_without_anything(config, runs):
  for run in runs:
    if run.variant == 'Full':
      (run.out / 'checkpoints' / str(STEPS)).rmdir()
  text = sweep_report.table(sweep_report.summary(config, runs))
  assert '| Auto (3) |' in text and 'Differences' not in text
  with pytest.raises(ValueError, match='no run of this sweep is finished'):
    sweep_report.write(config, [run for run in runs if run.variant == 'Full'])


def test_differences_of_the_same_values_are_not_bold():
  of = sweep_report.estimate([0.0, 0.0, 0.0])
  assert sweep_report.difference('em@1.0', of) == '+0.0 [+0.0, +0.0]'
  assert sweep_report.difference('tokens_trained', sweep_report.estimate([-4000, -4000])) == '**-4 [-4, -4]**'


def test_steps_that_compile_count_as_the_median():
  row = lambda seconds, compilations: {'seconds': seconds, 'compilations': compilations}
  assert sweep_report.seconds([row(90, 5), row(4, 0), row(6, 0), row(70, 1)]).tolist() == [5, 4, 6, 5]
  assert sweep_report.seconds([row(90, 5), row(4, 1)]).tolist() == [90, 4]


def test_curves(runs):
  points = sweep_report.curve(runs[0], 1.0)
  assert points == {0: (0, 0, 0.2), 2: (2000, 0.2, pytest.approx(0.3)), 4: (4000, 0.4, 0.4)}
  training = sweep_report.curve(runs[0], None)
  assert list(training) == [1, 2, 3, 4] and training[1] == (1000, 0.1, pytest.approx(0.1))


def test_what_a_row_does_not_tell_is_left_out_and_not_guessed(config, runs):
  for run in runs:
    path = run.out / 'metrics.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {'loss': None, 'em': None, 'last_failure': 'down'}  # of a skipped update
    if run.variant == 'Auto':
      del rows[1]['tokens_trained'], rows[0]['compilations'], rows[2]['seconds']
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  sweep_report.write(config, runs)
  found = sweep_report.summary(config, runs)['variants']
  assert found['Full']['figures'].keys() - found['Auto']['figures'].keys() == {'tokens_trained', 'seconds'}
  assert found['Full']['figures']['seconds']['mean'] == 24.0 and 'tokens_generated' in found['Auto']['figures']
  auto = next(run for run in runs if run.variant == 'Auto')
  np.testing.assert_allclose(sweep_report.curve(auto, 1.0)[2], [np.nan, 0.6, (0.2 + SAMPLED['Auto'][0]) / 2])
  training = [value for *_, value in sweep_report.curve(auto, None).values()]
  assert training[1] == training[0] < training[2]


def test_curves_differ_by_line_and_marker_too(config, runs, tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: drawn.append(figure))
  many = {f'variant {number}': [run for run in runs if run.variant == 'Auto'] for number in range(11)}
  sweep_report.plot({'Full': [run for run in runs if run.variant == 'Full'], **many}, config, tmp_path / 'curves.png')
  for axes in drawn[0].axes:
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(axes.lines) == len(looks) == 12


@pytest.mark.parametrize('name', ['searches', 'depth_mean'])
def test_em_reward_and_searches_over_the_steps(config, runs, tmp_path, monkeypatch, name):
  """CuSearch's figure 3: a line for each variant, the mean over seeds; the last panel has the capped depth where rows have it."""
  for run in runs:
    path = run.out / 'metrics.jsonl'
    rows = [json.loads(line) | {'reward': 0.1 * run.seed, 'searches': 9.0, name: 1 + 3 * run.seed + (run.variant == 'Auto')}
            for line in path.read_text().splitlines()]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: drawn.append(figure))
  by_variant = {variant: [run for run in runs if run.variant == variant] for variant in config.variants}
  sweep_report.plot_steps(by_variant, config, tmp_path / 'steps.png')
  em, reward, depth = drawn[0].axes
  legend = [text.get_text() for text in drawn[0].legends[0].texts]
  assert [line.get_label() for line in em.lines] == ['Full (3)', 'Auto (3)'] == legend
  np.testing.assert_allclose([line.get_xdata() for line in em.lines], [[0, 2, 4]] * 2)
  np.testing.assert_allclose([line.get_ydata()[-1] for line in em.lines], [45.0, 100 * np.mean(SAMPLED['Auto'])])
  np.testing.assert_allclose([line.get_xydata() for line in reward.lines], [[[step, 0.1] for step in (1, 2, 3, 4)]] * 2)
  np.testing.assert_allclose([line.get_ydata() for line in depth.lines], [[4] * 4, [5] * 4])
  assert all(axes.get_xlabel() == 'step' for axes in drawn[0].axes)


def test_with_few_evaluations_the_curve_is_that_of_the_training(config, runs, monkeypatch):
  asked = []
  original = sweep_report.curve
  monkeypatch.setattr(sweep_report, 'curve', lambda run, kind: asked.append(kind) or original(run, kind))
  sweep_report.write(config, runs)
  assert set(asked) == {1.0, 0.0}
  asked.clear()
  for run in runs:
    path = run.out / 'evaluations.jsonl'
    path.write_text(''.join(line + '\n' for line in path.read_text().splitlines() if json.loads(line)['step'] != 2))
  sweep_report.write(config, runs)
  assert set(asked) == {None}


def test_figures_that_only_some_variants_have_are_blank_in_the_others(config, runs):
  for run in runs:
    path = run.out / 'evaluations.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    extra = {'tool_rate_tier_2': 0.25} | ({'auc': 0.9} if run.variant == 'Auto' else {})
    path.write_text(''.join(json.dumps(row | extra) + '\n' for row in rows))
  text = sweep_report.table(sweep_report.summary(config, runs))
  head, full, auto = (next(line for line in text.splitlines() if line.startswith(start)).split(' | ')
                      for start in ('| variant (seeds)', '| Full (3)', '| Auto (3)'))
  column = {name.strip(' |'): place for place, name in enumerate(head)}
  assert full[column['tool use tier 2, T=1']] == '25.0 ± 0.0' and auto[column['AUC, greedy']] == '0.90 ± 0.00'
  assert full[column['AUC, greedy']].strip() == '' and column['seconds'] == len(head) - 1
  assert sweep_report.summary(config, runs)['variants']['Auto']['differences'].keys() >= {'tool_rate_tier_2@0.0', 'em@0.0'}


def test_em_of_each_data_set_has_a_column(config, runs):
  """Search-R2's table 7."""
  for run in runs:
    path = run.out / 'evaluations.jsonl'
    rows = [json.loads(line) | {'em_of_nq': 0.5 if run.variant == 'Auto' else 0.25} for line in path.read_text().splitlines()]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  lines = sweep_report.table(sweep_report.summary(config, runs)).splitlines()
  place = lines[2].split(' | ').index('EM nq, greedy')
  assert [line.split(' | ')[place] for line in lines[5:7]] == ['25.0 ± 0.0', '50.0 ± 0.0']


def test_what_training_noted_and_what_time_bought(config, runs):
  """Search-R2's terms are means over the steps that have them; EM and time are shares of the baseline's (its table 5)."""
  for run in runs:
    if run.variant == 'Auto':
      path = run.out / 'metrics.jsonl'
      rows = [json.loads(line) for line in path.read_text().splitlines()]
      for row in rows:
        row |= {'seconds': 1.5 * row['seconds'], 'em_draft_per_tree': 0.1 * row['step']}
        row |= ({'a_prec': 0.1} if row['step'] == 2 else {})
      path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  found = sweep_report.summary(config, runs)
  auto, full = found['variants']['Auto'], found['variants']['Full']
  assert auto['figures']['em_draft_per_tree']['mean'] == pytest.approx(0.25)
  assert auto['figures']['a_prec']['mean'] == pytest.approx(0.1)
  assert 'em_draft_per_tree' not in full['figures'] and 'relative' not in full
  em = np.mean(SAMPLED['Auto']) / np.mean(SAMPLED['Full']) - 1
  assert auto['relative'] == pytest.approx(auto['relative'] | {
    'seconds': 0.5, 'em@1.0': em, 'em@1.0/seconds': em / 0.5})
  text = sweep_report.table(found)
  assert '| variant | EM, T=1.0 | EM, T=0.0 | seconds | EM, T=1.0 / seconds | EM, T=0.0 / seconds |' in text
  assert f'| Auto | {100 * em:+.1f} |' in text and f'| +50.0 | {em / 0.5:.2f} |' in text and 'EM of drafts' in text
  for run in runs:  # a variant that takes less time buys nothing with it
    if run.variant == 'Auto':
      (run.out / 'metrics.jsonl').write_text((run.out / 'metrics.jsonl').read_text().replace('"seconds": 9.0', '"seconds": 1.0'))
  assert not any('/' in name for name in sweep_report.summary(config, runs)['variants']['Auto']['relative'])


def test_a_run_with_probes_has_no_costs(config, runs):
  for run in runs:
    if run.variant == 'Auto':
      path = run.out / 'metrics.jsonl'
      rows = [json.loads(line) | {'probed': 7} for line in path.read_text().splitlines()]
      path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  found = sweep_report.summary(config, runs)['variants']
  assert found['Full']['figures'].keys() - found['Auto']['figures'].keys() == {'tokens_generated', 'tokens_prefilled', 'seconds'}
  assert found['Auto']['relative'].keys() == {'em@1.0', 'em@0.0'}  # table 5 has no time of it
  auto = next(run for run in runs if run.variant == 'Auto')
  assert np.isnan([minutes for _, minutes, _ in sweep_report.curve(auto, 1.0).values()][1:]).all()
  sweep_report.write(config, runs)


def test_a_table_too_wide_for_a_page_is_turned():
  wide = [['variant', *(f'figure {i}' for i in range(20))], ['A', *map(str, range(20))], ['B', *map(str, range(20, 40))]]
  lines = sweep_report.markdown(wide).splitlines()
  assert lines[:3] == ['| variant | A | B |', '| --- | --: | --: |', '| figure 0 | 0 | 20 |'] and len(lines) == 22
  assert sweep_report.markdown([row[:3] for row in wide]).splitlines()[2:] == ['| A | 0 | 1 |', '| B | 20 | 21 |']
