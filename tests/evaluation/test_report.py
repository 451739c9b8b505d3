"""The page of a run: what it says of rows and evaluations, and its rollouts as a browser shows them."""

import html
import json
import re

import numpy as np
import pytest

from jaxsearch.evaluation import plots, report
from jaxsearch.evaluation.figures import record_of
from tests.evaluation.browser import CHROMIUM, run_in
from tests.evaluation.test_competence import grown

chromium = pytest.mark.skipif(not CHROMIUM, reason='no Chromium')


def sample(question, em, text='text'):
  return {'question': question, 'golden_answers': ['A'], 'em': em, 'prediction': 'an answer' if em else None,
          'stop': 'budget', 'searches': 1, 'spans': [
            {'role': 'policy', 'text': text}, {'role': 'observation', 'text': '<information>D'}]}


def evaluation(step, *samples, temperature=1.0):
  em = float(np.mean([own['em'] for own in samples]))
  return {'step': step, 'temperature': temperature, 'em': em, 'f1': em, 'searches': 1.0, 'n': len(samples),
          'samples': samples}


def metrics_row(step, **changes):
  return {'step': step, 'reward': 0.1 * step, 'em': 0.1 * step, 'searches': 1.0, 'entropy': 0.5, 'loss': 0.0,
          'seconds': 2.0, 'skipped': 0} | changes


def page_of(rows=(), evaluations=()):
  """The page without its curves, which take long to draw."""
  return report.render(rows, evaluations, {}, b'')


def written(folder, rows=(), evaluations=()):
  for name, lines in (('metrics', rows), ('evaluations', evaluations)):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return report.write_report(folder).read_text()


def texts(page, tag):
  """Returns what stands in the elements of one kind."""
  page = re.sub('(?s)<script>.*?</script>', '', page)
  found = re.findall(f'(?s)<{tag}[ >].*?</{tag}>', page)
  return [' '.join(html.unescape(re.sub('<[^>]*>', ' ', text)).split()) for text in found]


def test_the_page_stands_alone_and_escapes_what_models_wrote(tmp_path):
  rows = [evaluation(0, sample('Who <b>?', 0.0, '</script><script>alert(1)')),
          evaluation(3, sample('Who <b>?', 1.0))]
  page = written(tmp_path, [metrics_row(step) for step in (1, 2, 3)], rows)
  assert page.count('<script>') == page.count('</script>') == 1 and 'Who &lt;b&gt;?' in page
  assert '\\u003cscript\\u003ealert(1)' in page and 'data:image/png;base64,' in page
  assert not re.search('https?://', page.replace('http://www.w3.org/2000/svg', ''))
  assert (tmp_path / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')
  assert page.count('<div class="scroll" tabindex="0"><table>') == page.count('<table>') == 3


def test_the_first_example_is_one_that_training_changed_for_the_better():
  outcomes = {'both wrong': (0, 0), 'got worse': (1, 0), 'both right': (1, 1), 'got better': (0, 1),
              'better too': (0, 1)}
  rows = [evaluation(step, *(sample(name, float(own[place])) for name, own in outcomes.items()),
                     temperature=temperature)
          for place, step in enumerate((0, 9)) for temperature in (1.0, 0.0)]
  rows.insert(2, evaluation(5, sample('half way', 1.0)))
  page = page_of([metrics_row(9)], rows)
  questions = re.findall('<details data-pair="(.)"( open)?><summary><span class="question">(.*?)</span>', page)
  assert questions == [('0', ' open', 'got better'), ('1', '', 'better too'), ('2', ' open', 'got worse'),
                       ('3', ' open', 'both right'), ('4', ' open', 'both wrong')]
  assert texts(page, 'h3') == ['Wrong before, right after: 2 of 5', 'Right before, wrong after: 1 of 5',
                               'Right both times: 1 of 5', 'Wrong both times: 1 of 5']
  assert 'Before: step 0, greedy. After: step 9, greedy.' in ' '.join(page.split())  # alike decoded
  others = [evaluation(step, sample(name, 1.0)) for step, name in enumerate(('asked', 'others since'))]
  assert texts(page_of([metrics_row(9)], others), 'h3') == ['Right: 1 of 1']  # `eval` may change: no before
  assert texts(page, 'tr')[:2] == ['step decoding EM, % F1, % searches n', '0 T = 1 40.0 40.0 1.00 5']


def test_alike_are_the_evaluations_that_asked_what_the_last_one_did():
  few, many = ([evaluation(step, sample('asked', 1.0)) | {'em_each': [1.0] * number} for step in (0, 5)]
               for number in (2, 3))
  assert report.alike_last([*few, *many]) == many and report.alike_last(few) == few
  assert report.alike_last([]) == []


@pytest.mark.parametrize('rows', [
  [], [{'step': 1, 'em': None, 'skipped': 1}],
  [metrics_row(1), metrics_row(2, loss=None, reward=None, skipped=1), metrics_row(3, skipped=1)],
  [metrics_row(1, loss=None), {'step': 2, 'last_failure': 'text', 'alarms': ''}],
], ids=['no row', 'nothing but null', 'a skipped update', 'texts and an older version'])
def test_what_a_row_does_not_tell_is_left_out(tmp_path, rows):
  page = written(tmp_path, rows, [{'step': 0, 'temperature': 0.0, 'em': 0.5, 'n': 2}][:len(rows) // 2])
  (text,) = texts(page, 'body')
  assert 'nan' not in text.lower() and 'None' not in text
  assert ('Updates were skipped' in text) == any(row.get('skipped') for row in rows)
  if len(rows) == 3:
    assert 'Updates were skipped at step 2:' in text
    assert ['reward', '0.1', '0.3', '0.2'] in [own.split() for own in texts(page, 'tr')]


def test_what_went_wrong_stands_at_the_top():
  fine = {'searches_asked': 4, 'searches_failed': 0, 'tool_calls': 4, 'tool_calls_failed': 0}
  failing = fine | {'searches_failed': 3, 'tool_calls_failed': 3, 'last_failure': '<i>'}
  rows = [metrics_row(1, **fine), metrics_row(2, **failing),
          metrics_row(3, **failing | {'last_failure': 'slow'}, skipped=2),
          metrics_row(4, **fine, skipped=2, alarms='kl, entropy_low'),
          metrics_row(5, **fine, skipped=1, alarms='kl'), metrics_row(6, **fine, skipped=2)]
  page = page_of(rows, [evaluation(6, sample('Who?', 0.0)) | failing])
  assert [line.removeprefix('Warning: ') for line in texts(page, 'p') if line.startswith('Warning')] == [
    'Updates were skipped at steps 3, 6: the loss or its gradient was not finite.',
    'The monitor of collapse raised the alarm kl at steps 4, 5.',
    'The monitor of collapse raised the alarm entropy_low at step 4.',
    'At steps 2, 3: 6 of 24 searches failed; the last: slow.',
    'In the evaluations after step 6: 3 of 4 searches failed; the last: <i>.']
  dead = metrics_row(1, judgements=4, judge_failed=3, last_judge_failure='judge: down')
  [line] = [line for line in texts(page_of([dead, metrics_row(2, judgements=4)]), 'p') if line.startswith('Warning')]
  assert line == 'Warning: At step 1: 3 of 8 judgements failed; the last: judge: down.'
  assert page.index('Warning') < page.index('<h2>') and 'Steps with skipped updates 2' in texts(page, 'tr')


def test_costs():
  page = page_of([metrics_row(step, seconds_generate=1.25) for step in range(1, 31)])
  assert texts(page, 'tr')[-4:] == ['Seconds a step, median 2', 'Seconds to generate, median 1.25',
                                    'Minutes of all steps 1', 'Steps with skipped updates 0']


def test_the_depths_of_rollouts_are_stacked_where_a_run_tells_them(drawn):
  counts = [(6, 2, 0), (3, 3, 2), None, (0, 2, 6)]
  rows = [metrics_row(step) | {f'chains_depth_{d}': n for d, n in enumerate(of or [None] * 3)}
          for step, of in enumerate(counts, start=1)]
  report.plot_curves(rows, [])
  depths = [axes for axes in drawn[0].axes if axes.get_visible()][4]
  assert depths.get_ylabel() == 'rollouts by searches (%)'
  assert [text.get_text() for text in depths.get_legend().get_texts()] == ['0', '1', '≥ 2']
  tops = [{(x, y) for x, y in layer.get_paths()[0].vertices} for layer in depths.collections]
  assert {(1, 75), (2, 37.5), (4, 0)} <= tops[0] and {(1, 100), (2, 75), (4, 25)} <= tops[1]


def test_smoothing_starts_at_the_first_value_follows_and_leaves_out_what_is_missing():
  assert plots.smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
  values = plots.smoothed([0.0] + [1.0] * 50)
  assert values[0] == 0 and values[-1] == pytest.approx(1, abs=1e-3)
  np.testing.assert_allclose(plots.smoothed([np.nan, 1.0, np.nan, 3.0]),
                             [np.nan, 1.0, 1.0, *plots.smoothed([1.0, 3.0])[1:]])


# Rollouts, as rollout.js draws them.


@chromium
def test_credit_is_shown_with_its_sign_and_right_and_wrong_in_words(tmp_path):
  credited = record_of(grown([('<script>x</script>', '<b>kept</b>')], [0.3, 0.72, 0.45], 0.0, answer='x'))
  plain = sample(credited['question'], 1.0) | {'id': '1', 'prediction': 'A', 'spans': []}
  page = page_of([], [evaluation(0, plain), evaluation(5, credited)])
  said, labels, colours = run_in(page, '''
    const all = (selector) => [...document.querySelectorAll(selector)]
    await until(() => all('.column').length === 2)
    return [all('.column').map((one) => one.innerText), all('.block .label').map((one) => one.textContent),
            all('.block.policy .tokens > span').map((one) => getComputedStyle(one).backgroundColor)]''')
  assert said[0].startswith('before\n✓ right · A') and said[1].startswith('after\n✗ wrong · x')
  text = ' '.join(labels)
  assert all(number in text for number in ('+0.42', '−0.27', '−0.45', 'V 0.3 ', 'V 0.72', 'V 0.45'))
  assert text.count('forgotten') == 1  # the clean copy stays
  assert len(set(colours)) == 3  # a colour for each advantage
