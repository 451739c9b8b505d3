"""Tree-GRPO, where chains branch off and what each is compared with; TRACE, where rollouts go."""

import dataclasses

import numpy as np
import pytest

from jaxsearch.methods import trace, tree_grpo
from jaxsearch.sampler.requests import Generate, Search
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import QUESTION, Letters, context, drive, segments

SEARCH = '<think>hm</think><search> the author </search>'
RIGHT, WRONG = '<answer> Lovelace </answer>', '<answer> Byron </answer>'


def chains_of(tree):
  """The texts of the policy's spans of each chain."""
  return [[node.text for node in first.walk() if node.role is Role.POLICY]
          for first in tree.root.children[0].children]


def tree_of(*outcomes, shared=0):
  """A tree with a chain for each outcome (None: no answer) that have their first `shared` turns in common."""
  tree = Tree(Letters(), QUESTION)
  prompt = tree.root.append('Who?', Role.PROMPT)
  for number, outcome in enumerate(outcomes):
    node = prompt
    for text in [SEARCH] * shared + [f'{number}']:
      parent = node if node is prompt else node.append('seen', Role.OBSERVATION)
      node = parent.append(text, Role.POLICY, sampler_logprobs=[-1.0] * len(text))
    node.path()[2].data.update(outcome=outcome or 0.0, answered=int(outcome is not None))
  return tree


def credit_of(groups, **settings):
  seen = context()
  tree_grpo.credit(groups, seen, **settings)
  for tree in (tree for group in groups for tree in group):
    for first in tree.root.children[0].children:  # a chain has one advantage
      assert len({node.advantages for node in first.walk() if node.role is Role.POLICY}) == 1
  return [[first.advantages for first in tree.root.children[0].children]
          for group in groups for tree in group], seen


@pytest.mark.parametrize('trees, golden', [
  ([[1, 0, 0], [1, 1, 0]], [[2.067568, -1.490219, -1.490219], [1.490218, 1.490218, -2.067568]]),
  ([[1, .8, .2], [0]], [[1.850847, .950380, -1.751019], [-1.050208]]),
  ([[0, 0, 0], [1]], [[-.499999] * 3, [1.499997]])])
def test_chains_are_compared_within_and_between_trees(trees, golden):
  """The published estimators give these numbers; of a lone chain that which gives it 0 within its tree."""
  got, _ = credit_of([[tree_of(*each) for each in trees]])
  for own, expected in zip(got, golden, strict=True):
    np.testing.assert_allclose(own, expected, atol=1e-5)


def test_a_lone_chain_may_keep_its_reward_and_one_without_an_answer_loses():
  got, _ = credit_of([[tree_of(0, 0, 0), tree_of(1)]], singleton='raw')
  np.testing.assert_allclose(got[1], [2.499996], atol=1e-5)
  trees = [tree_of(1, None), tree_of(1, 0)]
  _, seen = credit_of([trees], no_answer=0.5)
  assert [tree.reward for tree in trees] == [0.25, 0.5] and seen.metrics['groups_alike'] == 0
  groups = [[tree_of(1, 1)], [tree_of(0, 0)], [tree_of(0, 1)], []]
  _, seen = credit_of(groups)
  assert seen.metrics == pytest.approx({'groups_alike': 2 / 3, 'groups_alike_wrong': 1 / 3})


def test_a_row_with_shared_spans_has_the_losses_of_chains_apart():
  """The paper trains a shared span once for every chain through it, each time with that chain's advantage."""
  trees = [tree_of(1, 0, 0, shared=2), tree_of(1, 1, 0, shared=2)]
  credit_of([trees])
  rows = lay_out(trees, 2048, pad_id=0)
  spans = [node for tree in trees for node in segments(tree)]
  total = sum(len(node.tokens) for node in spans)
  place = rows.places[spans[0]]  # all six chains go through it
  assert np.all(rows.spans[place] == 6)
  np.testing.assert_allclose(rows.gains[place], (2.067568 + 2 * 1.490218) / total, rtol=1e-4)
  np.testing.assert_allclose(rows.losses[place], (2 * 1.490219 + 2.067568) / total, rtol=1e-4)
  np.testing.assert_allclose(rows.loss_weights[place], 6 / total, rtol=1e-4)
  assert rows.spans.sum() == total > np.count_nonzero(rows.spans)


def test_chains_go_on_from_turns_that_were_drawn():
  begins, said = set(), [SEARCH, SEARCH, RIGHT]
  for seed in range(12):
    tree, requests, _ = drive([*said, RIGHT, WRONG], grow=tree_grpo.grow, seed=seed, max_turns=3)
    first, *others = chains_of(tree)
    assert first == said and tree.answer == 'Lovelace' and tree.stop is Stop.ANSWERED
    assert {own[-1] for own in others} == {RIGHT, WRONG}
    for own in others:
      assert own[:-1] == first[:len(own) - 1]  # it repeats what came before
      begins.add(len(own) - 1)
    assert [type(request) for request in requests] == [Generate, Search] * 2 + [Generate] * 3
    assert tree.metrics['searches'] == 2
    outcomes = {spans[-1].text: spans[0].data['outcome'] for spans, _ in tree_grpo.rewards(tree, 0.0)}
    assert outcomes == {RIGHT: 1, WRONG: 0}
  assert begins == {0, 1, 2}


def test_branches_are_grown_abreast_and_have_the_turns_that_are_left():
  """Both go on from the prompt: their searches are served together. `max_turns=1` leaves each one search."""
  tree, requests, _ = drive([RIGHT, SEARCH, SEARCH, SEARCH, WRONG], grow=tree_grpo.grow, max_turns=1)
  assert [type(request) for request in requests] == [Generate] * 3 + [Search] * 2 + [Generate] * 2
  assert chains_of(tree) == [[RIGHT], [SEARCH, SEARCH], [SEARCH, WRONG]]
  assert [spans[0].data['answered'] for spans, _ in tree_grpo.rewards(tree, 0.0)] == [1, 0, 1]
  assert len(chains_of(drive([SEARCH, RIGHT], grow=tree_grpo.grow, branches=0)[0])) == 1


def test_a_branch_keeps_what_was_noted_and_sampled():
  seed = next(seed for seed in range(30) if np.random.default_rng(seed).integers(2, size=1)[0] == 1)
  tree, *_ = drive([SEARCH, WRONG, RIGHT], grow=tree_grpo.grow, branches=1, seed=seed,
                   logprobs=[-1.0, -2.0, -3.0])
  (a, _), (b, last) = [[node for node in first.walk() if node.role is Role.POLICY]
                       for first in tree.root.children[0].children]
  assert a is not b and a.tokens == b.tokens
  assert b.sampler_logprobs == a.sampler_logprobs == [-1.0] * len(a.tokens)
  assert a.data['documents'] == b.data['documents'] and a.stop == b.stop
  assert (a.data['outcome'], b.data['outcome'], last.sampler_logprobs[0]) == (0, 1, -3.0)


# TRACE.

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
