"""The arithmetic of benchmarks/variance.py against slow loops, and what its trees hold."""

import functools
import importlib.util
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.models.decoder import DecoderConfig, hidden_states, initial_params, logits
from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Generate
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import QUESTION, Letters

_FILE = pathlib.Path(__file__).parents[1] / 'benchmarks' / 'variance.py'
_SPEC = importlib.util.spec_from_file_location('benchmarks_variance', _FILE)
variance = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(variance)

SEARCH, ANSWER, BROKEN = '<think>a</think><search> x </search>', '<think>a</think><answer> x </answer>', '<think>a'
# What a policy says in two steps of three trajectories and two more siblings; the answer comes too early.
SAID = [BROKEN, ANSWER, SEARCH, SEARCH, BROKEN, SEARCH, ANSWER, BROKEN, SEARCH, ANSWER, SEARCH]
SCORES = {judge.Thinking: 1, judge.Query: 0, judge.Answer: 1}


def rewards(questions, k, steps, seed=0):
  """Ternary rewards of a policy that is better at some questions, and at later steps the noisier."""
  rng = np.random.default_rng(seed)
  spread = rng.normal(size=(questions, 1, 1)) + rng.normal(size=(questions, k, steps)) * np.arange(1, steps + 1)
  return np.clip(spread.round(), -1, 1)


def test_ratios_against_the_papers_sums():
  whole, siblings = rewards(7, 5, 3), rewards(7, 5, 3, seed=1).transpose(0, 2, 1)
  full, truncated = 0.0, np.zeros(3)
  for q in range(7):
    totals = [sum(whole[q, i]) for i in range(5)]
    full += sum((total - sum(totals) / 5) ** 2 for total in totals) / 5 / 7
    for t in range(3):
      truncated[t] += sum((r - sum(siblings[q, t]) / 5) ** 2 for r in siblings[q, t]) / 5 / 7
  np.testing.assert_allclose(variance.step_ratios(whole, siblings), truncated / full)


def test_independent_steps_give_one_over_t():
  rng = np.random.default_rng(0)
  whole, siblings = rng.normal(size=(4000, 5, 4)), rng.normal(size=(4000, 4, 5))
  np.testing.assert_allclose(variance.step_ratios(whole, siblings), 0.25, rtol=0.05)
  low, high = variance.interval(whole, siblings, rng, 500)
  assert low < 0.25 < high and high - low < 0.02
  np.testing.assert_allclose(variance.advantage_variance(siblings).mean(), 1 - 1 / 5, rtol=0.05)  # eq. 13
  assert variance.step_correlation(whole) == pytest.approx(0, abs=0.02)


def test_steps_that_go_together_lower_the_ratio_and_opposed_ones_raise_it():
  rng = np.random.default_rng(0)
  siblings, first = rng.normal(size=(4000, 2, 5)), rng.normal(size=(4000, 5))
  together, opposed = np.stack([first, first], -1), np.stack([first, -0.5 * first], -1)
  assert variance.step_ratios(together, siblings).mean() == pytest.approx(1 / 4, rel=0.05)
  assert variance.step_ratios(opposed, siblings).mean() == pytest.approx(4, rel=0.05)
  assert variance.step_correlation(together) == pytest.approx(1) and variance.step_correlation(opposed) == pytest.approx(-1)


def test_correlation_against_numpy_and_a_step_that_never_varies():
  whole = rewards(1, 40, 3)
  expected = np.corrcoef(whole[0].T)
  assert variance.step_correlation(whole) == pytest.approx(np.mean([expected[0, 1], expected[0, 2], expected[1, 2]]))
  whole[..., 2] = 1.0
  assert variance.step_correlation(whole) == pytest.approx(expected[0, 1] / 3)
  shifted = np.concatenate([whole, whole + 7.0])  # easy and hard questions are no correlation of steps
  assert variance.step_correlation(shifted) == pytest.approx(expected[0, 1] / 3)


def test_interval_is_the_percentiles_over_questions():
  whole, siblings = rewards(6, 5, 2), rewards(6, 5, 2, seed=1).transpose(0, 2, 1)
  rng, ratios = np.random.default_rng(3), []
  for drawn in np.random.default_rng(3).integers(6, size=(50, 6)):
    ratios.append(variance.step_ratios(whole[drawn], siblings[drawn]).mean())
  assert variance.interval(whole, siblings, rng, 50) == pytest.approx(np.quantile(ratios, [0.025, 0.975]).tolist())


@pytest.mark.parametrize('low, high, said', [(0.1, 0.2, 'holds'), (0.3, 0.4, 'fails'), (0.2, 0.3, 'open')])
def test_verdicts(low, high, said):
  assert variance.verdict(low, high, 0.25) == said


def drive(said, *, steps, k, stop=None):
  """Grows a tree for a policy that says these texts in turn; returns it and the nodes that were asked behind, by request."""
  tree, asked, reply = Tree(Letters(), QUESTION), [], None
  scores = lambda items: [SCORES[type(item)] for item in items]
  growth = variance.grow(QUESTION, tree, steps=steps, k=k, max_tokens=64, template='world', chat=False, judge=scores)
  while True:
    try:
      requests = growth.send(reply)
    except StopIteration:
      return tree, asked
    if requests and isinstance(requests[0], Generate):
      asked.append([request.node for request in requests])
      reply = [request.node.append(next(said), Role.POLICY) for request in requests]
      for node in reply:
        node.stop = stop
    else:
      reply = [[Document('1', 'Title', 'text')] for _ in requests]


def test_whole_trajectories_and_siblings_of_the_first():
  tree, asked = drive(iter([SEARCH, SEARCH, BROKEN, ANSWER, BROKEN, SEARCH]), steps=2, k=2)
  first, second = asked
  assert first == [tree.nodes(Role.PROMPT)[0]] * 3 and second[0] is second[2] and second[1] is not second[0]
  assert [node.role for node in second] == [Role.OBSERVATION] * 3 and 'text' in second[0].text
  search, answer, broken = 1 + 0, 1 + 1, 1 - 1  # no bonus: B = T
  assert tree.root.data['whole'].tolist() == [[search, answer], [search, broken]]
  assert tree.root.data['siblings'].tolist() == [[search, broken], [answer, search]]


def test_what_is_no_action_is_a_step_and_an_answer_before_the_last_is_drawn_again():
  tree, asked = drive(iter([BROKEN, ANSWER, SEARCH, ANSWER, SEARCH] + [ANSWER] * 3), steps=2, k=2)
  prompt, (_, again, once_more, last) = tree.nodes(Role.PROMPT)[0], asked
  assert again == once_more == [prompt] and tree.metrics['answers_refused'] == 2
  assert 'not a valid action' in last[0].text and 'text' in last[1].text
  assert tree.root.data['whole'].shape == (2, 2) and tree.stop is Stop.BUDGET


def test_the_weights_are_those_of_the_gradients():
  """Eq. 10: all actions of a trajectory by its total; eq. 11: each of the first k by its own reward. Nothing else has any."""
  tree, _ = drive(iter(SAID), steps=2, k=3)
  whole, siblings = tree.root.data['whole'], tree.root.data['siblings']
  for k, is_whole in ((3, True), (3, False), (2, False)):
    variance.weigh(tree, k, is_whole)
    spans = tree.root.data['spans' if is_whole else 'sibling_spans']
    expected = {}
    for step in range(2):
      earned = [sum(whole[i]) for i in range(3)] if is_whole else siblings[step][:k]
      expected |= {node: (value - sum(earned) / k) / (k - 1) for node, value in zip(spans[step], earned)}
    trained = {node: node.advantages for node in tree.nodes(Role.POLICY) if node.trained}
    assert trained == pytest.approx(expected) and len(trained) == 2 * k
  assert any(expected.values()) and len(tree.nodes(Role.POLICY)) == 11


def test_the_gradient_is_the_sum_of_weighted_scores():
  config = DecoderConfig(vocab_size=256, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2,
                         head_dim=8, tie_embeddings=True)
  params = initial_params(config, jax.random.key(0))
  tree, _ = drive(iter(SAID), steps=2, k=3)
  variance.weigh(tree, 2, False)

  @jax.jit
  def naive(params, path, start, size):
    scores = jax.nn.log_softmax(logits(params, hidden_states(config, params, path[None])[0]))
    place = jnp.arange(1, len(path))
    of_token = scores[place - 1, path[1:]]
    return jnp.sum(jnp.where((place >= start) & (place < size), of_token, 0))

  total = 0.0
  for node in (node for node in tree.nodes(Role.POLICY) if node.trained):
    path = node.path_tokens()
    grads = jax.grad(naive)(params, jnp.asarray(path + [0] * (1024 - len(path))), len(path) - len(node.tokens), len(path))
    total += node.advantages * np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
  grad = jax.jit(jax.grad(functools.partial(variance.objective, config=config)))
  found = variance.gradient(tree, grad, params, 0)
  np.testing.assert_allclose(found, total, atol=1e-4 * np.abs(total).max())
  assert np.abs(total).max() > 0 and len(tree.nodes(Role.POLICY)) == 11  # the tree is as it was


def test_noise_and_signal_are_unbiased():
  rng, mean, scale = np.random.default_rng(0), np.array([1.0, -2.0, 0.5]), np.array([0.5, 2.0, 1.0])
  pairs = [variance.noise_and_signal(*(mean + scale * rng.normal(size=(2, 3)))) for _ in range(20_000)]
  np.testing.assert_allclose(np.mean(pairs, axis=0), [np.square(scale).sum(), np.square(mean).sum()], rtol=0.05)


def test_proposition_2():
  assert [variance.enough(5, steps) for steps in (1, 2, 3, 4, 5)] == [5, 3, 2, 2, 2]
  whole, siblings = rewards(9, 6, 3), rewards(9, 6, 3, seed=1).transpose(0, 2, 1)
  lengths = np.random.default_rng(2).integers(5, 50, size=(2, 9, 3, 6))
  found = variance.proposition_2(whole, siblings, lengths[0], lengths[1], [0.1, 0.4])
  ratio = variance.step_ratios(whole, siblings).mean()
  assert found['k'] == 2 and found['variance'] == pytest.approx((ratio / 2) / (1 / 6), abs=1e-3)  # eq. 21
  assert found['interval'] == [0.3, 1.2] and found['bound'] == 'open'
  longer = sum(lengths[1, q, t, j] * 2 / 6 for q in range(9) for t in range(3) for j in range(6))
  assert found['tokens'] == pytest.approx(longer / lengths[0].sum(), abs=1e-3)
  same = variance.proposition_2(whole, siblings, np.full((9, 3, 6), 7), np.full((9, 3, 6), 7), [0.1, 0.2])
  assert same['tokens'] == pytest.approx(1 / 3, abs=1e-3) and same['bound'] == 'holds'  # eq. 23


def test_left_out_where_it_answers_for_ever_or_finds_no_room():
  tree, asked = drive(itertools.repeat(ANSWER), steps=2, k=2)
  assert not tree.root.data and tree.stop is Stop.ANSWERED and len(asked) == variance.DRAWS
  tree, _ = drive(itertools.repeat(SEARCH), steps=2, k=2, stop=Stop.CONTEXT_FULL)
  assert not tree.root.data and tree.stop is Stop.CONTEXT_FULL
