"""Search-R2 (He et al. 2026, arXiv 2602.03647): draft, review, cut at the first flawed step, regenerate.

Actor and Meta-Refiner (refiner.py) are one model with two prompts. The review follows the draft, a revision
follows the kept prefix, and both reuse its cache. In the tree the cut-off steps and the review hang beside
the kept chain; credit goes to the kept chain and to the reviews, by GRPO over whole traces (section 3.4).

A trace earns `R = EM (1 + useful / M)` (eqs. 1, 16, 17), where M counts its searches that did not fail. For
M = 0, which the paper leaves open, a right answer earns `1 + credit.process_unsearched`.
"""

import functools
from collections.abc import Sequence

import numpy as np

from jaxsearch.advantages import hybrid_reward
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups, refiner as refiners
from jaxsearch.methods.actions import ask_judge
from jaxsearch.methods.credit import credit_relative
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Growth, Refused
from jaxsearch.trees.tree import Role, Tree

BRANCHES = True
SERVICES = ('judge', 'refiner')


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500,
         max_response: int = 3000, max_revisions: int = 1, threshold: float = 0.0, refiner: str = 'policy',
         random_share: float = 0.3, probe: float = 0.0, process: bool = True, template: str = 'search_r1',
         chat: bool = False, review: str = 'search_r2') -> Growth[None]:
  """Grows a draft and at most `max_revisions` revisions (N_max); algorithm 1 with the rollout of algorithm 2.

  `max_turns` is B, the actor's spans in a chain: Search-R1 counts one less. `max_revisions=0` is the actor
  alone, as the paper deploys it. configs/search_r2.py explains the other settings.
  """
  if max_turns < 1:
    raise Refused(f'grow.max_turns={max_turns}: it counts the spans of the actor, so at least 1')
  write = functools.partial(act, tree, max_tokens=max_tokens, max_response=max_response)
  regenerate = lambda steps, kept: write(steps[kept].parent, turns=max_turns - kept - 1)
  tree.metrics.update(found=0, revised=0, judge_unreadable=0)
  leaf = yield from write(start(tree, question, template, chat), turns=max_turns - 1)
  tree.metrics['em_draft'] = question.score(tree.answer)
  for revision in range(max_revisions):
    flawed, cuts = yield from refiners.review(
      tree, leaf, threshold=threshold, refiner=refiner, random_share=random_share, template=review)
    if revision == 0 and cuts is not None and tree.rng.random() < probe:
      yield from refiners.probe(tree, leaf, cuts, flawed == 0, regenerate,
                                functools.partial(judged, tree, process=process))
    if flawed == 0:
      break
    steps = refiners.steps_of(leaf)
    for node in steps[flawed - 1].walk():
      node.trained = node.trained and node.data.get('meta', False)
    tree.metrics['revised'] += 1
    leaf = yield from regenerate(steps, flawed - 1)
  (tree.root.data['judged'],) = yield from judged(tree, [(tree.answer, leaf)], process=process)
  kept = sum(len(node.tokens) for node in refiners.steps_of(leaf))
  tree.metrics.update(em_kept=question.score(tree.answer), tokens_extra=tree.count(Role.POLICY) - kept)


def judged(tree: Tree, chains: refiners.Chains, *, process: bool) -> Growth[list[list]]:
  """Returns [EM, useful, M] of each chain; judges together all that have a right answer and M > 0.

  `useful` is None where the judge gave no number, and 0 where it was not asked; without `process` M is 1, so
  that R is the EM.
  """
  notes, asked = [], []
  for answer, leaf in chains:
    retrieved = tuple(node.children[0].text for node in refiners.steps_of(leaf)
                      if 'documents' in node.data and node.children)
    outcome = tree.question.score(answer)
    notes.append([outcome, 0, len(retrieved) if process else 1])
    if process and retrieved and outcome:
      asked.append((notes[-1], judge.Collections(tree.question, retrieved), leaf))
  useful = (yield from ask_judge(tree, [about for _, *about in asked])) if asked else []
  for (note, *_), count in zip(asked, useful):
    note[1] = count
  return notes


def reward(tree: Tree) -> float:
  """Returns R of the kept trace."""
  return hybrid(tree.root.data['judged'])


def hybrid(note: Sequence, unread: float = 0.0, unsearched: float = 0.0) -> float:
  """Returns R of a chain from its `judged` note; a missing process reward is `unread` or `unsearched`."""
  outcome, useful, searches = note
  process = unsearched if not searches else unread if useful is None else useful / searches
  return float(hybrid_reward(outcome, process))


def mean_process(trees: Sequence[Tree]) -> float:
  """Returns the mean of useful / M over the trees for which the judge gave a number; 0 without any."""
  notes = [tree.root.data['judged'] for tree in trees]
  known = [useful / searches for outcome, useful, searches in notes
           if outcome and searches and useful is not None]
  return float(np.mean(known)) if known else 0.0


def credit(groups: Groups, context: Context, *, joint: bool = True,
           process_unsearched: float = 0.0, normalize_std: bool = True, singleton: str = 'raw') -> None:
  """Credits the kept chain and the reviews with the trace's reward relative to its group (GRPO).

  A trace whose judge gave no number (counted in `judge_unreadable`) gets the mean process reward of the
  others of its group. `joint=False` leaves the reviews out of the loss (table 3).
  """
  probes = []
  for group in groups:
    for tree in group:
      unread = mean_process([other for other in group if other is not tree])
      earned = functools.partial(hybrid, unread=unread, unsearched=process_unsearched)
      tree.reward = earned(tree.root.data['judged'])
      for node in tree.nodes(Role.POLICY):
        node.trained = node.trained and (joint or not node.data.get('meta', False))
      if probe := tree.root.data.get('probe'):
        draft, *others = map(earned, probe['judged'])
        probes.append(probe | {'reward': draft, 'gains': np.array(others) - draft, 'kept': tree.reward})
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
  figures = refiners.of_refinement(context.gather(probes)[0])  # covariances are not means of the processes'
  context.metrics.update(figures | ({'probed': len(probes)} if figures else {}))
