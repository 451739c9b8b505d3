"""Search-R2 (He et al. 2026, arXiv 2602.03647): draft a chain, review it, cut at the first flawed step, regenerate.

Actor and Meta-Refiner are one model with two prompts. The review follows the draft, a revision follows the kept prefix, and
both reuse its cache. In the tree the cut-off steps and the review hang beside the kept chain; credit goes to the kept chain
and to what the refiner wrote, by GRPO over whole traces (section 3.4).

The review writes a number (table 12): 0 for no flawed step, f if step f is the earliest flawed one. The steps before it are
kept, so the paper's cut-point is k = f - 1. The discriminator compares log-probabilities (appendix E): a draft is revised if
`log P(any f >= 1) - log P(0)` reaches the threshold.
"""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import hybrid_reward
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, figures
from jaxsearch.methods.actions import ask_judge
from jaxsearch.methods.credit import credit_relative
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.rewards import formats, judge
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import Generate, Request, Score
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Node, Role, Tree

SERVICES = ('judge',)


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500, max_revisions: int = 1,
         threshold: float = 0.0, refiner: str = 'policy', random_share: float = 0.3, probe: float = 0.0, process: bool = True,
         template: str = 'search_r1', chat: bool = False, review: str = 'search_r2') -> Generator[Request, Any, None]:
  """Grows a draft and at most `max_revisions` revisions (N_max); algorithm 1 with the rollout of algorithm 2.

  Args:
    max_turns, max_tokens: of the actor, see methods/search_r1.py. A revision gets the turns that the kept steps left over.
    max_revisions: 0 is the actor alone, as the paper deploys it.
    threshold: a draft is revised if its log-probability margin reaches this.
    refiner: 'policy', or 'random', a baseline that revises `random_share` of the drafts at a random step.
    probe: share of drafts on which `figures.probe_cuts` estimates the gain of a cut; its rollouts are not trained on.
    process: whether to ask the judge for the process reward.
    template, chat, review: see methods/search_r1.py and trees/templates.py.
  """
  regenerate = lambda steps, kept: act(tree, steps[kept].parent, turns=max_turns - kept, max_tokens=max_tokens)
  tree.metrics.update(found=0, revised=0, unreadable_review=0, judge_unreadable=0)
  leaf = yield from act(tree, start(tree, question, template, chat), turns=max_turns, max_tokens=max_tokens)
  tree.metrics['em_draft'] = exact_match(tree.answer, question.golden_answers)
  for revision in range(max_revisions):
    steps = kept_steps(leaf)
    verdict = yield from judge_draft(tree, leaf, len(steps), threshold, refiner, random_share, review)
    if verdict is None:
      break
    flawed, probs, accepted = verdict
    if revision == 0 and tree.rng.random() < probe:
      yield from figures.probe_cuts(tree, steps, probs, accepted, regenerate)
    if flawed == 0:
      break
    for node in steps[flawed - 1].walk():
      node.trained = node.trained and node.data.get('meta', False)
    tree.metrics['revised'] += 1
    leaf = yield from regenerate(steps, flawed - 1)
  kept = kept_steps(leaf)
  found = [node.children[0].text for node in kept if 'documents' in node.data and node.children]
  extra = tree.count(Role.POLICY) - sum(len(node.tokens) for node in kept)  # cut-off steps and reviews
  tree.metrics.update(useful=0, collections=len(found), tokens_extra=extra)
  if process and found and exact_match(tree.answer, question.golden_answers):  # the process counts only for a right answer
    (tree.metrics['useful'],) = yield from ask_judge(tree, [judge.Collections(question, tuple(found))])


def kept_steps(leaf: Node) -> list[Node]:
  """The actor's spans on the path to `leaf`."""
  return [node for node in leaf.path() if node.role is Role.POLICY]


def judge_draft(tree: Tree, leaf: Node, steps: int, threshold: float, refiner: str, random_share: float,
                review: str) -> Generator[Request, Any, tuple[int, np.ndarray, bool] | None]:
  """Discriminator and trimmer: reviews the draft that ends with `leaf`.

  Returns:
    The first flawed step (0: none), the probabilities [steps + 1] of 0 and of each step, and whether the discriminator
    accepts the draft; None if there is no room for a review.
  """
  if refiner == 'random':
    flawed = int(tree.rng.random() < random_share) * int(tree.rng.integers(1, steps + 1))
    return flawed, np.r_[1 - random_share, np.full(steps, random_share / steps)], flawed == 0
  if refiner != 'policy':
    raise ValueError(f"grow.refiner={refiner!r} is none of 'policy', 'random'")
  asked = leaf.append(templates.review_prompt(steps, review), Role.PROMPT)
  indices = [f' {index}' for index in range(steps + 1)]
  logprobs = yield Score(asked, tuple(indices))
  if any(own is None for own in logprobs):
    return None
  totals = np.array([np.sum(own) for own in logprobs], np.float64)
  probs = np.exp(totals - totals.max())
  accepted = bool(np.logaddexp.reduce(totals[1:]) - totals[0] < threshold)
  if accepted:
    written = asked.append(indices[0], Role.POLICY, logprobs=logprobs[0])
  else:
    written = yield Generate(asked, stop=('\n',), max_tokens=4)
  written.data['meta'] = True
  flawed = 0 if accepted else formats.flawed_step(written.text, steps)
  tree.metrics['unreadable_review'] += flawed is None
  return flawed or 0, probs / probs.sum(), accepted


def reward(tree: Tree) -> float:
  """`EM (1 + useful / M)` (eq. 1); without a search the process reward is 0."""
  outcome = exact_match(tree.answer, tree.question.golden_answers)
  return float(hybrid_reward(outcome, tree.metrics['useful'] / max(tree.metrics['collections'], 1)))


def credit(groups: Sequence[Sequence[Tree]], context: Context, *, joint: bool = True, normalize_std: bool = True,
           singleton: str = 'raw') -> None:
  """GRPO over traces: the kept chain and the reviews get the trace's reward relative to the other traces of its question.

  `joint=False` leaves the reviews out of the loss (table 3, without joint optimization).
  """
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    tree.reward = reward(tree)
    tree.metrics['em_kept'] = exact_match(tree.answer, tree.question.golden_answers)
    for node in tree.nodes(Role.POLICY):
      node.trained = node.trained and (joint or not node.data.get('meta', False))
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
  context.metrics.update(figures.of_refinement([tree.root.data['probe'] for tree in trees if 'probe' in tree.root.data]))
