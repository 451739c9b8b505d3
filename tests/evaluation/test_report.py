import json

import pytest

from jaxsearch.evaluation.report import pieces, read_rows, smoothed, write_report


def evaluation(step, em, text):
  sample = {'question': 'Who <b>?', 'golden_answers': ['A'], 'em': em,
            'spans': [{'role': 'policy', 'text': text}, {'role': 'observation', 'text': '<information>D</information>'}]}
  return {'step': step, 'temperature': 1.0, 'em': em, 'f1': em, 'searches': 1.0, 'n': 1, 'samples': [sample]}


def metrics_row(step):
  return {'step': step, 'reward': 0.1 * step, 'em': 0.1 * step, 'searches': 1.0, 'entropy': 0.5, 'loss': 0.0}


def write_lines(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def test_the_page_stands_alone_and_escapes_what_models_wrote(tmp_path):
  write_lines(tmp_path / 'metrics.jsonl', [metrics_row(step) for step in (1, 2, 3)])
  rows = [evaluation(0, 0.0, '<script>alert(1)</script>'), evaluation(3, 1.0, 'fine')]
  write_lines(tmp_path / 'evaluations.jsonl', rows)
  page = write_report(tmp_path).read_text()
  assert '<script>' not in page and '&lt;script&gt;' in page and 'Who &lt;b&gt;?' in page
  assert 'data:image/png;base64,' in page and 'http://' not in page and 'https://' not in page
  assert (tmp_path / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')
  assert page.index('&lt;script&gt;') < page.index('fine')  # before, then after


def test_a_run_without_evaluations_has_a_page_too(tmp_path):
  write_lines(tmp_path / 'metrics.jsonl', [metrics_row(1)])
  assert 'Learning curve' in write_report(tmp_path).read_text()


def test_figures_that_not_every_step_has_are_there_with_their_mean(tmp_path):
  """Search-R2's: a step without a probed draft has no estimate of the gain."""
  rows = [metrics_row(1), metrics_row(2) | {'gain_predicted': 0.25, 'a_prec': None}, metrics_row(3) | {'gain_predicted': 0.5}]
  write_lines(tmp_path / 'metrics.jsonl', rows)
  cells = write_report(tmp_path).read_text().partition('<td>gain_predicted</td>')[2].partition('</tr>')[0]
  assert cells.split() == ['<td>–</td><td>0.5</td><td>0.375</td>'] and 'a_prec' not in (tmp_path / 'report.html').read_text()


def test_smoothing_starts_at_the_first_value_and_follows():
  assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
  values = smoothed([0.0] + [1.0] * 50)
  assert values[0] == 0 and values[-1] == pytest.approx(1, abs=1e-3)


def test_rows_of_a_missing_file_are_none(tmp_path):
  assert read_rows(tmp_path / 'nothing.jsonl') == []


def test_pieces_lose_nothing():
  assert pieces('a <think>b</think><search> c</search><answer>e</answer>!') == [
    ('other', 'a '), ('think', '<think>b</think>'), ('search', '<search> c</search>'), ('answer', '<answer>e</answer>'),
    ('other', '!')]
