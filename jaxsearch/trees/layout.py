"""From trees to training rows.

A forest is laid out depth first in rows of T tokens, with four integers per token:

  tokens[B, T]
  positions[B, T]      tokens before it on its own path (the RoPE position, not the index in the row)
  previous[B, T]       row index of the token that it follows on its path: the hidden state there predicts it
  visible_until[B, T]  end (exclusive, row index) of the subtree of its span: token i sees token j iff j <= i < visible_until[j]

Depth-first order makes every subtree one stretch of the row, so a single integer per key is the mask of packing, of trees and
of causal rows at once (`models.decoder.tree_mask`), and a prefix that branches share is computed once. The loss weights are
decided here too, over the whole forest: the loss is the plain sum of `loss_weights * per-token loss`, so neither packing nor
micro-batches can change a gradient. Everything here is NumPy on the host. B: rows, T: tokens in a row.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsearch.trees.tree import Node, Tree

PER_TOKEN = {'advantages': 'advantages', 'logprobs': 'old_logprobs', 'values': 'values', 'returns': 'returns'}  # node -> rows
AGGREGATIONS = ('token-mean', 'span-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean')  # see `loss_weights`


class TrainingRows(NamedTuple):
  """Training rows, each field [B, T]; as a named tuple it is also a JAX pytree.

  A padding token sees itself alone (an attention row that sees nothing has no softmax), is seen by no other and weighs nothing.
  """
  tokens: np.ndarray         # int32, pad_id on padding
  positions: np.ndarray      # int32, 0 on padding
  previous: np.ndarray       # int32, row index; its own on padding and at the first token of a tree
  visible_until: np.ndarray  # int32, row index, exclusive; own index + 1 on padding
  loss_weights: np.ndarray   # float32, 0 wherever there is no loss
  value_weights: np.ndarray  # float32, the same for the critic's loss
  advantages: np.ndarray     # float32, 0 where a span has none
  old_logprobs: np.ndarray   # float32, captured while sampling, 0 where a span has none
  values: np.ndarray         # float32, of the critic before the updates of the step, 0 where a span has none
  returns: np.ndarray        # float32, the critic's targets, 0 where a span has none
  tree_ids: np.ndarray       # int32, index in the forest; -1 on padding
  span_ids: np.ndarray       # int32, index of the node in `tree.walk()`; -1 on padding

  @property
  def fill(self) -> float:
    """Share of tokens that are not padding."""
    return float((self.tree_ids >= 0).mean())


def lay_out(forest: Sequence[Tree], length: int, *, pad_id: int, how: str = 'token-mean') -> TrainingRows:
  """Packs trees into rows, first-fit decreasing; the result depends on its arguments alone.

  Args:
    forest: the trees of the whole batch. No tree is split over two rows.
    length: T.
    pad_id: token that fills the rows up.
    how: the average that the loss weights stand for, see `loss_weights`.
  Returns:
    `TrainingRows` of [B, T]; one row of padding where there is nothing to lay out.
  Raises:
    ValueError: a tree longer than `length`, an unknown `how`, per-token values that do not match their span, or advantages
      (log-probabilities, values, returns) present in some trained spans and absent in others.
  """
  rows_of_trees = pack([tree.count() for tree in forest], length)
  nodes = [list(tree.walk()) for tree in forest]
  trained = [node for node in itertools.chain(*nodes) if node.trained and node.tokens]
  for field in PER_TOKEN:  # a demonstration has none of them; where only some spans lack one, a method forgot it
    missing = sum(getattr(node, field) is None for node in trained)
    if 0 < missing < len(trained):
      raise ValueError(f'{missing} of {len(trained)} trained spans have no {field}')
  weights, value_weights = loss_weights(nodes, how)
  rows = _padding(max(len(rows_of_trees), 1), length, pad_id)
  for row, indices in enumerate(rows_of_trees):
    start = 0
    for index in indices:
      own = row, slice(start, start + len(weights[index]))
      _place(rows, row, start, nodes[index])
      rows.loss_weights[own], rows.value_weights[own], rows.tree_ids[own] = weights[index], value_weights[index], index
      start += len(weights[index])
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

  Raises ValueError for an item larger than `length`.
  """
  free = np.full(len(sizes), length)
  rows: list[list[int]] = [[] for _ in sizes]
  for index, size in sorted(enumerate(sizes), key=lambda item: -item[1]):
    if size > length:
      raise ValueError(f'tree {index} has {size} tokens, more than the {length} of a training row')
    if size:
      row = np.argmax(free >= size)
      free[row] -= size
      rows[row].append(index)
  return [row for row in rows if row]


def loss_weights(nodes: Sequence[Sequence[Node]], how: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """(policy, critic): weights of every tree such that the sum of `weight * per-token loss` is the average that `how` names.

  A sequence is a tree: one trajectory, or all branches of it. Trees without a trained token do not count.
    token-mean            every trained token of the forest alike; the weights sum to 1
    span-mean             every trained span of the forest alike, in it every trained token alike; the weights sum to 1
    seq-mean-token-mean   every tree alike, in it every trained token alike; the weights sum to 1
    seq-mean-token-sum    the sum over a tree's trained tokens, averaged over trees
    step-mean             the mean over a span's tokens, the mean over the trained siblings of a step, the sum over the steps
                          of a tree, the mean over trees: the objectives of SLATE and CARL (section 3.4 of both)
  The critic's weights are the policy's, except for 'step-mean': there they are the mean over the first tokens of a tree's
  spans (the states before the steps), averaged over trees.
  """
  if how not in AGGREGATIONS:
    raise ValueError(f'unknown aggregation {how!r}, expected one of {", ".join(AGGREGATIONS)}')
  masks = [np.concatenate([np.full(len(node.tokens), node.trained, bool) for node in tree]) for tree in nodes]
  for mask in masks:
    mask[:1] = False  # the first token of a tree follows nothing, so nothing predicts it
  counts = [int(mask.sum()) for mask in masks]
  sequences = max(np.count_nonzero(counts), 1)
  if how in ('span-mean', 'step-mean'):
    return _span_weights(nodes, masks, sequences, how)
  sizes = {'token-mean': [sum(counts)] * len(masks), 'seq-mean-token-mean': [sequences * count for count in counts],
           'seq-mean-token-sum': [sequences] * len(masks)}[how]
  weights = [(mask * (1 / max(size, 1))).astype(np.float32) for mask, size in zip(masks, sizes)]
  return weights, weights


def _span_weights(nodes, masks, sequences: int, how: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
  weights, first_tokens, spans = [], [], []
  for tree, mask in zip(nodes, masks):
    places = np.split(np.arange(len(mask)), np.cumsum([len(node.tokens) for node in tree]))
    spans.append([(node, place[mask[place]]) for node, place in zip(tree, places) if mask[place].any()])
  total = sum(map(len, spans))
  for own, mask in zip(spans, masks):
    weight, first = np.zeros((2, len(mask)))
    for node, trained in own:
      siblings = sum(child.trained and bool(child.tokens) for child in node.parent.children)
      weight[trained] = 1 / (len(trained) * (total if how == 'span-mean' else siblings * sequences))
      first[trained[0]] = 1
    weights.append(weight.astype(np.float32))
    first_tokens.append((first / (max(first.sum(), 1) * sequences)).astype(np.float32))
  return weights, weights if how == 'span-mean' else first_tokens


def _padding(num_rows: int, length: int, pad_id: int) -> TrainingRows:
  shape = (num_rows, length)
  index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
  zeros = {name: np.zeros(shape, np.float32) for name in ('loss_weights', 'value_weights', *PER_TOKEN.values())}
  return TrainingRows(
    tokens=np.full(shape, pad_id, np.int32), positions=np.zeros(shape, np.int32), previous=index.copy(), visible_until=index + 1,
    tree_ids=np.full(shape, -1, np.int32), span_ids=np.full(shape, -1, np.int32), **zeros)


def _place(rows: TrainingRows, row: int, start: int, nodes: Sequence[Node]) -> None:
  """Writes a tree's nodes, given depth first, into `row` from index `start` on."""
  subtree = {node: len(node.tokens) for node in nodes}  # tokens of the node and all below it
  for node in reversed(nodes[1:]):
    subtree[node.parent] += subtree[node]
  tails = {None: (-1, 0)}  # of a node's path: row index of its last token (-1: none yet), its tokens
  for span_id, node in enumerate(nodes):
    size, end = len(node.tokens), start + len(node.tokens)
    last, depth = tails[node.parent]
    tails[node] = (end - 1 if size else last, depth + size)
    if not size:
      continue
    span = slice(start, end)
    rows.tokens[row, span] = node.tokens
    rows.positions[row, span] = np.arange(depth, depth + size)
    rows.previous[row, span] = np.arange(start - 1, end - 1)
    rows.previous[row, start] = last if last >= 0 else start
    rows.visible_until[row, span] = start + subtree[node]
    rows.span_ids[row, span] = span_id
    for field, name in PER_TOKEN.items():
      if (values := getattr(node, field)) is not None:
        if np.shape(values) not in ((), (size,)):
          raise ValueError(f'{field} {np.shape(values)} on a {node.role.value} span of {size} tokens')
        getattr(rows, name)[row, span] = values
    start = end
