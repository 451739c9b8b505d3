"""Rows as Search-R1, verl and `datasets` write them."""

import json
import sys

import pytest

from jaxsearch.data import tables
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.sources import load_questions


def parquet(path, rows):
  pyarrow, writer = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  writer.write_table(pyarrow.Table.from_pylist(rows), path)
  return path


def saved(folder, rows):
  """Writes as `Dataset.save_to_disk` does (datasets 5.2)."""
  pyarrow, name = pytest.importorskip('pyarrow'), 'data-00000-of-00001.arrow'
  folder.mkdir(parents=True)
  table = pyarrow.Table.from_pylist(rows)
  with pyarrow.OSFile(str(folder / name), 'wb') as file, pyarrow.ipc.new_stream(file, table.schema) as out:
    out.write_table(table)
  (folder / 'state.json').write_text(json.dumps({'_data_files': [{'filename': name}], '_split': None}))
  return folder


def search_r1(source, number, asked, golds, **more):
  prompt = [{'role': 'system', 'content': 'You search.'},
            {'role': 'user', 'content': f'Use <search>. Question: {asked}\n'}]
  return {'data_source': source, 'prompt': prompt,
          'reward_model': {'style': 'rule', 'ground_truth': {'target': golds}},
          'extra_info': {'split': 'test', 'index': number}, **more}


def test_search_r1(tmp_path):
  rows = [search_r1('nq', 0, 'who?', ['A', 'B'], id='test_0', question='who?', golden_answers=['A', 'B']),
          search_r1('triviaqa', 0, 'when?', ['C'], id='test_0', question='when?', golden_answers=['C'])]
  first, second = load_questions(str(parquet(tmp_path / 'test.parquet', rows)))
  assert (first.id, first.question, first.golden_answers) == ('nq:test_0', 'who?', ('A', 'B'))
  assert (second.id, second.metadata) == ('triviaqa:test_0', {'source': 'triviaqa'})


def test_nulls_of_metadata_replace_nothing(tmp_path):
  rows = [{'question': 'who?', 'answer': 'A', 'data_source': 'nq', 'metadata': {'match': None, 'source': None, 'hops': 2}}]
  question, = tables.read_questions(parquet(tmp_path / 'a.parquet', rows))
  assert question.metadata == {'source': 'nq', 'hops': 2} and question.score('a') == 1.0


def test_bamboogle(tmp_path):
  question, = tables.read_questions(parquet(tmp_path / 'a.parquet', [{'Question': 'who?', 'Answer': 'A'}]))
  assert (question.question, question.golden_answers) == ('who?', ('A',))


def test_verl(tmp_path):
  row = search_r1('searchR1_hotpotqa', 3, 'in the prompt', ['A'])
  question, = tables.read_questions(parquet(tmp_path / 'a.parquet', [row]))
  assert (question.id, question.question) == ('test_3', 'in the prompt')
  assert question.metadata['source'] == 'hotpotqa'
  row = search_r1('openai/gsm8k', 5, 'in the prompt', '72') | {
    'extra_info': {'split': 'test', 'index': 5, 'answer': 'steps #### 72', 'question': '6 times 12?'}}
  question, = tables.read_questions(parquet(tmp_path / 'test.parquet', [row]))
  assert (question.id, question.question, question.golden_answers) == ('test_5', '6 times 12?', ('72',))
  assert question.score('$72.00') == 1.0  # numeric


@pytest.mark.parametrize(('cell', 'golds'), [
  ({'answer': 'A'}, ('A',)), ({'answer': ['A', 'B']}, ('A', 'B')),
  ({'answers': {'text': ['A'], 'answer_start': [3]}}, ('A',)),
  ({'possible_answers': '["A", "B"]'}, ('A', 'B')),
  ({'answer': 'A', 'answer_aliases': ['B'], 'answerable': True}, ('A', 'B')),
  ({'answer': {'value': 'A', 'aliases': ['a', 'A']}}, ('A', 'a')), ({'answer': '2 + 2 #### 4'}, ('4',))])
def test_golds_of_public_data_sets(tmp_path, cell, golds):
  question, = load_questions(str(saved(tmp_path / 'd', [{'question': 'Who?', **cell}])))
  assert (question.id, question.golden_answers) == ('row_0', golds)


def test_questions_of_musique_that_have_no_answer_are_left_out(tmp_path):
  rows = [{'question': 'Who?', 'answer': 'A', 'answerable': told} for told in (False, True)]
  assert [question.id for question in tables.read_questions(parquet(tmp_path / 'a.parquet', rows))] == ['row_1']


def test_a_folder_of_splits_is_read_by_split(tmp_path):
  saved(tmp_path / 'train', [{'id': 'x', 'question': 'Who?', 'answer': 'A'}])
  assert load_questions(str(tmp_path / 'train'))[0].id == 'x'
  with pytest.raises(DataError, match='take the folder of one split'):
    load_questions(str(tmp_path))


@pytest.mark.parametrize(('row', 'message'), [
  ({'question': 'Who?'}, "row 1: no gold answer in 'golden_answers or answers"),
  ({'question': 'Who?', 'answer': ' '}, 'no gold'),
  ({'question': 'Who?', 'answer': True}, "no gold answer in 'answer'?: True"),
  ({'question': 'Who?', 'answers': {'spans': ['A']}}, 'no gold'),
  ({'question': ' ', 'answer': 'A'}, "row 1: no 'question'")])
def test_a_row_that_lacks_something_is_named(tmp_path, row, message):
  with pytest.raises(DataError, match=message):
    tables.read_questions(parquet(tmp_path / 'x.parquet', [row]))


def test_files_of_another_kind_are_named(tmp_path):
  pytest.importorskip('pyarrow')
  (tmp_path / 'x.parquet').write_text('no table')
  with pytest.raises(DataError, match=r'x\.parquet: not a table'):
    tables.read_questions(tmp_path / 'x.parquet')


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  with pytest.raises(ImportError, match=r"pip install 'jaxsearch\[tables\]'"):
    tables.read_questions(tmp_path / 'x.parquet')
