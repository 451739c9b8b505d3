"""Credit that methods share; `credit_relative` and `credit_with_critic` are tested with Search-R1, GRPO and
PPO."""

import numpy as np
import pytest

from jaxsearch.methods import cusearch, r_search, research, search_r1, search_r2
from jaxsearch.methods.credit import credit_groups
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import ANSWER, Letters, context, drive


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


@pytest.mark.parametrize('method', [search_r1, cusearch, research, r_search, search_r2])
def test_every_method_with_groups_may_divide_by_no_deviation(monkeypatch, method):
  trees = [drive([ANSWER])[0] for _ in range(2)]
  monkeypatch.setattr(method, 'reward', lambda tree, *_, **__: float(tree is trees[0]))
  for tree, right in zip(trees, (1.0, 0.0)):
    tree.root.data['judged'] = [right, 0, 1]  # read by search_r2
  method.credit([trees], context(), normalize_std=False)
  assert [tree.nodes(Role.POLICY)[0].advantages for tree in trees] == [0.5, -0.5]
