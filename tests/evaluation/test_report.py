import html
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxsearch.evaluation import report
from jaxsearch.evaluation.report import pieces, read_rows, smoothed, write_report
from tests.evaluation.test_report_rollouts import Balance

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


def sample(question, em, text='text'):
  return {'question': question, 'golden_answers': ['A'], 'em': em, 'prediction': 'an answer' if em else None, 'stop': 'budget',
          'spans': [{'role': 'policy', 'text': text}, {'role': 'observation', 'text': '<information>D</information>'}]}


def evaluation(step, *samples, temperature=1.0):
  em = float(np.mean([own['em'] for own in samples]))
  return {'step': step, 'temperature': temperature, 'em': em, 'f1': em, 'searches': 1.0, 'n': len(samples), 'samples': samples}


def metrics_row(step, **changes):
  return {'step': step, 'reward': 0.1 * step, 'em': 0.1 * step, 'searches': 1.0, 'entropy': 0.5, 'loss': 0.0, 'seconds': 2.0,
          'skipped': 0} | changes


def page_of(rows=(), evaluations=()):
  """The page without its curves, which take long to draw."""
  return report.render(rows, evaluations, {}, b'', b'')


def written(folder, rows=(), evaluations=()):
  for name, lines in (('metrics', rows), ('evaluations', evaluations)):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return write_report(folder).read_text()


class Elements(Balance):
  """The elements of a page, as (tag, attributes, classes of the elements around it), and their text."""

  def __init__(self, page):
    super().__init__()
    self.found, self.around = [], []
    self.feed(page[page.index('<body>'):page.index('</html>')])
    assert not self.open

  def handle_starttag(self, tag, attrs):
    before = len(self.open)
    super().handle_starttag(tag, attrs)
    self.found.append((tag, dict(attrs), list(self.around)))
    if len(self.open) > before:
      self.around.append(dict(attrs).get('class', ''))

  def handle_endtag(self, tag):
    super().handle_endtag(tag)
    self.around.pop()


def texts(page, tag):
  """What stands in the elements of one kind."""
  found = re.findall(f'(?s)<{tag}[ >].*?</{tag}>', page)
  return [' '.join(html.unescape(re.sub('<[^>]*>', ' ', text)).split()) for text in found]


def test_the_page_stands_alone_and_escapes_what_models_wrote(tmp_path):
  rows = [evaluation(0, sample('Who <b>?', 0.0, '<script>alert(1)</script>')), evaluation(3, sample('Who <b>?', 1.0, 'fine'))]
  page = written(tmp_path, [metrics_row(step) for step in (1, 2, 3)], rows)
  assert '<script>' not in page and '&lt;script&gt;' in page and 'Who &lt;b&gt;?' in page
  assert 'data:image/png;base64,' in page and 'http://' not in page and 'https://' not in page
  assert (tmp_path / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')
  assert page.index('&lt;script&gt;') < page.index('fine')  # before, then after


def test_a_run_without_evaluations_has_a_page_too():
  page = page_of([metrics_row(1)])
  assert 'Learning curve' in page and 'class="pair' not in page and 'Warning' not in page


def test_the_first_example_is_one_that_training_changed_for_the_better():
  outcomes = {'both wrong': (0, 0), 'got worse': (1, 0), 'both right': (1, 1), 'got better': (0, 1), 'better too': (0, 1)}
  rows = [evaluation(step, *(sample(name, float(own[place])) for name, own in outcomes.items()), temperature=temperature)
          for place, step in enumerate((0, 9)) for temperature in (1.0, 0.0)]
  rows.insert(2, evaluation(5, sample('half way', 1.0)))
  page = page_of([metrics_row(9)], rows)
  questions = re.findall('<details( open)?><summary><span class="question">(.*?)</span>', page)
  assert questions == [(' open', 'got better'), ('', 'better too'), (' open', 'got worse'), (' open', 'both right'),
                       (' open', 'both wrong')]
  assert texts(page, 'h3') == ['Wrong before, right after: 2 of 5', 'Right before, wrong after: 1 of 5',
                               'Right both times: 1 of 5', 'Wrong both times: 1 of 5']
  text = ' '.join(page.split())
  assert 'Before: step 0, greedy. After: step 9, greedy.' in text  # alike decoded
  assert 'first what training changed for the better, then for the worse' in text


def test_right_and_wrong_are_said_in_words():
  page = page_of([metrics_row(1)], [evaluation(0, sample('Who?', 0.0)), evaluation(1, sample('Who?', 1.0))])
  before, after = re.findall(r'(?s)<div class="rollout (right|wrong)">\s*<div>(.*?)</div>', page)
  assert [(own, ' '.join(re.sub('<[^>]*>', ' ', text).split())) for own, text in (before, after)] == [
    ('wrong', 'before: ✗ wrong · no answer: budget'), ('right', 'after: ✓ right · an answer')]


def test_a_single_evaluation_is_shown_once():
  page = page_of([], [evaluation(0, sample('Who?', 1.0), sample('What?', 0.0))])
  assert texts(page, 'h3') == ['Right: 1 of 2', 'Wrong: 1 of 2'] and page.count('class="rollout') == 2
  assert 'before' not in Elements(page).text


@pytest.mark.parametrize('rows', [
  [],
  [{'step': 1}],
  [{'step': 1, 'em': None, 'skipped': 1}],
  [metrics_row(1), metrics_row(2, loss=None, reward=None, entropy=None, skipped=1), metrics_row(3, skipped=1)],
  [metrics_row(1, loss=None), {'step': 2, 'last_failure': 'text', 'alarms': ''}],
], ids=['no row', 'a row with nothing', 'nothing but null', 'a skipped update', 'texts and an older version'])
def test_what_a_row_does_not_tell_is_left_out(tmp_path, rows):
  evaluations = [{'step': 0, 'temperature': 0.0, 'em': 0.5, 'n': 2}] if len(rows) == 2 else []
  page = written(tmp_path, rows, evaluations)
  text = Elements(page).text
  assert 'nan' not in text.lower() and 'None' not in text
  assert ('Updates were skipped' in text) == any(row.get('skipped') for row in rows)
  if len(rows) == 3:
    assert 'Updates were skipped at step 2:' in text
    assert ['reward', '0.1', '0.3', '0.2'] in [own.split() for own in texts(page, 'tr')]


def test_what_went_wrong_stands_at_the_top():
  failing = {'searches_asked': 4, 'searches_failed': 3, 'tool_calls': 4, 'tool_calls_failed': 3, 'last_failure': '<i>down</i>'}
  fine = failing | {'searches_failed': 0, 'tool_calls_failed': 0}
  fine.pop('last_failure')
  rows = [metrics_row(1, **fine), metrics_row(2, **failing), metrics_row(3, **failing | {'last_failure': 'slow'}, skipped=2),
          metrics_row(4, **fine | {'tool_calls_failed': 1}, last_failure='sandbox', skipped=2, alarms='kl, entropy_low'),
          metrics_row(5, **fine, skipped=1, alarms='kl'), metrics_row(6, **fine, skipped=2)]
  evaluations = [evaluation(6, sample('Who?', 0.0)) | failing]
  page = page_of(rows, evaluations)
  assert [line.removeprefix('Warning: ') for line in texts(page, 'p') if line.startswith('Warning')] == [
    'Updates were skipped at steps 3, 6: the loss or its gradient was not finite.',
    'The monitor of collapse raised the alarm kl at steps 4–5.',
    'The monitor of collapse raised the alarm entropy_low at step 4.',
    'Searches failed at steps 2–3: 6 of 24 (25 %). The last reason: slow',
    'Searches failed in the evaluations after step 6: 3 of 4 (75 %). The last reason: <i>down</i>',
    'Tool calls failed at step 4: 7 of 24 (29 %). The last reason: sandbox']
  assert page.index('Warning') < page.index('<h2>') and 'Searches failed 6 of 24 (25 %)' in texts(page, 'tr')
  assert 'Steps with skipped updates 2' in texts(page, 'tr')


def test_costs_and_memory():
  row = {'seconds_generate': 1.25, 'resident_mib': 1000.0}
  page = page_of([metrics_row(step, **row) for step in range(1, 31)])
  assert texts(page, 'tr')[-5:] == ['Seconds a step, median 2', 'Seconds to generate, median 1.25', 'Minutes of all steps 1',
                                    'Steps with skipped updates 0', 'Resident memory 1,000 MiB']
  growing = [metrics_row(step, resident_mib=1000.0 + 20 * step) for step in range(1, 31)]
  assert report.grew(growing) and not report.grew(growing[:7])  # too few to tell
  assert not report.grew([metrics_row(step, resident_mib=1000.0 if step > 5 else 10.0) for step in range(1, 31)])  # the start
  assert 'Resident memory 1,600 MiB; it grew, see the last curve' in texts(page_of(growing), 'tr')


def test_a_table_scrolls_in_its_own_box():
  found = Elements(page_of([metrics_row(1)], [evaluation(0, sample('Who?', 0.0))])).found
  tables = [around for tag, _, around in found if tag == 'table']
  assert len(tables) == 3 and all(around[-1] == 'scroll' for around in tables)


@pytest.mark.skipif(not CHROMIUM, reason='no Chromium')
def test_on_a_phone_nothing_is_wider_than_the_screen_or_tiny(tmp_path):
  long = sample('Why' + 'y' * 200 + '?', 0.0, 'x' * 300) | {'prediction': 'z' * 200}
  long['spans'] += [{'role': 'policy', 'text': 'branch', 'parent': 0, 'advantage': -0.5, 'segment': 'invoke'}] * 2
  rows = [metrics_row(10**6, searches_failed=10**6, searches_asked=10**6, last_failure='v' * 300)]
  page = written(tmp_path, rows, [evaluation(step, long, sample('Who?', 1.0)) for step in (0, 10**6)])
  frame = tmp_path / 'frame.html'
  frame.write_text(f'''<iframe id=frame style="width:360px;height:800px;border:0" srcdoc="{html.escape(page)}"></iframe><script>
    onload = () => {{
      const phone = frame.contentDocument, sizes = [...phone.body.querySelectorAll('*')].map(
        (one) => parseFloat(frame.contentWindow.getComputedStyle(one).fontSize))
      document.title = [phone.documentElement.scrollWidth, Math.min(...sizes)].join(' ')
    }}</script>''')
  dom = subprocess.run([CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--dump-dom',
                        f'--user-data-dir={tmp_path}/user', frame.as_uri()],
                       capture_output=True, text=True, timeout=120, check=True).stdout
  width, size = map(float, re.search('<title>(.*?)</title>', dom)[1].split())
  assert width == 360 and size >= 12


def test_curves_differ_by_more_than_colour(monkeypatch):
  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: drawn.append(figure))
  rows = [metrics_row(step, resident_mib=100.0 * step, entropy=None) for step in range(1, 20)]
  evaluations = [evaluation(step, sample('Who?', 1.0), temperature=temperature) | {'em_of_nq': 0.5, 'em_of_2wiki': 0.25}
                 for step in (0, 19) for temperature in (0.0, 1.0)]
  for columns in (1, 2):
    report.plot_curves(rows, evaluations, columns)
  for figure in drawn:
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_ylabel() for axes in shown] == [  # of entropy there is none
      'exact match (%)', 'searches per question', 'reward (mean of rollouts)', 'exact match, 2wiki (%)', 'exact match, nq (%)',
      'resident memory (MiB)']
    assert [line.get_ydata()[-1] for line in shown[4].lines[-2:]] == [50, 50]
    assert all(axes.get_xlabel() == 'step' for axes in shown)
    looks = {(line.get_linestyle(), line.get_marker(), line.get_linewidth()) for line in shown[0].lines}
    assert len(shown[0].lines) == len(looks) == 4 and len(figure.legends) == 1 and not shown[0].get_legend()


@pytest.mark.parametrize('name', ['learning_curve.png', 'report.html'])
def test_a_kill_before_a_file_is_whole_leaves_the_one_before(tmp_path, monkeypatch, name):
  written(tmp_path, [metrics_row(1)])
  before, replace = (tmp_path / name).read_bytes(), pathlib.Path.replace

  def killed(part, target):
    if target.name == name:
      raise KeyboardInterrupt
    return replace(part, target)

  monkeypatch.setattr(pathlib.Path, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    written(tmp_path, [metrics_row(1), metrics_row(2)])
  assert (tmp_path / name).read_bytes() == before


def test_the_depths_of_rollouts_are_stacked_where_a_run_tells_them(monkeypatch):
  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: drawn.append(figure))
  counts = [(6, 2, 0), (3, 3, 2), None, (0, 2, 6)]
  rows = [metrics_row(step) | {f'chains_depth_{d}': n for d, n in enumerate(of or [None] * 3)}
          for step, of in enumerate(counts, start=1)]
  report.plot_curves(rows, [], 2)
  report.plot_curves([metrics_row(1)], [], 2)
  shown, without = ([axes for axes in figure.axes if axes.get_visible()] for figure in drawn)
  depths = shown[4]
  assert len(without) == 4 and depths.get_ylabel() == 'rollouts by searches (%)'
  assert [text.get_text() for text in depths.get_legend().get_texts()] == ['0', '1', '≥ 2']
  tops = [{(x, y) for x, y in layer.get_paths()[0].vertices} for layer in depths.collections]
  assert {(1, 75), (2, 37.5), (4, 0)} <= tops[0] and {(1, 100), (2, 75), (4, 25)} <= tops[1] and {(4, 100), (2, 100)} <= tops[2]


def test_figures_that_not_every_step_has_are_there_with_their_mean():
  """Search-R2's: a step without a probed draft has no estimate of the gain."""
  rows = [metrics_row(1), metrics_row(2) | {'gain_predicted': 0.25, 'a_prec': None}, metrics_row(3) | {'gain_predicted': 0.5}]
  page = page_of(rows)
  assert [own.split() for own in texts(page, 'tr') if 'gain' in own] == [['gain_predicted', '–', '0.5', '0.375']]
  assert 'a_prec' not in page


def test_smoothing_starts_at_the_first_value_and_follows():
  assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
  values = smoothed([0.0] + [1.0] * 50)
  assert values[0] == 0 and values[-1] == pytest.approx(1, abs=1e-3)


def test_smoothing_leaves_out_what_is_missing():
  np.testing.assert_allclose(smoothed([np.nan, 1.0, np.nan, 3.0]), [np.nan, 1.0, 1.0, *smoothed([1.0, 3.0])[1:]])


def test_ranges_of_steps():
  assert report.ranges([3]) == 'step 3' and report.ranges([9, 4, 5, 6, 9]) == 'steps 4–6, 9'
  assert report.ranges(range(0, 30, 2)) == 'steps 0, 2, 4, 6, 8, 10, 12, 14 and 7 more'


def test_rows_of_a_missing_file_are_none(tmp_path):
  assert read_rows(tmp_path / 'nothing.jsonl') == []


def test_pieces_lose_nothing():
  assert pieces('a <think>b</think><search> c</search><answer>e</answer>!') == [
    ('other', 'a '), ('think', '<think>b</think>'), ('search', '<search> c</search>'), ('answer', '<answer>e</answer>'),
    ('other', '!')]
