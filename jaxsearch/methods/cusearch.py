"""CuSearch (Shen et al. 2026, arXiv 2605.11611): train on the chains that searched most.

Rollouts are Search-R1's. `credit` is phases 2 and 3 of the paper's algorithm 2: count the searches of every
chain, select K chains, and compare these. Strategies:

  full           GRPO on all chains; with half the questions a step it is GRPO-Half
  random         K chains at random
  topk_reward    the K chains with the highest reward
  auto           SDGA-Auto, the deepest first (C.2)
  phase          SDGA-Phase, a depth that advances with the policy (C.3); the phase is in `context.memory`
  anti           SDGA-Anti, the shallowest first (C.4)
  within         the deepest chains of each question, equally many of each; not in the paper: depths then
                 differ by the policy's choice, never by the question

Any of them combines with those of appendix D.6: `drop_alike` (DAPO) and `sizes` (AR3PO).
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxsearch.advantages import advance_phase, depth_greedy, depth_plan, select_by_depth
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.credit import credit_relative
from jaxsearch.methods.search_r1 import grow
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import token_f1
from jaxsearch.trees.tree import Role, Tree

__all__ = ['credit', 'grow', 'sizes']


def reward(tree: Tree, weight: float = 0.2) -> float:
  """Returns `F1 (1 - w) + w format` (eq. 3)."""
  form = formats.chain_format(tree.turns(), tree.grammar.is_turn)
  return token_f1(tree.answer, tree.question.golden_answers) * (1.0 - weight) + weight * form


def depth(tree: Tree, max_depth: int) -> int:
  """Returns `cnt`: well-formed searches that found something, at most `max_depth` (section 3.2)."""
  return min(int(tree.metrics['found']), max_depth)


def credit(groups: Groups, context: Context, *, strategy: str = 'auto', keep: int = 96,
           max_depth: int = 5, format_weight: float = 0.2, drop_alike: bool = False,
           normalize_std: bool = True, singleton: str = 'raw', window: int = 4) -> None:
  """Rewards all chains, selects `keep` of them (K), and compares each with the selected ones of its question.

  Selection often leaves one chain of a question: the metric `singleton_share` is the share of the selected
  ones that are alone, so are not compared with anything. configs/cusearch.py explains the settings.
  """
  depths = {tree: depth(tree, max_depth) for group in groups for tree in group}
  for tree in depths:
    tree.reward = reward(tree, format_weight)
  remember_pass_rates(groups, context, window)
  gathered, places = context.gather([[(depths[tree], tree.reward) for tree in group] for group in groups])
  if drop_alike:
    gathered = [group if len({earned for _, earned in group}) > 1 else [] for group in gathered]
  chains = np.array([chain for group in gathered for chain in group]).reshape(-1, 2)
  ids = np.repeat(np.arange(len(gathered)), [len(group) for group in gathered])
  mask = select(chains[:, 0].astype(int), chains[:, 1], ids, context, strategy, keep, max_depth)
  masks = np.split(mask, np.cumsum([len(group) for group in gathered]))
  context.metrics['singleton_share'] = sum(part.sum() == 1 for part in masks) / max(mask.sum(), 1)
  groups = [list(itertools.compress(group, masks[place])) for group, place in zip(groups, places)]
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
  context.metrics.update(of_depths(depths, [tree for group in groups for tree in group], max_depth, context))


def select(depths: np.ndarray, rewards: np.ndarray, ids: np.ndarray, context: Context, strategy: str,
           keep: int, max_depth: int) -> np.ndarray:
  """Selects by depths, rewards and questions `ids` (in order), [N] each: a mask [N] of `keep`, or of all."""
  number = len(depths)
  if strategy == 'full' or not number:
    return np.ones(number, bool)
  if strategy == 'random':
    return np.isin(np.arange(number), context.rng.choice(number, min(keep, number), replace=False))
  if strategy == 'topk_reward':
    return np.isin(np.arange(number), np.lexsort((context.rng.random(number), -rewards))[:keep])
  if strategy == 'within':
    rank = np.argsort(np.lexsort((context.rng.random(number), -depths, ids))) - np.searchsorted(ids, ids)
    return np.isin(np.arange(number), np.lexsort((context.rng.random(number), rank))[:keep])
  capacities = np.bincount(depths, minlength=max_depth + 1)
  phase = context.memory.get('phase', 0)
  if strategy == 'phase':
    phase = context.memory['phase'] = int(advance_phase(phase, capacities, keep))
    context.metrics['phase'] = float(phase)
  targets, priorities = depth_plan(strategy, keep, max_depth, phase)
  allocation = depth_greedy(capacities, targets, priorities)
  return np.asarray(select_by_depth(jax.random.key(int(context.rng.integers(2**31))), depths, allocation))


def remember_pass_rates(groups: Groups, context: Context, window: int) -> None:
  """Keeps each question's last `window` shares of answers with F1 > 0 (AR3PO, appendix D.6)."""
  # The paper says "positive reward", but with the format term every well-formed chain would have one.
  right = lambda tree: token_f1(tree.answer, tree.question.golden_answers) > 0
  shares = [(group[0].question.id, float(np.mean(list(map(right, group))))) for group in groups if group]
  rates = context.memory.setdefault('pass_rates', {})
  for question, rate in context.gather(shares)[0]:
    rates[question] = [*rates.get(question, []), rate][-window:]


def sizes(questions: Sequence[Question], group_size: int, context: Context, *, adaptive: bool = False,
          smallest: int = 2, largest: int = 8) -> list[int]:
  """Gives each question `group_size` chains, or if `adaptive` more where its pass rate is middling (AR3PO).

  They sum to len(questions) * group_size: from `smallest` to `largest` for each question, and what is above
  `smallest` in proportion to `rate (1 - rate)`, where `rate` is the mean over the window, or 1/2 for an
  unseen question.
  """
  if not adaptive:
    return [group_size] * len(questions)
  seen = context.memory.get('pass_rates', {})
  rates = np.array([np.mean(seen[q.id]) if q.id in seen else 0.5 for q in questions])
  weights = rates * (1 - rates) + 1e-3
  numbers = np.full(len(questions), smallest)
  for _ in range(len(questions) * (group_size - smallest)):  # one goes to the furthest below its share
    numbers[np.argmax(np.where(numbers < largest, weights / (numbers - smallest + 0.5), -1.0))] += 1
  return numbers.tolist()


def of_depths(depths: Mapping[Tree, int], selected: Sequence[Tree], max_depth: int,
              context: Context) -> dict[str, float]:
  """Describes CuSearch's selection by depth.

  chains_depth_D, selected_depth_D: how many chains have depth D, of all and of the selected ones.
  retrieval_coverage: C_r (appendix G.2), the tokens of spans whose search found documents in the selected
  chains. retrieval_share: their share of all trained tokens.
  """
  searching = [node for tree in selected for node in tree.nodes(Role.POLICY) if node.data.get('documents')]
  coverage = sum(len(node.tokens) for node in searching)
  trained = sum(tree.count(Role.POLICY) for tree in selected)
  coverage_of_all, trained_of_all = np.sum(context.gather([(coverage, trained)])[0], axis=0)
  counts = {f'{name}_depth_{depth}': sum(depths[tree] == depth for tree in trees)
            for name, trees in (('chains', depths), ('selected', selected)) for depth in range(max_depth + 1)}
  return counts | {
    'depth_mean': sum(depths.values()) / max(len(depths), 1), 'selected': len(selected),
    'retrieval_coverage': coverage, 'retrieval_share': float(coverage_of_all / max(trained_of_all, 1))}
