"""Figures that methods add to a step's row of metrics.jsonl, for people: nothing is trained on them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import refinement_gain
from jaxsearch.parallel import mesh as meshes
from jaxsearch.trees.tree import Node, Role, Tree


def explained(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
  """Returns `value_explained`, the share of the variance of returns [N] that a critic's values [N] explain.

  Over all processes, each of which must call it; {} where returns are all the same.
  """
  (_, _, left), (_, _, outcomes) = meshes.moments(returns - values), meshes.moments(returns)
  return {'value_explained': 1 - left / outcomes} if outcomes > 1e-12 else {}  # not rounding


def of_critic(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
  """Compares a critic's values [N] with the returns [N]: `explained`, and the mean `value_error`."""
  error = {'value_error': float(np.abs(returns - values).mean())} if len(values) else {}
  return explained(values, returns) | error


def of_segments(chains: Sequence[Sequence[Node]]) -> dict[str, float]:
  """Describes CARL's segments under the critic; each chain holds the segments of one tree.

  value_start: mean of V(s_0). advantage_KIND: mean advantage of a kind of segment. opposed_pairs_share: of
  assimilates whose advantage has the opposite sign of their invoke's. gained_then_lost_pairs: number of those
  with a negative one behind a positive invoke (appendix I.1).
  """
  nodes = [node for chain in chains for node in chain]
  returns = np.array([node.tree.reward for node in nodes])
  figures = explained(np.array([node.values[0] for node in nodes]), returns)
  if chains:
    figures['value_start'] = float(np.mean([chain[0].values[0] for chain in chains]))
  for kind in ('invoke', 'assimilate', 'commit'):
    advantages = [node.advantages for node in nodes if node.data['segment'] == kind]
    if advantages:
      figures[f'advantage_{kind}'] = float(np.mean(advantages))
  pairs = [(a.advantages, b.advantages) for chain in chains for a, b in itertools.pairwise(chain)
           if (a.data['segment'], b.data['segment']) == ('invoke', 'assimilate')]
  if pairs:
    figures['opposed_pairs_share'] = float(np.mean([a * b < 0 for a, b in pairs]))
    figures['gained_then_lost_pairs'] = sum(a > 0 > b for a, b in pairs)
  return figures


def of_depths(depths: Mapping[Tree, int], selected: Sequence[Tree], max_depth: int) -> dict[str, float]:
  """Describes CuSearch's selection by depth.

  chains_depth_D, selected_depth_D: how many chains have depth D, of all and of the selected ones.
  retrieval_coverage: C_r (appendix G.2), the tokens of spans whose search found documents in the selected
  chains. retrieval_share: their share of all trained tokens.
  """
  of_all = np.array(list(depths.values()), int)
  of_selected = np.array([depths[tree] for tree in selected], int)
  searching = [node for tree in selected for node in tree.nodes(Role.POLICY) if node.data.get('documents')]
  coverage = sum(len(node.tokens) for node in searching)
  trained = sum(tree.count(Role.POLICY) for tree in selected)
  counts = {}
  for name, values in (('chains', of_all), ('selected', of_selected)):
    for value, count in enumerate(np.bincount(values, minlength=max_depth + 1)):
      counts[f'{name}_depth_{value}'] = int(count)
  return counts | {
    'depth_mean': float(of_all.mean()) if len(of_all) else 0.0,
    'selected_depth_mean': float(of_selected.mean()) if len(selected) else 0.0,
    'selected': len(selected), 'retrieval_coverage': coverage, 'retrieval_share': coverage / max(trained, 1)}


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
  return figures | {'gain_predicted': predicted, 'gain_measured': float(np.mean(kept - rewards)),
                    'probed': len(probes)}
