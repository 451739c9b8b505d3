"""Questions of two steps from two of one: what may be composed, and what is left out."""

import pytest

from jaxsearch.data.questions import Question
from recipes.wiki_composing import compose
from recipes.wiki_lookups import Lookup, Step


def lookup(question, answer, passage, held_out=False):
  return Lookup(Question(f'of_{passage}', question, (answer,), {'source': 'free text'}),
                (Step(passage, 'a title', 'A sentence.'),), held_out=held_out)


def composed(first, second, **changes):
  """What is asked of two (question, answer), about passages 1 and 2."""
  return [one.question.question for one in compose([lookup(*first, '1'), lookup(*second, '2', **changes)])]


def test_a_composed_question_has_the_steps_of_both():
  founded = lookup('Who founded the mill of Oslo?', 'Ann Lee', '1')
  died = lookup('Where did Ann Lee die?', 'Bergen', '2')
  (found,) = compose([founded, died])
  assert found.question == Question('of_2_of_1', 'Where did the person who founded the mill of Oslo die?', ('Bergen',),
                                    {'source': 'composed', 'attribute': 'Ann Lee'})
  assert found.steps == (
    Step('1', 'the person who founded the mill of Oslo', 'The person who founded the mill of Oslo is Ann Lee.'),
    Step('2', 'Where did Ann Lee die?', 'A sentence.'))
  assert not found.conclusion and not found.held_out


@pytest.mark.parametrize('asked, description', [
  ('Who was the first king of Rum?', 'the person who was the first king of Rum'),
  ('Which company was founded in 1901?', 'the company that was founded in 1901'),
  ('What band won the prize?', 'the band that won the prize'),
  ('Who wrote it?', 'the person who wrote it'),
])
def test_questions_for_a_subject_become_descriptions(asked, description):
  assert composed((asked, 'Lee'), ('When did Lee meet Moe?', '1900')) == [f'When did {description} meet Moe?']


@pytest.mark.parametrize('asked', ['Whom did Moe marry?', 'Who did Moe marry?', 'Who was Moe married to?', 'Where is it?',
                                   'What is the mill?', 'What city did Moe found?', 'Who, when asked, came?'])
def test_other_questions_do_not(asked):
  assert composed((asked, 'Lee'), ('When did Lee meet Moe?', '1900')) == []


@pytest.mark.parametrize('asked', ['What was said of Lee, the miller?', 'How old was Lee when Moe came?',
                                   'What did Lee eat?'])
def test_a_name_that_stands_alone_is_described(asked):
  described = asked.replace('Lee', 'the person who founded it')
  assert composed(('Who founded it?', 'Lee'), (asked, 'this')) == [described]


@pytest.mark.parametrize('asked', ['Who met Lee?', "What was Lee's age?", 'When did Ann Lee die?', 'What is Lee Street?',
                                   'Lee died when?', 'When did Leeds grow?', 'What did the Lee family eat?'])
def test_a_part_of_a_longer_name_is_not(asked):
  assert composed(('Who founded it?', 'Lee'), (asked, 'this')) == []


def test_what_is_left_out():
  founded, died = ('Who founded the mill of Oslo?', 'Lee'), ('Where did Lee die?', 'Bergen')
  assert composed(founded, died) and not composed(founded, died, held_out=True)
  assert not composed(founded, ('Where did Lee die?', 'Oslo'))  # the answer would be in the question
  assert not composed(('Who founded the mill of Lee?', 'Lee'), died)
  assert not composed((founded[0], 'the miller'), ('Where did the miller die?', 'Bergen'))  # no name
  assert not list(compose([lookup(*founded, '1'), lookup(*died, '1')]))  # one passage has both
  both = [lookup(*founded, '1', held_out=True), lookup(*died, '2', held_out=True)]
  assert [one.held_out for one in compose(both)] == [True]
