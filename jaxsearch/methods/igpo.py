"""IGPO (arXiv 2510.14967): a turn earns what it adds to the log-probability of the gold answer.

Rollouts are Search-R1's. Before the first turn and after every observation the policy is asked how likely the
gold answer would be if it answered now: `v_t`, the mean log-probability of the answer's tokens behind a fixed
remark, on a branch that is never trained. A turn that is not the last earns `v_t - v_{t-1}`, the last one the
F1 of the answer. Of several gold answers gains are about the first.

Gains land on what the policy wrote in the turn, not on what the tool replied, which bears no loss.
"""

import itertools

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import Action
from jaxsearch.methods.credit import credit_groups, rewarded
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.rewards.match import token_f1
from jaxsearch.sampler.requests import Growth, Score
from jaxsearch.trees.tree import Node, Role, Tree


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500,
         template: str = 'search_r1', chat: bool = False, gains: bool = True,
         remark: str = 'Now I know enough to answer.') -> Growth[None]:
  """Grows one chain as Search-R1 does; a span that was answered by an observation notes its `data['gain']`.

  A context in which remark and answer find no room gives no gain. tree.metrics['gain'] is the sum of them.
  They need the gold answer: evaluations set `gains=False`. configs/igpo.py explains the settings.
  """
  tree.metrics.update(found=0, gain=0.0)
  prompt = start(tree, question, template, chat, tools=max_turns > 0)
  told = tree.grammar.retell(f'<think> {remark}</think><answer> ANSWER</answer>')
  cue, known = told.rpartition(' ANSWER')[0], []

  def gain(action: Action, seen: Node) -> Growth[Node]:
    places = [seen] if known else [prompt, seen]
    answers = (f' {question.golden_answers[0]}',)
    for (logprobs,) in (yield [Score(place, answers, cue=cue) for place in places]):
      known.append(None if logprobs is None else float(np.mean(logprobs)))
    before, now = known[-2:]
    if None not in (before, now):  # a folded chain is shorter again
      action.node.data['gain'] = now - before
      tree.metrics['gain'] += now - before
    return seen

  yield from act(tree, prompt, turns=max_turns, max_tokens=max_tokens, each_turn=gain if gains else None)


def reward(tree: Tree, no_answer: float = -2.0) -> float:
  """Returns the F1 of the answer, `no_answer` without one."""
  return no_answer if tree.answer is None else token_f1(tree.answer, tree.question.golden_answers)


def credit(groups: Groups, context: Context, *, gamma: float = 1.0, joint: bool = False,
           no_answer: float = -2.0) -> None:
  """Sets `A_t = sum_{k>=t} gamma^(k-t) r_k`, r standardised over the question: gains apart from outcomes.

  configs/igpo.py explains the settings.
  """
  rewarded(groups, lambda tree: reward(tree, no_answer))
  chains = [[chain for tree in group if (chain := tree.nodes(Role.POLICY))] for group in groups]
  gains = [[([node], node.data['gain']) for chain in of for node in chain if 'gain' in node.data]
           for of in chains]
  outcomes = [[(chain[-1:], chain[-1].tree.reward) for chain in of] for of in chains]
  for node in itertools.chain(*itertools.chain(*chains)):
    node.advantages = 0.0
  pools = [a + b for a, b in zip(gains, outcomes)] if joint else gains + outcomes
  credit_groups(pools, ddof=0, added=1.0)
  for chain in itertools.chain(*chains):
    later = 0.0
    for node in reversed(chain):
      is_turn = node.data.get('segment') != 'summary'
      node.advantages = later = node.advantages + (gamma if is_turn else 1.0) * later
