"""From trees to training rows.

A forest is laid out depth first in rows of T tokens, with four integers per token that say all there is:

  tokens[B, T]
  positions[B, T]      tokens before it on its own path (the RoPE position, not the index in the row)
  previous[B, T]       row index of the token that it follows on its path: the hidden state there predicts it
  visible_until[B, T]  end (exclusive, row index) of the subtree of its span:
                       token i sees token j iff j <= i < visible_until[j]

Depth-first order makes every subtree one stretch of the row, so a single integer per key is the mask of
packing, of trees and of causal rows at once (`models.decoder.tree_mask`), and a prefix that branches
share is computed once. Beside them lie the loss weights. They are decided here, over the whole forest, and
the loss is the plain sum of `loss_weights * per-token loss`: neither packing nor micro-batches can change a
gradient.

Everything here is NumPy on the host. B: rows, T: tokens in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsearch.trees.tree import Node, Tree

PER_TOKEN = {'advantages': 'advantages', 'logprobs': 'old_logprobs', 'values': 'values', 'returns': 'returns'}  # node -> rows
AGGREGATIONS = ('token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean')


class TrainingRows(NamedTuple):
  """Training rows, each field [B, T]; as a named tuple it is also a JAX pytree.

  A padding token sees itself alone (an attention row that sees nothing has no softmax), is seen by no other,
  follows itself and weighs nothing.
  """
  tokens: np.ndarray         # int32, pad_id on padding
  positions: np.ndarray      # int32, 0 on padding
  previous: np.ndarray       # int32, row index; its own on padding and at the first token of a tree
  visible_until: np.ndarray  # int32, row index, exclusive; own index + 1 on padding
  loss_weights: np.ndarray   # float32, 0 wherever there is no loss
  value_weights: np.ndarray  # float32, the same for the critic's loss
  advantages: np.ndarray     # float32, 0 where a span has none
  old_logprobs: np.ndarray   # float32, captured while sampling, 0 where a span has none
  values: np.ndarray         # float32, of the critic that the rollouts met, 0 where a span has none
  returns: np.ndarray        # float32, what the critic is to learn, 0 where a span has none
  tree_ids: np.ndarray       # int32, index in the forest; -1 on padding
  span_ids: np.ndarray       # int32, index of the node in `tree.walk()`; -1 on padding

  @property
  def fill(self) -> float:
    """Share of tokens that are not padding."""
    return float((self.tree_ids >= 0).mean())


def lay_out(forest: Sequence[Tree], length: int, *, pad_id: int, rows_multiple: int = 1,
            how: str = 'token-mean') -> TrainingRows:
  """Packs trees into rows, first-fit decreasing; the result depends on its arguments alone.

  Args:
    forest: the trees of the whole batch. No tree is split over two rows.
    length: T. A tree of more tokens is an error.
    pad_id: token that fills the rows up.
    rows_multiple: B is rounded up to a multiple of it with rows of padding, at least one multiple.
    how: the average that the loss weights stand for, see `loss_weights`.
  Returns:
    `TrainingRows` of [B, T].
  Raises:
    ValueError: a tree longer than `length`, an unknown `how`, per-token values that do not match their span,
      or advantages (log-probabilities, values, returns) present in some trained spans and absent in others.
  """
  rows_of_trees = pack([tree.count() for tree in forest], length)
  nodes = [list(tree.walk()) for tree in forest]
  _check_all_or_none([node for tree_nodes in nodes for node in tree_nodes if node.trained and node.tokens])
  masks = [loss_mask(tree_nodes) for tree_nodes in nodes]
  weights, value_weights = step_weights(nodes, masks) if how == 'step-mean' else [loss_weights(masks, how)] * 2
  num_rows = max(1, -(-len(rows_of_trees) // rows_multiple)) * rows_multiple
  rows = _padding(num_rows, length, pad_id)
  for row, indices in enumerate(rows_of_trees):
    start = 0
    for index in indices:
      size = len(weights[index])
      _place(rows, row, start, nodes[index])
      rows.loss_weights[row, start:start + size] = weights[index]
      rows.value_weights[row, start:start + size] = value_weights[index]
      rows.tree_ids[row, start:start + size] = index
      start += size
  return rows


def take_back(rows: TrainingRows, forest: Sequence[Tree], values: np.ndarray, field: str) -> None:
  """Writes per-token values [B, T] of laid-out rows onto `field` of the trained spans they belong to, an array for each."""
  nodes = [list(tree.walk()) for tree in forest]
  owners = np.stack([rows.tree_ids, rows.span_ids], -1).reshape(-1, 2)
  starts = np.flatnonzero(np.any(owners[1:] != owners[:-1], axis=1)) + 1  # a span is one stretch of a row
  for (tree_id, span_id), own in zip(owners[np.r_[0, starts]], np.split(values.reshape(-1), starts)):
    if tree_id >= 0 and nodes[tree_id][span_id].trained:
      setattr(nodes[tree_id][span_id], field, own.copy())


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
  """First-fit decreasing: indices of the items in each row. Equals keep their order, empty items drop out.

  Raises:
    ValueError: an item is larger than `length`.
  """
  for index, size in enumerate(sizes):
    if size > length:
      raise ValueError(f'tree {index} has {size} tokens, more than the {length} of a training row')
  free = np.full(len(sizes), length)
  rows: list[list[int]] = [[] for _ in sizes]
  for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    if sizes[index]:
      row = int(np.argmax(free >= sizes[index]))
      free[row] -= sizes[index]
      rows[row].append(index)
  return [row for row in rows if row]


def loss_mask(nodes: Sequence[Node]) -> np.ndarray:
  """[tokens of the tree] bool, in layout order: the one place where a loss mask is built.

  The first token of a tree follows nothing, so nothing predicts it and it never bears a loss.
  """
  mask = np.concatenate([np.full(len(node.tokens), node.trained, bool) for node in nodes])
  mask[:1] = False
  return mask


def loss_weights(masks: Sequence[np.ndarray], how: str) -> list[np.ndarray]:
  """Weights such that the sum of `weight * per-token loss` is the average that `how` names.

  A sequence is a tree: one trajectory, or all branches of it. Trees without a trained token do not count.
    token-mean            every trained token of the forest alike; the weights sum to 1
    seq-mean-token-mean   every tree alike, in it every trained token alike; the weights sum to 1
    seq-mean-token-sum    the sum over a tree's trained tokens, averaged over trees
  """
  tokens = sum(int(mask.sum()) for mask in masks)
  sequences = sum(bool(mask.any()) for mask in masks)
  if how == 'token-mean':
    scales = [1 / max(tokens, 1) for _ in masks]
  elif how == 'seq-mean-token-mean':
    scales = [1 / (max(sequences, 1) * max(int(mask.sum()), 1)) for mask in masks]
  elif how == 'seq-mean-token-sum':
    scales = [1 / max(sequences, 1) for _ in masks]
  else:
    raise ValueError(f'unknown aggregation {how!r}, expected one of {", ".join(AGGREGATIONS)}')
  return [(mask * scale).astype(np.float32) for mask, scale in zip(masks, scales)]


def step_weights(nodes: Sequence[Sequence[Node]],
                 masks: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Weights of 'step-mean', of the policy and of the critic: the objectives of SLATE (section 3.4) and CARL (section 3.4).

  Policy: the mean over a span's own tokens, the mean over the trained siblings of a step (alternatives), the sum over the
  steps of a tree, the mean over trees. Critic: the states before the first tokens of the spans, the mean over those of a
  tree, the mean over trees.
  """
  sequences = max(sum(bool(mask.any()) for mask in masks), 1)
  weights, value_weights = [], []
  for tree_nodes, mask in zip(nodes, masks):
    ends = np.cumsum([len(node.tokens) for node in tree_nodes])
    own, states = np.zeros(len(mask)), np.zeros(len(mask))
    for node, end in zip(tree_nodes, ends):
      span = slice(end - len(node.tokens), end)
      if mask[span].any():
        siblings = sum(child.trained and bool(child.tokens) for child in node.parent.children)
        own[span] = mask[span] / (mask[span].sum() * siblings * sequences)
        states[span.start + int(mask[span].argmax())] = 1
    weights.append(own.astype(np.float32))
    value_weights.append((states / (max(states.sum(), 1) * sequences)).astype(np.float32))
  return weights, value_weights


def _padding(num_rows: int, length: int, pad_id: int) -> TrainingRows:
  shape = (num_rows, length)
  index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
  zeros = {name: np.zeros(shape, np.float32) for name in ('loss_weights', 'value_weights', *PER_TOKEN.values())}
  return TrainingRows(tokens=np.full(shape, pad_id, np.int32), positions=np.zeros(shape, np.int32),
              previous=index.copy(), visible_until=index + 1, tree_ids=np.full(shape, -1, np.int32),
              span_ids=np.full(shape, -1, np.int32), **zeros)


def _place(rows: TrainingRows, row: int, start: int, nodes: Sequence[Node]) -> None:
  """Writes a tree's nodes, given depth first, into `row` from index `start` on."""
  subtree = {id(node): len(node.tokens) for node in nodes}     # tokens of the node and all below it
  for node in reversed(nodes):
    if node.parent is not None:
      subtree[id(node.parent)] += subtree[id(node)]
  tails = {id(None): (-1, 0)}     # of a node's path: row index of its last token (-1: none yet), its tokens
  for span_id, node in enumerate(nodes):
    size, end = len(node.tokens), start + len(node.tokens)
    last, depth = tails[id(node.parent)]
    tails[id(node)] = (end - 1 if size else last, depth + size)
    if not size:
      continue
    span = slice(start, end)
    rows.tokens[row, span] = node.tokens
    rows.positions[row, span] = np.arange(depth, depth + size)
    rows.previous[row, span] = np.arange(start - 1, end - 1)
    rows.previous[row, start] = last if last >= 0 else start
    rows.visible_until[row, span] = start + subtree[id(node)]
    rows.span_ids[row, span] = span_id
    for field, name in PER_TOKEN.items():
      if getattr(node, field) is not None:
        getattr(rows, name)[row, span] = _per_token(node, field)
    start = end


def _per_token(node: Node, field: str) -> np.ndarray:
  values = np.asarray(getattr(node, field), np.float32)
  if values.ndim and values.shape != (len(node.tokens),):
    raise ValueError(f'{field} {values.shape} on a {node.role.value} span of {len(node.tokens)} tokens')
  return values


def _check_all_or_none(trained: Sequence[Node]) -> None:
  """Demonstrations have neither field; where only some trained spans lack one, a method forgot them."""
  for field in PER_TOKEN:
    missing = sum(getattr(node, field) is None for node in trained)
    if 0 < missing < len(trained):
      raise ValueError(f'{missing} of {len(trained)} trained spans have no {field}')
