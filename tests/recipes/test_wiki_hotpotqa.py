"""Questions that people asked about two passages: which are taken, in what order their steps stand, faults of files."""

import json

import pytest

from jaxsearch.data.jsonl import DataError
from recipes import wiki_hotpotqa as hotpotqa

CONTEXT = [['Ann Lee', ['Ann Lee was a painter.', ' She lived at Blue House.']],
           ['Blue House', ['Blue House is a museum.', ' It was built in 1931.', ' It burned in 1940.']],
           ['Red House', ['Red House is a pub.']]]


def of_two(question='When was the home of Ann Lee built?', answer='1931', facts=(('Blue House', 1), ('Ann Lee', 1)),
           kind='bridge', context=CONTEXT):
  return {'_id': question, 'question': question, 'answer': answer, 'type': kind, 'supporting_facts': facts,
          'context': context}


def read(folder, *records, words=64):
  path = folder / 'train.json'
  path.write_text(json.dumps(records))
  return hotpotqa.read(path, words, 0)


def test_the_step_that_has_the_answer_comes_last(tmp_path):
  documents, (lookup,) = read(tmp_path, of_two())
  assert [document.title for document in documents] == ['Ann Lee', 'Blue House', 'Red House']
  assert documents[1].text == 'Blue House is a museum. It was built in 1931. It burned in 1940.'
  assert [(step.passage, step.query, step.finding) for step in lookup.steps] == [
    (documents[0].id, 'Ann Lee', 'She lived at Blue House.'),
    (documents[1].id, 'Blue House', 'It was built in 1931.')]
  assert lookup.question.golden_answers == ('1931',) and lookup.question.metadata == {'source': 'HotpotQA'}


def test_a_passage_of_several_records_is_there_once(tmp_path):
  documents, found = read(tmp_path, of_two(), of_two('When did the home of Ann Lee burn?', '1940', (
    ('Ann Lee', 1), ('Blue House', 0), ('Blue House', 2))))
  assert len(documents) == 3 and len({lookup.question.id for lookup in found}) == 2
  assert {lookup.steps[-1].finding for lookup in found} == {'It was built in 1931.', 'It burned in 1940.'}


def test_2wikimultihopqa_calls_them_compositional(tmp_path):
  assert read(tmp_path, of_two(kind='compositional'))[1] == read(tmp_path, of_two())[1]


@pytest.mark.parametrize('left_out', [
  of_two(kind='comparison'), of_two(answer='yes'), of_two(answer='Ann Lee'), of_two(answer='1950'),
  of_two(facts=(('Blue House', 7), ('Ann Lee', 1))), of_two(facts=(('Blue House', 1), ('Green House', 0)))],
  ids=['comparison', 'yes', 'in the question', 'in no fact', 'no such fact', 'no such passage'])
def test_questions_that_are_left_out(tmp_path, left_out):
  assert read(tmp_path, left_out)[1] == []


def test_the_answer_stands_where_the_passage_is_cut(tmp_path):
  assert len(read(tmp_path, of_two(), words=10)[1]) == 1
  assert read(tmp_path, of_two(), words=8)[1] == []


def test_the_columns_of_hugging_face_are_read(tmp_path):
  columns = {'title': ['Blue House', 'Ann Lee'], 'sent_id': [1, 1]}
  context = {'title': [title for title, _ in CONTEXT], 'sentences': [said for _, said in CONTEXT]}
  assert read(tmp_path, of_two(facts=columns, context=context)) == read(tmp_path, of_two())


def test_faults_are_named(tmp_path):
  with pytest.raises(DataError, match='record 1: not in the format of hotpotqa'):
    read(tmp_path, of_two(context=[['Ann Lee', 'She lived.']]))
