"""Search-R2 (He et al. 2026, arXiv 2602.03647): draft a chain, review it, cut at the first flawed step, regenerate.

Actor and Meta-Refiner are one model with two prompts. The review stands behind the draft, whose cache it continues; a
revision continues the kept prefix, of which nothing is computed again. In the tree the cut-off steps and the review hang
beside the kept chain: credit goes to the kept chain and to what the refiner wrote, by GRPO over whole traces (section 3.4).

The numbers of the review (table 12): 0 means that no step is flawed, f that step f is the earliest flawed one; steps before
it are kept, so the paper's cut-point is k = f - 1. The discriminator compares log-probabilities (appendix E): a draft is
revised if `log P(any f >= 1) - log P(0)` reaches the threshold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import hybrid_reward, refinement_gain
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context
from jaxsearch.methods.search_r1 import act, credit_relative, start
from jaxsearch.rewards import formats, judge
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import Ask, Generate, Request, Score, ToolFailure
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Node, Role, Tree

SERVICES = ('judge',)


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500, max_revisions: int = 1,
         threshold: float = 0.0, refiner: str = 'policy', random_share: float = 0.3, probe: float = 0.0, process: bool = True,
         template: str = 'search_r1', chat: bool = False, review: str = 'search_r2') -> Generator[Request, Any, None]:
  """Grows a draft and at most `max_revisions` revisions (N_max); algorithm 1 with the rollout of algorithm 2.

  Args:
    max_turns, max_tokens: of the actor, see methods/search_r1.py. A revision has the turns that the kept steps left.
    max_revisions: 0 is the actor alone, as the paper deploys it.
    threshold: log-probability margin from which on a draft is revised.
    refiner: 'policy', or 'random' (revises `random_share` of the drafts at a step drawn at random), to compare with.
    probe: share of drafts from whose every step a chain is regenerated to estimate what a cut gains; these are not trained on.
    process: whether the judge is asked for the process reward.
    template, chat, review: see methods/search_r1.py and trees/templates.py.
  """
  tree.metrics.update(searches=0, found=0, malformed=0, tool_failures=0, revised=0, unreadable_review=0, judge_unreadable=0)
  leaf = yield from act(tree, start(tree, question, template, chat), turns=max_turns, max_tokens=max_tokens)
  tree.metrics['em_draft'] = exact_match(tree.answer, question.golden_answers)
  for revision in range(max_revisions):
    steps = kept_steps(leaf)
    verdict = yield from judge_draft(tree, leaf, len(steps), threshold, refiner, random_share, review)
    if verdict is None:  # no room for a review
      break
    if revision == 0 and tree.rng.random() < probe:
      yield from estimate(tree, steps, verdict, max_turns, max_tokens)
    if verdict.flawed == 0:
      break
    cut = steps[verdict.flawed - 1]
    for node in cut.walk():
      node.trained = node.trained and node.data.get('meta', False)
    tree.metrics['revised'] += 1
    leaf = yield from act(tree, cut.parent, turns=max_turns - (verdict.flawed - 1), max_tokens=max_tokens)
  found = [node.children[0].text for node in kept_steps(leaf) if 'documents' in node.data and node.children]
  extra = tree.count(Role.POLICY) - sum(len(node.tokens) for node in kept_steps(leaf))  # cut-off steps and reviews
  tree.metrics.update(useful=0, collections=len(found), tokens_extra=extra)
  if process and found and exact_match(tree.answer, question.golden_answers):  # the process counts only for a right answer
    useful = yield Ask('judge', judge.Collections(question, tuple(found)))
    if useful is None or isinstance(useful, ToolFailure):
      tree.metrics['judge_unreadable'] += 1
    else:
      tree.metrics['useful'] = useful


def kept_steps(leaf: Node) -> list[Node]:
  """The actor's spans on the path to `leaf`."""
  return [node for node in leaf.path() if node.role is Role.POLICY]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the refiner said of a draft: the first flawed step (0: none) and the probability of each, [steps + 1]."""
  flawed: int
  probs: np.ndarray
  accepted: bool


def judge_draft(tree: Tree, leaf: Node, steps: int, threshold: float, refiner: str, random_share: float,
                review: str) -> Generator[Request, Any, Verdict | None]:
  """Discriminator and trimmer: reviews the draft that ends with `leaf`; None if there is no room to."""
  if refiner == 'random':
    flawed = int(tree.rng.random() < random_share) * int(tree.rng.integers(1, steps + 1))
    return Verdict(flawed, np.r_[1 - random_share, np.full(steps, random_share / steps)], flawed == 0)
  if refiner != 'policy':
    raise ValueError(f"grow.refiner={refiner!r} is none of 'policy', 'random'")
  asked = leaf.append(templates.review_prompt(steps, review), Role.PROMPT)
  indices = [f' {index}' for index in range(steps + 1)]
  logprobs = yield Score(asked, tuple(indices))
  if any(own is None for own in logprobs):
    return None
  totals = np.array([np.sum(own) for own in logprobs], np.float64)
  probs = np.exp(totals - totals.max())
  if np.logaddexp.reduce(totals[1:]) - totals[0] < threshold:
    written = asked.append(indices[0], Role.POLICY, logprobs=logprobs[0])
    written.data['meta'] = True
    return Verdict(0, probs / probs.sum(), True)
  written = yield Generate(asked, stop=('\n',), max_tokens=4)
  written.data['meta'] = True
  flawed = formats.flawed_step(written.text, steps)
  tree.metrics['unreadable_review'] += flawed is None
  return Verdict(flawed or 0, probs / probs.sum(), False)


def estimate(tree: Tree, steps: Sequence[Node], verdict: Verdict, max_turns: int,
             max_tokens: int) -> Generator[Request, Any, None]:
  """Regenerates once from before every step of a draft, for `refinement_gain`; the tree stays, but for a note at its root."""
  answer, stop, counts = tree.answer, tree.stop, dict(tree.metrics)
  draft, gains = exact_match(answer, tree.question.golden_answers), []
  for number, step in enumerate(steps):
    leaf = yield from act(tree, step.parent, turns=max_turns - number, max_tokens=max_tokens)
    gains.append(exact_match(tree.answer, tree.question.golden_answers) - draft)
    branch = next(node for node in leaf.path() if node.parent is step.parent)
    step.parent.children.remove(branch)
  tree.answer, tree.stop = answer, stop
  tree.metrics.update(counts)
  cuts = verdict.probs[1:] / verdict.probs[1:].sum()
  tree.root.data['probe'] = {'accept': float(verdict.accepted), 'cuts': cuts, 'gains': np.array(gains), 'reward': draft}


def reward(tree: Tree) -> float:
  """`EM (1 + useful / M)` (eq. 1); without a search the process reward is 0."""
  outcome = exact_match(tree.answer, tree.question.golden_answers)
  return float(hybrid_reward(outcome, tree.metrics['useful'] / max(tree.metrics['collections'], 1)))


def credit(groups: Sequence[Sequence[Tree]], context: Context, *, joint: bool = True, normalize_std: bool = True) -> None:
  """GRPO over traces: the kept chain and the reviews get the trace's reward relative to the other traces of its question.

  Args:
    joint: False leaves the reviews out of the loss (table 3, without joint optimization).
  """
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    tree.reward = reward(tree)
    tree.metrics['em_kept'] = exact_match(tree.answer, tree.question.golden_answers)
    for node in tree.nodes(Role.POLICY):
      node.trained = node.trained and (joint or not node.data.get('meta', False))
  credit_relative(groups, normalize_std=normalize_std)
  context.metrics.update(gain([tree.root.data['probe'] for tree in trees if 'probe' in tree.root.data]))


def gain(probes: Sequence[dict]) -> dict[str, float]:
  """`a_prec`, `v_inter` and `s_trim` (appendix D) over the drafts that were probed; nothing without any."""
  if not probes:
    return {}
  width = max(len(probe['cuts']) for probe in probes)
  cuts, gains = (np.stack([np.pad(probe[name], (0, width - len(probe[name]))) for probe in probes]) for name in ('cuts', 'gains'))
  accept, rewards = (np.array([probe[name] for probe in probes]) for name in ('accept', 'reward'))
  found = refinement_gain(accept, cuts, gains, rewards, rewards + np.sum(cuts * gains, axis=1))
  return {name: float(value) for name, value in found.items()} | {'probed': len(probes)}
