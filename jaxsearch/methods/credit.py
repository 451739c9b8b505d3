"""Credit that methods share: by comparison (of groups, trees), or by a critic for each token."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxsearch.advantages import gae, group_relative, whiten
from jaxsearch.methods import Groups
from jaxsearch.parallel import transfer
from jaxsearch.trees.tree import Node, Role, Tree

_gae = jax.jit(gae, static_argnames=('gamma', 'lam'))
_whiten = jax.jit(whiten)


def rewarded(groups: Groups, reward: Callable[[Tree], float]) -> list[Tree]:
  """Sets `tree.reward` of all trees, and returns them."""
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    tree.reward = reward(tree)
  return trees


def padded(size: int) -> int:
  """Returns the next power of two: arrays of such sizes keep compiled programs few."""
  return 1 << (max(size, 1) - 1).bit_length()


def credit_groups(groups: Sequence[Sequence[tuple[Sequence[Node], float]]], *, normalize_std: bool = True,
                  singleton: str = 'zero', ddof: int = 1, added: float | None = None) -> None:
  """Compares the members of each group: every span of a member gets the member's value relative to its group.

  Args:
    groups: the (spans, value) of each member, which is a span, a chain or a whole tree.
    normalize_std: False gives `value - mean`.
    singleton: what the only member of a group gets: 'zero', or 'raw' for its value as it is.
    ddof: 1 for the sample, 0 for the population standard deviation.
    added: if given, a span's credit is increased by `added` times what it gets, not replaced by it.
  """
  members = [member for group in groups for member in group]
  sizes = [len(group) for group in groups if len(group)]
  size = padded(len(members))
  values, ids = np.zeros(size, np.float32), np.full(size, -1)  # padding belongs to no group
  values[:len(members)] = [value for _, value in members]
  ids[:len(members)] = np.repeat(np.arange(len(sizes)), sizes)
  advantages = group_relative(values, ids, size, normalize_std=normalize_std, singleton=singleton, ddof=ddof)
  for (spans, _), advantage in zip(members, np.asarray(advantages).tolist()):
    for node in spans:
      node.advantages = advantage if added is None else node.advantages + added * advantage


def credit_relative(groups: Groups, *, normalize_std: bool = True, singleton: str = 'raw') -> None:
  """Gives policy spans their tree's `reward` relative to the other trees of its group (GRPO)."""
  credit_groups([[(tree.nodes(Role.POLICY), tree.reward) for tree in group] for group in groups],
                normalize_std=normalize_std, singleton=singleton)


def credit_with_critic(trees: Sequence[Tree], *, gamma: float, lam: float) -> dict[str, float]:
  """Sets returns and advantages of chains by token-level GAE; returns figures of the critic.

  Advantages are whitened over the chains of all processes. `tree.reward` is earned at the last token of a
  chain; a span may earn `node.data['reward']` at its own last token.
  Raises ValueError if the spans have no values, since the run has no critic.
  """
  chains = [valued_spans(tree) for tree in trees]
  lengths = [sum(len(node.tokens) for node in spans) for spans in chains]
  shape = padded(len(trees)), padded(max(lengths, default=1))
  rewards, values, mask = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, bool)
  for row, (tree, spans, length) in enumerate(zip(trees, chains, lengths)):
    if spans:
      ends = np.cumsum([len(node.tokens) for node in spans])
      values[row, :length], mask[row, :length] = np.concatenate([node.values for node in spans]), True
      rewards[row, ends - 1] = [node.data.get('reward', 0.0) for node in spans]
      rewards[row, length - 1] += tree.reward
  advantages, returns = map(np.asarray, _gae(rewards, values, mask, gamma=gamma, lam=lam))
  advantages = whiten_over_processes(advantages, mask)
  for row, spans in enumerate(chains):
    start = 0
    for node in spans:
      columns = slice(start, start := start + len(node.tokens))
      node.advantages, node.returns = advantages[row, columns], returns[row, columns]
  return explained(values[mask], returns[mask])


def valued_spans(tree: Tree) -> list[Node]:
  """Returns the policy spans that have tokens; ValueError if they lack the values of a critic."""
  spans = [node for node in tree.nodes(Role.POLICY) if node.tokens]
  if any(node.values is None for node in spans):
    raise ValueError('no values on the policy spans: this method needs config.critic.enabled=True')
  return spans


def whiten_over_processes(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Whitens as `advantages.whiten` does, by the mean and variance of what all processes pass."""
  if jax.process_count() == 1:
    return np.asarray(_whiten(x, mask))
  count, mean, variance = transfer.moments(x[mask])
  deviation = np.sqrt(variance * count / max(count - 1, 1) + 1e-8)
  return np.where(mask, (x - mean) / deviation, 0).astype(np.float32)


def explained(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
  """Returns `value_explained`, the share of the variance of returns [N] that a critic's values [N] explain.

  Over all processes, each of which must call it; {} where returns are all the same.
  """
  (_, _, left), (_, _, outcomes) = transfer.moments(returns - values), transfer.moments(returns)
  return {'value_explained': 1 - left / outcomes} if outcomes > 1e-12 else {}  # not rounding
