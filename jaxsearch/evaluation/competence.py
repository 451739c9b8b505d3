"""Does the critic know what the model knows, and are tools used where they are needed: CARL's section 4.4 in numbers.

All figures are of finished trees that were credited (appendices C, E, I, J and N of the paper). A question is of tier 2 if
the policy can answer it without tools, else of tier 1; `tiers` says so by question id, and trees of other questions count
only where tiers do not matter. Trees of methods without a critic or without segments of several kinds are welcome: what
they do not have is NaN. Every rollout counts once, however many a question has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.evaluation import calibration
from jaxsearch.evaluation.metrics import answer_found
from jaxsearch.rewards.match import normalize_answer
from jaxsearch.trees.tree import Node, Role, Tree

_CLOSED_ANSWERS = ('yes', 'no')


class Pair(NamedTuple):
  """An invoke and the assimilate that read its output; a value is NaN where there is none."""
  retrieved: bool  # a gold answer is in the raw output
  extracted: bool  # a gold answer is in the context that was written
  before: float    # V before the invoke
  between: float   # V before the assimilate, the raw output in sight
  after: float     # V before the segment that follows


def critic_figures(trees: Sequence[Tree], tiers: Mapping[str, int]) -> dict[str, float]:
  """How good the critic is (tables 11, 13 and 14).

  Returns:
    auc: of V(s_0), tier 2 against tier 1; ece, brier: of V(s_0) as the probability of the reward; explained_variance: of
    the reward by the value of every boundary state; value_tier_1, value_tier_2: mean V(s_0); rollouts and boundary_states
    that have a value.
  """
  start, rewards, tier = first_values(trees, tiers)
  states = [(_value(node), tree.reward) for tree in trees for node in _segments(tree) if np.isfinite(_value(node))]
  values, outcomes = np.array(states, np.float64).reshape(-1, 2).T
  return {
    'auc': _figure(calibration.auc, start[tier > 0], tier[tier > 0] == 2),
    'ece': _figure(calibration.ece, start, rewards),
    'brier': _figure(calibration.brier, start, rewards),
    'explained_variance': _figure(calibration.explained_variance, values, outcomes),
    'value_tier_1': _mean(start[tier == 1]),
    'value_tier_2': _mean(start[tier == 2]),
    'rollouts': float(len(start)),
    'boundary_states': float(len(states)),
  }


def gate_figures(trees: Sequence[Tree], tiers: dict[str, int]) -> dict[str, float]:
  """What the gate looks at (auc, sign, explained), and how well calibrated the critic is (ece, brier), on held-out rollouts.

  Signs are those over assimilates in tool-required rollouts, as in the paper; NaN for methods without such segments.
  """
  found = critic_figures(trees, tiers)
  signs = sign_figures([tree for tree in trees if tree.root.data['kind'] == 'tool-required'])
  return {'auc': found['auc'], 'sign': signs['sign_accuracy'], 'explained': found['explained_variance'], 'ece': found['ece'],
          'brier': found['brier']}


def first_values(trees: Sequence[Tree], tiers: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """V(s_0), reward and tier (0 where it is not known) of the trees that have a V(s_0): three [N], as the plots take them."""
  rows = [(_value(node), tree.reward, tiers.get(tree.question.id, 0)) for tree in trees for node in _segments(tree)[:1]]
  values, rewards, tier = np.array([row for row in rows if np.isfinite(row[0])], np.float64).reshape(-1, 3).T
  return values, rewards, tier.astype(int)


def sign_figures(trees: Sequence[Tree]) -> dict[str, float]:
  """How often the critic moves as it should (table 12).

  V should rise over an assimilate that took the gold answer over from the raw output and drop over one that lost it; where
  retrieval failed nothing is expected. It should rise over an invoke whose output has the gold answer. All pairs of a tree
  count, so that long rollouts weigh more; the paper draws at most one pair a trajectory, and a person judges what was
  found. Pairs without a value on both sides are left out, as at the end of a rollout that had no segments left.

  Returns:
    For X in extracted, lost: X_pairs, X_right (moved as it should) and X_rate; failed_pairs; sign_accuracy over both;
    invoke_pairs, invoke_right and invoke_rate. Rates of nothing are NaN.
  """
  found = [pair for tree in trees for pair in pairs(tree)]
  columns = np.array(found, np.float64).reshape(-1, len(Pair._fields)).T
  retrieved, extracted = columns[:2] > 0
  before, between, after = columns[2:]
  invoked, assimilated = between - before, after - between
  known = np.isfinite(assimilated)
  expected = np.where(retrieved, np.where(extracted, 1.0, -1.0), 0.0)
  figures = {}
  for name, rows, changes, direction in (
    ('extracted', known & (expected > 0), assimilated, 1.0), ('lost', known & (expected < 0), assimilated, -1.0),
    ('invoke', retrieved & np.isfinite(invoked), invoked, 1.0),
  ):  # fmt: skip
    right = float(np.sum(changes[rows] * direction > 0))
    rate = _figure(calibration.sign_accuracy, changes[rows], np.full(rows.sum(), direction))
    figures |= {f'{name}_pairs': float(rows.sum()), f'{name}_right': right, f'{name}_rate': rate}
  return figures | {
    'failed_pairs': float(np.sum(known & (expected == 0))),
    'sign_accuracy': _figure(calibration.sign_accuracy, assimilated[known], expected[known]),
  }


def pairs(tree: Tree) -> list[Pair]:
  """The invoke-assimilate pairs of a tree, in order; none where yes or no is the answer, which stands in any text."""
  golds = [gold for gold in tree.question.golden_answers if normalize_answer(gold) not in _CLOSED_ANSWERS]
  found, segments = [], _segments(tree)
  for i, (invoke, assimilate) in enumerate(itertools.pairwise(segments)):
    if golds and (_kind(invoke), _kind(assimilate)) == ('invoke', 'assimilate'):
      after = _value(segments[i + 2]) if i + 2 < len(segments) else np.nan
      found.append(Pair(_stands_in(golds, invoke.data['output']), _stands_in(golds, assimilate.data['context']),
                        _value(invoke), _value(assimilate), after))
  return found


def use_figures(trees: Sequence[Tree], tiers: Mapping[str, int]) -> dict[str, float]:
  """What the policy does with its tools (tables 3, 6, 14 and 19).

  Returns:
    For each tier: tool_rate_tier_N, the share of rollouts with a call; calls_tier_N, their mean number; em_tier_N.
    needless_calls: mean calls on tier 2. The paper's '53 % fewer unnecessary tool calls' is table 3's tool_rate_tier_2
    (82.6 to 38.6 %), so compare that as well. confident_wrong: share of rollouts on tier 1 that give an answer, and a wrong
    one. em; tokens_per_answer: tokens the policy wrote in a rollout, all segments, answered or not; assimilate_tokens: mean
    length of the assimilate segments.
  """
  calls = np.array([tree.metrics['searches'] for tree in trees], np.float64)
  right = np.array([tree.question.score(tree.answer) for tree in trees], np.float64)
  answered = np.array([bool(tree.answer and tree.answer.strip()) for tree in trees], bool)
  tier = np.array([tiers.get(tree.question.id, 0) for tree in trees], int)
  lengths = [len(node.tokens) for tree in trees for node in _segments(tree) if _kind(node) == 'assimilate']
  figures = {}
  for number in (1, 2):
    of = tier == number
    figures |= {f'tool_rate_tier_{number}': _mean(calls[of] > 0), f'calls_tier_{number}': _mean(calls[of]),
                f'em_tier_{number}': _mean(right[of])}
  return figures | {
    'needless_calls': figures['calls_tier_2'],
    'confident_wrong': _mean((answered & (right == 0))[tier == 1]),
    'em': _mean(right),
    'tokens_per_answer': _mean([tree.count(Role.POLICY) for tree in trees]),
    'assimilate_tokens': _mean(lengths),
  }


def calibration_curve(probabilities, outcomes, bins: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """What was predicted and what happened, by equally wide bins of the prediction, as `calibration.ece` makes them.

  Args:
    probabilities: [N] in [0, 1]; on the border of two bins: in the upper one.
    outcomes: [N] in [0, 1].
  Returns:
    Mean prediction, mean outcome (both NaN in an empty bin) and count, each [bins].
  """
  probabilities, outcomes = np.asarray(probabilities, np.float32), np.asarray(outcomes, np.float64)
  which = np.digitize(probabilities, (np.arange(1, bins) / bins).astype(np.float32))
  counts = np.bincount(which, minlength=bins)
  with np.errstate(invalid='ignore'):
    predicted, right = (np.bincount(which, x, minlength=bins) / counts for x in (probabilities, outcomes))
  return predicted, right, counts


def _segments(tree: Tree) -> list[Node]:
  return [node for node in tree.nodes(Role.POLICY) if node.tokens]


def _value(node: Node) -> float:
  """V of the state before a segment."""
  return float(node.values[0]) if node.values is not None else np.nan


def _kind(node: Node) -> str | None:
  return node.data.get('segment')


def _stands_in(golds: Sequence[str], text: str) -> bool:
  return answer_found(golds, [Document('', '', text)])


def _mean(values) -> float:
  return float(np.mean(values)) if len(values) else float('nan')


def _figure(function: Callable, *arrays) -> float:
  """A figure of `calibration` of arrays [N], padded to a power of two: numbers of rollouts change, programs should not."""
  number = len(arrays[0])
  size = max(16, 1 << (number - 1).bit_length())
  padded = [np.pad(np.asarray(x, np.float32), (0, size - number)) for x in arrays]
  return float(_compiled(function)(*padded, np.arange(size) < number))


_compiled = functools.cache(jax.jit)
