"""The training layout against its definition, written out slowly, and causal rows through a decoder."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsearch.models.decoder import Decoder, DecoderConfig, parameter_shapes, tree_mask
from jaxsearch.trees.layout import AGGREGATIONS, TrainingRows, lay_out, pack, take_back
from jaxsearch.trees.tree import Role, Tree

VOCAB = 40
PAD = 39


@st.composite
def trees(draw, max_nodes=9, max_span=4):
  """A random tree; spans may be empty, roles and credit are random, log-probabilities always captured."""
  tree = Tree(tokenizer=None)
  nodes = [tree.root]
  for _ in range(draw(st.integers(0, max_nodes))):
    size = draw(st.integers(0, max_span))
    role = draw(st.sampled_from([Role.PROMPT, Role.POLICY, Role.OBSERVATION]))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    logprobs = [-0.5 * (token + 1) for token in tokens] if role is Role.POLICY else None
    node = draw(st.sampled_from(nodes)).append(tokens, role, logprobs=logprobs)
    if role is Role.POLICY:
      per_token = np.arange(size) - 1.5
      node.advantages = per_token if draw(st.booleans()) else float(len(nodes))
      node.values, node.returns = per_token + 0.25, per_token - 0.25
    nodes.append(node)
  return tree


@hypothesis.given(st.lists(trees(), min_size=1, max_size=4))
@hypothesis.settings(deadline=None)
def test_what_is_computed_on_rows_comes_back_to_its_spans(forest):
  rows = lay_out(forest, 64, pad_id=PAD)
  values = np.random.default_rng(0).random(rows.tokens.shape, np.float32)
  take_back(rows, forest, values, 'values')
  again = lay_out(forest, 64, pad_id=PAD)
  trained = np.zeros(rows.tokens.shape, bool)
  for row, column in np.ndindex(rows.tokens.shape):
    if rows.tree_ids[row, column] >= 0:
      trained[row, column] = list(forest[rows.tree_ids[row, column]].walk())[rows.span_ids[row, column]].trained
  np.testing.assert_array_equal(again.values, np.where(trained, values, 0))


def chain(*sizes, seed=0):
  """A prompt, then policy and observation spans in turn, of the given sizes."""
  rng = np.random.default_rng(seed)
  tree = Tree(tokenizer=None)
  node = tree.root
  for index, size in enumerate(sizes):
    role = Role.PROMPT if index == 0 else Role.POLICY if index % 2 else Role.OBSERVATION
    node = node.append(rng.integers(0, VOCAB, size), role)
  return tree


def depth_first(node, ancestors=()):
  """(token, node, index in the node, ancestors) in layout order, by recursion."""
  entries = [(token, node, index, ancestors) for index, token in enumerate(node.tokens)]
  for child in node.children:
    entries += depth_first(child, (*ancestors, node))
  return entries


def forest_entries(rows, forest):
  """{(row, column): (tree, entry, start of the tree)}; each tree must be one stretch in its order."""
  entries = {}
  for index, tree in enumerate(forest):
    expected = depth_first(tree.root)
    where = np.argwhere(rows.tree_ids == index)
    assert len(where) == len(expected)
    for offset, entry in enumerate(expected):
      assert tuple(where[offset]) == (where[0][0], where[0][1] + offset)
      entries[tuple(map(int, where[offset]))] = (tree, entry, int(where[0][1]))
  return entries


forests = st.lists(trees(), min_size=1, max_size=5)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(forests)
def test_fields_follow_their_definition(forest):
  rows = lay_out(forest, 40, pad_id=PAD)
  entries = forest_entries(rows, forest)
  B, T = rows.tokens.shape
  for row, column in np.ndindex(B, T):
    here = {field: getattr(rows, field)[row, column] for field in rows._fields}
    if (row, column) not in entries:
      assert here == dict(tokens=PAD, positions=0, previous=column, visible_until=column + 1, loss_weights=0,
                          value_weights=0, advantages=0, old_logprobs=0, values=0, returns=0, tree_ids=-1, span_ids=-1)
      continue
    tree, (token, node, index, ancestors), start = entries[row, column]
    before = [t for ancestor in ancestors for t in ancestor.tokens] + node.tokens[:index]
    assert here['tokens'] == token
    assert here['positions'] == len(before)
    assert list(tree.walk())[here['span_ids']] is node
    advantage = 0 if node.advantages is None else np.broadcast_to(node.advantages, len(node.tokens))[index]
    assert here['advantages'] == advantage
    assert here['old_logprobs'] == (node.logprobs[index] if node.logprobs else 0)
    for field in ('values', 'returns'):
      assert here[field] == (0 if getattr(node, field) is None else getattr(node, field)[index])
    assert (here['loss_weights'] > 0) == (node.role is Role.POLICY and column > start)
    assert here['value_weights'] == here['loss_weights']  # of 'token-mean'
    if before:     # the previous token is the last one before it on the path, wherever it lies in the row
      _, (_, previous_node, previous_index, _), _ = entries[row, here['previous']]
      owner = node if index else next(ancestor for ancestor in reversed(ancestors) if ancestor.tokens)
      assert (previous_node, previous_index) == (owner, (index or len(owner.tokens)) - 1)
    else:
      assert here['previous'] == column


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(forests)
def test_a_token_sees_its_own_path_and_nothing_else(forest):
  rows = lay_out(forest, 40, pad_id=PAD)
  entries = forest_entries(rows, forest)
  B, T = rows.tokens.shape
  for row, i, j in np.ndindex(B, T, T):
    if (row, i) not in entries or (row, j) not in entries:
      expected = i == j
    else:
      tree, (_, node, index, ancestors), _ = entries[row, i]
      other_tree, (_, other, other_index, _), _ = entries[row, j]
      expected = tree is other_tree and (other in ancestors or (other is node and other_index <= index))
    assert (j <= i < rows.visible_until[row, j]) == expected


def test_dense_mask_of_the_attention_is_the_definition():
  visible_until = np.random.default_rng(0).integers(0, 9, (3, 8))
  expected = np.zeros((3, 8, 8), bool)
  for row, i, j in np.ndindex(expected.shape):
    expected[row, i, j] = j <= i < visible_until[row, j]
  np.testing.assert_array_equal(tree_mask(jnp.asarray(visible_until)), expected)


# Exactness: one program, one shape, for trees and for paths.

ROWS, LENGTH = 8, 40


@functools.cache
def decoder():
  """A jitted function: tokens, positions, visible_until [ROWS, LENGTH] -> log-probabilities [..., VOCAB]."""
  config = DecoderConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                         num_kv_heads=2, head_dim=8, qkv_bias=True, qk_norm=True)
  rng = np.random.default_rng(0)

  def draw(path, shape):     # far larger than an initialisation, so that the mask and the positions matter
    scale = 1.5 if 'norm' in path[-1].key else 0.3
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

  shapes = parameter_shapes(config)
  model = Decoder(config, params=jax.tree.map_with_path(draw, shapes, is_leaf=lambda s: isinstance(s, tuple)))
  return jax.jit(lambda *rows: jax.nn.log_softmax(model(*rows)))


def padded(rows):
  """ROWS rows, the last of them padding."""
  padding = lay_out([], LENGTH, pad_id=PAD)
  return TrainingRows(*(np.concatenate([own, *[blank] * (ROWS - len(own))]) for own, blank in zip(rows, padding)))


def logprobs_on_layout(rows):
  """{(tree, node in walk order, index in the node): log-probability}, read through `previous`."""
  values = np.asarray(decoder()(rows.tokens, rows.positions, rows.visible_until))
  result, within = {}, {}
  for row, column in np.argwhere(rows.tree_ids >= 0):
    key = (int(rows.tree_ids[row, column]), int(rows.span_ids[row, column]))
    index = within[key] = within.get(key, -1) + 1
    if rows.previous[row, column] != column:
      result[(*key, index)] = values[row, rows.previous[row, column], rows.tokens[row, column]]
  return result


def logprobs_on_paths(forest):
  """The same from each root-to-leaf path alone, a plain causal row; a shared token has a value per path."""
  result = {}
  paths = [(index, leaf.path()) for index, tree in enumerate(forest) for leaf in tree.leaves()]
  positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
  for first in range(0, len(paths), ROWS):
    tokens = np.full((ROWS, LENGTH), PAD)
    for row, (_, path) in enumerate(paths[first:first + ROWS]):
      tokens[row, :path[-1].length] = path[-1].path_tokens()
    values = np.asarray(decoder()(tokens, positions, np.full((ROWS, LENGTH), LENGTH)))
    for row, (tree, path) in enumerate(paths[first:first + ROWS]):
      order = list(forest[tree].walk())
      places = [(order.index(node), index) for node in path for index in range(len(node.tokens))]
      for t, place in enumerate(places[1:], start=1):
        result.setdefault((tree, *place), []).append(values[row, t - 1, tokens[row, t]])
  return result


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.lists(trees(), min_size=1, max_size=5))
def test_every_branch_has_the_logprobs_of_its_path_run_alone(forest):
  rows = lay_out(forest, LENGTH, pad_id=PAD)
  hypothesis.assume(len(rows.tokens) <= ROWS)
  rows = padded(rows)
  on_layout, on_paths = logprobs_on_layout(rows), logprobs_on_paths(forest)
  assert on_layout.keys() == on_paths.keys()
  for place, values in on_paths.items():
    np.testing.assert_allclose(values, on_layout[place], rtol=0, atol=1e-5)


def test_exactness_would_notice_a_wrong_mask_or_position():
  tree = chain(5, 6)
  tree.root.children[0].append([3, 1, 4, 1, 5], Role.POLICY)
  rows = padded(lay_out([tree], LENGTH, pad_id=PAD))
  right = logprobs_on_layout(rows)
  index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), rows.tokens.shape)
  for wrong in (rows._replace(visible_until=np.full_like(index, LENGTH)), rows._replace(positions=index)):
    changed = logprobs_on_layout(wrong)
    assert max(abs(changed[place] - right[place]) for place in right) > 1e-2


# Packing.


def test_packing_is_first_fit_decreasing():
  assert pack([3, 7, 5, 3, 2, 10], 10) == [[5], [1, 0], [2, 3, 4]]
  assert pack([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]
  assert pack([0, 6, 0], 8) == [[1]]
  assert pack([], 8) == []


@hypothesis.given(st.lists(st.integers(0, 30), max_size=60))
def test_packing_places_everything_once_and_overfills_no_row(sizes):
  rows = pack(sizes, 30)
  assert sorted(index for row in rows for index in row) == [index for index, size in enumerate(sizes) if size]
  totals = [sum(sizes[index] for index in row) for row in rows]
  assert all(0 < total <= 30 for total in totals)
  # No two rows could be merged: first fit leaves at most one row half empty.
  assert sum(total <= 15 for total in totals) <= 1


@pytest.mark.parametrize('seed', range(3))
def test_realistic_batches_fill_their_rows(seed):
  rng = np.random.default_rng(seed)
  # Search agents: a prompt, then up to four turns of thought and observation, cut off at the context length.
  forest = []
  for _ in range(320):
    turns = rng.integers(1, 5)
    spans = np.stack([rng.integers(20, 200, turns), rng.integers(200, 500, turns)], axis=1).ravel()
    forest.append(chain(rng.integers(100, 160), *spans[:-1]))
  assert lay_out(forest, 4096, pad_id=PAD).fill > 0.9
  small = [chain(12, *rng.integers(10, 60, rng.integers(1, 6))) for _ in range(64)]
  assert lay_out(small, 512, pad_id=PAD).fill > 0.9


def test_nothing_to_lay_out_is_a_row_of_padding():
  for forest in ([], [chain(0)]):
    rows = lay_out(forest, 8, pad_id=PAD)
    assert (rows.tokens == PAD).all() and (rows.loss_weights == 0).all() and rows.fill == 0 and rows.tokens.shape == (1, 8)
  assert lay_out([chain(4, 2)], 8, pad_id=PAD).fill == 6 / 8


def test_a_tree_that_does_not_fit_is_named():
  with pytest.raises(ValueError, match='tree 1 has 13 tokens, more than the 12'):
    lay_out([chain(4, 4), chain(4, 4, 5)], 12, pad_id=PAD)


def test_the_same_forest_gives_the_same_rows():
  forest = [chain(4, seed % 3 + 1, 2, seed=seed) for seed in range(20)]
  first, second = (lay_out(forest, 16, pad_id=PAD) for _ in range(2))
  for one, other in zip(first, second):
    np.testing.assert_array_equal(one, other)
    assert one.dtype in (np.int32, np.float32)


def test_rows_are_a_pytree():
  rows = lay_out([chain(2, 2)], 8, pad_id=PAD)
  assert [leaf.shape for leaf in jax.tree.leaves(rows)] == [(1, 8)] * len(rows._fields)


# Loss weights.


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(forests, st.sampled_from(AGGREGATIONS))
def test_weights_are_the_average_they_name(forest, how):
  losses = [np.random.default_rng(index).normal(size=tree.count()) for index, tree in enumerate(forest)]
  trained = [[i > 0 and node.role is Role.POLICY for i, (_, node, _, _) in enumerate(depth_first(tree.root))]
             for tree in forest]
  picked = [[loss for loss, mask in zip(*pair) if mask] for pair in zip(losses, trained)]
  picked = [sequence for sequence in picked if sequence]
  if not picked:
    expected = 0
  elif how == 'token-mean':
    expected = np.mean(np.concatenate(picked))
  elif how == 'span-mean':     # over a span's tokens, over all spans
    owners = [[node for _, node, _, _ in depth_first(tree.root)] for tree in forest]
    spans = [[x for x, m, owner in zip(*own) if m and owner is node]
             for tree, *own in zip(forest, losses, trained, owners) for node in tree.walk()]
    expected = np.mean([np.mean(span) for span in spans if span])
  elif how == 'step-mean':     # over a span's tokens, over the siblings of a step; summed over steps, averaged over trees
    expected = 0
    for tree, loss, mask in zip(forest, losses, trained):
      owners = [node for _, node, _, _ in depth_first(tree.root)]
      for node in tree.walk():
        own = [x for x, m, owner in zip(loss, mask, owners) if m and owner is node]
        siblings = sum(child.trained and len(child.tokens) > 0 for child in node.parent.children) if node.parent else 0
        expected += np.mean(own) / siblings / len(picked) if own else 0
  else:
    reduce = np.mean if how == 'seq-mean-token-mean' else np.sum
    expected = np.mean([reduce(sequence) for sequence in picked])
  for length in (40, 64, 256):     # however it is packed
    rows = lay_out(forest, length, pad_id=PAD, how=how)
    total = sum((rows.loss_weights[rows.tree_ids == index] * loss).sum() for index, loss in enumerate(losses))
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
    if how in ('token-mean', 'span-mean', 'seq-mean-token-mean') and picked:
      np.testing.assert_allclose(rows.loss_weights.sum(), 1, rtol=1e-5)


def test_the_critic_has_weights_of_its_own_for_step_mean_alone():
  for how in AGGREGATIONS:
    rows = lay_out([chain(3, 2, 4, 3), chain(2, 2)], 16, pad_id=PAD, how=how)
    assert np.array_equal(rows.loss_weights, rows.value_weights) == (how != 'step-mean')
  np.testing.assert_allclose(lay_out([chain(3, 2, 4, 3)], 12, pad_id=PAD, how='span-mean').loss_weights[0],
                             [0] * 3 + [1 / 4] * 2 + [0] * 4 + [1 / 6] * 3)


def test_weights_do_not_depend_on_packing_to_the_bit():
  forest = [chain(5, seed % 4 + 1, 3, 2, seed=seed) for seed in range(12)]
  for how in AGGREGATIONS:
    narrow, wide = (lay_out(forest, length, pad_id=PAD, how=how) for length in (16, 64))
    for index in range(len(forest)):
      np.testing.assert_array_equal(narrow.loss_weights[narrow.tree_ids == index],
                                    wide.loss_weights[wide.tree_ids == index])


def test_the_mask_comes_from_what_is_trained_not_from_the_role():
  tree = chain(3, 2, 2, 2)
  prompt, first, observation, second = list(tree.walk())[1:]
  first.trained, observation.trained = False, True
  rows = lay_out([tree], 12, pad_id=PAD)
  np.testing.assert_allclose(rows.loss_weights[0], [0] * 5 + [1 / 4] * 4 + [0] * 3)


def test_the_first_token_of_a_tree_bears_no_loss():
  tree = Tree(tokenizer=None)
  tree.root.append([], Role.PROMPT).append([5, 6, 7], Role.POLICY).append([8], Role.POLICY)
  rows = lay_out([tree], 6, pad_id=PAD)
  np.testing.assert_allclose(rows.loss_weights[0], [0, 1 / 3, 1 / 3, 1 / 3, 0, 0], rtol=1e-6)


def test_an_unknown_average_is_named():
  with pytest.raises(ValueError, match="'mean'.*token-mean"):
    lay_out([chain(2, 2)], 8, pad_id=PAD, how='mean')


@pytest.mark.parametrize('field', ['advantages', 'logprobs'])
def test_credit_that_only_some_spans_have_is_refused(field):
  tree = chain(2, 2, 2, 2)
  policy = tree.nodes(Role.POLICY)
  setattr(policy[0], field, [0.5, 0.5])
  with pytest.raises(ValueError, match=f'1 of 2 trained spans have no {field}'):
    lay_out([tree], 8, pad_id=PAD)
  policy[1].trained = False
  rows = lay_out([tree], 8, pad_id=PAD)
  values = rows.advantages if field == 'advantages' else rows.old_logprobs
  np.testing.assert_array_equal(values[0], [0, 0, 0.5, 0.5, 0, 0, 0, 0])


@pytest.mark.parametrize('field', ['advantages', 'logprobs'])
def test_per_token_values_must_match_their_span(field):
  tree = chain(2, 3)
  setattr(tree.nodes(Role.POLICY)[0], field, [0.5])     # NumPy alone would spread it over the span
  with pytest.raises(ValueError, match=f'{field} .*policy span of 3 tokens'):
    lay_out([tree], 8, pad_id=PAD)
