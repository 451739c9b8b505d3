"""GiGPO: chains against chains, steps against steps from the same state."""

import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.methods import gigpo
from tests.methods.driving import ANSWER, context, drive, segments

RIGHT = '<answer> Lovelace </answer>'
found = lambda request: [Document(request.query, request.query, 'text')]


def chain(queries, right, thought='hm'):
  said = [f'<think>{thought}</think><search> {query} </search>' for query in queries]
  return drive([*said, RIGHT if right else ANSWER], found=found, max_turns=4)[0]


def advantages(trees):
  return [[node.advantages for node in segments(tree)] for tree in trees]


@pytest.mark.parametrize('normalize_std, golden', [
  (True, [[1.775861, 1.443373], [-1.731479, -2.020722, -0.866024], [1.687097, 0.866024, 1.443373],
          [-1.731479]]),
  (False, [[0.986875, 0.833333], [-0.963125, -1.166667, -0.5], [0.939375, 0.5, 0.833333], [-0.963125]])])
def test_four_chains_that_share_states(normalize_std, golden):
  """The published estimator gives these numbers; states are the question, and what A, B and C found."""
  queries, outcomes = ['A', 'AB', 'CA', ''], [1, 0, 1, 0]
  trees = [chain(*each, thought=f'of {place}') for place, each in enumerate(zip(queries, outcomes))]
  gigpo.credit([trees], context(), normalize_std=normalize_std)
  for got, expected in zip(advantages(trees), golden, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)
  assert [tree.reward for tree in trees] == outcomes


def test_the_first_state_is_the_question_however_its_prompt_was_cut():
  first, second = segments(chain('A', 1))[:2]
  first.parent.split(3)
  assert gigpo.state(first) == () and gigpo.state(second) == tuple(second.parent.tokens)


def test_states_belong_to_their_question_and_an_invalid_step_costs():
  groups = [[chain('A', 1)], [chain('A', 0)]]
  gigpo.credit(groups, context())
  assert advantages(groups[0]) == [[1, 1]] and advantages(groups[1]) == [[0, 0]]  # a chain alone keeps its reward
  tree = drive(['hm', RIGHT])[0]
  assert gigpo.rewards(tree, -0.25) == [-0.25, 1.0]
  gigpo.credit([[tree, chain('', 1)]], context(), invalid=-0.25, weight=0.0)
  assert tree.reward == 0.75
  assert segments(tree)[0].advantages == pytest.approx(-np.sqrt(0.5), abs=1e-4)
