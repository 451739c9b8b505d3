"""Search-R1 with PPO (Jin et al. 2025, arXiv 2503.09516, section 3.1): the same rollouts and reward, credited by a critic.

Needs `config.critic.enabled`. The KL to the initial policy is a term of the loss, as with GRPO; the authors' PPO script
subtracts it from the rewards instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jaxsearch.advantages import gae, whiten
from jaxsearch.methods import Context
from jaxsearch.methods.search_r1 import grow, reward
from jaxsearch.trees.tree import Role, Tree

__all__ = ['credit', 'grow']

BUCKET = 128  # tokens: chains are padded to a multiple, so that few programs are compiled


def credit(groups: Sequence[Sequence[Tree]], context: Context, *, gamma: float = 1.0, lam: float = 1.0) -> None:
  """Token-level GAE of the outcome reward, which stands on the last token of the chain."""
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    tree.reward = reward(tree)
  context.metrics.update(credit_with_critic(trees, gamma=gamma, lam=lam))


@functools.partial(jax.jit, static_argnames=('gamma', 'lam'))
def _whitened_gae(rewards, values, mask, *, gamma, lam):
  advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
  return whiten(advantages, mask), returns


def credit_with_critic(trees: Sequence[Tree], *, gamma: float, lam: float) -> dict[str, float]:
  """Writes whitened advantages and returns onto the policy spans of chains; returns figures about the critic.

  Besides `tree.reward` on the last token, a span may earn `node.data['reward']` on its own last token.

  Raises:
    ValueError: the spans have no values, since the run has no critic.
  """
  chains = [[node for node in tree.nodes(Role.POLICY) if node.tokens] for tree in trees]
  if not any(chains):
    return {}
  if any(node.values is None for spans in chains for node in spans):
    raise ValueError('no values on the policy spans: PPO needs config.critic.enabled=True')
  lengths = [sum(len(node.tokens) for node in spans) for spans in chains]
  shape = len(trees), -(-max(lengths) // BUCKET) * BUCKET
  rewards, values, mask = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, bool)
  for row, (tree, spans, length) in enumerate(zip(trees, chains, lengths)):
    if not spans:
      continue
    ends = np.cumsum([len(node.tokens) for node in spans])
    values[row, :length], mask[row, :length] = np.concatenate([node.values for node in spans]), True
    rewards[row, ends - 1] = [node.data.get('reward', 0.0) for node in spans]
    rewards[row, length - 1] += tree.reward
  advantages, returns = map(np.asarray, _whitened_gae(rewards, values, mask, gamma=gamma, lam=lam))
  for row, spans in enumerate(chains):
    start = 0
    for node in spans:
      own = slice(start, start := start + len(node.tokens))
      node.advantages, node.returns = advantages[row, own], returns[row, own]
  residual, target = (returns - values)[mask], returns[mask]
  return {'value_explained': float(1 - residual.var() / max(target.var(), 1e-8)), 'value_error': float(np.abs(residual).mean())}
