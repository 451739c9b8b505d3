"""Credit that methods share; `credit_relative` and `credit_with_critic` are tested with Search-R1, GRPO and PPO."""

import numpy as np
import pytest

from jaxsearch.methods.credit import credit_siblings
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters


def branching_tree(rng):
  """Five children of the prompt, one of them cut off and one empty; two below the first, an only child below the second."""
  tree = Tree(Letters())
  prompt = tree.root.append('Who?', Role.PROMPT)
  first, second, third, cut, empty = (prompt.append(text, Role.POLICY) for text in ('a', 'bb', 'ccc', 'dd', ''))
  seen = first.append('documents', Role.OBSERVATION)
  below = [seen.append(text, Role.POLICY) for text in ('e', 'ff')]
  alone = second.append('more', Role.OBSERVATION).append('g', Role.POLICY)
  cut.trained = False
  families = [[first, second, third], below, [alone]]
  return tree, families, [cut, empty], {node: float(rng.normal()) for family in families for node in family}


@pytest.mark.parametrize('normalize_std', [True, False])
def test_siblings_are_compared_with_each_other(normalize_std):
  rng = np.random.default_rng(0)
  trees, families, others, values = zip(*(branching_tree(rng) for _ in range(3)))
  credit_siblings(trees, {node: value for own in values for node, value in own.items()}, normalize_std=normalize_std)
  for own, worth in zip(families, values):
    for family in own:
      family_values = np.array([worth[node] for node in family])
      spread = family_values.std(ddof=1) + 1e-6 if normalize_std and len(family) > 1 else 1.0
      expected = (family_values - family_values.mean()) / spread
      np.testing.assert_allclose([node.advantages for node in family], expected, atol=1e-5)
    assert own[2][0].advantages == 0.0  # an only child
  assert all(node.advantages is None for own in others for node in own)
  assert all(node.advantages is None for tree in trees for node in tree.walk() if node.role is not Role.POLICY)


def test_trees_without_a_trained_span_are_no_trouble():
  tree = Tree(Letters())
  credit_siblings([tree], {})
  credit_siblings([], {})
  assert tree.root.advantages is None
