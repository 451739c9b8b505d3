"""Makes the batch of an update from trees: rows, micro-batches, trained tokens, shape buckets.

`pack` does all of it; `split` says which trees an update is on, `note` writes what a program says of tokens
back onto spans. All that processes exchange about an update is exchanged here.

A step projects onto the vocabulary only where there is a loss, so a batch carries the row indices of the
trained tokens and their values packed to the front. Shapes come from few buckets, so that programs compile in
the first steps of a run and hardly ever after; micro-batches of nothing but padding are not run (`count`).

Letters: n micro-batches, R rows of each, T tokens of a row, M trained tokens of a row.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.trees.layout import TrainingRows, count_trained, lay_out, take_back
from jaxsearch.trees.tree import Tree

Groups = list[list[Tree]]  # the trees of each question


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A training batch, or (without the leading n, `count` unused) one micro-batch of it."""
  tokens: jax.Array         # [n, R, T] int32
  positions: jax.Array      # [n, R, T] int32
  previous: jax.Array       # [n, R, T] int32, row index of the token before on its path
  visible_until: jax.Array  # [n, R, T] int32
  targets: jax.Array        # [n, R, M] int32, row indices of the trained tokens; -1 is padding
  weights: jax.Array        # [n, R, M] float32, 0 on padding: the loss is the sum of weight * per-token loss
  gains: jax.Array          # [n, R, M] float32, weighted advantages above 0 of all spans that share it
  losses: jax.Array         # [n, R, M] float32, those below 0, as a positive number
  spans: jax.Array          # [n, R, M] float32, how many trained spans share the token
  sampler_logprobs: jax.Array  # [n, R, M] float32, as captured while sampling
  old_logprobs: jax.Array | None  # [n, R, M] float32, what the ratio refers to; None: the policy itself
  count: jax.Array          # int32, micro-batches that hold more than padding
  sequences: jax.Array | None = None  # [n, R, M] int32, see `TrainingRows`; None if not asked for
  ref_logprobs: jax.Array | None = None  # [n, R, M] float32, of the reference policy; None without one
  value_weights: jax.Array | None = None  # [n, R, M] float32, of the critic's loss; None without a critic
  values: jax.Array | None = None  # [n, R, M] float32, of the critic that the rollouts met
  returns: jax.Array | None = None  # [n, R, M] float32, what the critic is to learn


@dataclasses.dataclass(frozen=True)
class Packed:
  """The trees of this process that an update is on, their rows, and the batch of all processes."""
  trees: Sequence[Tree]
  rows: TrainingRows
  batch: Batch        # on the mesh
  rows_of_all: int    # of all processes
  tokens_of_all: int  # without padding


def pack(trees: Sequence[Tree], mesh: Mesh, settings: ConfigDict, *, attention: str, at_most: int = 0,
         share_trained: bool = True, sequences: bool = False, critic: bool = False) -> Packed:
  """Lays out the trees that this process has, and packs those of all processes into one batch.

  Averages of the loss are over the trees of all. The score programs return the layout of the batch, so that
  their values are put into it as they are. `settings` are `config.train`, and `attention` is the decoder's:
  'flash' takes rows of plain chains; the others see `lay_out` and `make_batch`.
  """
  totals = sum(transfer.gather_objects(count_trained(trees)))
  rows = lay_out(trees, settings.row_length, pad_id=0, totals=totals, how=settings.aggregate,
                 penalties=settings.penalties, share_trained=share_trained,
                 chains=attention == 'flash')
  sizes = transfer.gather_objects((len(rows.tokens), int(rows.real.sum())))
  batch = make_batch(rows, settings.micro_rows, trees=at_most, sequences=sequences, critic=critic)
  return Packed(trees, rows, place(batch, mesh), *map(sum, zip(*sizes)))


def note(packed: Packed, values: jax.Array, field: str) -> None:
  """Writes values [n, R, M] of the batch onto `field` of the trained spans; all processes must call it."""
  take_back(packed.rows, packed.trees, to_rows(values, packed.batch, packed.rows), field)


def split(groups: Groups, size: int, rng: np.random.Generator) -> list[list[Tree]]:
  """Cuts the groups of all processes into `mini_batches`; returns the trees of each that this process has."""
  sizes, places = transfer.gather_items([len(group) for group in groups])
  local = dict(zip(places, groups))
  return [[local[group][member] for group, member in part if group in local]
          for part in mini_batches(sizes, size, rng)]


def make_batch(rows: TrainingRows, micro_rows: int, *, trees: int = 0, sequences: bool = False,
               critic: bool = False) -> Batch:
  """Cuts rows into micro-batches and packs the trained tokens of each row.

  Every process brings its own rows, and has an equal part of each micro-batch: with `micro_rows` rows in all,
  R of them are trained here. A process that has too many passes the last ones on, see `row_moves`.

  n has room for `trees` rows (one tree each), or for all rows if they are more, rounded up to a power of two:
  in most runs it never changes. M fits the fullest row, see `target_bucket`. Both depend on the arguments
  alone, never on earlier batches: a resumed run computes the same.

  The `old_logprobs` are the sampler's, and the `ref_logprobs` None: the trainer's own scores of the batch
  have the layout that both want.
  """
  T = rows.tokens.shape[1]
  index = np.arange(T)  # in rows of padding every token sees and follows itself
  per_token = {'tokens': 0, 'positions': 0, 'previous': index, 'visible_until': index + 1}
  per_target = ['spans', 'loss_weights', 'gains', 'losses', 'sampler_logprobs']
  per_target += ['sequences'] * sequences
  per_target += ['value_weights', 'values', 'returns'] * critic
  most_trained = int((rows.spans != 0).sum(axis=1).max(initial=1))
  sizes, largest = zip(*transfer.gather_objects((len(rows.tokens), most_trained)))
  count = max(-(-sum(sizes) // micro_rows), 1)
  n, R = 1 << (max(count, -(-trees // micro_rows)) - 1).bit_length(), micro_rows // len(sizes)
  rows_here = [{name: getattr(rows, name)[row] for name in (*per_token, *per_target)}
               for row in range(len(rows.tokens))]
  rows_here = exchange(rows_here, row_moves(sizes, micro_rows))
  columns = {name: np.stack([row[name] for row in rows_here]) for name in rows_here[0]}
  trained = columns['spans'] != 0
  M = target_bucket(max(largest), T)
  order = np.argsort(~trained, axis=1, kind='stable')[:, :M]  # trained tokens first, in row order
  real = np.take_along_axis(trained, order, axis=1)

  def cut(values, padding=0):
    padding = np.broadcast_to(np.asarray(padding, values.dtype), (n * R - len(values), values.shape[1]))
    return np.concatenate([values, padding]).reshape(n, R, -1)

  packed = {name: cut(np.where(real, np.take_along_axis(columns[name], order, axis=1), 0))
            for name in per_target}
  return Batch(**{name: cut(columns[name], padding) for name, padding in per_token.items()},
               targets=cut(np.where(real, order, -1).astype(np.int32), -1), count=np.int32(count),
               weights=packed.pop('loss_weights'), old_logprobs=packed['sampler_logprobs'], **packed)


def row_moves(sizes: Sequence[int], micro_rows: int) -> list[tuple[int, int]]:
  """Returns (source, target) of rows to move, so that processes with `sizes` rows share micro-batches."""
  most = max(-(-sum(sizes) // micro_rows), 1) * (micro_rows // len(sizes))
  sources = [process for process, size in enumerate(sizes) for _ in range(size - most)]
  return list(zip(sources, (process for process, size in enumerate(sizes) for _ in range(most - size))))


def exchange(rows: Sequence[Any], moves: Sequence[tuple[int, int]]) -> list[Any]:
  """Returns the rows that stay in this process, then those that come; its last ones go."""
  keep = len(rows) - sum(source == jax.process_index() for source, _ in moves)
  return [*rows[:keep], *transfer.pass_on(rows[keep:], moves)]


def check_rows(micro_rows: int, mesh) -> None:
  """Raises ValueError if a micro-batch does not split evenly over the mesh."""
  parts = meshes.batch_size(mesh)
  if micro_rows < 1 or micro_rows % parts:
    raise ValueError(f'train.micro_rows={micro_rows} must be a multiple of the {parts} parts that the '
                     'mesh splits a batch into (data * fsdp)')
  if parts % jax.process_count():
    raise ValueError(f'mesh.data * mesh.fsdp is {parts}, which must be a multiple of the '
                     f'{jax.process_count()} processes: each has rows of its own')


def target_bucket(largest: int, length: int) -> int:
  """Returns the smallest of T/8, T/4, 3T/8, T/2, 3T/4, T that holds `largest`."""
  return next(bucket for eighths in (1, 2, 3, 4, 6, 8) if largest <= (bucket := -(-length * eighths // 8)))


def mini_batches(sizes: Sequence[int], size: int, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
  """Cuts a batch into parts of at most `size` trees (0: all), equal to within one, for one update each.

  Groups come in random order. The trees of a group stay together as far as they can: they share their prompt.

  Args:
    sizes: trees of each group of the whole batch.
  Returns:
    (group, member) of the trees of each part.
  """
  number = max(-(-sum(sizes) // size), 1) if size else 1
  groups = [group for group, members in enumerate(sizes) if members]
  if number > 1:
    groups = [groups[i] for i in rng.permutation(len(groups))]
  ordered = [(group, member) for group in groups for member in range(sizes[group])]
  ends = np.arange(number + 1) * len(ordered) // number
  return [ordered[start:end] for start, end in itertools.pairwise(ends)]


def to_rows(values: jax.Array, batch: Batch, rows: TrainingRows) -> np.ndarray:
  """Returns values [n, R, M] of a batch's trained tokens as [B, T] of the rows it was made of, 0 elsewhere.

  All processes must call it: rows that were passed on come home.
  """
  targets, values = transfer.local_rows(batch.targets), transfer.local_rows(values)
  n, R, _ = targets.shape
  spread = np.zeros((n * R, rows.tokens.shape[1]), np.float32)
  targets = targets.reshape(n * R, -1)
  row, column = np.nonzero(targets >= 0)
  spread[row, targets[row, column]] = values.reshape(targets.shape)[row, column]
  sizes, process = transfer.gather_objects(len(rows.tokens)), jax.process_index()
  moves = row_moves(sizes, R * len(sizes))
  held = len(rows.tokens) + sum((target == process) - (source == process) for source, target in moves)
  return np.stack(exchange(spread[:held], [(target, source) for source, target in moves]))


def place(batch: Batch, mesh) -> Batch:
  """Places a batch on the mesh, rows split over `data` and `fsdp`; every process passes its own."""
  whole, rows = transfer.replicated(mesh), transfer.split_over_batch(mesh, 1)
  place_one = lambda x: (jax.make_array_from_process_local_data(rows, np.asarray(x)) if np.ndim(x)
                         else transfer.place(x, whole))
  return jax.tree.map(place_one, batch)
