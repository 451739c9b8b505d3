"""Does the critic know what the policy knows, and does the policy use tools where it needs them? CARL's section 4.4 in figures.

Figures are of the records of answered questions (appendices C, E, F, I, J, M and N of the paper); without a critic or without
CARL's segments they are NaN. A question is tier 2 if the policy can answer it closed-book, else tier 1; `tiers` maps question ids
to tiers, and records of other questions count only where tiers do not matter.
"""

import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxsearch.evaluation import calibration
from jaxsearch.evaluation.records import policy_spans, predictions
from jaxsearch.rewards.match import answer_found, normalize_answer
from jaxsearch.trees.tree import Role, Tree

Record = Mapping[str, Any]  # of `predictions`
Records = Sequence[Record]


class ToolCall(NamedTuple):
  """An invoke segment and the assimilate segment that reads its output. Values are NaN where there is none."""
  retrieved: bool  # the raw output holds a gold answer
  extracted: bool  # the context written from it holds a gold answer
  before: float    # V before the invoke
  between: float   # V before the assimilate, with the raw output in sight
  after: float     # V before the next segment


def critic_figures(records: Records, tiers: Mapping[str, int]) -> dict[str, float]:
  """How good the critic is (tables 11, 13 and 14).

  Returns:
    auc: of V(s_0), tier 2 against tier 1; ece, brier: of V(s_0) as the probability of the reward; explained_variance: of the
    reward by the value of every boundary state; value_tier_1, value_tier_2: mean V(s_0); rollouts and boundary_states: how many
    have a value.
  """
  states = [(span['value'], _outcome(record), tiers.get(record['id'], 0), number == 0)
            for record in records for number, span in enumerate(policy_spans(record)) if 'value' in span]
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
  found = critic_figures(predictions([tree for tree in trees if tree.root.data['kind'] == 'tool-optional']), tiers)
  signs = sign_figures(predictions(trees))
  return {'auc': found['auc'], 'sign': signs['sign_accuracy'], 'explained': found['explained_variance'],
          'ece': found['ece'], 'brier': found['brier']}


def sign_figures(records: Records) -> dict[str, float]:
  """How often the critic's value moves in the right direction (table 12).

  V should rise over an assimilate that keeps the gold answer from the raw output and drop over one that loses it; after a
  failed retrieval nothing is expected. It should rise over an invoke whose output holds the gold answer. All calls of a rollout
  count, so long rollouts weigh more; the paper draws at most one call a trajectory and has people judge what was found. Calls
  without a value on both sides are left out, such as the last one of a rollout that ran out of segments.

  Returns:
    For X in extracted, lost and invoke: X_pairs (how many), X_right (moved in the right direction) and X_rate; failed_pairs;
    sign_accuracy over extracted and lost. Rates of nothing are NaN.
  """
  calls = np.array([call for record in records for call in tool_calls(record)], np.float64).reshape(-1, len(ToolCall._fields)).T
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


def tool_calls(record: Record) -> list[ToolCall]:
  """The tool calls of a rollout, in order; none if the gold answer is yes or no, which any text may hold."""
  golds, found = [gold for gold in record['golden_answers'] if normalize_answer(gold) not in ('yes', 'no')], []
  values = [*(span.get('value', np.nan) for span in policy_spans(record)), np.nan]
  spans, number = record['spans'], -1
  for i, span in enumerate(spans):
    number += span['role'] == Role.POLICY.value
    if golds and span.get('segment') == 'invoke' and [one.get('segment') for one in spans[i + 2:i + 3]] == ['assimilate']:
      output, context = _bare(spans[i + 1]), ''.join(map(_bare, spans[i + 3:i + 4]))
      found.append(ToolCall(answer_found(golds, output), answer_found(golds, context), *values[number:number + 3]))
  return found


def by_rule(records: Records, right: str) -> list[dict]:
  """Records whose `em` is their figure `right`: 'em', or 'em_entity', the looser rule of CARL's section 4.1."""
  return [{**record, 'em': record[right]} for record in records]


def use_figures(records: Records, tiers: Mapping[str, int]) -> dict[str, float]:
  """How the policy uses its tools (tables 3, 6, 14 and 19).

  Returns:
    For each tier: tool_rate_tier_N, the share of rollouts with a call; calls_tier_N, calls a rollout; em_tier_N.
    needless_calls: calls a rollout on tier 2. The paper's '53 % fewer unnecessary tool calls' is table 3's tool_rate_tier_2
    (82.6 to 38.6 %), so compare that as well. confident_wrong: share of tier 1 rollouts with a wrong answer;
    tokens_per_answer: policy tokens a rollout, all segments, answered or not; assimilate_tokens: mean length of the assimilate
    segments.
  """
  calls, right = (np.array([record[name] for record in records], np.float64) for name in ('searches', 'em'))
  answered = np.array([bool((record['prediction'] or '').strip()) for record in records], bool)
  tier = np.array([tiers.get(record['id'], 0) for record in records], int)
  figures = {}
  for number, own in ((1, tier == 1), (2, tier == 2)):
    figures |= {f'tool_rate_tier_{number}': _mean(calls[own] > 0), f'calls_tier_{number}': _mean(calls[own]),
                f'em_tier_{number}': _mean(right[own])}
  return figures | {
    'needless_calls': figures['calls_tier_2'], 'confident_wrong': _mean((answered & (right == 0))[tier == 1]),
    'tokens_per_answer': _mean([record['tokens'] for record in records]),
    'assimilate_tokens': _mean([span['tokens'] for record in records for span in record['spans']
                                if span.get('segment') == 'assimilate']),
    'assimilate_precision': _mean([share for record in records for share in _precisions(record)]),
  }  # fmt: skip


def _precisions(record: Record) -> list[float]:
  """Of each context of a right rollout the share of its words that stand in sentences with a gold answer (table 14).

  The paper says no more than 'the fraction of tokens that are answer-relevant'.
  """
  golds, found = record['golden_answers'], []
  for span in record['spans']:
    if span['role'] == Role.CONTEXT.value and record['em']:
      sentences = re.split(r'(?<=[.!?])\s+', _bare(span))
      words = [(len(sentence.split()), answer_found(golds, sentence)) for sentence in sentences]
      found.append(sum(size for size, relevant in words if relevant) / max(sum(size for size, _ in words), 1))
  return found


def hop_figures(records: Records) -> dict[str, float]:
  """em_hops_N and n_hops_N by the number of hops, for questions that tell it (table 18)."""
  hops = np.array([record.get('hops', 0) for record in records])
  right = np.array([record['em'] for record in records])
  return {name: value for number in sorted(set(hops[hops > 0])) for name, value in (
    (f'em_hops_{number}', _mean(right[hops == number])), (f'n_hops_{number}', int(np.sum(hops == number))))}


ERRORS = ('no_answer', 'no_call', 'not_retrieved', 'lost', 'wrong_commit')


def errors(records: Records) -> dict[str, dict[str, int]]:
  """Hops ('all', '2', …) -> how many wrong rollouts fell into each of `ERRORS` (table 7), the first that fits.

  not_retrieved: no output of a tool holds a gold answer; lost: no context does; wrong_commit: one does. The paper's annotators
  also tell a poor query from a poor retriever, and poor reasoning from a poor commit, which takes a person.
  """
  found = collections.defaultdict(lambda: dict.fromkeys(ERRORS, 0))
  for record in records:
    if not record['em']:
      texts = {role: [_bare(span) for span in record['spans'] if span['role'] == role.value]
               for role in (Role.OBSERVATION, Role.CONTEXT)}
      seen = lambda role: any(answer_found(record['golden_answers'], text) for text in texts[role])
      kind = ('no_answer' if not record['prediction'] else 'no_call' if not record['searches'] else
              'not_retrieved' if not seen(Role.OBSERVATION) else
              'lost' if texts[Role.CONTEXT] and not seen(Role.CONTEXT) else 'wrong_commit')
      for name in ('all', *([str(record['hops'])] if 'hops' in record else [])):
        found[name][kind] += 1
  return dict(found)


def starts(records: Records) -> tuple[np.ndarray, np.ndarray, list[str]]:
  """(V(s_0) [N], outcomes [N], question ids) of the records with a value: of table 11 and figures 2a and 4."""
  found = [(spans[0]['value'], _outcome(record), record['id']) for record in records
           if (spans := policy_spans(record)) and 'value' in spans[0]]
  return np.array([one[0] for one in found]), np.array([one[1] for one in found]), [one[2] for one in found]


def reliability(records: Records) -> list[dict[str, float]]:
  """For each tenth of V(s_0) that has rollouts: its lower border, mean value, share right, and how many (table 11)."""
  values, outcomes, _ = starts(records)
  return [{'from': number / calibration.BINS, 'value': float(value), 'right': float(right), 'n': int(n)}
          for number, (value, right, n) in enumerate(zip(*calibration.curve(values, outcomes))) if n]


def _bare(span: Mapping[str, Any]) -> str:
  """Its text without tags: else they would be parts of the words beside them."""
  return re.sub(r'</?\w+>', ' ', span['text'])


def _outcome(record: Record) -> float:
  return record.get('reward', record['em'])


def _mean(values) -> float:
  return float(np.mean(values)) if len(values) else float('nan')


def _figure(function: Callable, *arrays) -> float:
  """A figure of `calibration` over arrays [N], padded to a power of two: few compiled programs for any number of rollouts."""
  number = len(arrays[0])
  size = max(16, 1 << (number - 1).bit_length())
  padded = [np.pad(np.asarray(x, np.float32), (0, size - number)) for x in arrays]
  return float(_compiled(function)(*padded, np.arange(size) < number))


_compiled = functools.cache(jax.jit)
