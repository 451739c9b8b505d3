import numpy as np
import pytest

from jaxsearch.methods import search_r1_ppo
from jaxsearch.trees.tree import Role
from tests.methods.driving import SEARCH, context, drive


def chains():
  """Three chains with random values; the first earns something for its search, too."""
  rng = np.random.default_rng(0)
  said = [SEARCH, '<answer> Lovelace </answer>'], ['<answer> Byron </answer>'], [SEARCH] * 3
  trees = [drive(spans, max_turns=2)[0] for spans in said]
  trees[0].nodes(Role.POLICY)[0].data['reward'] = 0.25
  for tree in trees:
    for node in tree.nodes(Role.POLICY):
      node.values = rng.random(len(node.tokens), np.float32)
  return trees


@pytest.mark.parametrize('gamma, lam', [(1.0, 1.0), (0.9, 0.7)])
def test_advantages_equal_a_loop(gamma, lam):
  trees = chains()
  search_r1_ppo.credit([trees[:2], trees[2:]], context(), gamma=gamma, lam=lam)
  assert [tree.reward for tree in trees] == [1, 0, 0]
  expected, targets = [], []
  for tree in trees:
    spans = tree.nodes(Role.POLICY)
    values = np.concatenate([node.values for node in spans]).astype(float)
    rewards = np.concatenate([np.r_[np.zeros(len(node.tokens) - 1), node.data.get('reward', 0.0)]
                              for node in spans])
    rewards[-1] += tree.reward
    advantages, following, value_after = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
      following = rewards[t] + gamma * value_after - values[t] + gamma * lam * following
      advantages[t], value_after = following, values[t]
    expected.append(advantages)
    targets.append(advantages + values)
  every = np.concatenate(expected)
  for tree, advantages, target in zip(trees, expected, targets):
    spans = tree.nodes(Role.POLICY)
    np.testing.assert_allclose(np.concatenate([node.returns for node in spans]), target, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([node.advantages for node in spans]),
                               (advantages - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8), atol=1e-4)


def test_without_a_critic_it_says_so():
  with pytest.raises(ValueError, match='config.critic.enabled=True'):
    search_r1_ppo.credit([[drive([SEARCH, '<answer> Ada </answer>'])[0]]], context())
