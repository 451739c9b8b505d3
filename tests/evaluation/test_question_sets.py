"""Benchmarks in folders, the corpus beside them, and which of their answers a corpus holds."""

import pytest

from configs import quickstart
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation import question_sets
from jaxsearch.rewards.match import answer_found
from tests.data.test_tables import parquet, search_r1


def test_golds_are_found_as_whole_words():
  golds = ['New York', 'York', 'the Moor', 'Ada', '1,234', 'a', 'Ada Moor lives', 'in Yor']
  documents = [Document('1', 'Ada Moor', 'lives in New-York.'),
               Document('2', 'x', 'the moor; 1,234 of them in New York')]
  expected = {gold for gold in golds if any(answer_found([gold], f'{d.title}\n{d.text}') for d in documents)}
  assert question_sets.find_golds(golds, documents) == expected == {
    'New York', 'York', 'the Moor', 'Ada', '1,234', 'Ada Moor lives'}


def test_numbers_are_matched_as_numbers(tmp_path):
  (tmp_path / 'gsm8k').mkdir()
  (tmp_path / 'gsm8k/test.jsonl').write_text(
    '{"id": "test_0", "question": "6 times 12?", "golden_answers": ["72"]}')
  question, = question_sets.load(quickstart.get_config(), 'gsm8k', str(tmp_path)).questions
  assert question.score('It is $72.00') == 1.0 and question.metadata['source'] == 'gsm8k'
  assert question_sets.present(str(tmp_path)) == ['gsm8k']


def test_one_file_with_several_benchmarks(tmp_path):
  config = quickstart.get_config()
  parquet(tmp_path / 'test.parquet', [search_r1(source, 0, f'{source}?', ['A'])
                                      for source in ('nq', 'hotpotqa', '2wikimultihopqa')])
  for name, asked in (('hotpotqa', 'hotpotqa?'), ('2wiki', '2wikimultihopqa?')):
    question, = question_sets.load(config, name, str(tmp_path)).questions
    assert question.question == asked
  with pytest.raises(DataError, match='no question of popqa in it, but of 2wikimultihopqa, hotpotqa, nq'):
    question_sets.load(config, 'popqa', str(tmp_path))
  assert question_sets.present(str(tmp_path)) == ['nq', 'hotpotqa', '2wikimultihopqa']


def test_the_world_is_a_benchmark_with_its_own_corpus(tmp_path):
  config, corpus = quickstart.get_config(), tmp_path / 'wiki_corpus.jsonl'
  corpus.touch()
  (tmp_path / 'qa').mkdir()
  (tmp_path / 'nq.jsonl').write_text('{"id": "1", "question": "Who?", "golden_answers": ["A"]}')
  both = [question_sets.load(config, name, str(tmp_path), 2) for name in ('world:test', 'nq')]
  assert [len(one.questions) for one in both] == [2, 1]
  assert question_sets.corpus_beside(config, both[:1], str(tmp_path)) == ''
  assert question_sets.corpus_beside(config, both, str(tmp_path)) == f'world+{corpus}'
  assert question_sets.corpus_beside(config, both[1:], str(tmp_path / 'qa')).endswith('/wiki_corpus.jsonl')
  config.data.corpus = 'mine.jsonl'
  assert question_sets.corpus_beside(config, both[1:], str(tmp_path)) == ''
