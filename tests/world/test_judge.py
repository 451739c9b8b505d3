"""The judge that knows the gold chains."""

import json
import re

import pytest

from jaxsearch.data.questions import Question
from jaxsearch.rewards.judge import Answer, Collections, Query, Thinking
from jaxsearch.tools.tool import listed
from jaxsearch.trees import grammar
from jaxsearch.world import files as world
from jaxsearch.world.chains import full_chain, search
from jaxsearch.world.judge import judge

QUESTION = next(q for q in world.questions('dev') if q.metadata['hops'] == 2 and 'operation' not in q.metadata)
STEPS = QUESTION.metadata['steps']
SPANS = [text if role == 'policy' else grammar.information(search(text), ())
         for role, text in full_chain(QUESTION)]
THOUGHTS = [re.search('<think>(.*?)</think>', text)[1] for text in SPANS[::2]]


def test_it_likes_every_step_of_a_gold_chain():
  before = ''
  for turn, step in enumerate(STEPS):
    observation = SPANS[2 * turn + 1]
    assert judge([Thinking(QUESTION, before, THOUGHTS[turn]),
                  Query(QUESTION, before, THOUGHTS[turn], step['query'], observation)]) == [1, 1]
    before += SPANS[2 * turn] + observation
  assert judge([Thinking(QUESTION, before, THOUGHTS[-1]),
                Answer(QUESTION, QUESTION.golden_answers[0])]) == [1, 1]


def test_it_knows_no_other_questions():
  with pytest.raises(ValueError, match="judge.kind='world' judges the world's questions alone"):
    judge([Answer(Question('1', 'Who?', ('Ada',)), 'Ada', '', '')])


def test_what_it_dislikes():
  first, second = SPANS[1], SPANS[3]
  assert judge([
    Thinking(QUESTION, '', 'I guess.'),
    Query(QUESTION, '', '', 'something else', first),
    Query(QUESTION, first, '', STEPS[0]['query'], first),         # asked again
    Query(QUESTION, '', '', STEPS[1]['query'], second),           # a step too early
    Query(QUESTION, '', '', STEPS[0]['query'], '\n<information>nothing</information>\n'),
    Answer(QUESTION, 'nonsense'),
    Answer(QUESTION, f'{QUESTION.golden_answers[0]} or nonsense'),
  ]) == [-1, -1, -1, 0, 0, -1, 0]


def test_useful_collections_are_counted_once():
  first, second = SPANS[1], SPANS[3]
  assert judge([Collections(QUESTION, (first, first, 'noise', second)),
                Collections(QUESTION, ('noise',)), Collections(QUESTION, ())]) == [2, 0, 0]


def test_it_knows_documents_as_tools_show_them():
  found = listed(search(STEPS[0]['query']))
  for shown in found, json.dumps(found):
    asked = Query(QUESTION, '', '', STEPS[0]['query'], shown)
    assert judge([asked, Query(QUESTION, shown, '', STEPS[1]['query'], listed(search(STEPS[1]['query'])))]) == [1, 1]
    assert judge([Query(QUESTION, shown, '', STEPS[0]['query'], shown)]) == [-1]
