"""Which chains CuSearch and what it is compared with train on, and what they earn."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from jaxsearch.methods import cusearch
from jaxsearch.training import metrics
from jaxsearch.training.metrics import credited, summary
from jaxsearch.trees.tree import Role
from tests.methods.driving import FOUND, QUESTION, context, drive

THINK = '<think>hm</think>'
RIGHT, WRONG = f'{THINK}<answer> Lovelace </answer>', f'{THINK}<answer> Byron </answer>'


def chain(searches, right=False, found=True, question=QUESTION):
  said = [f'{THINK}<search> query </search>'] * searches + [RIGHT if right else WRONG]
  documents = FOUND if found else ()
  return drive(said, found=documents, question=question, max_turns=8)[0]


def groups_of(*depths, right=lambda number: number % 2 == 0):
  """Groups of chains with the given searches, each of a question of its own."""
  numbers = iter(range(1000))
  return [[chain(depth, right(next(numbers)), question=dataclasses.replace(QUESTION, id=str(i)))
           for depth in group]
          for i, group in enumerate(depths)]


def trained(groups):
  return [tree for group in groups
          for tree in group if any(node.advantages is not None for node in tree.walk())]


def depths_of(trees):
  return dict(collections.Counter(tree.metrics['searches'] for tree in trees))


def test_depth_counts_searches_that_found_something():
  trees = chain(0), chain(2), chain(7), chain(3, found=False)
  assert [cusearch.depth(tree, 5) for tree in trees] == [0, 2, 5, 0]
  unclosed = drive([f'{THINK}<search> query', RIGHT], max_turns=3)[0]
  assert unclosed.metrics['malformed'] == 1 and cusearch.depth(unclosed, 5) == 0


@pytest.mark.parametrize('strategy, expected', [
  ('auto', {4: 1, 3: 2, 2: 1}), ('phase', {2: 2, 3: 2}), ('anti', {0: 2, 1: 2}),
  ('full', {0: 2, 1: 2, 2: 2, 3: 2, 4: 1})])
def test_what_each_strategy_selects(strategy, expected):
  groups = groups_of([0, 1, 2], [3, 4, 0], [1, 2, 3])
  cusearch.credit(groups, context(), strategy=strategy, keep=4)
  assert depths_of(trained(groups)) == expected


def test_within_keeps_the_deepest_of_each_question():
  groups = groups_of([0, 1, 2], [3, 4, 0], [1, 2, 3])
  cusearch.credit(groups, context(), strategy='within', keep=6)
  assert [sorted(depths_of(trained([group]))) for group in groups] == [[1, 2], [3, 4], [2, 3]]
  groups = groups_of([0, 1, 2], [3, 4, 0], [1, 2, 3])
  cusearch.credit(groups, context(), strategy='within', keep=4)  # one each, and the second of one of them
  assert depths_of(trained(groups)).keys() >= {2, 3, 4} and len(trained(groups)) == 4


def test_random_and_top_reward():
  groups = groups_of([0, 1, 2], [3, 4, 0], [1, 2, 3], right=lambda number: number in (1, 5))
  cusearch.credit(groups, context(), strategy='topk_reward', keep=2)
  assert all(tree.answer == 'Lovelace' for tree in trained(groups)) and len(trained(groups)) == 2
  chosen = set()
  for seed in range(60):
    groups = groups_of([0, 1, 2], [3, 4, 5])
    cusearch.credit(groups, context(seed), strategy='random', keep=2)
    chosen |= {tree.metrics['searches'] for tree in trained(groups)}
    assert len(trained(groups)) == 2
  assert chosen == set(range(6))


def test_all_are_rewarded_and_the_selected_compared():
  groups = groups_of([4, 4, 0, 0], [0, 0, 0, 0], [4, 0, 0, 0], right=lambda number: number in (0, 8))
  cusearch.credit(groups, context(), strategy='auto', keep=3)
  assert [tree.reward for group in groups
          for tree in group] == pytest.approx([1.0] + [0.2] * 7 + [1.0] + [0.2] * 3)
  assert trained(groups) == [*groups[0][:2], groups[2][0]]
  row = summary(groups, credited(groups), {})
  assert row['reward'] == pytest.approx(4 / 12)
  assert row['reward_retained'] == pytest.approx((1.0 + 0.2 + 1.0) / 3)
  assert row['em'] == pytest.approx(2 / 12)
  advantages = [tree.nodes(Role.POLICY)[0].advantages for tree in trained(groups)]
  high, low = 0.8 + 0.2, 0.2  # F1 (1 - w) + w format
  expected = (high - low) / 2 / np.std([high, low], ddof=1)
  # one of its group alone keeps its reward
  np.testing.assert_allclose(advantages, [expected, -expected, high], rtol=1e-4)


def test_reward_is_f1_and_format():
  assert cusearch.reward(chain(1, right=True)) == pytest.approx(1.0)
  assert cusearch.reward(chain(1)) == pytest.approx(0.2)  # eq. 3 with the weight of table 2
  assert cusearch.reward(chain(1), weight=0.0) == 0.0
  half = chain(1)
  half.answer = 'Lovelace or Byron'  # F1 0.5
  assert cusearch.reward(half) == pytest.approx(0.6) and cusearch.reward(half, weight=0.0) == 0.5
  # no thought: not the format
  assert cusearch.reward(drive(['<answer> Lovelace </answer>'])[0]) == pytest.approx(0.8)
  closed = chain(1, question=dataclasses.replace(QUESTION, golden_answers=('yes',)))
  closed.answer = 'yes it is'  # F1 0.5 of its tokens: HotpotQA's rule for closed answers is for evaluation
  assert cusearch.reward(closed) == pytest.approx(0.6)
  assert cusearch.reward(drive(['<answer> Lovelace'], max_turns=0)[0]) == 0.0              # never closed


def test_the_phase_advances_and_is_remembered():
  deep = [[2, 3, 4], [3, 3, 4]]
  first = context()
  cusearch.credit(groups_of(*deep), first, strategy='phase', keep=4)
  assert first.memory['phase'] == first.metrics['phase'] == 1      # 6 chains above depth 1: at least K
  again = dataclasses.replace(first, metrics={})
  groups = groups_of([0, 0, 1], [0, 1, 2])
  cusearch.credit(groups, again, strategy='phase', keep=2)
  assert again.memory['phase'] == 1                                # never back
  # its bucket first, then deeper, then shallower
  assert depths_of(trained(groups)) == {2: 1, 1: 1}
  few = context()
  cusearch.credit(groups_of([2, 2]), few, strategy='phase', keep=96)
  assert few.memory['phase'] == 0                                  # two chains are not K


def test_a_step_compiles_no_program_again():
  compiled = []
  note = lambda event, seconds, **_: compiled.append(event) if event == metrics.COMPILATION else None
  jax.monitoring.register_event_duration_secs_listener(note)
  for _ in range(3):
    known = len(compiled)
    cusearch.credit(groups_of([0, 1, 2], [3, 4, 0]), context(), keep=4)
  jax.monitoring.unregister_event_duration_listener(note)
  assert compiled[known:] == []


def test_figures_of_a_step():
  groups, seen = groups_of([0, 2, 2]), context()
  cusearch.credit(groups, seen, strategy='auto', keep=2, max_depth=3)
  search = len(f'{THINK}<search> query </search>')
  assert [seen.metrics[f'chains_depth_{d}'] for d in range(4)] == [1, 0, 2, 0]
  assert [seen.metrics[f'selected_depth_{d}'] for d in range(4)] == [0, 0, 2, 0]
  assert seen.metrics['retrieval_coverage'] == 4 * search
  assert seen.metrics['singleton_share'] == 0
  assert seen.metrics['depth_mean'] == pytest.approx(4 / 3)


def test_dapo_drops_groups_without_a_difference():
  groups = groups_of([1, 1], [1, 1], [1, 1], right=lambda number: number in (0, 1, 2))
  cusearch.credit(groups, context(), strategy='full', drop_alike=True)
  assert trained(groups) == groups[1]
  groups = groups_of([1, 2], [3, 3], right=lambda number: number == 0)
  cusearch.credit(groups, context(), strategy='auto', keep=1, drop_alike=True)
  assert trained(groups) == [groups[0][1]]  # what is dropped are groups, before any chain is selected


def test_ar3po_moves_chains_to_questions_in_the_middle():
  seen = context()
  groups = groups_of([0] * 4, [0] * 4, [0] * 4, right=lambda number: number < 4 or number in (4, 6))
  questions = [group[0].question for group in groups]
  assert cusearch.sizes(questions, 4, seen, adaptive=True) == [4, 4, 4]
  cusearch.credit(groups, seen, strategy='full', window=2)
  assert seen.memory['pass_rates'] == {'0': [1.0], '1': [0.5], '2': [0.0]}
  assert cusearch.sizes(questions, 4, seen, adaptive=True) == [2, 8, 2]
  assert cusearch.sizes(questions, 4, seen) == [4, 4, 4]
  for _ in range(3):
    cusearch.credit(groups, seen, strategy='random', keep=1, window=2)
  assert seen.memory['pass_rates']['1'] == [0.5, 0.5]  # of all rollouts, not of the one that is trained on
