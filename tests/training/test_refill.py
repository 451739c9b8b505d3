"""Groups that teach nothing are found without a trace, and what judges say of answers is asked once."""

import types
import zlib

import numpy as np
import pytest

from configs import base
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, cusearch, search_r1, slate
from jaxsearch.rewards.judge import Reasoned
from jaxsearch.training import growing, judging, refill
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters
from tests.processes import as_processes
from tests.training.test_growing import counting_learner


def chain(answer, name='q'):
  tree = Tree(Letters(), Question(name, '?', ('yes',)))
  tree.answer = answer
  tree.root.append('prompt', Role.PROMPT).append('span', Role.POLICY, sampler_logprobs=[-1.0] * 4)
  return tree


def learner(**credit):
  config = base.get_config().unlock()
  config.credit = credit
  return types.SimpleNamespace(config=config, values=None, verdicts={})


@pytest.mark.parametrize('method, credit', [
  (search_r1, {}), (cusearch, dict(strategy='phase', keep=2, singleton='zero'))], ids=['search_r1', 'cusearch'])
def test_groups_with_equal_rewards_are_found_and_nothing_is_left_of_it(method, credit):
  groups = [[chain('yes'), chain('yes')], [chain('yes'), chain('no')], [chain(None), chain(None)]]
  context, trees = Context(3, np.random.default_rng(0), {}), [tree for group in groups for tree in group]
  before = [tree.to_json() | {'reward': None} for tree in trees]
  assert refill.alike(learner(**credit), method, groups, context) == [True, False, True]
  assert [tree.to_json() | {'reward': None} for tree in trees] == before
  assert context.memory == {} and context.rng.integers(1 << 30) == np.random.default_rng(0).integers(1 << 30)


def test_a_tree_alone_is_alike_without_credit():
  """SLATE's siblings are credited as they grow."""
  groups = [[chain('yes')], [chain('yes')]]
  for (tree,), advantage in zip(groups, (0.0, -0.5)):
    (node,) = tree.nodes(Role.POLICY)
    node.advantages, node.data['reward'] = advantage, 1.0
    tree.metrics['turns'] = 1
  assert refill.alike(learner(), slate, groups, Context(1, np.random.default_rng(0), {})) == [True, False]
  assert [node.advantages for (tree,) in groups for node in tree.nodes(Role.POLICY)] == [0.0, -0.5]


def test_equal_rewards_with_credit_of_their_own_are_not_alike():
  """As GiGPO's, whose steps are compared too."""
  def credit(groups, context):
    for tree in (tree for group in groups for tree in group):
      tree.reward = 1.0
      tree.nodes(Role.POLICY)[0].advantages = float(tree.answer == 'yes')

  groups = [[chain('yes'), chain('no')], [chain('no'), chain('no')]]
  method = types.SimpleNamespace(credit=credit)
  assert refill.alike(learner(), method, groups, Context(1, np.random.default_rng(0), {})) == [False, True]


@pytest.mark.parametrize('ahead', [0, 1])
def test_new_questions_take_the_places_of_groups_that_are_alike_on_any_number_of_processes(monkeypatch, ahead):
  def credit(groups, context):
    for tree in (tree for group in groups for tree in group):
      tree.reward = float(zlib.crc32(str(tree.leaves()[0].path_tokens()).encode()) % 2)

  def grown():
    one, stream = counting_learner(monkeypatch, refill=3, async_steps=ahead)
    one.config.credit = {}
    method = types.SimpleNamespace(credit=credit)
    current = growing.begin(one, method, stream, 1)
    groups = refill.refill(one, method, current, stream)
    alike = sum(refill.alike(one, method, groups, current.context))
    return [[tree.to_json() for tree in group] for group in groups], stream.drawn, alike, dict(current.context.metrics)

  groups, drawn, alike, metrics = grown()
  spent = drawn - 6
  assert 0 < spent <= 3 and (spent == 3 or not alike) and metrics == {'questions_refilled': spent}
  parts = as_processes(2, monkeypatch, grown)
  assert groups == [group for pair in zip(parts[0][0], parts[1][0]) for group in pair]
  assert [part[1] for part in parts] == [drawn] * 2 and alike == parts[0][2] + parts[1][2]


def test_a_judge_pays_for_each_answer_once_and_another_says_how_kind_it_is():
  asked, trees = [], [chain(answer) for answer in ('right', 'half', 'right', None, 'yes', 'wrong')]
  scores = {'right': Reasoned(1, 'so it is'), 'half': 0, 'yes': TimeoutError('down'), 'wrong': None}

  def pays(items):
    asked.extend(item.answer for item in items)
    return [scores[item.answer] for item in items]

  one = learner()
  services = {'judge': pays, 'second_judge': lambda items: [-1] * len(items)}
  one.agent = types.SimpleNamespace(tools=types.SimpleNamespace(services=services))
  assert judging.judge(one, trees) == {} and trees[0].judged is None  # off
  one.config.reward, one.config.second_judge.kind = 'judge', 'chat'
  for known in (['right', 'half', 'yes', 'wrong'], ['yes', 'wrong']):  # what failed is asked again
    asked.clear()
    figures = judging.judge(one, trees)
    assert asked == known
  assert [search_r1.reward(tree) for tree in trees] == [1.0, 0.5, 1.0, 0.0, 1.0, 0.0]  # failed: by the golds
  assert figures == {'judgements': 5, 'judge_failed': 2, 'judged': pytest.approx(3.5 / 6),
                     'judge_gap': pytest.approx(2.5 / 3),
                     'last_judge_failure': 'judge: ValueError: a reply that cannot be read'}


def test_what_a_server_counts_since_the_start_is_not_added_twice():
  row = {'searches_asked': 3, 'seconds_tools': 1.5, 'requests_failed': 3, 'idle_share': 0.2}
  refill.add_metrics(row, {'searches_asked': 2, 'seconds_tools': 1.0, 'requests_failed': 4, 'idle_share': 0.4},
                     newest={'requests_failed': 4})
  assert row == {'searches_asked': 5, 'seconds_tools': 2.5, 'requests_failed': 4, 'idle_share': 0.2}
