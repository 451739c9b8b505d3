"""Search-R2 (He et al. 2026, arXiv 2602.03647): draft a chain, review it, cut at the first flawed step, regenerate.

Actor and Meta-Refiner are one model with two prompts. The review follows the draft, a revision follows the kept prefix, and
both reuse its cache. In the tree the cut-off steps and the review hang beside the kept chain; credit goes to the kept chain
and to what the refiner wrote, by GRPO over whole traces (section 3.4).

The review is a number (table 12): 0 for no flawed step, f if step f is the earliest flawed one. The steps before it are kept,
so the paper's cut-point is k = f - 1. The discriminator compares log-probabilities (appendix E): a draft is revised if
`log P(any f >= 1) - log P(0)` reaches the threshold. It then has to be cut: the trimmer draws f from the probabilities of the
steps alone. A review is trained on with the policy's own log-probability of that number.

A trace earns `R = EM (1 + useful / M)` (eqs. 1, 16, 17), where M counts its searches that did not fail. The paper leaves
open what M = 0 earns. Here a right answer without a search earns 1, and one whose searches were all useful 2, so that searching
pays; `credit.process_unsearched=1` is the other reading, in which nothing useless was retrieved and both earn 2.
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
from jaxsearch.rewards import judge
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import Ask, Request, Score, ToolFailure
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Node, Role, Tree

SERVICES = ('judge', 'refiner')
UNSEARCHED, UNREAD = 'unsearched', 'unread'  # in place of a process reward: M = 0; the judge gave no number


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500, max_response: int = 3000,
         max_revisions: int = 1, threshold: float = 0.0, refiner: str = 'policy', random_share: float = 0.3, probe: float = 0.0,
         process: bool = True, template: str = 'search_r1', chat: bool = False,
         review: str = 'search_r2') -> Generator[Request, Any, None]:
  """Grows a draft and at most `max_revisions` revisions (N_max); algorithm 1 with the rollout of algorithm 2.

  Args:
    max_turns: B, the actor's spans in a chain; Search-R1 counts one less. A revision gets those that the kept steps left over.
    max_tokens, max_response: of each of the actor's spans, and of all in a chain.
    max_revisions: 0 is the actor alone, as the paper deploys it.
    threshold: a draft is revised if its log-probability margin reaches this.
    refiner: 'policy'; 'frozen', the service `refiner`, whose reviews are not trained on; or 'random', a baseline that revises
      `random_share` of the drafts at a random step.
    probe: share of drafts on which `figures.probe_cuts` estimates the gain of a cut; its rollouts are not trained on, and sweeps
      give no costs of such a run.
    process: whether to ask the judge for the process reward.
    template, chat, review: see methods/search_r1.py and trees/templates.py.
  """
  if max_turns < 1:
    raise ValueError(f'grow.max_turns={max_turns}: it counts the spans of the actor, so at least 1')
  write = lambda node, kept: act(tree, node, turns=max_turns - kept - 1, max_tokens=max_tokens, max_response=max_response)
  regenerate = lambda steps, kept: write(steps[kept].parent, kept)
  tree.metrics.update(found=0, revised=0, judge_unreadable=0)
  leaf = yield from write(start(tree, question, template, chat), 0)
  tree.metrics['em_draft'] = question.score(tree.answer)
  for revision in range(max_revisions):
    steps = kept_steps(leaf)
    flawed, cuts = yield from judge_draft(tree, leaf, len(steps), threshold, refiner, random_share, review)
    if revision == 0 and cuts is not None and tree.rng.random() < probe:
      yield from figures.probe_cuts(tree, leaf, cuts, flawed == 0, regenerate, lambda chains: judged(tree, chains, process))
    if flawed == 0:
      break
    for node in steps[flawed - 1].walk():
      node.trained = node.trained and node.data.get('meta', False)
    tree.metrics['revised'] += 1
    leaf = yield from regenerate(steps, flawed - 1)
  extra = tree.count(Role.POLICY) - sum(len(node.tokens) for node in kept_steps(leaf))  # cut-off steps and reviews
  (tree.root.data['judged'],) = yield from judged(tree, [(tree.answer, leaf)], process)
  tree.metrics.update(em_kept=question.score(tree.answer), tokens_extra=extra)


def kept_steps(leaf: Node) -> list[Node]:
  """The actor's spans on the path to `leaf`."""
  return [node for node in leaf.path() if node.role is Role.POLICY]


def judge_draft(tree: Tree, leaf: Node, steps: int, threshold: float, refiner: str, random_share: float,
                review: str) -> Generator[Request, Any, tuple[int, np.ndarray | None]]:
  """Discriminator and trimmer: reviews the draft that ends with `leaf`.

  Returns:
    The first flawed step (0: the draft is accepted) and the trimmer's probabilities [steps] of each step, whatever the
    discriminator says; (0, None) if there is no room for a review. Raises RuntimeError if the frozen refiner does not reply.
  """
  if refiner == 'random':
    return int(tree.rng.random() < random_share) * int(tree.rng.integers(1, steps + 1)), np.full(steps, 1 / steps)
  asked, indices = leaf.append(templates.review_prompt(steps, review), Role.PROMPT), tuple(f' {i}' for i in range(steps + 1))
  score = Score(asked, indices)
  logprobs = yield score if refiner == 'policy' else Ask('refiner', score)
  if isinstance(logprobs, ToolFailure):
    raise RuntimeError(f"grow.refiner='frozen': {logprobs.reason}")
  if any(own is None for own in logprobs):
    return 0, None
  totals = np.array([np.sum(own) for own in logprobs], np.float64)
  margin = np.logaddexp.reduce(totals[1:]) - totals[0]
  cuts = np.exp(totals[1:] - totals[1:].max())
  cuts /= cuts.sum()
  flawed = int(tree.rng.choice(steps, p=cuts)) + 1 if margin >= threshold else 0
  written = asked.append(indices[flawed], Role.POLICY, logprobs=logprobs[flawed])
  written.data['meta'], written.trained = True, refiner == 'policy'
  return flawed, cuts


def judged(tree: Tree, chains: Sequence[tuple[str | None, Node]], process: bool) -> Generator[Request, Any, list[list]]:
  """[EM, useful / M] of chains, each an answer and its last span; all are judged at a time.

  M collections are what the searches found. The judge is asked where the process can count: the answer is right, M > 0. In place
  of useful / M stands UNSEARCHED where M = 0, UNREAD where the judge gave no number, and 0 without `process`.
  """
  found = [tuple(node.children[0].text for node in kept_steps(leaf) if 'documents' in node.data and node.children)
           for _, leaf in chains]
  outcomes = [exact_match(answer, tree.question.golden_answers) for answer, _ in chains]
  asked = [i for i, own in enumerate(found) if process and own and outcomes[i]]
  items = [judge.Collections(tree.question, found[i]) for i in asked]
  useful = dict(zip(asked, (yield from ask_judge(tree, items, unreadable=None)))) if asked else {}
  shares = {i: UNREAD if count is None else count / len(found[i]) for i, count in useful.items()}
  return [[outcome, shares.get(i, 0.0 if found[i] or not process else UNSEARCHED)] for i, outcome in enumerate(outcomes)]


def reward(tree: Tree, *, unread: float = 0.0, process_unsearched: float = 0.0) -> float:
  """R of the kept trace; `unread` is the process reward where the judge gave no number."""
  return hybrid(tree.root.data['judged'], unread, process_unsearched)


def hybrid(one: Sequence, unread: float, unsearched: float) -> float:
  """R of what `judged` says of a chain."""
  outcome, process = one
  return float(hybrid_reward(outcome, {UNREAD: unread, UNSEARCHED: unsearched}.get(process, process)))


def mean_process(trees: Sequence[Tree]) -> float:
  """The mean of useful / M over the trees for which the judge gave a number; 0 without any."""
  notes = [tree.root.data['judged'] for tree in trees]
  known = [process for outcome, process in notes if outcome and not isinstance(process, str)]
  return float(np.mean(known)) if known else 0.0


def credit(groups: Sequence[Sequence[Tree]], context: Context, *, joint: bool = True, process_unsearched: float = 0.0,
           normalize_std: bool = True, singleton: str = 'raw') -> None:
  """GRPO over traces: the kept chain and the reviews get the trace's reward relative to the other traces of its question.

  A trace whose judge gave no number (counted in `judge_unreadable`) gets the mean process reward of the others of its group.

  Args:
    joint: False leaves the reviews out of the loss (table 3, without joint optimization).
    process_unsearched: the process reward of a trace without a search, see above.
    normalize_std, singleton: see `credit_groups`.
  """
  probes = []
  for group in groups:
    for tree in group:
      unread = mean_process([other for other in group if other is not tree])
      tree.reward = reward(tree, unread=unread, process_unsearched=process_unsearched)
      for node in tree.nodes(Role.POLICY):
        node.trained = node.trained and (joint or not node.data.get('meta', False))
      if probe := tree.root.data.get('probe'):
        draft, *others = (hybrid(one, unread, process_unsearched) for one in probe['judged'])
        probes.append(probe | {'reward': draft, 'gains': np.array(others) - draft, 'kept': tree.reward})
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
  context.metrics.update(figures.of_refinement(probes))
