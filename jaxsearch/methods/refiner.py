"""Search-R2's Meta-Refiner: reviews a draft, and probes what cutting it would gain.

The review is a number (table 12): 0 for no flawed step, f if step f is the earliest flawed one, which is the
paper's cut-point k = f - 1. The discriminator compares log-probabilities (appendix E): a draft is revised if
`log P(any f >= 1) - log P(0)` reaches the threshold. The trimmer then draws f from the probabilities of the
steps alone. A review is trained on with the policy's own log-probability of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import refinement_gain
from jaxsearch.sampler.requests import Ask, Growth, Refused, Score, ToolFailure
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Node, Role, Tree

Chains = Sequence[tuple[str | None, Node]]  # the answer and the last span of each


def steps_of(leaf: Node) -> list[Node]:
  """Returns the actor's spans on the path to `leaf`."""
  return [node for node in leaf.path() if node.role is Role.POLICY]


def review(tree: Tree, leaf: Node, *, threshold: float, refiner: str, random_share: float,
           template: str) -> Growth[tuple[int, np.ndarray | None]]:
  """Reviews the draft that ends with `leaf`: discriminator and trimmer. Arguments as of `search_r2.grow`.

  Returns the first flawed step (0: the draft is accepted) and the trimmer's probabilities [steps], whatever
  the discriminator says; (0, None) if there is no room. Raises Refused if a frozen refiner fails.
  """
  steps = len(steps_of(leaf))
  if refiner == 'random':
    revised, step = tree.rng.random() < random_share, int(tree.rng.integers(1, steps + 1))
    return revised * step, np.full(steps, 1 / steps)
  text = templates.fill(templates.find(template, 'reviewer'), steps=steps)
  asked = leaf.append(tree.grammar.aside(leaf, text), Role.PROMPT)
  replies = tuple(f'{tree.grammar.lead}{flawed}' for flawed in range(steps + 1))
  score = Score(asked, replies)
  logprobs = yield score if refiner == 'policy' else Ask('refiner', score)
  if isinstance(logprobs, ToolFailure):
    raise Refused(f"grow.refiner='frozen': {logprobs.reason}")
  if None in logprobs:
    return 0, None
  totals = np.array([np.sum(of_reply) for of_reply in logprobs], np.float64)
  cuts = np.exp(totals[1:] - totals[1:].max())
  cuts /= cuts.sum()
  margin = np.logaddexp.reduce(totals[1:]) - totals[0]
  flawed = int(tree.rng.choice(steps, p=cuts)) + 1 if margin >= threshold else 0
  written = asked.append(replies[flawed], Role.POLICY, sampler_logprobs=logprobs[flawed])
  written.data['meta'], written.trained = True, refiner == 'policy'
  return flawed, cuts


def probe(tree: Tree, leaf: Node, cuts: np.ndarray, accepted: bool,
          regenerate: Callable[[Sequence[Node], int], Growth[Node]],
          judged: Callable[[Chains], Growth[list]]) -> Growth[None]:
  """Regenerates the draft that ends with `leaf` once from before each of its n steps, and removes what grew.

  Notes in the root's `data['probe']`: 'accept' and 'cuts', for `of_refinement`; and 'judged', of the
  draft and of the n chains.

  Args:
    cuts: [n], the trimmer's probabilities of the steps; accepted: the discriminator's verdict.
    regenerate: (steps, how many of them to keep) -> the last node of the new chain.
    judged: returns the notes that a reward is worked out from.
  """
  answer, stop, counts, chains = tree.answer, tree.stop, dict(tree.metrics), [(tree.answer, leaf)]
  steps = steps_of(leaf)
  for kept in range(len(steps)):
    end = yield from regenerate(steps, kept)
    chains.append((tree.answer, end))
  notes = yield from judged(chains)
  for step, (_, end) in zip(steps, chains[1:]):
    step.parent.children.remove(next(node for node in end.path() if node.parent is step.parent))
  tree.answer, tree.stop = answer, stop
  tree.metrics.update(counts)
  tree.root.data['probe'] = {'accept': float(accepted), 'cuts': cuts.tolist(), 'judged': notes}


def of_refinement(probes: Sequence[dict[str, Any]]) -> dict[str, float]:
  """Describes Search-R2's gain over its drafts (appendix D) on the probed ones; {} without any.

  See `refinement_gain`; `gain_predicted = a_prec + v_inter (s_trim + g_bar)` and `gain_measured`, the mean
  reward of the kept traces minus that of the drafts, have the same expectation with N_max = 1.

  A draft's probe: 'accept' (0 or 1); 'reward', R of the draft; 'cuts' [steps], the trimmer's probabilities;
  'gains' [steps], R after regenerating from before each step, minus the draft's; 'kept', R of the kept trace.
  """
  if not probes:
    return {}
  width = max(len(probe['cuts']) for probe in probes)
  stacked = lambda name: np.stack([np.pad(probe[name], (0, width - len(probe[name]))) for probe in probes])
  cuts, gains = stacked('cuts'), stacked('gains')
  column = lambda name: np.array([probe[name] for probe in probes])
  accept, rewards, kept = map(column, ('accept', 'reward', 'kept'))
  terms = refinement_gain(accept, cuts, gains, rewards, rewards + np.sum(cuts * gains, axis=1))
  figures = {name: float(value) for name, value in terms.items()}
  figures['g_bar'] = float(cuts.mean(axis=0) @ gains.mean(axis=0))
  predicted = figures['a_prec'] + figures['v_inter'] * (figures['s_trim'] + figures['g_bar'])
  return figures | {'gain_predicted': predicted, 'gain_measured': float(np.mean(kept - rewards))}
