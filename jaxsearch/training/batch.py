"""Makes the batch of a training step from rows: micro-batches, trained tokens, shape buckets.

Rows hold a loss weight for every token, most of them 0: prompts, observations, padding. A step projects onto
the vocabulary only where there is a loss, so a batch carries the row indices of the trained tokens and their
values packed to the front. Shapes come from few buckets, so that programs compile in the first steps of a run
and hardly ever after; padding weighs 0, and micro-batches of nothing but padding are not run at all
(`count`).

Letters: n micro-batches, R rows of each, T tokens of a row, M trained tokens of a row.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxsearch.parallel import mesh as meshes
from jaxsearch.trees.layout import TrainingRows, count_trained, lay_out
from jaxsearch.trees.tree import Tree

CRITIC = {'value_weights', 'values', 'returns'}  # what only it needs


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
  kl_weights: jax.Array | None  # [n, R, M] float32, the weights of the KL to the reference; None without one
  gains: jax.Array          # [n, R, M] float32, weighted advantages above 0 of all spans that share it
  losses: jax.Array         # [n, R, M] float32, those below 0, as a positive number
  spans: jax.Array          # [n, R, M] float32, how many trained spans share the token
  old_logprobs: jax.Array | None  # [n, R, M] float32, what the ratio refers to; None: the policy itself
  sampler_logprobs: jax.Array  # [n, R, M] float32, as captured while sampling
  ref_logprobs: jax.Array | None  # [n, R, M] float32, of the reference policy; None without one
  value_weights: jax.Array | None  # [n, R, M] float32, those of the critic's loss; None without a critic
  values: jax.Array | None  # [n, R, M] float32, of the critic that the rollouts met; None without one
  returns: jax.Array | None  # [n, R, M] float32, what the critic is to learn; None without one
  count: jax.Array          # int32, micro-batches that hold more than padding


def lay_out_own(trees: Sequence[Tree], length: int, *, how: str = 'token-mean', **options) -> TrainingRows:
  """Lays out trees of which every process has its own; the averages of the loss are over those of all."""
  counts = count_trained([list(tree.walk()) for tree in trees])
  return lay_out(trees, length, how=how, totals=sum(meshes.gather_objects(counts)), **options)


def make_batch(rows: TrainingRows, micro_rows: int, *, trees: int = 0, ref: bool = False,
               critic: bool = False) -> Batch:
  """Cuts rows into micro-batches and packs the trained tokens of each row.

  Every process brings its own rows, and has an equal part of each micro-batch: with `micro_rows` rows in all,
  R of them are trained here. A process that has more than fill its parts passes the last ones on to others,
  see `row_moves`. M is that of the row that needs most.

  There are as many micro-batches as rows with one tree each would fill, or more where these do not do,
  rounded up to a power of two. In most runs their number never changes; padding costs no compute, see
  `count`. M is rounded up to a multiple of T/8, or of T/4 from T/2 on: a program is compiled late only where
  a row is fuller than all before. Both depend on the arguments alone, never on earlier batches: a resumed run
  computes the same.

  Args:
    trees: how many the rows of all processes may hold.
    ref: whether there is a KL to a reference, so that the weights of the KL are taken.
    critic: whether to take the values and returns of the rows.
  Returns:
    A batch whose `old_logprobs` are the sampler's, and whose `ref_logprobs` are None: the trainer's own
    scores of the batch have the layout that both want.
  """
  T = rows.tokens.shape[1]
  unused = {'places', 'real'} | (set() if ref else {'kl_weights'}) | (set() if critic else CRITIC)
  names = [field.name for field in dataclasses.fields(rows) if field.name not in unused]
  most_trained = int((rows.spans != 0).sum(axis=1).max(initial=1))
  sizes, largest = zip(*meshes.gather_objects((len(rows.tokens), most_trained)))
  given = pass_rows_on({name: getattr(rows, name) for name in names}, row_moves(sizes, micro_rows))
  count = max(-(-sum(sizes) // micro_rows), 1)
  n = 1 << (max(count, -(-trees // micro_rows)) - 1).bit_length()
  B, micro_rows = len(given['tokens']), micro_rows // len(sizes)
  trained = given['spans'] != 0
  M = target_bucket(max(largest), T)
  order = np.argsort(~trained, axis=1, kind='stable')[:, :M]  # trained tokens first, in row order
  real = np.take_along_axis(trained, order, axis=1)

  def split(values, padding=0):
    padding = np.broadcast_to(np.asarray(padding, values.dtype), (n * micro_rows - B, values.shape[1]))
    return np.concatenate([values, padding]).reshape(n, micro_rows, -1)

  def packed(name):
    if name in given:
      values = given[name]
      return split(np.where(real, np.take_along_axis(values, order, axis=1), 0).astype(values.dtype))

  index = np.arange(T)  # in rows of padding every token sees and follows itself
  sampler_logprobs = packed('sampler_logprobs')
  return Batch(
    tokens=split(given['tokens']), positions=split(given['positions']),
    previous=split(given['previous'], index), visible_until=split(given['visible_until'], index + 1),
    targets=split(np.where(real, order, -1).astype(np.int32), -1),
    weights=packed('loss_weights'), kl_weights=packed('kl_weights'),
    gains=packed('gains'), losses=packed('losses'), spans=packed('spans'),
    old_logprobs=sampler_logprobs, sampler_logprobs=sampler_logprobs, ref_logprobs=None,
    value_weights=packed('value_weights'), values=packed('values'), returns=packed('returns'),
    count=np.int32(count),
  )  # fmt: skip


def row_moves(sizes: Sequence[int], micro_rows: int) -> list[tuple[int, int]]:
  """Returns (source, target) of rows to move, so that all processes need no more micro-batches than they
  fill.

  Args:
    sizes: rows that each process has. Those that go are its last, the least full.
  """
  most = max(-(-sum(sizes) // micro_rows), 1) * (micro_rows // len(sizes))
  sources = [process for process, size in enumerate(sizes) for _ in range(size - most)]
  return list(zip(sources, (process for process, size in enumerate(sizes) for _ in range(most - size))))


def pass_rows_on(rows: dict[str, np.ndarray], moves: Sequence[tuple[int, int]]) -> dict[str, np.ndarray]:
  """Returns the rows, each array [B, T], that this process trains: its own but for those that go, then
  others'."""
  if not moves:
    return rows
  keep = len(rows['tokens']) - _sent(moves)
  sent = [{name: values[row] for name, values in rows.items()} for row in range(keep, len(rows['tokens']))]
  come = meshes.pass_on(sent, moves)
  return {name: np.stack([*values[:keep], *(row[name] for row in come)]) for name, values in rows.items()}


def _sent(moves: Sequence[tuple[int, int]]) -> int:
  return sum(source == jax.process_index() for source, _ in moves)


def check_rows(micro_rows: int, mesh) -> None:
  """Raises ValueError if a micro-batch does not split evenly over the mesh."""
  if micro_rows < 1 or micro_rows % meshes.batch_size(mesh):
    parts = meshes.batch_size(mesh)
    raise ValueError(f'train.micro_rows={micro_rows} must be a multiple of the {parts} parts that the '
                     'mesh splits a batch into (data * fsdp)')
  if meshes.batch_size(mesh) % jax.process_count():
    raise ValueError(f'mesh.data * mesh.fsdp is {meshes.batch_size(mesh)}, which must be a multiple of the '
                     f'{jax.process_count()} processes: each has rows of its own')


def target_bucket(largest: int, length: int) -> int:
  """Returns the smallest of T/8, T/4, 3T/8, T/2, 3T/4, T that holds `largest`."""
  return next(bucket for eighths in (1, 2, 3, 4, 6, 8) if largest <= (bucket := -(-length * eighths // 8)))


def mini_batches(sizes: Sequence[int], size: int, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
  """Cuts a batch into parts for one update each: of at most `size` trees (0: all), as many in each up to one.

  Groups come in random order. The trees of a group stay together as far as they can: they share their prompt.

  Args:
    sizes: trees of each group of the whole batch.
  Returns:
    (group, member) of the trees of each part.
  """
  number = -(-sum(sizes) // size) if size else 1
  groups = [group for group, members in enumerate(sizes) if members]
  if number > 1:
    groups = [groups[i] for i in rng.permutation(len(groups))]
  ordered = [(group, member) for group in groups for member in range(sizes[group])]
  ends = np.arange(max(number, 1) + 1) * len(ordered) // max(number, 1)
  return [ordered[start:end] for start, end in itertools.pairwise(ends)]


def compute_on_rows(program: Callable, params: dict, rows: TrainingRows, micro_rows: int, mesh,
                    trees: int = 0) -> np.ndarray:
  """Returns what a compiled score or value step says of the trained tokens, see `to_rows`; `trees`: see
  `make_batch`."""
  batch = place(make_batch(rows, micro_rows, trees=trees), mesh)
  with meshes.issuing():
    values = program(params, batch)
  return to_rows(values, batch, rows, micro_rows)


def to_rows(values: jax.Array, batch: Batch, rows: TrainingRows, micro_rows: int) -> np.ndarray:
  """Returns values [n, R, M] of a batch's trained tokens as [B, T] of the rows it was made of, 0 elsewhere.

  All processes must call it: rows that were passed on come home.
  """
  targets, values = meshes.local_rows(batch.targets), meshes.local_rows(values)
  spread = np.zeros((targets.shape[0] * targets.shape[1], rows.tokens.shape[1]), np.float32)
  targets = targets.reshape(len(spread), -1)
  row, column = np.nonzero(targets >= 0)
  spread[row, targets[row, column]] = values.reshape(targets.shape)[row, column]
  B = len(rows.tokens)
  moves = row_moves(meshes.gather_objects(B), micro_rows)
  keep, back = B - _sent(moves), [(target, source) for source, target in moves]
  come = meshes.pass_on(spread[keep:keep + _sent(back)], back) if moves else []
  return np.stack([*spread[:keep], *come])


def place(batch: Batch, mesh) -> Batch:
  """Places a batch on the mesh, rows split over `data` and `fsdp`; every process passes its own."""
  whole, rows = meshes.replicated(mesh), meshes.split_over_batch(mesh, 1)
  return jax.tree.map(lambda x: meshes.place_local(x, rows) if np.ndim(x) else meshes.place(x, whole), batch)
