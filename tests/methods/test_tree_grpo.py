"""Tree-GRPO: where chains branch off, and what each is compared with."""

import numpy as np
import pytest

from jaxsearch.methods import tree_grpo
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
  relative = lambda x, of: (x - np.mean(of)) / (np.std(of, ddof=1) + 1e-6) if len(of) > 1 else 0.0
  got, _ = credit_of([[tree_of(*each) for each in trees]])
  every = [value for each in trees for value in each]
  for own, values, expected in zip(got, trees, golden):
    np.testing.assert_allclose(own, [relative(x, values) + relative(x, every) for x in values], atol=1e-5)
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
