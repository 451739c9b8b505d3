"""The study of SLATE with frozen weights: what is credited, what it costs, and figures of known gradients."""

import argparse
import collections
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.models.architecture import initial_params, preset
from jaxsearch.models.decoder import hidden_states
from jaxsearch.trees.tree import Role
from studies import gradients, slate
from tests.methods.driving import drive

SEARCH, BROKEN = '<think>hm</think><search> author </search>', '<think>hm'
RIGHT, WRONG = '<answer> Lovelace </answer>', '<answer> Byron </answer>'
(WHOLE_JUDGE, WHOLE_EM), (JUDGE, EM) = (
  [slate.Estimator(whole, reward, k=2) for reward in ('judge', 'EM')] for whole in (True, False))


@pytest.fixture(scope='module')
def tree():
  """Two siblings a step: a search, from which a chain and other siblings go on, and a wrong answer."""
  seed = next(seed for seed in range(9) if np.random.default_rng(seed).integers(2) == 0)
  return drive([SEARCH, WRONG, RIGHT, BROKEN, RIGHT], grow=slate.grow, seed=seed, steps=2, k=2, max_tokens=64,
               chat=False, judges=[lambda items: [1] * len(items)])[0]


def test_siblings_earn_their_own_score_and_whole_chains_the_sum(tree):
  of = slate.earned([tree], 3, 1)
  assert of.taken.tolist() == [[True, True, False]]
  assert of.whole[0].tolist() == [[2 + 2, 2], [1, 0]]  # by judge and EM
  assert of.steps[0].tolist() == [[[2, 2], [1, 0]], [[1 - 1, 2], [0, 1]], [[0, 0], [0, 0]]]
  assert slate.alike(JUDGE, of) == 0.5 and slate.alike(EM, of) == 0


def test_an_estimator_costs_what_it_needs(tree):
  prompt, search, observation, wrong, right, broken = (len(text) for text in (
    tree.nodes(Role.PROMPT)[0].text, SEARCH, tree.nodes(Role.OBSERVATION)[0].text, WRONG, RIGHT, BROKEN))
  first = prompt + search + wrong + observation
  assert slate.cost(tree, WHOLE_JUDGE) == first + right
  assert slate.cost(tree, JUDGE) == first + broken + right
  assert slate.cost(tree, EM) == first + right + broken + right
  assert slate.cost(tree, slate.Estimator(False, 'judge', k=1)) == prompt + search + observation + broken


def test_gradients_are_those_of_the_credited_actions(tree):
  model = dataclasses.replace(preset('world-tiny'), vocab_size=256, hidden_size=16, intermediate_size=16,
                              num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
  params = initial_params(model, jax.random.key(0))
  sketches = gradients.Sketches(model, params, width=20_000, rows=2)  # wider than a gradient: exact
  of_tree, of = slate.scores([tree], 2, sketches), slate.earned([tree], 2, 1)

  @jax.jit
  def gradient(params, path, own):  # [L] tokens, whether each is the span's
    def logprob(params):
      logprobs = jax.nn.log_softmax(hidden_states(model, params, path[None])[0, :-1] @ params['embedding'].T)
      return jnp.where(own[1:], logprobs[jnp.arange(len(path) - 1), path[1:]], 0).sum()

    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.grad(logprob)(params))])

  def of_span(node, length=256):
    path, place = np.array(node.path_tokens()), np.arange(length)
    own = (place >= node.length - len(node.tokens)) & (place < node.length)
    return np.asarray(gradient(params, np.pad(path, (0, length - len(path))), own))

  (first, wrong, *_), (broken, right) = (
    [chain[0] for chain in chains] for chains in tree.root.data['groups'])
  completion = tree.root.data['groups'][0][0][1]
  expected = {
    WHOLE_EM: {first: 0.25, completion: 0.25, wrong: -0.25},
    WHOLE_JUDGE: {first: 0.5, completion: 0.5, wrong: -0.5},
    JUDGE: {broken: -0.5, right: 0.5},
    EM: {first: 0.25, wrong: -0.25, broken: -0.25, right: 0.25},
  }
  exact = [sum(weight * of_span(node) for node, weight in weights.items()) for weights in expected.values()]
  found = np.concatenate([slate.gradients(of_estimator, of_tree, of) for of_estimator in expected])
  np.testing.assert_allclose(found @ found.T, np.stack(exact) @ np.stack(exact).T, rtol=1e-3, atol=1e-5)
  target = slate.expected_em([tree], sketches)[0]
  np.testing.assert_allclose(target @ target, exact[0] @ exact[0], rtol=1e-3)


def test_figures_of_gradients_that_are_known():
  """A mean of length 1, at 60 degrees to the target; a covariance of trace 3, of which `scale` leaves 1."""
  rng = np.random.default_rng(0)
  noise = rng.normal(size=(6000, 12)) * 0.5
  mean, target = np.zeros(12), np.zeros(12)
  mean[0], target[:2] = 1, (0.5, np.sqrt(0.75))
  ones = np.ones((1, 6000))
  found = gradients.figures(mean + noise, 1 / 3, target + noise[::-1], ones, ones)
  expected = {'noise over signal': 1, 'own': np.sqrt(0.5), 'direction': 0.5, 'towards': 0.5 * np.sqrt(0.5)}
  assert {name: of[0] for name, of in found.items()} == pytest.approx(expected, abs=0.03)


def test_a_draw_without_a_value_may_lie_on_either_side():
  draws = np.concatenate([[0.5], np.linspace(0.1, 1, 1000)])
  sure = gradients.estimate(draws)
  assert sure.mean == 0.5 and 0.1 < sure.low < 0.15 and 0.95 < sure.high < 1 and sure.p == 1e-3
  draws[1:41] = np.nan
  unsure = gradients.estimate(draws)
  assert unsure.low == -np.inf and unsure.high == np.inf and unsure.p == pytest.approx(0.08)


def test_the_bootstrap_leaves_out_products_of_a_mini_batch_with_itself():
  values = np.random.default_rng(1).normal(size=(5, 3))
  weights = np.array([[2.0, 0, 1, 1, 1]])
  pairs = [(values[i] @ values[j], weights[0, i] * weights[0, j])
           for i, j in itertools.permutations(range(5), 2)]
  signal, noise = gradients.moments(values, weights)
  assert signal[0] == pytest.approx(sum(x * w for x, w in pairs) / sum(w for _, w in pairs))
  assert noise[0] == pytest.approx(weights[0] @ (values**2).sum(1) / 5 - signal[0])


def test_theorem_1_holds_where_the_whole_interval_lies_below_its_bound():
  intervals = [0.2, 0.1, 0.25, 0.0], [0.2, 0.1, 0.26, 0.0], [0.3, 0.26, 0.4, 0.0], [0.2, None, None, 0.0]
  assert [slate.bounded(of, 0.25) for of in intervals] == ['holds', 'undecided', 'does not hold', 'undecided']


def test_the_contrasts_of_the_plan_are_among_those_that_are_computed():
  draws = {figure: np.ones(3) for figure in ('noise over signal', 'towards')}
  for steps in (3, 4, 5):
    every = collections.defaultdict(lambda: draws)
    every['truncated, judge'] = {'noise over signal': np.full(3, 0.5), 'towards': np.full(3, 3.0)}
    found, k = slate.contrasts(every, steps, lambda of: 2.0 * of.k), slate.fewer(steps)[0]
    assert slate.primary(steps).keys() <= found.keys()
    assert found['truncation, judge: quieter'] == pytest.approx(np.log(2))
    assert found['truncation, judge: closer'] == pytest.approx(2)
    assert found[f'proposition 2, EM, k = {k}: quieter'] == pytest.approx(np.log(k / 5))


def test_the_ratio_of_advantage_variances():
  steps = np.array([[[[0, 2]], [[0, 2]]], [[[0, 2]], [[0, 0]]]], float)  # [Q,T,R,k]
  of = slate.Earned(steps, np.full((2, 1, 2), [0.0, 4]), np.array([[True, True], [True, False]]))
  found = slate.theorem(of, 0, np.ones((3, 2)))
  assert (found['all steps'][0], found['steps reached'][0]) == (0.1875, 0.25)


def test_fewer_alternatives_as_proposition_2_has_them():
  assert {steps: slate.fewer(steps) for steps in (2, 3, 4, 5)} == {2: [3], 3: [2], 4: [2], 5: [1, 2]}


@pytest.mark.slow
def test_the_study_from_beginning_to_end(tmp_path):
  settings = argparse.Namespace(policy='start', lengths='3', **slate.SIZES['small'])
  tables = slate.study(settings, tmp_path / 'slate.jsonl')
  assert tables.count('| start, T = 3, truncated, judge') >= 2 and 'undecided' in tables
  row, = (json.loads(line) for line in (tmp_path / 'slate.jsonl').read_text().splitlines())
  assert row['questions'] == 4 and 1 <= row['steps'] <= 3 and len(row['figures']) == 35
  assert all(of['noise over signal'][0] != 0 for of in row['figures'].values())
