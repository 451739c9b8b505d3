"""Broken tools: an irrelevant passage is what is found for another question."""

import ast

import pytest

from configs import carl
from jaxsearch import setup
from jaxsearch.data.questions import Question, write_questions
from jaxsearch.tools import faults
from jaxsearch.tools.python_sandbox import CHARACTERS


def test_every_question_knows_another_of_its_source():
  asked = [Question(str(i), f'Which {i}?', ('x',), {'source': ('a', 'b', 'b')[i % 3]}) for i in range(12)]
  asked.append(Question('alone', 'Alone?', ('x',), {'source': 'c'}))
  found = faults.with_others(asked)
  assert [(one.id, one.question) for one in found] == [(one.id, one.question) for one in asked]
  source = {one.question: one.metadata['source'] for one in asked}
  for one in found[:-1]:
    assert one.metadata['other'] != one.question and source[one.metadata['other']] == one.metadata['source']
  assert len({one.metadata['other'] for one in found[:-1]}) == 12
  with pytest.raises(ValueError, match='another question'):
    faults.check('irrelevant', found[-1])


def test_of_a_long_question_the_end_is_searched_for():
  report = Question('q', 'Who?', ('x',), {'other': 'a page of a report. ' * 100 + 'What was the profit?'})
  query = ast.literal_eval(faults.program('irrelevant', '', report).removeprefix('print(search(')[:-2])
  assert len(query) == CHARACTERS and query.endswith('What was the profit?')


@pytest.mark.parametrize('group', ['grow', 'eval.grow'])
def test_questions_are_loaded_with_others_only_where_the_fault_asks_for_them(tmp_path, group):
  write_questions([Question(str(i), f'Which {i}?', ('x',)) for i in range(4)], tmp_path / 'q.jsonl')
  config = carl.get_config().unlock()
  assert not any(one.metadata for one in setup.load_questions(config, str(tmp_path / 'q.jsonl')))
  (config.grow if group == 'grow' else config.eval.grow).fault = 'irrelevant'
  others = [one.metadata['other'] for one in setup.load_questions(config, str(tmp_path / 'q.jsonl'))]
  assert others == ['Which 2?', 'Which 3?', 'Which 0?', 'Which 1?']
