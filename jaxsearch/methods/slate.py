"""SLATE (Samarinas et al. 2026, arXiv 2602.23440): k alternatives for every step, judged, and one of them goes on.

`grow` is the paper's algorithm 1. All alternatives of a step continue one cached prefix, so it is computed once; each is
credited against the others of its step, and in the loss each counts by the mean over its own tokens
(`train.aggregate='step-mean'`). Questions need one tree: the group is the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import step_reward, truncated_step
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context
from jaxsearch.methods.search_r1 import start
from jaxsearch.rewards import judge
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import Ask, Generate, Request, Search, ToolFailure
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node, Role, Stop, Tree

SERVICES = ('judge',)
ONE_TREE = True
REWARDS = ('judge', 'outcome', 'none')


def grow(question: Question, tree: Tree, *, k: int = 5, budget: int = 4, eta: float = 0.7, best: bool = False,
         early_bonus: float = 0.1, rewards: str = 'judge', max_tokens: int = 500,
         template: str = 'search_r1', chat: bool = False) -> Generator[Request, Any, None]:
  """Grows `k` siblings a step from the chosen one of the step before, at most `budget` steps (B).

  Args:
    eta: temperature of the choice `j* ~ softmax(advantages / eta)`.
    best: choose the one with the highest reward instead.
    early_bonus: lambda, what an answer at the first step of many earns on top.
    rewards: 'judge'; 'outcome' is the ablation where an answer earns its exact match and everything else 0 (table 2, c);
      'none', with k = 1, is how a trained policy answers.
    max_tokens: of a step.
    template, chat: see methods/search_r1.py.
  """
  if rewards not in REWARDS:
    raise ValueError(f'grow.rewards={rewards!r} is none of {", ".join(REWARDS)}')
  special = tree.tokenizer.special_tokens
  counts = tree.metrics
  counts.update(searches=0, found=0, malformed=0, tool_failures=0, judge_unreadable=0, turns=0)
  node = start(tree, question, template, chat)
  for step in range(1, budget + 1):
    siblings = yield [Generate(node, stop=grammar.SEARCH_R1.stops, max_tokens=max_tokens) for _ in range(k)]
    candidates = [read(sibling) for sibling in siblings]
    candidates = yield from search(candidates, tree, special)
    advantages = np.zeros(k)
    if rewards != 'none':
      scores = np.array([exact_match(candidate.answer, question.golden_answers) for candidate in candidates])
      if rewards == 'judge':
        scores = yield from score(question, candidates, context(node), step, budget, early_bonus, counts)
      advantages = np.asarray(truncated_step(scores))
      for candidate, earned, advantage in zip(candidates, scores, advantages):
        candidate.node.data['reward'], candidate.node.advantages = float(earned), float(advantage)
    counts['turns'] = step
    chosen = choose(candidates, advantages, eta, best, tree.rng)
    if chosen is None:
      full = [c.node.stop for c in candidates if c.node.stop in (Stop.CONTEXT_FULL, Stop.DEADLINE)]
      tree.stop = Stop(full[0]) if full else Stop.MALFORMED
      return
    if chosen.answer is not None:
      tree.answer, tree.stop = chosen.answer, Stop.ANSWERED
      return
    counts['searches'] += 1
    counts['found'] += chosen.found
    node = chosen.node.append(chosen.observation, Role.OBSERVATION)
  tree.stop = Stop.TOOL_FAILED if counts['tool_failures'] else Stop.BUDGET


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One of the alternatives for a step: a search, an answer, or neither."""
  node: Node
  thinking: str
  query: str | None
  answer: str | None
  observation: str = ''  # what its search returned
  found: bool = False    # whether that holds documents


def read(node: Node) -> Candidate:
  """What a policy span says."""
  thoughts = [element.content for element in grammar.elements(node.text) if element.name == grammar.SEARCH_R1.think]
  answer = grammar.answer(node.text)
  return Candidate(node, ' '.join(thoughts), None if answer is not None else grammar.search_query(node.text), answer)


def search(candidates: Sequence[Candidate], tree: Tree, special) -> Generator[Request, Any, list[Candidate]]:
  """The candidates with what their searches returned: a query is judged with its documents."""
  asking = [candidate for candidate in candidates if candidate.query is not None]
  replies = dict(zip(map(id, asking), (yield [Search(candidate.node, candidate.query) for candidate in asking])))
  served = []
  for candidate in candidates:
    reply = replies.get(id(candidate))
    if isinstance(reply, ToolFailure):
      tree.metrics['tool_failures'] += 1
      candidate = dataclasses.replace(candidate, observation=grammar.failure(reply.reason, special))
    elif reply is not None:
      candidate = dataclasses.replace(candidate, observation=grammar.information(reply, special), found=bool(reply))
    served.append(candidate)
  tree.metrics['malformed'] += sum(c.query is None and c.answer is None for c in candidates)
  return served


def context(node: Node) -> str:
  """The trajectory so far, as the judge reads it: everything after the prompt."""
  return ''.join(span.text for span in node.path()[2:])


def score(question: Question, candidates: Sequence[Candidate], before: str, step: int, budget: int, early_bonus: float,
          counts: dict[str, float]) -> Generator[Request, Any, np.ndarray]:
  """The rewards [k] of eqs. 5 and 6. What is neither search nor answer scores -1 in their place; an unreadable score is 0."""
  items = []
  for c in candidates:
    items.append(judge.Thinking(question, before, c.thinking))
    if c.answer is not None:
      items.append(judge.Answer(question, c.answer))
    elif c.query is not None:
      items.append(judge.Query(question, before, c.thinking, c.query, c.observation))
  replies = yield [Ask('judge', item) for item in items]
  unreadable = [reply is None or isinstance(reply, ToolFailure) for reply in replies]
  counts['judge_unreadable'] += sum(unreadable)
  scores = iter(0 if bad else reply for bad, reply in zip(unreadable, replies))
  think, action = np.zeros(len(candidates)), np.full(len(candidates), -1.0)
  for index, c in enumerate(candidates):
    think[index] = next(scores)
    if c.answer is not None or c.query is not None:
      action[index] = next(scores)
  answers = np.array([c.answer is not None for c in candidates])
  return np.asarray(step_reward(think, action, action, answers, step, budget, early_bonus=early_bonus))


def choose(candidates: Sequence[Candidate], advantages: np.ndarray, eta: float, best: bool,
           rng: np.random.Generator) -> Candidate | None:
  """The candidate that goes on, among those that search or answer; None if there is none."""
  usable = np.array([c.query is not None or c.answer is not None for c in candidates])
  if not usable.any():
    return None
  preferences = np.where(usable, advantages, -np.inf)
  if best:
    return candidates[int(np.argmax(preferences))]
  weights = np.exp((preferences - preferences.max()) / eta)
  return candidates[rng.choice(len(candidates), p=weights / weights.sum())]


def credit(groups: Sequence[Sequence[Tree]], context: Context) -> None:
  """The steps were credited as they grew; the reward of a tree is the mean of its steps', for the log."""
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    tree.reward = float(np.mean([node.data['reward'] for node in tree.nodes(Role.POLICY)]))
  context.metrics.update(step_groups=sum(tree.metrics['turns'] for tree in trees),
                         candidates=sum(len(tree.nodes(Role.POLICY)) for tree in trees))
