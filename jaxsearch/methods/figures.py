"""Figures that methods add to a step's row of metrics.jsonl, for people to read: nothing is trained on them."""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import refinement_gain
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.requests import Request
from jaxsearch.trees.tree import Node, Role, Tree


def explained(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
  """`value_explained`: how much of the variance of returns [N] a critic's values [N] explain (1 is all), over those of all
  processes, each of which must call it; {} where returns are all the same."""
  (_, _, left), (_, _, outcomes) = meshes.moments(returns - values), meshes.moments(returns)
  return {'value_explained': 1 - left / outcomes} if outcomes > 1e-12 else {}  # not rounding


def of_critic(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
  """How well a critic's values [N] match the returns [N]: `explained`, and the mean `value_error`."""
  return explained(values, returns) | ({'value_error': float(np.abs(returns - values).mean())} if len(values) else {})


def of_segments(chains: Sequence[Sequence[Node]]) -> dict[str, float]:
  """CARL's segments under the critic; each chain holds the segments of one tree.

  value_start: mean of V(s_0). value_explained: see `explained`, over all states. advantage_KIND: mean advantage of a kind of
  segment. opposed_pairs_share: share of assimilates whose advantage has the opposite sign of their invoke's.
  gained_then_lost_pairs: how many have a negative one behind a positive invoke (appendix I.1).
  """
  nodes = [node for chain in chains for node in chain]
  found = explained(np.array([node.values[0] for node in nodes]), np.array([node.tree.reward for node in nodes]))
  if chains:
    found['value_start'] = float(np.mean([chain[0].values[0] for chain in chains]))
  for kind in ('invoke', 'assimilate', 'commit'):
    own = [node.advantages for chain in chains for node in chain if node.data['segment'] == kind]
    if own:
      found[f'advantage_{kind}'] = float(np.mean(own))
  pairs = [(a.advantages, b.advantages) for chain in chains for a, b in itertools.pairwise(chain)
           if (a.data['segment'], b.data['segment']) == ('invoke', 'assimilate')]
  if pairs:
    found['opposed_pairs_share'] = float(np.mean([a * b < 0 for a, b in pairs]))
    found['gained_then_lost_pairs'] = sum(a > 0 > b for a, b in pairs)
  return found


def of_depths(depths: Mapping[Tree, int], selected: Sequence[Tree], max_depth: int) -> dict[str, float]:
  """CuSearch's selection, by depth.

  chains_depth_D, selected_depth_D: how many chains have depth D, of all and of the selected ones; depth_mean,
  selected_depth_mean. selected: how many chains. retrieval_coverage: C_r (appendix G.2), the tokens of spans whose search
  found documents, as depth counts them, in the selected chains. retrieval_share: their share of all trained tokens.
  """
  own = np.array(list(depths.values()), int)
  everyone = np.bincount(own, minlength=max_depth + 1)
  kept = np.bincount(np.array([depths[tree] for tree in selected], int), minlength=max_depth + 1)
  coverage = sum(len(node.tokens) for tree in selected for node in tree.nodes(Role.POLICY) if node.data.get('documents'))
  trained = sum(tree.count(Role.POLICY) for tree in selected)
  return {f'chains_depth_{d}': int(n) for d, n in enumerate(everyone)} | {
    f'selected_depth_{d}': int(n) for d, n in enumerate(kept)} | {
    'depth_mean': float(own.mean()) if len(own) else 0.0,
    'selected_depth_mean': float(kept @ np.arange(max_depth + 1) / max(len(selected), 1)),
    'selected': len(selected), 'retrieval_coverage': coverage, 'retrieval_share': coverage / max(trained, 1)}


def of_refinement(probes: Sequence[dict[str, Any]]) -> dict[str, float]:
  """Search-R2's gain over its drafts (appendix D) on the probed ones; {} without any.

  `a_prec`, `v_inter`, `s_trim`, the baseline gain `g_bar`, their sum `gain_predicted = a_prec + v_inter (s_trim + g_bar)`, and
  `gain_measured`, the mean reward of the kept traces minus that of the drafts. With N_max = 1 both have the same expectation.

  A draft's probe: 'accept' (0 or 1); 'reward', R of the draft; 'cuts' [steps], the trimmer's probabilities; 'gains' [steps], R
  after regenerating from before each step, minus the draft's; 'kept', R of the trace that was kept.
  """
  if not probes:
    return {}
  width = max(len(probe['cuts']) for probe in probes)
  cuts, gains = (np.stack([np.pad(probe[name], (0, width - len(probe[name]))) for probe in probes]) for name in ('cuts', 'gains'))
  accept, rewards, kept = (np.array([probe[name] for probe in probes]) for name in ('accept', 'reward', 'kept'))
  terms = refinement_gain(accept, cuts, gains, rewards, rewards + np.sum(cuts * gains, axis=1))
  found = {name: float(value) for name, value in terms.items()} | {'g_bar': float(cuts.mean(axis=0) @ gains.mean(axis=0))}
  return found | {'gain_predicted': found['a_prec'] + found['v_inter'] * (found['s_trim'] + found['g_bar']),
                  'gain_measured': float(np.mean(kept - rewards)), 'probed': len(probes)}


Chains = list[tuple[str | None, Node]]  # the answer and the last span of each


def probe_cuts(tree: Tree, leaf: Node, cuts: np.ndarray, accepted: bool,
               regenerate: Callable[[Sequence[Node], int], Generator[Request, Any, Node]],
               judged: Callable[[Chains], Generator[Request, Any, list]]) -> Generator[Request, Any, None]:
  """Regenerates the draft that ends with `leaf` once from before each of its n steps. The tree stays as it was, but for the
  root's `data['probe']`: 'accept' and 'cuts' for `of_refinement`; 'judged', what is said of the draft and of the n chains.

  Args:
    cuts: [n], the trimmer's probabilities of the steps.
    accepted: whether the discriminator accepts the draft.
    regenerate: (steps, how many of them to keep) -> the last node of the new chain.
    judged: what a reward needs to know of finished chains.
  """
  answer, stop, counts, chains = tree.answer, tree.stop, dict(tree.metrics), [(tree.answer, leaf)]
  steps = [node for node in leaf.path() if node.role is Role.POLICY]
  for kept in range(len(steps)):
    end = yield from regenerate(steps, kept)
    chains.append((tree.answer, end))
  found = yield from judged(chains)
  for step, (_, end) in zip(steps, chains[1:]):
    step.parent.children.remove(next(node for node in end.path() if node.parent is step.parent))
  tree.answer, tree.stop = answer, stop
  tree.metrics.update(counts)
  tree.root.data['probe'] = {'accept': float(accepted), 'cuts': cuts.tolist(), 'judged': found}
