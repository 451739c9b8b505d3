"""Results of bench as other commands read them."""

import json

import pytest

from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation import answers, figures, results
from tests.evaluation.test_figures import record
from tests.evaluation.test_table import MANIFEST


def test_a_closed_book_result_never_searched(tmp_path):
  records = [record('nq', '1', 1.0), record('nq', '1', 0.0, sample=1), record('hotpotqa', '1', 1.0)]
  result = figures.scores(records) | {'manifest': MANIFEST, 'predictions': records}
  path = tmp_path / 'r.json'
  path.write_text(json.dumps(result))
  with pytest.raises(DataError, match='this agent searched'):
    results.read_closed_book(path)
  path.write_text(json.dumps(result | {'manifest': MANIFEST | {'searched': False}}))
  assert results.read_closed_book(path) == {
    (name, '1', records[0]['question']): em for name, em in (('nq', 0.5), ('hotpotqa', 1.0))}


def test_what_is_kept_of_an_answer_in_two_rows_is_one_record(tmp_path):
  kept = answers.Kept(str(tmp_path / 'r.json'), {}, 1)
  spans = [{'role': 'policy', 'text': 'A'}]
  answered = {'id': '1', 'question': 'Who?', 'golden_answers': ['A'], 'spans': spans}
  kept.add({0: answered})
  kept.add({0: {'judged': 1.0}})
  assert results.read_predictions(kept.path) == [answered | {'judged': 1.0}] == kept.all()


def test_rows_without_an_identity_are_of_another_evaluation(tmp_path, capsys):
  path = tmp_path / f'r.json{answers.PART}'
  path.write_text('{"number": 0, "record": {}}\n')
  assert not answers.Kept(str(tmp_path / 'r.json'), {}, 1).records
  assert 'of another evaluation (it does not say which); starting again' in capsys.readouterr().err
