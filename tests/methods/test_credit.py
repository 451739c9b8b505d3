"""Credit that methods share; `credit_relative` and `credit_with_critic` are tested with Search-R1, GRPO and
PPO."""

import numpy as np
import pytest

from jaxsearch.methods import cusearch, r_search, research, search_r1, search_r2
from jaxsearch.methods.credit import credit_groups, credit_siblings
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import ANSWER, Letters, context, drive


def branching_tree(rng):
  """Five children of the prompt, one of them cut off and one empty; two below the first, an only child below
  the second."""
  tree = Tree(Letters())
  prompt = tree.root.append('Who?', Role.PROMPT)
  first, second, third, cut, empty = (prompt.append(text, Role.POLICY)
                                      for text in ('a', 'bb', 'ccc', 'dd', ''))
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
  credit_siblings(trees, {node: value for own in values for node, value in own.items()},
                  normalize_std=normalize_std)
  for own, worth in zip(families, values):
    for family in own:
      family_values = np.array([worth[node] for node in family])
      spread = family_values.std(ddof=1) + 1e-6 if normalize_std and len(family) > 1 else 1.0
      expected = (family_values - family_values.mean()) / spread
      np.testing.assert_allclose([node.advantages for node in family], expected, atol=1e-5)
    assert own[2][0].advantages == 0.0  # an only child
  assert all(node.advantages is None for own in others for node in own)
  assert all(node.advantages is None for tree in trees
             for node in tree.walk() if node.role is not Role.POLICY)


@pytest.mark.parametrize('singleton', ['zero', 'raw'])
def test_groups_of_any_spans_are_compared(singleton):
  """Members are chains of two trees, and groups may be empty: more of them than members."""
  rng, trees = np.random.default_rng(0), [Tree(Letters()) for _ in range(2)]
  prompts = [tree.root.append('Who?', Role.PROMPT) for tree in trees]
  chains = [[first := prompt.append('a', Role.POLICY),
             first.append('seen', Role.OBSERVATION).append('b', Role.POLICY)]
            for prompt in prompts for _ in range(3)]
  values = rng.normal(size=6).tolist()
  groups = [[], [], [], [], [(chain, value) for chain, value in zip(chains[:5], values)], [], [], [],
            [(chains[5], values[5])]]
  credit_groups(groups, singleton=singleton)
  expected = [*((values[:5] - np.mean(values[:5])) / (np.std(values[:5], ddof=1) + 1e-6)),
              values[5] if singleton == 'raw' else 0]
  for chain, advantage in zip(chains, expected):
    np.testing.assert_allclose([node.advantages for node in chain], advantage, atol=1e-5)


@pytest.mark.parametrize('method', [search_r1, cusearch, research, r_search, search_r2])
@pytest.mark.parametrize('singleton, advantage', [('raw', 1.0), ('zero', 0.0)])
def test_every_method_with_groups_says_what_an_only_member_gets(monkeypatch, method, singleton, advantage):
  monkeypatch.setattr(method, 'reward', lambda tree, *_, **__: 1.0)
  tree = drive([ANSWER])[0]
  tree.root.data['judged'] = [1.0, 0, 1]  # read by search_r2
  method.credit([[tree]], context(), singleton=singleton)
  assert tree.nodes(Role.POLICY)[0].advantages == advantage
