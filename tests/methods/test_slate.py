"""SLATE's rollout: what siblings earn, who goes on, and what the sampler computes for them."""

import types

import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.methods import slate
from jaxsearch.methods.actions import Action
from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Ask, ToolFailure
from jaxsearch.trees.grammars import Called
from jaxsearch.trees.tree import Role, Stop
from tests.methods import driving
from tests.methods.driving import context

SEARCH = '<think>hm</think><search> author </search>'
RIGHT, WRONG = '<think>so</think><answer> Lovelace </answer>', '<think>so</think><answer> Byron </answer>'
BROKEN = '<think>hm'
SCORES = {'hm': 0, 'so': 1, 'Lovelace': 1, 'Byron': -1, 'author': 1}


def verdict(item):
  match item:
    case judge.Thinking():
      return SCORES.get(item.thinking, -1)
    case judge.Query():
      return SCORES[item.query]
    case judge.Answer():
      return SCORES[item.answer]


def drive(*steps, verdict=verdict, **settings):
  """Grows a tree; `steps` holds what the siblings of each step say. Returns (tree, requests)."""
  return driving.drive([text for step in steps for text in step], grow=slate.grow, k=len(steps[0]),
                       asked=lambda request: verdict(request.item), **settings)[:2]


def judged(requests):
  return [request.item for request in requests if isinstance(request, Ask)]


def test_rewards_and_advantages_of_a_step():
  tree, requests = drive([SEARCH, RIGHT, WRONG, BROKEN], best=True, budget=4)
  rewards = [0 + 1, 1 + 1 + 0.1 * 3 / 4, 1 - 1 + 0.1 * 3 / 4, -1 - 1]
  siblings = tree.nodes(Role.POLICY)
  assert [node.data['reward'] for node in siblings] == pytest.approx(rewards)
  expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
  assert [node.advantages for node in siblings] == pytest.approx(list(expected), abs=1e-5)
  assert {node.parent for node in siblings} == {tree.nodes(Role.PROMPT)[0]}
  assert tree.answer == 'Lovelace' and tree.stop is Stop.ANSWERED and tree.metrics['malformed'] == 1
  kinds = [type(item) for item in judged(requests)]
  assert kinds == [judge.Thinking, judge.Query, judge.Thinking, judge.Answer, judge.Thinking, judge.Answer,
                   judge.Thinking]


def test_one_sibling_goes_on_with_its_documents():
  tree, requests = drive([SEARCH, WRONG], [RIGHT, RIGHT], best=True, verdict=lambda item: {
    judge.Thinking: 0, judge.Query: 1, judge.Answer: 0}[type(item)])
  first, second = tree.nodes(Role.PROMPT)[0].children, tree.nodes(Role.OBSERVATION)[0].children
  assert len(first) == len(second) == 2 and tree.nodes(Role.OBSERVATION)[0].parent is first[0]
  assert judged(requests)[4].context == first[0].text + tree.nodes(Role.OBSERVATION)[0].text
  assert tree.metrics['searches'] == 1 and tree.metrics['turns'] == 2


def test_the_choice_follows_the_softmax():
  search, other = ([Called('search', {'query': query})] for query in ('query', 'another query'))
  candidates = [Action(None, '', search, None), Action(None, '', (), 'answer'), Action(None, '', (), None),
                Action(None, '', other, None)]
  advantages = np.array([1.0, 0.0, 5.0, -1.0])
  rng = np.random.default_rng(0)
  picks = [candidates.index(slate.choose(candidates, advantages, 0.7, False, rng)) for _ in range(4000)]
  weights = np.exp(np.array([1.0, 0.0, -np.inf, -1.0]) / 0.7)
  np.testing.assert_allclose(np.bincount(picks, minlength=4) / 4000, weights / weights.sum(), atol=0.03)
  assert slate.choose(candidates, advantages, 0.7, True, rng) is candidates[0]
  assert slate.choose(candidates[2:3], advantages[2:3], 0.7, False, rng) is None


def test_an_unreadable_judge_is_neutral_and_counted():
  tree, _ = drive([RIGHT, SEARCH], budget=2, best=True, verdict=lambda item: (
    None if isinstance(item, judge.Thinking) else ToolFailure('down')))
  assert [node.data['reward'] for node in tree.nodes(Role.POLICY)] == [0, 0]  # no bonus for an early answer either
  assert tree.metrics['judge_unreadable'] == 4


def test_a_search_that_failed_is_neutral_and_not_judged():
  tree, requests = drive([SEARCH, BROKEN], budget=1, found=ToolFailure('down'))
  assert [node.data['reward'] for node in tree.nodes(Role.POLICY)] == [0, -2]
  assert [type(item) for item in judged(requests)] == [judge.Thinking] * 2 and tree.metrics['tool_failures'] == 1


def test_evaluation_is_that_of_search_r1():
  """What is malformed costs a turn and does not end the chain; one more span follows the last turn. Nobody is
  judged."""
  for said in ([SEARCH, RIGHT], [BROKEN, SEARCH, RIGHT], [BROKEN] * 3, [SEARCH] * 3):
    tree, requests, seen = driving.drive(said, grow=slate.grow, rewards='none', budget=2, k=5)
    same, _, seen_there = driving.drive(said, max_turns=2)
    assert (tree.answer, tree.stop, seen) == (same.answer, same.stop, seen_there)
    assert tree.metrics == same.metrics
    assert not judged(requests)


def test_whole_chains_with_judged_rewards():
  """Table 2, a: every step of a chain gets the chain's sum, relative to the other chains of the question."""
  trees = [drive([SEARCH], [RIGHT], budget=2)[0], drive([SEARCH], [WRONG], budget=2)[0],
           drive([BROKEN], budget=2)[0]]
  slate.credit([trees], context(), whole=True)
  totals = [1 + 2, 1 + 0, -2]
  assert [tree.reward for tree in trees] == totals
  expected = (np.array(totals) - np.mean(totals)) / (np.std(totals, ddof=1) + 1e-6)
  for tree, advantage in zip(trees, expected):
    assert [node.advantages
            for node in tree.nodes(Role.POLICY)] == pytest.approx([advantage] * len(tree.nodes(Role.POLICY)))
  with pytest.raises(ValueError, match='grow.k=1'):
    slate.credit([[drive([SEARCH, RIGHT], budget=1)[0]]], context(), whole=True)


def test_other_calls_than_searches_are_judged_too():
  tree, _ = drive([BROKEN, BROKEN], budget=1)
  opens = Action(tree.nodes(Role.POLICY)[0], 'hm', [Called('open', {'document': '1'})], None, 'its text')
  growth = slate.judged([opens], tree, 1, 4, early_bonus=0.1)
  _, about = (ask.item for ask in next(growth))
  assert (about.query, about.documents) == ('open {"document": "1"}', 'its text')
  with pytest.raises(StopIteration) as end:
    growth.send([0, 1])
  assert end.value.value == 1


def test_the_ablation_rewards_right_answers_alone_by_the_questions_rule():
  question = Question('1', 'How many?', ('18',), {'match': 'numeric'})
  tree, requests = drive([SEARCH, '<answer>18.0</answer>', WRONG], rewards='outcome', budget=1, question=question)
  assert [node.data['reward'] for node in tree.nodes(Role.POLICY)] == [0, 1, 0]
  assert not judged(requests)


def test_the_last_step_alone_is_rewarded():
  """Table 2, c: an answer that is not continued from earns nothing; the choice does not see what was
  earned."""
  picked = set()
  for seed in range(12):
    tree, requests = drive([SEARCH, RIGHT], rewards='final', budget=1, seed=seed)
    picked.add(tree.stop)
    assert [node.data['reward'] for node in tree.nodes(Role.POLICY)] == [0, 1] and not judged(requests)
  assert picked == {Stop.ANSWERED, Stop.BUDGET}
  seed = next(seed for seed in range(12) if drive([SEARCH, RIGHT], rewards='final', budget=1,
                                                  seed=seed)[0].stop is Stop.BUDGET)
  tree, _ = drive([SEARCH, RIGHT], [RIGHT, WRONG], rewards='final', budget=2, seed=seed)
  assert [node.data['reward'] for node in tree.nodes(Role.PROMPT)[0].children] == [0, 0]
  assert [node.data['reward'] for node in tree.nodes(Role.OBSERVATION)[0].children] == [1, 0]
  assert [node.advantages for node in tree.nodes(Role.PROMPT)[0].children] == [0, 0]


def test_a_sibling_may_earn_the_exact_match_of_a_chain_completed_from_it():
  """A completion goes on after a malformed action, and nothing of it is trained or credited."""
  tree, requests = drive([SEARCH, BROKEN, WRONG], [BROKEN, RIGHT], [RIGHT], [RIGHT, WRONG, WRONG],
                         rewards='completed', budget=3, best=True)
  trained = [node for node in tree.nodes(Role.POLICY) if node.trained]
  assert [node.data['reward'] for node in trained if node.parent.role is Role.PROMPT] == [1, 1, 0]
  assert [node.data['reward'] for node in trained if node.parent.role is Role.OBSERVATION] == [1, 0, 0]
  assert len(tree.nodes(Role.POLICY)) == 9 and tree.answer == 'Lovelace' and not judged(requests)
  slate.credit([[tree]], context())
  assert tree.reward == 0.5


def test_nothing_is_completed_from_an_action_that_ends_the_episode():
  ended, malformed = (types.SimpleNamespace(answer=None, ends=ends, node=types.SimpleNamespace(stop=''),
                                            observation='what is wrong') for ends in (True, False))
  malformed.node.append = lambda *_: malformed.node
  tree = types.SimpleNamespace(grammar=types.SimpleNamespace(stops=('</answer>',)))
  asked = next(slate.completed([ended, malformed], tree, 1, 8))
  assert len(asked) == 1
