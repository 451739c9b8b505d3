"""The study of Search-R2: where a chain leaves the gold one, and what the terms are."""

import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.trees.tree import Role, Tree
from studies import search_r2
from tests.methods.driving import Letters

STEPS = [{'query': name, 'attribute': 'country', 'finding': ''} for name in ('Bonn', 'Germany', 'German')]
QUESTION = Question('q', 'Which code?', ('de',), {'steps': STEPS, 'hops': 3})


@pytest.mark.parametrize('said, flaw', [
  (['Bonn', 'germany', 'German', '=de'], 0), (['Paris', 'France', 'French', '=fr'], 1),
  (['Bonn', 'Bonn', 'Germany', 'German'], 2), (['Bonn', 'Germany', 'Dutch', '=nl'], 3),
  (['Bonn', 'Germany', 'German', '=nl'], 4), (['Paris', '=de'], 0), (['Bonn', '=nl'], 2)])
def test_the_first_flaw_is_the_step_that_leaves_the_gold_chain(said, flaw):
  tree = Tree(Letters(), QUESTION)
  node = tree.root.append('q', Role.PROMPT)
  for text in said:
    action = f'<answer> {text[1:]}</answer>' if text[0] == '=' else f'<search> {text}</search>'
    node = node.append(f'<think> a</think>{action}', Role.POLICY)
  assert search_r2.first_flaw(tree, node) == flaw


def test_the_terms_add_up_and_a_cut_that_does_not_look_has_no_skill():
  rng = np.random.default_rng(0)
  accept, cuts = rng.integers(0, 2, 60).astype(float), rng.dirichlet(np.ones(4), 60)
  gains, rewards = rng.normal(0, 1, (60, 4)), rng.integers(0, 2, 60).astype(float)
  of = search_r2.terms(accept, cuts, gains, rewards)
  total = of['a_prec'].mean + of['v_inter'].mean * of['s_trim'].mean + of['v_inter g_bar'].mean
  assert total == pytest.approx(of['sum'].mean, abs=1e-5)
  blind = search_r2.terms(accept, np.full((60, 4), 0.25), gains, rewards)
  assert blind['s_trim'].mean == pytest.approx(0)
