"""CuSearch (Shen et al. 2026, arXiv 2605.11611): train on the chains that searched most, as far as the batch has them.

Rollouts are Search-R1's. `credit` is phases 2 and 3 of the paper's algorithm 2: count the searches of every chain, select
K chains by depth (SDGA), reward and compare only these. The selection never sees a reward; what it is compared with does:

  full           GRPO on all chains; with fewer questions a step it is GRPO-Half
  random         K chains at random
  topk_reward    the K chains with the highest reward
  auto           SDGA-Auto, the deepest first (C.2)
  phase          SDGA-Phase, a depth that advances with the policy (C.3); the phase is in `context.memory`
  anti           SDGA-Anti, the shallowest first (C.4)

The prompt-level methods of appendix D.6 work beside any of them: `drop_alike` (DAPO's dynamic sampling) and `sizes`
(AR3PO's adaptive rollouts).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxsearch.advantages import advance_phase, depth_greedy, depth_plan, select_by_depth
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context
from jaxsearch.methods.search_r1 import credit_relative, grow
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import f1
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role, Tree

STRATEGIES = ('full', 'random', 'topk_reward', 'auto', 'phase', 'anti')

__all__ = ['credit', 'grow', 'sizes']


def reward(tree: Tree, weight: float = 0.2) -> float:
  """`F1 (1 - w) + w format` (eq. 3)."""
  spans = [node.text for node in tree.nodes(Role.POLICY)]
  return formats.cusearch_reward(f1(tree.answer, tree.question.golden_answers), formats.chain_format(spans), weight)


def depth(tree: Tree, max_depth: int) -> int:
  """`cnt`: well-formed searches that found something, at most `max_depth` (section 3.2)."""
  return min(int(tree.metrics['found']), max_depth)


def credit(groups: Sequence[Sequence[Tree]], context: Context, *, strategy: str = 'auto', keep: int = 96, max_depth: int = 5,
           format_weight: float = 0.2, drop_alike: bool = False, normalize_std: bool = True, window: int = 4) -> None:
  """Selects `keep` chains (K), rewards them, and compares each with the retained ones of its question.

  Args:
    strategy: one of STRATEGIES.
    max_depth: S, deeper chains count as so deep.
    format_weight: w of the reward.
    drop_alike: leave out groups in which all retained chains have the same reward (DAPO).
    window: how many recent pass rates of a question `sizes` goes by.
  Raises:
    ValueError: an unknown strategy.
  """
  trees = [tree for group in groups for tree in group]
  depths = np.array([depth(tree, max_depth) for tree in trees])
  if strategy == 'topk_reward':
    for tree in trees:
      tree.reward = reward(tree, format_weight)
  mask = select(trees, depths, context, strategy=strategy, keep=min(keep, len(trees)), max_depth=max_depth)
  chosen = {id(tree) for tree, kept in zip(trees, mask) if kept}
  retained = [kept for group in groups if (kept := [tree for tree in group if id(tree) in chosen])]
  for tree in (tree for group in retained for tree in group):
    tree.reward = reward(tree, format_weight)
  remember_pass_rates(retained, context, window)
  if drop_alike:
    retained = [group for group in retained if len({tree.reward for tree in group}) > 1]
  credit_relative(retained, normalize_std=normalize_std)
  context.metrics.update(figures(trees, depths, [tree for group in retained for tree in group], max_depth))


def select(trees: Sequence[Tree], depths: np.ndarray, context: Context, *, strategy: str, keep: int,
           max_depth: int) -> np.ndarray:
  """Which trees are retained: a mask [N] with `keep` ones, with as many as there are trees for 'full'."""
  if strategy == 'full':
    return np.ones(len(trees), bool)
  if strategy == 'random':
    return np.isin(np.arange(len(trees)), context.rng.choice(len(trees), keep, replace=False))
  if strategy == 'topk_reward':
    ties = context.rng.random(len(trees))
    order = np.lexsort((ties, [-tree.reward for tree in trees]))
    return np.isin(np.arange(len(trees)), order[:keep])
  if strategy not in STRATEGIES:
    raise ValueError(f'credit.strategy={strategy!r} is none of {", ".join(STRATEGIES)}')
  capacities = np.bincount(depths, minlength=max_depth + 1)
  phase = context.memory.get('phase', 0)
  if strategy == 'phase':
    phase = context.memory['phase'] = int(advance_phase(phase, capacities, keep))
    context.metrics['phase'] = phase
  targets, priorities = depth_plan(strategy, keep, max_depth, phase)
  allocation = depth_greedy(capacities, targets, priorities)
  context.metrics['fallback'] = 1 - float(allocation[int(np.argmax(targets))]) / keep
  return np.asarray(select_by_depth(jax.random.key(int(context.rng.integers(2**31))), depths, allocation)) > 0


def figures(trees: Sequence[Tree], depths: np.ndarray, retained: Sequence[Tree], max_depth: int) -> dict[str, float]:
  """Histograms of depth over all and over retained chains, and what of their retrieval is trained on (appendix G.2).

  retrieval_coverage: C_r, tokens of spans that end in a search, in the retained chains; retrieval_share: of all trained.
  """
  own = {id(tree): d for tree, d in zip(trees, depths)}
  kept = np.bincount([own[id(tree)] for tree in retained], minlength=max_depth + 1)
  coverage = sum(len(node.tokens) for tree in retained for node in tree.nodes(Role.POLICY) if grammar.search_query(node.text))
  trained = sum(tree.count(Role.POLICY) for tree in retained)
  return {f'depth_{d}': float(n) for d, n in enumerate(np.bincount(depths, minlength=max_depth + 1))} | {
    f'selected_{d}': float(n) for d, n in enumerate(kept)} | {
    'depth': float(depths.mean()), 'selected_depth': float(kept @ np.arange(max_depth + 1) / max(len(retained), 1)),
    'selected': len(retained), 'retrieval_coverage': coverage, 'retrieval_share': coverage / max(trained, 1)}


# AR3PO, as appendix D.6 describes it.


def remember_pass_rates(groups: Sequence[Sequence[Tree]], context: Context, window: int) -> None:
  """Adds each question's share of answers with F1 > 0 to the last `window` of them in `context.memory`.

  The paper says "positive reward", which the format term alone would give to every well-formed chain.
  """
  rates = context.memory.setdefault('pass_rates', {})
  for group in groups:
    right = np.mean([f1(tree.answer, tree.question.golden_answers) > 0 for tree in group])
    rates[group[0].question.id] = [*rates.get(group[0].question.id, []), float(right)][-window:]


def sizes(questions: Sequence[Question], group_size: int, context: Context, *, adaptive: bool = False,
          smallest: int = 1) -> list[int]:
  """Chains for each question: `group_size`, or where it is `adaptive` more where the pass rate is in the middle.

  The budget len(questions) * group_size stays; a question gets `smallest` at least, and of the rest a share in
  proportion to `rate (1 - rate)`, its own over the window; one that was not seen yet counts as 1/2.
  """
  budget = len(questions) * group_size
  if not adaptive:
    return [group_size] * len(questions)
  seen = context.memory.get('pass_rates', {})
  rates = np.array([np.mean(seen[q.id]) if q.id in seen else 0.5 for q in questions])
  weights = rates * (1 - rates) + 1e-3
  exact = (budget - smallest * len(questions)) * weights / weights.sum()
  found = np.floor(exact).astype(int)
  found[np.argsort(found - exact, kind='stable')[:budget - smallest * len(questions) - found.sum()]] += 1  # largest remainders
  return [smallest + int(n) for n in found]
