"""Does the critic know what the policy knows, and does the policy use tools where it needs them? CARL's section 4.4 in figures.

Figures are of finished, credited trees (appendices C, E, I, J and N of the paper); without a critic or without CARL's segments
they are NaN. A question is tier 2 if the policy can answer it closed-book, else tier 1; `tiers` maps question ids to tiers, and
trees of other questions count only where tiers do not matter.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxsearch.evaluation import calibration
from jaxsearch.methods.carl import segments
from jaxsearch.rewards.match import answer_found, normalize_answer
from jaxsearch.trees.tree import Node, Role, Tree


class ToolCall(NamedTuple):
  """An invoke segment and the assimilate segment that reads its output. Values are NaN where there is none."""
  retrieved: bool  # the raw output holds a gold answer
  extracted: bool  # the context written from it holds a gold answer
  before: float    # V before the invoke
  between: float   # V before the assimilate, with the raw output in sight
  after: float     # V before the next segment


def critic_figures(trees: Sequence[Tree], tiers: Mapping[str, int]) -> dict[str, float]:
  """How good the critic is (tables 11, 13 and 14).

  Returns:
    auc: of V(s_0), tier 2 against tier 1; ece, brier: of V(s_0) as the probability of the reward; explained_variance: of the
    reward by the value of every boundary state; value_tier_1, value_tier_2: mean V(s_0); rollouts and boundary_states: how many
    have a value.
  """
  states = [(_value(node), tree.reward, tiers.get(tree.question.id, 0), number == 0)
            for tree in trees for number, node in enumerate(segments(tree)) if np.isfinite(_value(node))]
  values, outcomes, tier, first = np.array(states, np.float64).reshape(-1, 4).T
  start, rewards, tier = values[first > 0], outcomes[first > 0], tier[first > 0]
  return {
    'auc': _figure(calibration.auc, start[tier > 0], tier[tier > 0] == 2),
    'ece': _figure(calibration.ece, start, rewards), 'brier': _figure(calibration.brier, start, rewards),
    'explained_variance': _figure(calibration.explained_variance, values, outcomes),
    'value_tier_1': _mean(start[tier == 1]), 'value_tier_2': _mean(start[tier == 2]),
    'rollouts': float(len(start)), 'boundary_states': float(len(states)),
  }  # fmt: skip


def gate_figures(trees: Sequence[Tree], tiers: Mapping[str, int]) -> dict[str, float]:
  """What the gate looks at (auc, sign, explained), and how well calibrated the critic is (ece, brier), on held-out rollouts.

  Signs are those of all calls (appendix C asks for tool-required rollouts), the rest is of rollouts under the prompt of training.
  """
  found = critic_figures([tree for tree in trees if tree.root.data['kind'] == 'tool-optional'], tiers)
  signs = sign_figures(trees)
  return {'auc': found['auc'], 'sign': signs['sign_accuracy'], 'explained': found['explained_variance'],
          'ece': found['ece'], 'brier': found['brier']}


def sign_figures(trees: Sequence[Tree]) -> dict[str, float]:
  """How often the critic's value moves in the right direction (table 12).

  V should rise over an assimilate that keeps the gold answer from the raw output and drop over one that loses it; after a
  failed retrieval nothing is expected. It should rise over an invoke whose output holds the gold answer. All calls of a tree
  count, so long rollouts weigh more; the paper draws at most one call a trajectory and has people judge what was found. Calls
  without a value on both sides are left out, such as the last one of a rollout that ran out of segments.

  Returns:
    For X in extracted, lost and invoke: X_pairs (how many), X_right (moved in the right direction) and X_rate; failed_pairs;
    sign_accuracy over extracted and lost. Rates of nothing are NaN.
  """
  calls = np.array([call for tree in trees for call in tool_calls(tree)], np.float64).reshape(-1, len(ToolCall._fields)).T
  (retrieved, extracted), (before, between, after) = calls[:2] > 0, calls[2:]
  expected = np.where(retrieved, np.where(extracted, 1.0, -1.0), 0.0)  # direction of V over the assimilate
  read, invoked = after - between, between - before
  known = np.isfinite(read)
  figures = {}
  for name, chosen, changes, direction in (
    ('extracted', known & (expected > 0), read, 1.0), ('lost', known & (expected < 0), read, -1.0),
    ('invoke', retrieved & np.isfinite(invoked), invoked, 1.0),
  ):  # fmt: skip
    figures |= {f'{name}_pairs': float(chosen.sum()), f'{name}_right': float(np.sum(changes[chosen] * direction > 0)),
                f'{name}_rate': _figure(calibration.sign_accuracy, changes[chosen], np.full(chosen.sum(), direction))}
  return figures | {'failed_pairs': float(np.sum(known & (expected == 0))),
                    'sign_accuracy': _figure(calibration.sign_accuracy, read[known], expected[known])}


def tool_calls(tree: Tree) -> list[ToolCall]:
  """The tool calls of a tree, in order; none if the gold answer is yes or no, which any text may hold."""
  golds = [gold for gold in tree.question.golden_answers if normalize_answer(gold) not in ('yes', 'no')]
  spans = segments(tree)
  values = [*map(_value, spans), np.nan]
  return [
    ToolCall(answer_found(golds, invoke.data['output']), answer_found(golds, assimilate.data['context']), *values[i:i + 3])
    for i, (invoke, assimilate) in enumerate(itertools.pairwise(spans))
    if golds and [node.data.get('segment') for node in (invoke, assimilate)] == ['invoke', 'assimilate']]


def use_figures(trees: Sequence[Tree], tiers: Mapping[str, int]) -> dict[str, float]:
  """How the policy uses its tools (tables 3, 6, 14 and 19).

  Returns:
    For each tier: tool_rate_tier_N, the share of rollouts with a call; calls_tier_N, calls a rollout; em_tier_N.
    needless_calls: calls a rollout on tier 2. The paper's '53 % fewer unnecessary tool calls' is table 3's tool_rate_tier_2
    (82.6 to 38.6 %), so compare that as well. confident_wrong: share of tier 1 rollouts with a wrong answer. em;
    tokens_per_answer: policy tokens a rollout, all segments, answered or not; assimilate_tokens: mean length of the assimilate
    segments.
  """
  calls = np.array([tree.metrics['searches'] for tree in trees], np.float64)
  right = np.array([tree.question.score(tree.answer) for tree in trees], np.float64)
  answered = np.array([bool(tree.answer and tree.answer.strip()) for tree in trees], bool)
  tier = np.array([tiers.get(tree.question.id, 0) for tree in trees], int)
  figures = {}
  for number, own in ((1, tier == 1), (2, tier == 2)):
    figures |= {f'tool_rate_tier_{number}': _mean(calls[own] > 0), f'calls_tier_{number}': _mean(calls[own]),
                f'em_tier_{number}': _mean(right[own])}
  return figures | {
    'needless_calls': figures['calls_tier_2'], 'confident_wrong': _mean((answered & (right == 0))[tier == 1]),
    'em': _mean(right), 'tokens_per_answer': _mean([tree.count(Role.POLICY) for tree in trees]),
    'assimilate_tokens': _mean([len(node.tokens) for tree in trees for node in segments(tree)
                                if node.data.get('segment') == 'assimilate']),
  }  # fmt: skip


def _value(node: Node) -> float:
  """V of the state before a segment."""
  return float(node.values[0]) if node.values is not None else np.nan


def _mean(values) -> float:
  return float(np.mean(values)) if len(values) else float('nan')


def _figure(function: Callable, *arrays) -> float:
  """A figure of `calibration` over arrays [N], padded to a power of two: few compiled programs for any number of rollouts."""
  number = len(arrays[0])
  size = max(16, 1 << (number - 1).bit_length())
  padded = [np.pad(np.asarray(x, np.float32), (0, size - number)) for x in arrays]
  return float(_compiled(function)(*padded, np.arange(size) < number))


_compiled = functools.cache(jax.jit)
