"""IGPO: what a turn gains, where it lands, and who is compared with whom."""

import numpy as np
import pytest

from jaxsearch.methods import igpo
from jaxsearch.sampler.requests import Generate, Score, Search
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role
from tests.methods.driving import ANSWER, SEARCH, context, drive, segments

RIGHT = '<answer> Ada Lovelace </answer>'


def chain(gains, outcome, begin=''):
  """A chain whose turns gain what is said; its answer is made to be worth `outcome`."""
  values = iter(np.cumsum([-3.0, *gains]))
  scored = lambda request: [[value := next(values), value]]
  said = [begin + SEARCH] * len(gains) + [begin + ANSWER]
  tree, *_ = drive(said, grow=igpo.grow, scored=scored)
  tree.answer = {1: 'Ada Lovelace', 0.5: 'Ada Byron', 0: 'Byron'}[outcome]
  for node in tree.nodes(Role.POLICY):
    node.sampler_logprobs = [-1.0] * len(node.tokens)
  return tree


def advantages(trees):
  return [[node.advantages for node in segments(tree)] for tree in trees]


@pytest.mark.parametrize('gamma, joint, golden', [
  (1.0, False, [[0.28179, -0.11524, 1.22474], [0.41302, -1.22474], [-0.69481, -0.09926, 0]]),
  (0.5, False, [[0.03323, -0.72761, 1.22474], [1.02539, -1.22474], [-0.64518, -0.09926, 0]]),
  (1.0, True, [[0.24254, 0, 1.45521], [0.48507, -0.97014], [-0.72761, 0, 0.24254]])])
def test_what_three_chains_get(gamma, joint, golden):
  """The published estimator gives these numbers; joint pools take F1 of 1, 0 and 0.5."""
  gains, outcomes = [[.5, -.2], [1], [.1, .3]], [1, 0, .5]
  trees = [chain(*each) for each in zip(gains, outcomes)]
  igpo.credit([trees], context(), gamma=gamma, joint=joint)
  for got, expected in zip(advantages(trees), golden, strict=True):
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_a_summary_is_no_turn_of_the_discount():
  trees = [chain([.5, .5], 1), chain([.1, .3], 0)]
  for tree in trees:
    segments(tree)[1].data['segment'] = 'summary'
  igpo.credit([trees], context(), gamma=0.5)
  for tree in trees:
    first, second, last = (node.advantages for node in segments(tree))
    bare = [chain([.5, .5], 1), chain([.1, .3], 0)]
    igpo.credit([bare], context(), gamma=0.0)
    own = [node.advantages for node in segments(bare[trees.index(tree)])]
    np.testing.assert_allclose([first, second], [own[0] + 0.5 * (own[1] + last), own[1] + last], rtol=1e-5)


def test_a_chain_alone_and_a_chain_without_an_answer():
  trees = [chain([.7], 1)]
  igpo.credit([trees], context())
  assert advantages(trees) == [[0, 0]]
  silent, *_ = drive(['no'], grow=igpo.grow, max_turns=0)
  assert igpo.reward(silent) == -2 and igpo.reward(trees[0]) == 1


def test_gains_land_on_what_the_policy_wrote():
  """In a published trainer they land on the tool's reply, which is masked: advantages are then 1 and -1."""
  trees = [chain([.5], 1, 'a'), chain([-.2], 0, 'b')]
  igpo.credit([trees], context())
  np.testing.assert_allclose(advantages(trees), [[2, 1], [-2, -1]], atol=1e-4)
  rows = lay_out(trees, 1024, pad_id=0)
  per_token = (rows.gains - rows.losses) * sum(len(node.tokens) for tree in trees for node in segments(tree))
  for node in (node for tree in trees for node in tree.walk() if node.tokens):
    expected = node.advantages if node.role is Role.POLICY else 0
    np.testing.assert_allclose(per_token[rows.places[node]], expected, rtol=1e-4)


def test_the_gold_answer_is_scored_before_the_first_turn_and_after_each_observation():
  tree, requests, _ = drive([SEARCH, 'hm', RIGHT], grow=igpo.grow, remark='The ANSWER is here.',
                            scored=lambda request: [[-1.0, -1.0 - len(request.node.path())]])
  kinds = [type(request) for request in requests]
  assert kinds == [Generate, Search, Score, Score, Generate, Score, Generate]
  scores = [request for request in requests if isinstance(request, Score)]
  assert [request.node.role for request in scores] == [Role.PROMPT, Role.OBSERVATION, Role.OBSERVATION]
  assert {(request.continuations, request.cue) for request in scores} == {
    ((' Ada Lovelace',), '<think> The ANSWER is here.</think><answer>')}
  assert [node.data.get('gain') for node in segments(tree)] == [-1, -1, None]  # (2 + 4) / 2 nodes deeper
  assert tree.metrics['gain'] == -2 and {node.role for node in tree.leaves()} == {Role.POLICY}


def test_without_room_for_the_answer_there_is_no_gain_and_evaluations_ask_for_none():
  scored = lambda request: [None if request.node.length > 200 else [-1.0]]
  tree, *_ = drive([SEARCH, SEARCH, SEARCH, RIGHT], grow=igpo.grow, scored=scored)
  assert [node.data.get('gain') for node in segments(tree)] == [0, None, None, None]
  igpo.credit([[tree, chain([.5], 0)]], context())
  assert [node.advantages for node in segments(tree)[1:]] == pytest.approx([1, 1, 1], abs=1e-4)
  replies = iter([[-3.0], None, [-1.0], [-0.5]])  # a folded chain has room again
  tree, *_ = drive([SEARCH, SEARCH, SEARCH, RIGHT], grow=igpo.grow, scored=lambda request: [next(replies)])
  assert [node.data.get('gain') for node in segments(tree)] == [None, None, 0.5, None]
  _, requests, _ = drive([SEARCH, RIGHT], grow=igpo.grow, gains=False)
  assert not any(isinstance(request, Score) for request in requests)
