"""From trees to training rows.

The trees of a question have their prompt in common, and often more: what two paths have in common from their first token on is
laid out once. Such a trie, with all that hangs on it, goes depth first into a row of T tokens, with four integers per token:

  tokens[B, T]
  positions[B, T]      tokens before it on its own path (the RoPE position, not the index in the row)
  previous[B, T]       row index of the token that it follows on its path: the hidden state there predicts it
  visible_until[B, T]  end (exclusive, row index) of its subtree: token i sees token j iff j <= i < visible_until[j]

Depth-first order makes every subtree one stretch of the row, so a single integer per key is the mask of packing, of trees and
of causal rows at once (`models.attention.tree_mask`). A trie that is larger than a row is split at a branch; what both parts need
is then laid out twice, with a loss in one of them.

The loss weights are decided here too, over the whole forest: the loss is the plain sum of `loss_weights * per-token loss`, so
neither packing nor micro-batches can change a gradient. It stays exact for a token that several spans share. With their weights
w_i and advantages A_i, all that a clipped surrogate needs is P = sum w_i max(A_i, 0) and N = sum w_i max(-A_i, 0): see
`losses.shared_surrogate`. KL and entropy count sum w_i times, and the squared errors of a shared state are those of the mean
return, up to a constant. Everything here is NumPy on the host. B: rows, T: tokens in a row.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxsearch import losses
from jaxsearch.trees.tree import Node, Tree

CREDIT = ('advantages', 'sampler_logprobs', 'values', 'returns')  # of a trained span, each one number or one per token
AGGREGATIONS = ('token-mean', 'span-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean')  # see `loss_weights`


@dataclasses.dataclass(frozen=True)
class TrainingRows:
  """Training rows, each array [B, T].

  A padding token sees itself alone (an attention row that sees nothing has no softmax), is seen by no other and weighs nothing.
  """
  tokens: np.ndarray         # int32, pad_id on padding
  positions: np.ndarray      # int32, 0 on padding
  previous: np.ndarray       # int32, row index; its own on padding and at the first token of a path
  visible_until: np.ndarray  # int32, row index, exclusive; own index + 1 on padding
  real: np.ndarray           # bool, False on padding
  spans: np.ndarray          # float32, how many trained spans share it; 0 wherever there is no loss
  loss_weights: np.ndarray   # float32, their weights in the loss (with `penalties` those of KL and entropy), added up
  kl_weights: np.ndarray     # float32, those of the spans that the KL is about, added up
  gains: np.ndarray          # float32, P: the weighted advantages above 0, added up; 0 where spans have none
  losses: np.ndarray         # float32, N: the weighted advantages below 0, added up, as a positive number
  sampler_logprobs: np.ndarray  # float32, captured while sampling, their mean; 0 where spans have none
  value_weights: np.ndarray  # float32, their weights in the critic's loss, added up
  values: np.ndarray         # float32, of the critic before the updates of the step, their weighted mean
  returns: np.ndarray        # float32, the critic's targets, their weighted mean
  places: dict[Node, tuple[int, np.ndarray]]  # (row, columns) of a span's tokens

  @property
  def fill(self) -> float:
    """Share of tokens that are not padding."""
    return float(self.real.mean())


def lay_out(forest: Sequence[Tree], length: int, *, pad_id: int, how: str = 'token-mean', penalties: str = '',
            share_trained: bool = True, totals: Sequence[int] | None = None,
            kl_on: Callable[[Tree], bool] = lambda tree: True) -> TrainingRows:
  """Packs the tries of a forest into rows, first-fit decreasing; the result depends on its arguments alone.

  Args:
    forest: the trees of the whole batch. Those of one question are merged; a tree without a question is alone.
    length: T.
    pad_id: token that fills the rows up.
    how: the average that the loss weights stand for, see `loss_weights`.
    penalties: that of KL and entropy; '' is `how`.
    share_trained: False merges only what is not trained, for a loss that is not linear or quadratic in the credit.
    totals: `count_trained` of the whole batch, where `forest` is a part of it; None: it is the whole.
    kl_on: whether the KL to the reference is about a tree.
  Returns:
    `TrainingRows` of [B, T]; one row of padding where there is nothing to lay out.
  Raises:
    ValueError: a path longer than `length`, an unknown `how`, per-token values that do not match their span, or advantages
      (log-probabilities, values, returns) present in some trained spans and absent in others.
  """
  nodes = [list(tree.walk()) for tree in forest]
  trained = [node for node in itertools.chain(*nodes) if node.trained and node.tokens]
  for field in CREDIT:  # a demonstration has none of them; where only some spans lack one, a method forgot it
    missing = sum(getattr(node, field) is None for node in trained)
    if 0 < missing < len(trained):
      raise ValueError(f'{missing} of {len(trained)} trained spans have no {field}')
  weights = {}  # node -> (policy, critic, penalties), each [tokens of the node]
  policy, critic = loss_weights(nodes, how, totals)
  for own, *of_tree in zip(nodes, policy, critic, loss_weights(nodes, penalties, totals)[0] if penalties else policy):
    ends = np.cumsum([len(node.tokens) for node in own])
    weights |= zip(own, zip(*(np.split(values, ends[:-1]) for values in of_tree)))
  trees = collections.defaultdict(list)
  for tree in forest:
    trees[tree if tree.question is None else tree.question.id].append(tree)
  tries = [trie for own in trees.values() for trie in _tries(own, length, share_trained)]
  packed = pack([trie.size for trie in tries], length)
  rows = _padding(max(len(packed), 1), length, pad_id)
  for row, indices in enumerate(packed):
    start = 0
    for index in indices:
      start = _place(rows, row, start, tries[index], weights, kl_on)
  rows.sampler_logprobs[...] /= np.maximum(rows.spans, 1)
  for name in ('values', 'returns'):
    getattr(rows, name)[...] /= np.where(rows.value_weights > 0, rows.value_weights, 1)
  return rows


def take_back(rows: TrainingRows, forest: Sequence[Tree], values: np.ndarray, field: str) -> None:
  """Writes per-token values [B, T] of laid-out rows onto `field` of the trained spans they belong to, an array for each."""
  for node in itertools.chain(*(tree.walk() for tree in forest)):
    if node.trained and node.tokens:
      row, columns = rows.places[node]
      setattr(node, field, values[row, columns])


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


def count_trained(nodes: Sequence[Sequence[Node]]) -> np.ndarray:
  """[3]: the trained tokens of trees, the trees that have any, and the spans that have any."""
  masks = [_trained_mask(tree) for tree in nodes]
  spans = sum(len(found) for found in map(_trained_spans, nodes, masks))
  return np.array([sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks), spans])


def loss_weights(nodes: Sequence[Sequence[Node]], how: str,
                 totals: Sequence[int] | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """(policy, critic): weights of every tree such that the sum of `weight * per-token loss` is the average that `how` names.

  A sequence is a tree: one trajectory, or all branches of it. Trees without a trained token do not count.
    token-mean            every trained token of the forest alike; the weights sum to 1
    span-mean             every trained span of the forest alike, in it every trained token alike; the weights sum to 1
    seq-mean-token-mean   every tree alike, in it every trained token alike; the weights sum to 1
    seq-mean-token-sum    the sum over a tree's trained tokens, averaged over trees
    step-mean             the mean over a span's tokens, the mean over the trained siblings of a step, the sum over the steps
                          of a tree, the mean over trees: the objectives of SLATE and CARL (section 3.4 of both)
  The critic's weights are the policy's, except for 'step-mean': there they are the mean over the first tokens of a tree's
  spans (the states before the steps), averaged over trees. Averages are over all that `totals` counts (`count_trained` of the
  whole batch); None: over `nodes`.
  """
  if how not in AGGREGATIONS:
    raise ValueError(f'unknown aggregation {how!r}, expected one of {", ".join(AGGREGATIONS)}')
  masks = [_trained_mask(tree) for tree in nodes]
  tokens, sequences, spans = (max(int(total), 1) for total in (count_trained(nodes) if totals is None else totals))
  if how in ('span-mean', 'step-mean'):
    return _span_weights(nodes, masks, sequences, spans, how)
  sizes = [losses.denominator(how, int(mask.sum()), tokens, sequences) for mask in masks]
  weights = [(mask * (1 / max(size, 1))).astype(np.float32) for mask, size in zip(masks, sizes)]
  return weights, weights


def _trained_mask(tree: Sequence[Node]) -> np.ndarray:
  """[tokens of the tree] bool."""
  mask = np.concatenate([np.full(len(node.tokens), node.trained, bool) for node in tree])
  mask[:1] = False  # the first token of a tree follows nothing, so nothing predicts it
  return mask


def _trained_spans(tree: Sequence[Node], mask: np.ndarray) -> list[tuple[Node, np.ndarray]]:
  """The spans that have trained tokens, each with the indices of these in the tree."""
  places = np.split(np.arange(len(mask)), np.cumsum([len(node.tokens) for node in tree]))
  return [(node, place[mask[place]]) for node, place in zip(tree, places) if mask[place].any()]


def _span_weights(nodes, masks, sequences: int, total: int, how: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
  weights, first_tokens = [], []
  for own, mask in zip(map(_trained_spans, nodes, masks), masks):
    weight, first = np.zeros((2, len(mask)))
    for node, trained in own:
      siblings = sum(child.trained and bool(child.tokens) for child in node.parent.children)
      weight[trained] = 1 / (len(trained) * (total if how == 'span-mean' else siblings * sequences))
      first[trained[0]] = 1
    weights.append(weight.astype(np.float32))
    first_tokens.append((first / (max(first.sum(), 1) * sequences)).astype(np.float32))
  return weights, weights if how == 'span-mean' else first_tokens


@dataclasses.dataclass
class _Trie:
  """Paths in the order of their tokens, so that each has as much as it can in common with the one before."""
  size: int = 0  # tokens
  paths: list[tuple[int, np.ndarray, list[Node]]] = dataclasses.field(default_factory=list)  # (tokens shared with the last, …)


def _tries(trees: Sequence[Tree], length: int, share_trained: bool) -> Iterator[_Trie]:
  """The paths of trees, merged where they begin alike, in as many tries as it takes for each to fit into a row."""
  paths, owners = [], {}  # a trained span that is not to be shared has a number of its own, in the upper half of its keys
  for leaf in itertools.chain(*(tree.leaves() for tree in trees)):
    path = [node for node in leaf.path() if node.tokens]
    numbers = [0 if share_trained or not node.trained else owners.setdefault(node, len(owners) + 1) for node in path]
    if path:
      paths.append((np.concatenate([np.array(node.tokens) + (number << 32) for node, number in zip(path, numbers)]), path))
  trie, last = _Trie(), np.zeros(0, np.int64)
  for key, path in sorted(paths, key=lambda item: item[0].astype('>i8').tobytes()):  # big-endian bytes sort as the numbers do
    if len(key) > length:
      raise ValueError(f'a path has {len(key)} tokens, more than the {length} of a training row')
    shared = common_prefix(key, last)
    if trie.size + len(key) - shared > length:
      yield trie
      trie, shared = _Trie(), 0
    trie.paths.append((shared, (key & 0xFFFFFFFF).astype(np.int32), path))
    trie.size += len(key) - shared
    last = key
  if trie.paths:
    yield trie


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """Returns how many leading elements two arrays share."""
  size = min(len(a), len(b))
  differ = np.flatnonzero(a[:size] != b[:size])
  return int(differ[0]) if len(differ) else size


def _padding(num_rows: int, length: int, pad_id: int) -> TrainingRows:
  shape = (num_rows, length)
  index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
  names = ('spans', 'loss_weights', 'kl_weights', 'gains', 'losses', 'sampler_logprobs', 'value_weights', 'values', 'returns')
  return TrainingRows(
    tokens=np.full(shape, pad_id, np.int32), positions=np.zeros(shape, np.int32), previous=index.copy(), visible_until=index + 1,
    real=np.zeros(shape, bool), places={}, **{name: np.zeros(shape, np.float32) for name in names})


def _place(rows: TrainingRows, row: int, start: int, trie: _Trie, weights: dict[Node, tuple[np.ndarray, ...]],
           kl_on: Callable[[Tree], bool]) -> int:
  """Writes a trie into `row` from index `start` on and returns its end. A span that is in two tries counts in the first."""
  columns = np.zeros(0, np.int64)  # of the tokens of the last path
  for shared, tokens, path in trie.paths:
    end = start + len(tokens) - shared
    rows.visible_until[row, columns[shared:]] = start
    columns = np.concatenate([columns[:shared], np.arange(start, end)])
    own = slice(start, end)
    rows.tokens[row, own], rows.positions[row, own], rows.real[row, own] = tokens[shared:], np.arange(shared, len(tokens)), True
    rows.previous[row, own] = columns[np.maximum(np.arange(shared, len(tokens)) - 1, 0)]
    depth = 0
    for node in path:
      here = columns[depth:(depth := depth + len(node.tokens))]
      if node not in rows.places:
        rows.places[node] = row, here
        if node.trained:
          _credit(rows, row, here, node, *weights[node], kl_on(node.tree))
    start = end
  rows.visible_until[row, columns] = start
  return start


def _credit(rows: TrainingRows, row: int, columns: np.ndarray, node: Node, weights: np.ndarray,
            value_weights: np.ndarray, penalty_weights: np.ndarray, kl: bool) -> None:
  """Accumulates a span's weights and credit into its row."""
  found = {}
  for field in CREDIT:
    values = getattr(node, field)
    if values is not None and np.shape(values) not in ((), (len(columns),)):
      raise ValueError(f'{field} {np.shape(values)} on a {node.role.value} span of {len(columns)} tokens')
    found[field] = np.zeros(len(columns)) if values is None else np.asarray(values)
  bears_loss = weights != 0
  for name, values in (
      ('spans', bears_loss), ('loss_weights', penalty_weights), ('value_weights', value_weights),
      ('kl_weights', penalty_weights * kl),
      ('gains', weights * np.maximum(found['advantages'], 0)), ('losses', weights * np.maximum(-found['advantages'], 0)),
      ('sampler_logprobs', bears_loss * found['sampler_logprobs']),
      ('values', value_weights * found['values']), ('returns', value_weights * found['returns'])):
    getattr(rows, name)[row, columns] += values
