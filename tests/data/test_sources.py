import json

import pytest

from jaxsearch.data.sources import ARITHMETIC, load_corpus, load_questions


def test_questions_of_the_world_by_hops_and_without_arithmetic():
  found = load_questions('world:test', hops=(1, 2), arithmetic=False)
  assert {question.metadata['hops'] for question in found} == {1, 2}
  assert not any(question.metadata.get('operation') in ARITHMETIC for question in found)
  assert len(load_questions('world:test')) > len(found) > 100


def test_a_file_is_read_and_not_filtered(tmp_path):
  path = tmp_path / 'q.jsonl'
  path.write_text(json.dumps({'id': '1', 'question': 'Who?', 'golden_answers': ['A']}) + '\n')
  assert [question.id for question in load_questions(str(path), hops=(3,), arithmetic=False)] == ['1']


def test_what_is_not_there_is_named():
  with pytest.raises(ValueError, match="no split 'tset'"):
    load_questions('world:tset')
  with pytest.raises(ValueError, match='hops'):
    load_questions('world:test', hops=(9,))


def test_corpus_by_name(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text(json.dumps({'id': '1', 'contents': '"Title"\nText.'}) + '\n')
  assert load_corpus(str(path))[0].title == 'Title'
  assert len(load_corpus('world')) > 4000
