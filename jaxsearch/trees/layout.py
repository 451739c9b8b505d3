"""From trees to training rows.

The trees of a question have their prompt in common, and often more: what two paths have in common from their
first token on is laid out once. Such a trie, with all that hangs on it, goes depth first into a row of T
tokens, with four integers per token. What follows the last trained span of a path is left out.

  tokens[B, T]
  positions[B, T]      tokens before it on its own path (the RoPE position, not the index in the row)
  previous[B, T]       row index of the token that it follows on its path: the hidden state there predicts it
  visible_until[B, T]  end (exclusive, row index) of its subtree: i sees j iff j <= i < visible_until[j]

Depth-first order makes every subtree one stretch of the row, so a single integer per key is the mask of
packing, of trees and of causal rows at once (`models.attention.tree_mask`). A trie that is larger than a row
is split at a branch; what both parts need is then laid out twice, with a loss in one of them.

The loss weights are decided here too, over the whole forest: the loss is the plain sum of `loss_weights *
per-token loss`, so neither packing nor micro-batches can change a gradient. It stays exact for a token that
several spans share: with their weights w_i and advantages A_i, a clipped surrogate needs only P = sum w_i
max(A_i, 0) and N = sum w_i max(-A_i, 0), see `losses.shared_surrogate`; KL and entropy count sum w_i times;
the squared errors of a shared state are those of the mean return, up to a constant. All is NumPy on the host.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxsearch import losses
from jaxsearch.trees.tree import Node, Tree

# Of a trained span, each one number or one per token.
CREDIT = ('advantages', 'sampler_logprobs', 'values', 'returns')
AGGREGATIONS = ('token-mean', 'span-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean')
# Paths sorted by tokens, so that neighbours share the longest prefixes. Each: (how many tokens it shares
# with the path before, its tokens, its spans).
Trie = list[tuple[int, np.ndarray, list[Node]]]


@dataclasses.dataclass(frozen=True)
class TrainingRows:
  """Training rows, each array [B, T].

  A padding token sees itself alone (an attention row that sees nothing has no softmax), is seen by no other
  and weighs nothing.
  """
  tokens: np.ndarray         # int32, pad_id on padding
  positions: np.ndarray      # int32, 0 on padding
  previous: np.ndarray       # int32, row index; its own on padding and at the first token of a path
  visible_until: np.ndarray  # int32, row index, exclusive; own index + 1 on padding
  real: np.ndarray           # bool, False on padding
  places: dict[Node, tuple[int, np.ndarray]]  # (row, columns) of a span's tokens
  sequences: np.ndarray      # int32, of a trained token: the column of the first of its `sequence`
  # float32, 0 wherever there is no loss; of all spans that share a token:
  spans: np.ndarray          # how many trained ones
  loss_weights: np.ndarray   # their weights in the loss (with `penalties` of KL and entropy), added up
  gains: np.ndarray          # P: the weighted advantages above 0, added up; 0 where spans have none
  losses: np.ndarray         # N: the weighted advantages below 0, added up, as a positive number
  sampler_logprobs: np.ndarray  # captured while sampling, their mean; 0 where spans have none
  value_weights: np.ndarray  # their weights in the critic's loss, added up
  values: np.ndarray         # of the critic before the updates of the step, their weighted mean
  returns: np.ndarray        # the critic's targets, their weighted mean


def lay_out(forest: Sequence[Tree], length: int, *, pad_id: int, how: str = 'token-mean', penalties: str = '',
            share_trained: bool = True, chains: bool = False,
            totals: Sequence[int] | None = None) -> TrainingRows:
  """Packs the tries of a forest into rows, first-fit decreasing; the result depends on its arguments alone.

  Args:
    forest: the trees of the batch; those of one question are merged.
    length: T.
    how: the average that the loss weights stand for, see `loss_weights`.
    penalties: that of KL and entropy; '' is `how`.
    share_trained: False merges only what is not trained, for a loss that is not linear or quadratic in the
      credit.
    chains: lays out each path by itself: all of its tokens have the same `visible_until`, no other token of
      the row has it. Tokens that branches share are laid out again, with a loss in one copy only.
    totals: `count_trained` of the whole batch, where `forest` is a part of it.
  Returns:
    `TrainingRows` of [B, T]; one row of padding where there is nothing to lay out.
  Raises:
    ValueError: a path longer than `length`, an unknown `how`, per-token values that do not match their span,
      or credit that only some of the trained spans have.
  """
  trained = [node for tree in forest for node in tree.walk() if node.trained and node.tokens]
  for field in CREDIT:  # a demonstration has none of them; where only some spans lack one, a method forgot it
    missing = sum(getattr(node, field) is None for node in trained)
    if 0 < missing < len(trained):
      raise ValueError(f'{missing} of {len(trained)} trained spans have no {field}')
  weights = loss_weights(forest, how, totals)
  penalty_weights = loss_weights(forest, penalties, totals) if penalties else weights
  trees = collections.defaultdict(list)
  for tree in forest:
    trees[tree if tree.question is None else tree.question.id].append(tree)
  tries = [trie for alike in trees.values() for trie in _tries(alike, length, share_trained, chains)]
  packed = pack([sum(len(tokens) - shared for shared, tokens, _ in trie) for trie in tries], length)
  rows = _padding(max(len(packed), 1), length, pad_id)
  for row, indices in enumerate(packed):
    start = 0
    for index in indices:
      start = _place(rows, row, start, tries[index])
  first = {node: whole[0] for tree in forest for whole in sequences_of(tree) for node in whole}
  for node in rows.places:
    if node in weights:
      rows.sequences[rows.places[node]] = rows.places[first[node]][1][0]
      _credit(rows, node, *weights[node], penalty_weights[node][0])
  rows.sampler_logprobs[...] /= np.maximum(rows.spans, 1)
  for name in ('values', 'returns'):
    getattr(rows, name)[...] /= np.where(rows.value_weights > 0, rows.value_weights, 1)
  return rows


def take_back(rows: TrainingRows, forest: Sequence[Tree], values: np.ndarray, field: str) -> None:
  """Writes values [B, T] of tokens in rows onto `field` of the trained spans that they belong to."""
  for node in itertools.chain(*(tree.walk() for tree in forest)):
    if node.trained and node.tokens:
      setattr(node, field, values[rows.places[node]])


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
  """Packs items first-fit decreasing; returns the indices of those in each row. Empty items drop out.

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


def count_trained(trees: Sequence[Tree]) -> np.ndarray:
  """Counts [3] the trained tokens of trees, the trees that have any, and the spans that have any."""
  masks = [_trained_masks(tree) for tree in trees]
  tokens = sum(int(mask.sum()) for of_tree in masks for mask in of_tree.values())
  return np.array([tokens, sum(map(bool, masks)), sum(map(len, masks))])


def loss_weights(trees: Sequence[Tree], how: str,
                 totals: Sequence[int] | None = None) -> dict[Node, tuple[np.ndarray, np.ndarray]]:
  """Returns the weights (policy, critic), each [tokens of the span] float32, of every span that bears a loss.

  With them the sum of `weight * per-token loss` is the average that `how` names. A sequence is a tree with
  trained tokens, all branches of it.
    token-mean            every trained token of the forest alike; the weights sum to 1
    span-mean             every trained span of the forest alike, in it every trained token alike; the weights
                          sum to 1
    seq-mean-token-mean   every tree alike, in it every trained token alike; the weights sum to 1
    seq-mean-token-sum    the sum over a tree's trained tokens, averaged over trees
    step-mean             the mean over a span's tokens, the mean over the trained siblings of a step, the sum
                          over the steps of a tree, the mean over trees: the objectives of SLATE and CARL
                          (section 3.4 of both)
  The critic's weights are the policy's, except for 'step-mean': there they are the mean over the first tokens
  of a tree's spans (the states before the steps), averaged over trees. Averages are over all that `totals`
  counts (`count_trained` of the whole batch); None: over `trees`.
  """
  if how not in AGGREGATIONS:
    raise ValueError(f'unknown aggregation {how!r}, expected one of {", ".join(AGGREGATIONS)}')
  tokens, sequences, spans = np.maximum(count_trained(trees) if totals is None else totals, 1)
  weights = {}
  for masks in map(_trained_masks, trees):
    in_tree = sum(mask.sum() for mask in masks.values())
    for node, mask in masks.items():
      if how == 'span-mean':
        divisor = mask.sum() * spans
      elif how == 'step-mean':
        siblings = sum(child.trained and bool(child.tokens) for child in node.parent.children)
        divisor = mask.sum() * siblings * sequences
      else:
        divisor = losses.denominator(how, in_tree, tokens, sequences)
      policy = critic = (mask / divisor).astype(np.float32)
      if how == 'step-mean':
        critic = ((np.arange(len(mask)) == mask.argmax()) / (len(masks) * sequences)).astype(np.float32)
      weights[node] = policy, critic
  return weights


def sequences_of(tree: Tree) -> list[list[Node]]:
  """Returns the trained spans of each sequence: those of a tree are one sequence if they lie on one path,
  otherwise each span is a sequence."""
  trained = [node for node in tree.walk() if node.trained and node.tokens]
  path = set(trained[-1].path()) if trained else ()
  return [trained] if path and path.issuperset(trained) else [[node] for node in trained]


def _trained_masks(tree: Tree) -> dict[Node, np.ndarray]:
  """Returns [tokens of the span] bool for each span with trained tokens.

  The first token of a tree follows nothing, so nothing predicts it.
  """
  nodes = [node for node in tree.walk() if node.tokens]
  masks = {node: np.arange(len(node.tokens)) >= (node is nodes[0]) for node in nodes if node.trained}
  return {node: mask for node, mask in masks.items() if mask.any()}


def _tries(trees: Sequence[Tree], length: int, share_trained: bool, chains: bool) -> Iterator[Trie]:
  """Merges the paths of trees where they begin alike, in as many tries as it takes for each to fit a row.

  As `chains`, every path is a trie.
  """
  # A trained span that is not to be shared has a number of its own, in the upper half of its keys.
  to_last, owners = {}, {}
  for leaf in itertools.chain(*(tree.leaves() for tree in trees)):
    path = [node for node in leaf.path() if node.tokens]
    while path and not path[-1].trained:
      path.pop()
    if path:
      to_last[path[-1]] = path
  inner = {node for path in to_last.values() for node in path[:-1]}  # where only untrained spans hang beside
  paths = []
  for path in [path for last, path in to_last.items() if last not in inner]:
    numbers = [0 if share_trained or not node.trained else owners.setdefault(node, len(owners) + 1)
               for node in path]
    keys = [np.array(node.tokens) + (number << 32) for node, number in zip(path, numbers)]
    paths.append((np.concatenate(keys), path))
  trie, size, last = [], 0, np.zeros(0, np.int64)
  for key, path in sorted(paths, key=lambda item: item[0].astype('>i8').tobytes()):  # sorts as the numbers do
    if len(key) > length:
      raise ValueError(f'a path has {len(key)} tokens, more than the {length} of a training row')
    shared = common_prefix(key, last)
    if trie and (chains or size + len(key) - shared > length):
      yield trie
      trie, size, shared = [], 0, 0
    trie.append((shared, (key & 0xFFFFFFFF).astype(np.int32), path))
    size += len(key) - shared
    last = key
  if trie:
    yield trie


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """Returns how many leading elements two arrays share."""
  size = min(len(a), len(b))
  differ = np.flatnonzero(a[:size] != b[:size])
  return int(differ[0]) if len(differ) else size


def _padding(num_rows: int, length: int, pad_id: int) -> TrainingRows:
  shape = (num_rows, length)
  index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
  names = [field.name for field in dataclasses.fields(TrainingRows)]
  numbers = {name: np.zeros(shape, np.float32) for name in names[names.index('spans'):]}
  return TrainingRows(
    tokens=np.full(shape, pad_id, np.int32), positions=np.zeros(shape, np.int32), previous=index.copy(),
    visible_until=index + 1, real=np.zeros(shape, bool), places={},
    sequences=np.zeros(shape, np.int32), **numbers)


def _place(rows: TrainingRows, row: int, start: int, trie: Trie) -> int:
  """Writes a trie into `row` from index `start` on; returns its end. A span in two tries is of the first."""
  columns = np.zeros(0, np.int64)  # of the tokens of the last path
  for shared, tokens, path in trie:
    end = start + len(tokens) - shared
    new, depths = slice(start, end), np.arange(shared, len(tokens))
    rows.visible_until[row, columns[shared:]] = start
    columns = np.concatenate([columns[:shared], np.arange(start, end)])
    rows.tokens[row, new], rows.positions[row, new], rows.real[row, new] = tokens[shared:], depths, True
    rows.previous[row, new] = columns[np.maximum(depths - 1, 0)]
    depth = 0
    for node in path:
      rows.places.setdefault(node, (row, columns[depth:depth + len(node.tokens)]))
      depth += len(node.tokens)
    start = end
  rows.visible_until[row, columns] = start
  return start


def _credit(rows: TrainingRows, node: Node, weights: np.ndarray, value_weights: np.ndarray,
            penalty_weights: np.ndarray) -> None:
  """Accumulates a span's weights and credit into its row."""
  credit = {}
  for field in CREDIT:
    values = getattr(node, field)
    credit[field] = np.asarray(0.0 if values is None else values)
    if credit[field].shape not in ((), weights.shape):
      raise ValueError(f'{field} {np.shape(values)} on a {node.role.value} span of {len(weights)} tokens')
  bears_loss = weights != 0
  for name, values in {
      'spans': bears_loss, 'loss_weights': penalty_weights, 'value_weights': value_weights,
      'gains': weights * np.maximum(credit['advantages'], 0),
      'losses': weights * np.maximum(-credit['advantages'], 0),
      'sampler_logprobs': bears_loss * credit['sampler_logprobs'],
      'values': value_weights * credit['values'], 'returns': value_weights * credit['returns']}.items():
    getattr(rows, name)[rows.places[node]] += values
