"""The sampler over eight devices: two share the two key/value heads, so that there are four lanes."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.models.architecture import parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Generate, Score
from jaxsearch.trees.tree import Role, Tree
from tests.sampler.test_engine import PROMPTS, chains, run, tokens_of

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
LANES = dict(slots=8, prefill_lengths=(16,))  # few programs


@pytest.fixture(scope='module')
def split(config, params):
  """(mesh, parameters on it) as a trainer has them."""
  mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2)
  return mesh, jax.device_put(params, meshes.shardings(parameter_axes(config), parameter_shapes(config), mesh))


@pytest.fixture(scope='module')
def engine(make_engine, split):
  mesh, params = split
  return make_engine(mesh=mesh, params=params, **LANES)


def siblings(tree):
  """Three from one node, scores behind it, then on from one of the three."""
  node = tree.root.append('Doc 1: ' + PROMPTS[0] * 2, Role.PROMPT)
  *spans, scores = yield [*(Generate(node, max_tokens=6 + i) for i in range(3)), Score(node, ('yes', ' no no'))]
  tree.root.data['scores'] = [sum(score) for score in scores]
  yield Generate(spans[1].append(PROMPTS[1], Role.OBSERVATION), max_tokens=8)


def one_span(tree):
  yield Generate(tree.root.append(tree.question.question, Role.PROMPT), max_tokens=1)


def test_tokens_are_those_of_one_device(engine, make_engine):
  growths = chains(PROMPTS * 4, turns=3) + [siblings] * 5
  one, alone = run(make_engine(), growths)
  other, together = run(engine, growths)
  assert tokens_of(one) == tokens_of(other)
  np.testing.assert_allclose([tree.root.data['scores'] for tree in one[-5:]], [tree.root.data['scores'] for tree in other[-5:]],
                             atol=1e-3)
  assert together['episodes'] == 17 and together['tokens_decoded'] == alone['tokens_decoded']


def test_weights_of_8_bits_are_split_as_others(make_engine, split):
  mesh, params = split
  one, _ = run(make_engine(weights='int8'), chains(PROMPTS))
  other, _ = run(make_engine(mesh=mesh, params=params, weights='int8', **LANES), chains(PROMPTS))
  assert tokens_of(one) == tokens_of(other)


def test_siblings_compute_their_prefix_once(engine):
  (tree,), metrics = run(engine, [siblings])
  prefix = len(tree.nodes(Role.PROMPT)[0].tokens)
  assert metrics['tokens_reused'] >= 3 * (prefix - 1)
  assert metrics['tokens_prefilled'] < 2 * (prefix - 1)


@pytest.mark.parametrize(('groups', 'prefills'), [([6] * 4, [1] * 4), ([5, 5, 5, 5, 4], [1, 1, 1, 1, 4]), ([8], [4])])
def test_the_trees_of_a_question_share_a_lane_unless_another_would_be_idle(engine, groups, prefills):
  prompts = [f'Question {number}: which of them is it?' for number in range(len(groups))]
  questions = [Question(prompt, prompt, ()) for prompt, size in zip(prompts, groups) for _ in range(size)]
  trees = [Tree(engine.tokenizer, question) for question in questions]
  metrics = engine.run([(one_span(tree), tree) for tree in trees], jax.random.key(0))
  sizes = [len(engine.tokenizer.encode(prompt)) - 1 for prompt in prompts]
  assert metrics['tokens_prefilled'] == np.dot(sizes, prefills) and metrics['idle_share'] == 0
  assert metrics['tokens_reused'] == np.dot(sizes, np.subtract(groups, prefills))


@pytest.mark.parametrize(('heads', 'tensor', 'lanes'), [(2, 0, 4), (2, 1, 8), (8, 0, 1), (8, 2, 4), (8, 4, 2), (2, 4, 4)])
def test_a_lane_has_the_devices_that_it_is_given(config, split, heads, tensor, lanes):
  config = dataclasses.replace(config, num_heads=8, num_kv_heads=heads)
  tokenizer = types.SimpleNamespace(pieces=lambda size: [b''] * size, eos_ids=(), pad_id=0,
                                    check_fits=lambda size: None)
  assert Engine(config, tokenizer, slots=8, length=64, mesh=split[0], tensor=tensor).lanes == lanes


def test_slots_are_rounded_up_to_the_lanes(make_engine, split):
  mesh, params = split
  engine = make_engine(mesh=mesh, params=params, slots=3)
  assert engine.slots == 4 and len(engine.pools) == 4


def test_nothing_compiles_after_compile_all(engine, compiled):
  engine.compile_all(score=True)
  growths = chains(PROMPTS * 3, turns=3) + [siblings] * 3
  trees = [Tree(engine.tokenizer) for _ in growths]
  key = jax.random.key(3)
  compiled.clear()
  with jax.transfer_guard('disallow'):
    engine.run([(grow(tree), tree) for grow, tree in zip(growths, trees)], key)
  assert not compiled


def test_parameters_want_their_mesh(make_engine, split):
  with pytest.raises(ValueError, match='give the Engine their mesh'):
    make_engine(params=split[1])
