import json
import pathlib

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


@pytest.mark.parametrize('name', ['learning_curve.png', 'report.html'])
def test_a_kill_before_a_file_is_whole_leaves_the_one_before(tmp_path, monkeypatch, name):
  write_lines(tmp_path / 'metrics.jsonl', [metrics_row(1)])
  write_report(tmp_path)
  before, replace = (tmp_path / name).read_bytes(), pathlib.Path.replace

  def killed(part, target):
    if target.name == name:
      raise KeyboardInterrupt
    return replace(part, target)

  monkeypatch.setattr(pathlib.Path, 'replace', killed)
  write_lines(tmp_path / 'metrics.jsonl', [metrics_row(1), metrics_row(2)])
  with pytest.raises(KeyboardInterrupt):
    write_report(tmp_path)
  assert (tmp_path / name).read_bytes() == before


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
