import json

import pytest

from jaxsearch.data.jsonl import DataError
from jaxsearch.data.questions import Question, QuestionBatches, read_questions, write_questions


def write(path, *records):
  path.write_text('\n'.join(map(json.dumps, records)))
  return path


def some(count):
  # By the thousand below: grain's shuffle takes tens of milliseconds a draw from a handful.
  return [Question(str(i), f'question {i}', (f'answer {i}',)) for i in range(count)]


def stream(questions, batch_size, seed=0):
  return QuestionBatches(questions, batch_size, seed=seed)


def ids(batch):
  return [question.id for question in batch]


def test_reads_golds_as_they_come(tmp_path):
  path = write(
      tmp_path / 'q.jsonl',
      {'id': 'a', 'question': 'Who?', 'golden_answers': ['X', 'Y'], 'metadata': {'hops': 2, 'source': None}},
      {'id': 7, 'question': 'Where?', 'golden_answers': 'Paris'},
      {'id': 'c', 'question': 'How many?', 'golden_answers': [12, 0.5], 'metadata': None})
  assert read_questions(path) == [
      Question('a', 'Who?', ('X', 'Y'), {'hops': 2}), Question('7', 'Where?', ('Paris',)),
      Question('c', 'How many?', ('12', '0.5'))]


def test_written_questions_are_read_back(tmp_path):
  asked = [Question('a', 'Who?', ('X', 'É'), {'hops': 2, 'steps': [{'query': 'a'}]}), *some(2)]
  write_questions(asked, tmp_path / 'q.jsonl')
  assert read_questions(tmp_path / 'q.jsonl') == asked


@pytest.mark.parametrize(('change', 'reason'), [
    *[({'golden_answers': value}, "'golden_answers'") for value in ([], ['A', ' '], True, None, '')],
    ({'question': ''}, "'question'"), ({'question': 3}, "'question'"),
    ({'metadata': []}, "'metadata'"), ({'metadata': {'source': 3}}, "metadata: 'source' must be"),
    ({'metadata': {'match': 'number'}}, "'match' must be one of exact, numeric, stated"),
    ({'metadata': {'match': 'numeric', 'tolerance': float('inf')}}, "'tolerance' must be finite and >= 0, not inf"),
    ({'metadata': {'match': 'numeric', 'tolerance': -1}}, "'tolerance' must be finite and >= 0, not -1"),
    ({'id': '1'}, "id '1' was already used at .*q.jsonl:1")])
def test_faults_name_file_line_and_key(tmp_path, change, reason):
  good = {'id': '1', 'question': 'Who?', 'golden_answers': ['X']}
  path = write(tmp_path / 'q.jsonl', good, good | {'id': '2'} | change)
  with pytest.raises(DataError, match=reason) as error:
    read_questions(path)
  assert f'{path}:2: ' in str(error.value)


def test_every_epoch_holds_every_question_once_in_its_own_order():
  batches = stream(some(1000), 400, seed=3)
  drawn = [name for _ in range(10) for name in ids(next(batches))]
  epochs = [drawn[i:i + 1000] for i in range(0, 4000, 1000)]
  assert all(sorted(epoch) == sorted(map(str, range(1000))) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_seed_decides():
  first, same, other = (stream(some(1000), 1000, seed=seed) for seed in (1, 1, 2))
  orders = ids(next(first)), ids(next(first))
  assert orders == (ids(next(same)), ids(next(same)))
  assert ids(next(other)) not in orders  # not even a later epoch of another seed


def test_restored_mid_epoch_the_same_batches_follow():
  batches = stream(some(1000), 400, seed=5)
  next(batches)
  state = json.loads(json.dumps(batches.get_state()))
  expected = [ids(next(batches)) for _ in range(8)]
  fresh = stream(some(1000), 400, seed=5)
  fresh.set_state(state)
  assert [ids(next(fresh)) for _ in range(8)] == expected
  batches.set_state(state)  # and back, in the same stream
  assert ids(next(batches)) == expected[0]


@pytest.mark.parametrize(('other', 'named'), [
    (lambda: stream(some(1001), 400), 'questions'), (lambda: stream(some(1000)[::-1], 400), 'questions'),
    (lambda: stream(some(1000), 200), 'batch_size'), (lambda: stream(some(1000), 400, seed=1), 'seed')])
def test_a_state_of_another_stream_is_refused(other, named):
  with pytest.raises(ValueError, match=f'{named} was'):
    other().set_state(stream(some(1000), 400).get_state())
