"""TRACE: where rollouts go."""

import dataclasses

import numpy as np
import pytest

from jaxsearch.methods import trace
from tests.methods.driving import QUESTION, context, drive
from tests.methods.test_tree_grpo import RIGHT, SEARCH, WRONG, chains_of, tree_of


def test_what_more_chains_are_worth():
  chances = {.1: [0, .18, .27, .3438], .3: [0, .42, .63, .7518], .5: [0, .5, .75, .875]}
  for success, expected in chances.items():
    assert trace.mixed(success, np.arange(1, 5)) == pytest.approx(expected)
  assert trace.contradicted(.3, 1, np.arange(1, 4)) == pytest.approx([.7, .91, .973])
  assert trace.contradicted(.3, 0, np.arange(1, 4)) == pytest.approx([.3, .51, .657])


@pytest.mark.parametrize('success, budget, expected', [
  ([.5, .3, .1], 12, [4, 5, 3]), ([.5, .3, .05], 24, [6, 7, 11])])
def test_questions_get_chains_by_the_chance_of_both_outcomes(success, budget, expected):
  success = np.array(success)
  gain = lambda m: success * (1 - success) * (success**(m - 1) + (1 - success)**(m - 1))  # of one more
  assert trace.allocate(gain, np.ones(3, int), budget - 3).tolist() == expected
  gain = lambda m: trace.mixed(success, m + 1) - trace.mixed(success, m)
  assert trace.allocate(gain, np.ones(3, int), budget - 3).tolist() == expected


def test_what_is_known_of_a_question_decides_how_many_trees_it_gets():
  questions = [dataclasses.replace(QUESTION, id=str(number)) for number in range(3)]
  seen = context()
  assert trace.sizes(questions, 3, seen) == [3, 3, 3]
  for question, outcomes in zip(questions, ([1] * 20, [1, 0, 0, 1])):
    tree = tree_of(*outcomes)
    tree.question = question
    trace.credit([[tree]], seen)
    trace.credit([[tree]], seen)
  assert seen.memory['outcomes'] == {'0': [40, 40], '1': [4, 8]}
  assert trace.sizes(questions, 3, seen) == [1, 4, 4]
  assert trace.sizes(questions, 1, seen) == [1, 1, 1]


@pytest.mark.parametrize('last, begins', [(RIGHT, [0, 1]), (WRONG, [1, 2])])
def test_a_right_chain_is_left_early_and_a_wrong_one_late(last, begins):
  """Where success is unlikely a right chain may well fail, where it is likely a wrong one may well succeed."""
  said = [SEARCH, SEARCH, last, RIGHT, WRONG]
  tree, *_ = drive(said, grow=trace.grow, success=(.1, .5, .9), max_turns=3)
  assert sorted(len(own) - 1 for own in chains_of(tree)[1:]) == begins
  assert tree.answer == ('Lovelace' if last == RIGHT else 'Byron')
