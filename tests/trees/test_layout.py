"""The training layout against its definition, written out slowly, and causal rows through a decoder."""

import collections
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.models.architecture import DecoderConfig, parameter_shapes
from jaxsearch.models.attention import tree_mask
from jaxsearch.models.decoder import Decoder
from jaxsearch.trees.layout import AGGREGATIONS, lay_out, loss_weights, pack, take_back
from jaxsearch.trees.tree import Role, Tree

VOCAB = 40
PAD = 39


@st.composite
def trees(draw, max_nodes=9, max_span=4, vocab=3):
  """A random tree of one of two questions, or of none; spans may be empty, roles and credit are random.

  There are few tokens, so that trees have much in common. A log-probability is a function of the path up to
  its token.
  """
  questions = [None, Question('1', '?', ('a',)), Question('2', '?', ('a',))]
  tree = Tree(tokenizer=None, question=draw(st.sampled_from(questions)))
  nodes = [tree.root]
  for _ in range(draw(st.integers(0, max_nodes))):
    size = draw(st.integers(0, max_span))
    role = draw(st.sampled_from([Role.PROMPT, Role.POLICY, Role.OBSERVATION]))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    parent = draw(st.sampled_from(nodes))
    path = parent.path_tokens() + tokens
    logprobs = [-0.1 * sum(path[:end]) for end in range(len(path) - size + 1, len(path) + 1)]
    node = parent.append(tokens, role, sampler_logprobs=logprobs if role is Role.POLICY else None)
    if role is Role.POLICY:
      per_token = np.arange(size) - 1.5
      node.advantages = per_token if draw(st.booleans()) else float(draw(st.integers(-3, 3)))
      node.values, node.returns = per_token + 0.25, per_token * len(nodes)
    nodes.append(node)
  return tree


def path_in_row(rows, row, column):
  """Row indices of the path to a token, read through `previous`."""
  path = [column]
  while rows.previous[row, path[-1]] != path[-1]:
    path.append(int(rows.previous[row, path[-1]]))
  return path[::-1]


def arrays(rows):
  return {name: value for name, value in vars(rows).items() if name != 'places'}


def chain(*sizes, seed=0):
  """A prompt, then policy and observation spans in turn, of the given sizes."""
  rng = np.random.default_rng(seed)
  tree = Tree(tokenizer=None)
  node = tree.root
  for index, size in enumerate(sizes):
    role = Role.PROMPT if index == 0 else Role.POLICY if index % 2 else Role.OBSERVATION
    node = node.append(rng.integers(0, VOCAB, size), role)
  return tree


forests = st.lists(trees(), min_size=1, max_size=5)


def trained_paths(forest):
  """The path to each trained span that has none below it."""
  trained = lambda node: node.trained and node.tokens
  return [[above for above in node.path() if above.tokens] for tree in forest for node in tree.walk()
          if trained(node) and not any(below is not node and trained(below) for below in node.walk())]


def tokens_of(path):
  return [token for node in path for token in node.tokens]


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(forests, st.booleans(), st.booleans(), st.sampled_from([40, 64, 256]))
def test_every_token_lies_behind_its_path_and_sees_nothing_else(forest, share_trained, chains, length):
  rows = lay_out(forest, length, pad_id=PAD, share_trained=share_trained, chains=chains)
  if chains:  # a kernel that takes `visible_until` for numbers of chains sees the same
    assert rows.real.sum() == sum(len(tokens_of(path)) for path in trained_paths(forest))
    same = rows.visible_until[:, :, None] == rows.visible_until[:, None]
    np.testing.assert_array_equal(tree_mask(rows.visible_until), np.tril(same))
  laid_out = {node for path in trained_paths(forest) for node in path}
  assert set(rows.places) == laid_out
  for node in laid_out:
    row, columns = rows.places[node]
    path = path_in_row(rows, row, columns[-1])
    assert rows.tokens[row, path].tolist() == node.path_tokens()
    assert path[-len(node.tokens):] == columns.tolist()
  for row, i in np.ndindex(rows.tokens.shape):
    seen = [j for j in range(length) if j <= i < rows.visible_until[row, j]]
    if rows.real[row, i]:
      path = path_in_row(rows, row, i)
      assert seen == path and rows.positions[row, i] == len(path) - 1
    else:
      own = {name: value[row, i] for name, value in arrays(rows).items()}
      padding = {'tokens': PAD, 'previous': i, 'visible_until': i + 1}
      assert seen == [i] and own == dict.fromkeys(own, 0) | padding


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(forests)
def test_what_the_trees_of_a_question_have_in_common_is_there_once(forest):
  rows = lay_out(forest, 256, pad_id=PAD)
  id_of = lambda tree: tree if tree.question is None else tree.question.id
  beginnings = {(id_of(path[-1].tree), *tokens_of(path)[:end]) for path in trained_paths(forest) if path
                for end in range(1, len(tokens_of(path)) + 1)}
  assert rows.real.sum() == len(beginnings)
  apart = lay_out(forest, 256, pad_id=PAD, share_trained=False)
  assert rows.real.sum() <= apart.real.sum() <= sum(len(tokens_of(path)) for path in trained_paths(forest))
  owners = collections.defaultdict(set)
  for node, (row, columns) in apart.places.items():
    for column in columns if node.trained else ():
      owners[row, column].add(node)
  assert all(len(own) == 1 for own in owners.values())


NAMES = ('spans', 'loss_weights', 'gains', 'losses', 'sampler_logprobs', 'value_weights', 'values', 'returns')


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(forests, st.sampled_from(AGGREGATIONS), st.sampled_from([40, 64, 256]))
def test_credit_adds_up_over_the_spans_that_share_a_token(forest, how, length):
  rows = lay_out(forest, length, pad_id=PAD, how=how)
  expected = collections.defaultdict(lambda: dict.fromkeys(NAMES, 0.0))
  for node, weights in loss_weights(forest, how).items():
    row, columns = rows.places[node]
    advantages = np.broadcast_to(node.advantages, len(node.tokens))
    for index, (weight, value_weight) in enumerate(zip(*weights)):
      if weight:
        credit = (1, weight, weight * max(advantages[index], 0), weight * max(-advantages[index], 0),
                  node.sampler_logprobs[index], value_weight,
                  value_weight * node.values[index], value_weight * node.returns[index])
        for name, value in zip(NAMES, credit):
          expected[row, columns[index]][name] += value
  for (row, column), at in expected.items():
    at['sampler_logprobs'] /= at['spans'] or 1
    for name in ('values', 'returns'):
      at[name] /= at['value_weights'] or 1
    for name, value in at.items():
      np.testing.assert_allclose(getattr(rows, name)[row, column], value, rtol=1e-5, atol=1e-6, err_msg=name)
  assert (rows.spans > 0).sum() == sum(at['spans'] > 0 for at in expected.values())


@hypothesis.given(forests)
@hypothesis.settings(deadline=None)
def test_what_is_computed_on_rows_comes_back_to_its_spans(forest):
  rows = lay_out(forest, 64, pad_id=PAD)
  values = np.random.default_rng(0).random(rows.tokens.shape, np.float32)
  take_back(rows, forest, values, 'values')
  for node in itertools.chain(*(tree.walk() for tree in forest)):
    if node.trained and node.tokens:
      row, columns = rows.places[node]
      np.testing.assert_array_equal(node.values, values[row, columns])


# Exactness: one program, one shape, for trees and for paths.

ROWS, LENGTH = 8, 40


@functools.cache
def decoder():
  """A jitted function: tokens, positions, visible_until [ROWS, LENGTH] -> log-probabilities [..., VOCAB]."""
  config = DecoderConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                         num_kv_heads=2, head_dim=8, qkv_bias=True, qk_norm=True)
  rng = np.random.default_rng(0)

  def draw(path, shape):  # far larger than an initialisation, so that the mask and the positions matter
    scale = 1.5 if 'norm' in path[-1].key else 0.3
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

  shapes = parameter_shapes(config)
  model = Decoder(config, params=jax.tree.map_with_path(draw, shapes, is_leaf=lambda s: isinstance(s, tuple)))
  return jax.jit(lambda *rows: jax.nn.log_softmax(model(*rows)))


def logprobs_on_rows(rows, **changes):
  """{(row, column): log-probability} of all tokens that follow another, read through `previous`."""
  given = {name: getattr(rows, name) for name in ('tokens', 'positions', 'visible_until')} | changes
  blank = arrays(lay_out([], LENGTH, pad_id=PAD))
  full = [np.concatenate([own, *[blank[name]] * (ROWS - len(own))]) for name, own in given.items()]
  values = np.asarray(decoder()(*full))
  return {(row, column): values[row, rows.previous[row, column], rows.tokens[row, column]]
          for row, column in np.argwhere(rows.real).tolist() if rows.previous[row, column] != column}


def assert_exact(forest, rows):
  """Every span has the log-probabilities of its path as a plain causal row."""
  found = logprobs_on_rows(rows)
  paths = [(tokens_of(path), path) for path in trained_paths(forest)]
  positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
  for first in range(0, len(paths), ROWS):
    tokens = np.full((ROWS, LENGTH), PAD)
    for row, (own, _) in enumerate(paths[first:first + ROWS]):
      tokens[row, :len(own)] = own
    values = np.asarray(decoder()(tokens, positions, np.full((ROWS, LENGTH), LENGTH)))
    for row, (_, path) in enumerate(paths[first:first + ROWS]):
      spans = [rows.places[node] for node in path]
      places = [(row, column) for row, columns in spans for column in columns.tolist()]
      for t, place in enumerate(places[1:], start=1):
        np.testing.assert_allclose(found[place], values[row, t - 1, tokens[row, t]], rtol=0, atol=1e-5)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(forests, st.booleans(), st.booleans())
def test_every_branch_has_the_logprobs_of_its_path_run_alone(forest, share_trained, chains):
  rows = lay_out(forest, LENGTH, pad_id=PAD, share_trained=share_trained, chains=chains)
  hypothesis.assume(len(rows.tokens) <= ROWS)
  assert_exact(forest, rows)


def test_a_trie_larger_than_a_row_is_split_at_a_branch():
  tree = chain(10)
  for sibling in range(4):
    tree.root.children[0].append([sibling] * 8, Role.POLICY, sampler_logprobs=[-1.0] * 8).advantages = 1.0
  whole, split = (lay_out([tree], length, pad_id=PAD) for length in (LENGTH + 2, 28))
  assert whole.real.sum() == 42
  assert split.tokens.shape == (2, 28) and split.real.sum() == 52  # the prompt twice
  for rows in (whole, split):
    assert rows.loss_weights.sum() == pytest.approx(1) and rows.spans.sum() == 32
  assert_exact([tree], lay_out([tree], LENGTH, pad_id=PAD))


# Packing.


def test_packing_is_first_fit_decreasing():
  assert pack([3, 7, 5, 3, 2, 10], 10) == [[5], [1, 0], [2, 3, 4]]
  assert pack([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]
  assert pack([0, 6, 0], 8) == [[1]]
  assert pack([], 8) == []


def test_nothing_to_lay_out_is_a_row_of_padding():
  for forest in ([], [chain(0)]):
    rows = lay_out(forest, 8, pad_id=PAD)
    assert rows.tokens.tolist() == [[PAD] * 8] and (rows.loss_weights == 0).all() and not rows.real.any()
  assert lay_out([chain(4, 2)], 8, pad_id=PAD).real.mean() == 6 / 8


def test_a_path_that_does_not_fit_is_an_error():
  with pytest.raises(ValueError, match='a path has 13 tokens, more than the 12'):
    lay_out([chain(4, 4), chain(4, 4, 4, 1)], 12, pad_id=PAD)


# Loss weights.


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(forests, st.sampled_from(AGGREGATIONS))
def test_weights_are_the_average_they_name(forest, how):
  rng = np.random.default_rng(0)
  losses = {}  # of the trained tokens of each span
  for tree in forest:
    nodes = [node for node in tree.walk() if node.tokens]
    for node in nodes:
      if node.role is Role.POLICY and len(node.tokens) > (node is nodes[0]):
        losses[node] = rng.normal(size=len(node.tokens) - (node is nodes[0]))
  of_trees = [own for tree in forest if (own := [losses[node] for node in tree.walk() if node in losses])]
  if not losses:
    expected = 0
  elif how == 'token-mean':
    expected = np.mean(np.concatenate(list(losses.values())))
  elif how == 'span-mean':
    expected = np.mean([span.mean() for span in losses.values()])
  elif how == 'step-mean':  # over the siblings of a step; summed over steps, averaged over trees
    siblings = lambda node: sum(child.trained and len(child.tokens) > 0 for child in node.parent.children)
    expected = sum(span.mean() / siblings(node) for node, span in losses.items()) / len(of_trees)
  else:
    reduce = np.mean if how == 'seq-mean-token-mean' else np.sum
    expected = np.mean([reduce(np.concatenate(own)) for own in of_trees])
  weights = {node: policy[-len(losses[node]):] for node, (policy, _) in loss_weights(forest, how).items()}
  total = sum((weights[node] * span).sum() for node, span in losses.items())
  np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
  critic = {node: own[-len(losses[node]):] for node, (_, own) in loss_weights(forest, how).items()}
  if how == 'step-mean' and losses:  # the states before the steps of a tree, averaged over trees
    expected = np.mean([np.mean([span[0] for span in own]) for own in of_trees])
  total = sum((critic[node] * span).sum() for node, span in losses.items())
  np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
  for length in (40, 256):  # however it is packed
    rows = lay_out(forest, length, pad_id=PAD, how=how)
    np.testing.assert_allclose(rows.loss_weights.sum(), sum(own.sum() for own in weights.values()), rtol=1e-5)
    if how in ('token-mean', 'span-mean', 'seq-mean-token-mean') and losses:
      np.testing.assert_allclose(rows.loss_weights.sum(), 1, rtol=1e-5)


def test_the_mask_comes_from_what_is_trained_not_from_the_role():
  tree = chain(3, 2, 2, 2)
  prompt, first, observation, second = list(tree.walk())[1:]
  first.trained, observation.trained = False, True
  rows = lay_out([tree], 12, pad_id=PAD)
  np.testing.assert_allclose(rows.loss_weights[0], [0] * 5 + [1 / 4] * 4 + [0] * 3)


def test_a_chain_is_a_sequence_and_where_trees_branch_each_span_is_one():
  """Of the trees of one question, whose prompt is there once, in one row and split over two."""
  forest = []
  for branches in (1, 2, 1):
    tree = Tree(None, Question('1', '?', ('a',)))
    first = tree.root.append([1, 2], Role.PROMPT).append([3, 4], Role.POLICY)
    for _ in range(branches):
      first.append([5], Role.OBSERVATION).append([6, 7, 8], Role.POLICY)
    forest.append(tree)
  for length in (40, 16):
    rows = lay_out(forest, length, pad_id=0, share_trained=False)
    names = [[{(rows.places[node][0], name) for name in rows.sequences[rows.places[node]].tolist()}
              for node in tree.nodes(Role.POLICY)] for tree in forest]
    assert all(len(name) == 1 for of_tree in names for name in of_tree)
    numbers = [[next(iter(name)) for name in of_tree] for of_tree in names]
    assert [len(set(of_tree)) for of_tree in numbers] == [1, 3, 1]
    assert len({name for of_tree in numbers for name in of_tree}) == 5


@pytest.mark.parametrize('chains', [False, True])
def test_a_chain_is_one_sequence_beside_what_is_not_trained(chains):
  """As Search-R2's is without its reviews; with another tree of the question a row holds its beginning alone."""
  question = Question('1', '?', ('a',))
  other, tree = (Tree(None, question) for _ in range(2))
  other.root.append([1, 2], Role.PROMPT).append([0] * 4, Role.POLICY)
  first = tree.root.append([1, 2], Role.PROMPT).append([3, 4], Role.POLICY)
  for _ in range(2):
    first.append([4], Role.OBSERVATION).append([9], Role.POLICY).trained = False
  last = first.append([5], Role.OBSERVATION).append([6, 7, 8], Role.POLICY)
  rows = lay_out([other, tree], 11, pad_id=0, share_trained=False, chains=chains)
  assert rows.places[first][0] == rows.places[last][0] and rows.real.sum() == 6 + 8
  assert {rows.sequences[rows.places[node]].tolist()[0] for node in (first, last)} == {rows.places[first][1][0]}


def test_an_unknown_average_is_named():
  with pytest.raises(ValueError, match="'mean'.*token-mean"):
    lay_out([chain(2, 2)], 8, pad_id=PAD, how='mean')


@pytest.mark.parametrize('field', ['advantages', 'sampler_logprobs'])
def test_credit_that_only_some_spans_have_is_refused(field):
  tree = chain(2, 2, 2, 2)
  policy = tree.nodes(Role.POLICY)
  setattr(policy[0], field, [0.5, 0.5])
  with pytest.raises(ValueError, match=f'1 of 2 trained spans have no {field}'):
    lay_out([tree], 8, pad_id=PAD)
  policy[1].trained = False
  rows = lay_out([tree], 8, pad_id=PAD)
  values = rows.gains if field == 'advantages' else rows.sampler_logprobs
  np.testing.assert_array_equal(values[0], [0, 0, *[0.25 if field == 'advantages' else 0.5] * 2, 0, 0, 0, 0])


@pytest.mark.parametrize('field', ['advantages', 'sampler_logprobs'])
def test_per_token_values_must_match_their_span(field):
  tree = chain(2, 3)
  setattr(tree.nodes(Role.POLICY)[0], field, [0.5])  # NumPy alone would spread it over the span
  with pytest.raises(ValueError, match=f'{field} .*policy span of 3 tokens'):
    lay_out([tree], 8, pad_id=PAD)
