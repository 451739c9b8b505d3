"""SLATE (Samarinas et al. 2026, arXiv 2602.23440): k alternatives for every step are judged, one goes on.

`grow` is the paper's algorithm 1. All alternatives of a step share one cached prefix. Each is compared with
the others of its step; the loss averages over its own tokens (`train.aggregate='step-mean'`). The group is
the step, so a question needs only one tree. With k = 1 a step is credited with its reward (appendix A.9).
"""

from collections.abc import Sequence

import numpy as np

from jaxsearch.advantages import step_reward, truncated_step
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import NO_ROOM, Action, ask_judge, finish, read, search
from jaxsearch.methods.credit import credit_relative
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees.tree import Role, Tree

BRANCHES = True
SERVICES = ('judge',)
ONE_TREE = True


def grow(question: Question, tree: Tree, *, k: int = 5, budget: int = 4, eta: float = 0.7, best: bool = False,
         early_bonus: float = 0.1, rewards: str = 'judge', max_tokens: int = 500,
         template: str = 'search_r1', chat: bool = False) -> Growth[None]:
  """Grows `k` siblings per step, each time from the one chosen before, for at most `budget` steps (B).

  `rewards` is 'judge'; 'outcome': an answer earns its exact match, all else 0 (table 2, b); 'completed': each
  alternative earns the exact match of a chain completed from it; 'final': alternatives of the path's last
  step earn their exact match, those of earlier steps 0, and the choice among these is uniform (c: the paper
  says no more than "only at the final step"). 'none' evaluates a policy: one chain of Search-R1 with
  `max_turns=budget`, as all methods are evaluated. configs/slate.py explains the other settings.
  """
  tree.metrics['found'] = 0
  node = start(tree, question, template, chat)
  if rewards == 'none':
    return (yield from act(tree, node, turns=budget, max_tokens=max_tokens))
  tree.metrics.update(judge_unreadable=0, turns=0)
  for step in range(1, budget + 1):
    tree.metrics['turns'] = step
    siblings = yield [Generate(node, stop=tree.grammar.stops, max_tokens=max_tokens)] * k
    candidates = [read(sibling) for sibling in siblings]
    yield from search(candidates, tree)  # before the judge: it sees a query with its documents
    if rewards == 'judge':
      earned = yield from judged(candidates, tree, step, budget, early_bonus)
    else:
      chains = [[each] for each in candidates]
      if rewards == 'completed':
        chains = yield from completed(candidates, tree, budget - step, max_tokens)
      earned = np.array([question.score(chain[-1].answer) for chain in chains])
    advantages = np.asarray(truncated_step(earned))
    final = rewards == 'final'
    chosen = choose(candidates, advantages * (not final), eta, best and not final, tree.rng)
    if final and chosen and chosen.answer is None and step < budget:
      earned, advantages = 0 * earned, 0 * advantages
    for candidate, reward, advantage in zip(candidates, earned, advantages):
      candidate.node.data['reward'], candidate.node.advantages = float(reward), float(advantage)
    if chosen is None:
      return finish(tree, next((each for each in siblings if each.stop in NO_ROOM), siblings[0]), None)
    if chosen.answer is not None:
      return finish(tree, chosen.node, chosen.answer)
    tree.metrics['searches'] += chosen.asked
    tree.metrics['found'] += chosen.found
    node = chosen.node.append(chosen.observation, Role.OBSERVATION)
  finish(tree, node, None, spent=True)


def completed(candidates: Sequence[Action], tree: Tree, steps: int,
              max_tokens: int) -> Growth[list[list[Action]]]:
  """Completes a chain from each candidate with at most `steps` more actions, none of which is trained.

  As in Search-R1 the chain goes on after a malformed action, unless it ends there. Returns its actions, the
  candidate first.
  """
  chains = [[candidate] for candidate in candidates]
  for _ in range(steps):
    open_ = [chain for chain in chains if chain[-1].answer is None and not chain[-1].ends
             and chain[-1].node.stop not in NO_ROOM]
    ends = [chain[-1].node.append(chain[-1].observation, Role.OBSERVATION) for chain in open_]
    actions = [read(span) for span in (yield [
      Generate(end, stop=tree.grammar.stops, max_tokens=max_tokens) for end in ends])] if ends else []
    yield from search(actions, tree)
    for chain, action in zip(open_, actions):
      action.node.trained = False
      chain.append(action)
  return chains


def judged(candidates: Sequence[Action], tree: Tree, step: int, budget: int,
           early_bonus: float) -> Growth[np.ndarray]:
  """Returns the rewards [k] of eqs. 5 and 6; an action that neither calls a tool nor answers scores -1.

  What nobody scored is neutral: 0, and no bonus. So is a call that failed, which is not judged.
  """
  before = ''.join(span.text for span in candidates[0].node.parent.path()[2:])  # after the prompt
  question, items = tree.question, {}
  for i, each in enumerate(candidates):
    items['think', i] = judge.Thinking(question, before, each.thinking), each.node
    if each.answer is not None:
      items['act', i] = judge.Answer(question, each.answer, before, each.thinking), each.node
    elif each.is_valid and not each.failed:
      items['act', i] = judge.Query(question, before, each.thinking, each.called, each.observation), each.node
  scores = dict(zip(items, (yield from ask_judge(tree, list(items.values())))))
  think, act = ([scores.get((kind, i)) for i in range(len(candidates))] for kind in ('think', 'act'))
  answers = np.array([each.answer is not None and score is not None for each, score in zip(candidates, act)])
  action = np.array([score or 0 if each.is_valid else -1 for each, score in zip(candidates, act)])
  think = np.array([score or 0 for score in think])
  return np.asarray(step_reward(think, action, action, answers, step, budget, early_bonus=early_bonus))


def choose(candidates: Sequence[Action], advantages: np.ndarray, eta: float, best: bool,
           rng: np.random.Generator) -> Action | None:
  """Chooses the candidate to continue from, among those that search or answer; None without any."""
  usable = np.array([candidate.is_valid and not candidate.ends for candidate in candidates])
  if not usable.any():
    return None
  preferences = np.where(usable, advantages, -np.inf)
  if best:
    return candidates[int(np.argmax(preferences))]
  weights = np.exp((preferences - preferences.max()) / eta)
  return candidates[rng.choice(len(candidates), p=weights / weights.sum())]


def credit(groups: Groups, context: Context, *, whole: bool = False) -> None:
  """Logs the mean reward of a tree's steps as its reward; the steps were credited as they grew.

  `whole` is SLATE without truncated sampling (table 2, a; eq. 10): with `grow.k=1` every tree is a chain, and
  its steps are credited with the sum of its rewards relative to the others of its question.
  """
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    earned = [node.data['reward'] for node in tree.nodes(Role.POLICY) if node.trained]
    tree.reward = float(np.sum(earned)) if whole else float(np.mean(earned)) if earned else None
  if whole:
    if any(len(node.children) > 1 for tree in trees for node in tree.walk()):
      raise ValueError('credit.whole=True compares whole chains: set grow.k=1')
    credit_relative(groups)
