"""Does the critic know what the policy knows, and does the policy use tools where it needs them?

CARL, section 4.4 and appendices C, E, F, I, J, M and N. Figures are of records of answers; without a critic
or CARL's segments they are NaN. `tiers` maps question ids to 2 if the policy can answer closed-book, else 1;
records of other questions count only where tiers do not matter.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsearch.evaluation import calibration
from jaxsearch.evaluation.calibration import mean
from jaxsearch.evaluation.figures import OF_KINDS, OF_SOURCE, Record, column, policy_spans, record_of
from jaxsearch.rewards.match import answer_found, normalize_answer
from jaxsearch.trees.tree import Role, Tree

Records = Sequence[Record]
ERRORS = ('no_answer', 'no_call', 'not_retrieved', 'lost', 'wrong_commit')


class ToolCall(NamedTuple):
  """An invoke segment and the assimilate segment that reads its output. Missing values are NaN."""
  retrieved: bool  # the raw output holds a gold answer
  extracted: bool  # the context written from it holds a gold answer
  before: float    # V before the invoke
  between: float   # V before the assimilate, with the raw output in sight
  after: float     # V before the next segment


def tables(records: Records, tiers: Mapping[str, int], right: str = 'em') -> dict[str, Any]:
  """Returns em_of_SOURCE of each data set, EM by kind, and what the records have of CARL's tables.

  Tables 7 and 18 where questions tell their hops; with `tiers` also 3, 6, 14, 16 and 19; with a critic's
  values 11 and 12. Figures that are undefined are left out. `right` says which figure tells what is right:
  'em', or 'em_entity', the looser rule of CARL's section 4.1; a critic is held against its reward.
  """
  by_rule = [{**record, 'em': record[right]} for record in records]
  figures = {OF_SOURCE + source: mean([record['em'] for record in by_rule if record['source'] == source])
             for source in sorted({record['source'] for record in records} - {''})}
  figures |= {name: mean([record[name] for record in records if name in record]) for name in OF_KINDS}
  figures |= hop_figures(by_rule)
  if tiers or any('hops' in record for record in records):
    figures['errors'] = errors(by_rule)
  if tiers:
    figures |= use_figures(by_rule, tiers)
  values, outcomes, _ = starts(records, tiers)
  if len(values):
    figures |= critic_figures(records, tiers) | sign_figures(records)
    bins = enumerate(zip(*calibration.curve(values, outcomes)))  # tenths of V(s_0)
    figures['reliability'] = [
      {'from': number / calibration.BINS, 'value': float(value), 'right': float(share), 'n': int(n)}
      for number, (value, share, n) in bins if n]
  return {name: value for name, value in figures.items() if value == value}  # NaN does not equal itself


def states(records: Records, tiers: Mapping[str, int]) -> np.ndarray:
  """Returns [4, N]: value, outcome, tier or 0, and whether it is s_0, of each boundary state with a value."""
  rows = [(span['value'], record.get('reward', record['em']), tiers.get(record['id'], 0), number == 0)
          for record in records for number, span in enumerate(policy_spans(record)) if 'value' in span]
  return np.array(rows, np.float64).reshape(-1, 4).T


def starts(records: Records, tiers: Mapping[str, int]) -> np.ndarray:
  """Returns [3, N]: V(s_0), outcome, and tier or 0 of the records with a value (table 11)."""
  every = states(records, tiers)
  return every[:3, every[3] > 0]


def critic_figures(records: Records, tiers: Mapping[str, int]) -> dict[str, float]:
  """Returns how good the critic is (tables 11, 13 and 14).

  auc: of V(s_0), tier 2 against tier 1; ece, brier: of V(s_0) as the probability of the reward;
  explained_variance: of the reward by the value of every boundary state; value_tier_1, value_tier_2: mean
  V(s_0); rollouts and boundary_states: how many have a value.
  """
  (values, outcomes, *_), (start, rewards, tier) = states(records, tiers), starts(records, tiers)
  return {
    'auc': calibration.auc(start[tier > 0], tier[tier > 0] == 2), 'ece': calibration.ece(start, rewards),
    'brier': calibration.brier(start, rewards),
    'explained_variance': calibration.explained_variance(values, outcomes),
    'value_tier_1': mean(start[tier == 1]), 'value_tier_2': mean(start[tier == 2]),
    'rollouts': float(len(start)), 'boundary_states': float(len(values)),
  }


def gate_figures(trees: Sequence[Tree], tiers: Mapping[str, int]) -> dict[str, float]:
  """Returns what the gate looks at (auc, sign, explained) and the calibration (ece, brier).

  Signs are those of all calls (appendix C asks for tool-required rollouts), the rest is of rollouts under the
  prompt of training.
  """
  optional = [record_of(tree) for tree in trees if tree.root.data['kind'] == 'tool-optional']
  figures, signs = critic_figures(optional, tiers), sign_figures([record_of(tree) for tree in trees])
  return {'auc': figures['auc'], 'sign': signs['sign_accuracy'], 'explained': figures['explained_variance'],
          'ece': figures['ece'], 'brier': figures['brier']}


def sign_figures(records: Records) -> dict[str, float]:
  """Returns how often the critic's value moves in the right direction (table 12).

  V should rise over an assimilate that keeps the gold answer from the raw output and drop over one that loses
  it; after a failed retrieval nothing is expected. It should rise over an invoke whose output holds the gold.
  All calls of a rollout with a value on both sides count; the paper draws at most one call a trajectory and
  has people judge what was found.

  Returns:
    For X in extracted, lost and invoke: X_pairs (how many) and X_rate (the share that moved in the right
    direction, NaN of nothing); sign_accuracy over extracted and lost.
  """
  calls = np.array([call for record in records for call in tool_calls(record)], np.float64)
  retrieved, extracted, before, between, after = calls.reshape(-1, len(ToolCall._fields)).T
  expected = np.where(retrieved > 0, np.where(extracted > 0, 1.0, -1.0), 0.0)  # of V over the assimilate
  read, invoked = after - between, between - before
  known = np.isfinite(read)
  figures = {'sign_accuracy': calibration.sign_accuracy(read[known], expected[known])}
  for name, moves in {'extracted': read[known & (expected > 0)], 'lost': -read[known & (expected < 0)],
                      'invoke': invoked[(retrieved > 0) & np.isfinite(invoked)]}.items():
    figures |= {f'{name}_pairs': float(len(moves)), f'{name}_rate': mean(moves > 0)}
  return figures


def tool_calls(record: Record) -> list[ToolCall]:
  """Returns the tool calls of a rollout, in order; none if the gold is yes or no, which any text may hold."""
  golds = [gold for gold in record['golden_answers'] if normalize_answer(gold) not in ('yes', 'no')]
  values = [*(span.get('value', np.nan) for span in policy_spans(record)), np.nan]
  spans, calls = record['spans'], []
  written = (place for place, span in enumerate(spans) if span['role'] == Role.POLICY.value)
  for number, place in enumerate(written):
    invoke, output, assimilate, context = [*spans[place:place + 4], {}, {}, {}][:4]
    kinds = invoke.get('segment'), assimilate.get('segment')
    if golds and kinds == ('invoke', 'assimilate'):
      held = (answer_found(golds, _bare(span)) for span in (output, context))
      calls.append(ToolCall(*held, *values[number:number + 3]))
  return calls


def use_figures(records: Records, tiers: Mapping[str, int]) -> dict[str, float]:
  """Returns how the policy uses its tools (tables 3, 6, 14 and 19).

  For each tier tool_rate_tier_N, the share of rollouts with a call ('unnecessary' on tier 2), calls_tier_N,
  calls a rollout, and em_tier_N. confident_wrong: share of tier 1 rollouts with a wrong answer;
  tokens_per_answer: tokens a rollout, answered or not; assimilate_tokens: mean length of these segments;
  assimilate_precision: see below.
  """
  calls, right = column(records, 'searches'), column(records, 'em')
  answered = np.array([bool((record['prediction'] or '').strip()) for record in records], bool)
  tier = np.array([tiers.get(record['id'], 0) for record in records], int)
  spans, figures = [span for record in records for span in record['spans']], {}
  for number in (1, 2):
    inside = tier == number
    figures |= {f'tool_rate_tier_{number}': mean(calls[inside] > 0),
                f'calls_tier_{number}': mean(calls[inside]), f'em_tier_{number}': mean(right[inside])}
  return figures | {
    'confident_wrong': mean((answered & (right == 0))[tier == 1]),
    'tokens_per_answer': mean(column(records, 'tokens')),
    'assimilate_tokens': mean([span['tokens'] for span in spans if span.get('segment') == 'assimilate']),
    'assimilate_precision': mean([share for record in records for share in _precisions(record)]),
  }


def _precisions(record: Record) -> list[float]:
  """Returns the shares of words in sentences with a gold answer, for contexts of right rollouts (table 14).

  The paper says no more than 'the fraction of tokens that are answer-relevant'.
  """
  shares = []
  for span in record['spans']:
    if span['role'] == Role.CONTEXT.value and record['em']:
      sentences = re.split(r'(?<=[.!?])\s+', _bare(span))
      sizes = np.array([len(sentence.split()) for sentence in sentences])
      relevant = np.array([answer_found(record['golden_answers'], sentence) for sentence in sentences])
      shares.append(sizes[relevant].sum() / max(sizes.sum(), 1))
  return shares


def hop_figures(records: Records) -> dict[str, float]:
  """Returns em_hops_N and n_hops_N by the number of hops, for questions that tell it (table 18)."""
  figures = {}
  for hops in sorted({record.get('hops', 0) for record in records} - {0}):
    right = [record['em'] for record in records if record.get('hops') == hops]
    figures |= {f'em_hops_{hops}': mean(right), f'n_hops_{hops}': len(right)}
  return figures


def errors(records: Records) -> dict[str, dict[str, int]]:
  """Returns hops ('all', '2', …) -> how many wrong rollouts fell into each of `ERRORS`, the first to fit.

  Table 7. not_retrieved: no output of a tool holds a gold answer; lost: no context does; wrong_commit: one
  does. What the paper's annotators also tell apart takes a person.
  """
  counts = collections.defaultdict(lambda: dict.fromkeys(ERRORS, 0))
  for record in records:
    if not record['em']:
      for hops in ('all', *([str(record['hops'])] if 'hops' in record else [])):
        counts[hops][_error(record)] += 1
  return dict(counts)


def _error(record: Record) -> str:
  if not record['prediction']:
    return 'no_answer'
  if not record['searches']:
    return 'no_call'
  holds = {role: [answer_found(record['golden_answers'], _bare(span)) for span in record['spans']
                  if span['role'] == role.value] for role in (Role.OBSERVATION, Role.CONTEXT)}
  if not any(holds[Role.OBSERVATION]):
    return 'not_retrieved'
  return 'lost' if holds[Role.CONTEXT] and not any(holds[Role.CONTEXT]) else 'wrong_commit'


def _bare(span: Mapping) -> str:
  """Returns its text without tags: else they would be parts of the words beside them."""
  return re.sub(r'</?\w+>', ' ', span.get('text', ''))
