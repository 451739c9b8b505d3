"""The KV cache: its arrays, and the host's record of which token path each of its rows holds.

One pair of arrays a layer, keys [rows, kv_heads, head_dim, length] and values [rows, kv_heads, length, head_dim], so that
XLA updates every layer's cache in place. There are more rows than are decoded at a time: a path that waits for a tool keeps its row while another
is decoded. The last row is scratch: whatever a program must write but nobody wants goes there.

To append is to write behind the length, to fork is to copy a row (`segment.fork`), to rewind is to lower the length,
which only the host knows: `Rows` holds the valid tokens of each row and decides which row serves a path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxsearch.models.decoder import DecoderConfig

FORK_MIN = 16  # a shorter common prefix is computed again rather than copied


AXES = ('rows', 'kv_heads', 'time', 'time')  # logical names for the sharding; only heads are split


def allocate(config: DecoderConfig, rows: int, length: int, place: Callable[[Sequence[int]], Sharding]) -> list:
  """Zeros in the compute dtype: a list over layers of (keys, values); `place` says where an array of a shape lies."""
  def zeros(*shape):
    return jnp.zeros(shape, config.dtype, device=place(shape))

  K, h = config.num_kv_heads, config.head_dim
  return [(zeros(rows, K, h, length), zeros(rows, K, length, h)) for _ in range(config.num_layers)]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """How many leading tokens two paths share."""
  size = min(len(a), len(b))
  differ = a[:size] != b[:size]
  first = int(differ.argmax()) if size else 0
  return first if size and differ[first] else size


@dataclasses.dataclass
class Row:
  """One row: the tokens whose keys and values it holds, who uses it and who may come back to it."""
  index: int
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  busy: bool = False
  owner: int | None = None  # the episode whose path it holds, until that episode has ended
  used: int = 0  # when it was last given out


@dataclasses.dataclass(frozen=True)
class Placement:
  """Row `row` shall serve path number `item`; `shared` leading tokens are there, after a copy from `source` if given."""
  item: int
  row: Row
  shared: int
  source: Row | None


class Rows:
  """Decides which row serves which path. `evicted` counts rows taken from episodes that still run."""

  def __init__(self, count: int):
    self.scratch = count  # index of the row behind them
    self.evicted = 0
    self.forget()

  def forget(self) -> None:
    """Everything cached is void, as after a change of the parameters."""
    self.rows = [Row(index) for index in range(self.scratch)]
    self._clock = 0

  def release(self, owner: int) -> None:
    """The episode has ended: its rows are anyone's, what they hold may still serve others."""
    for row in self.rows:
      if row.owner == owner:
        row.owner = None

  def place(self, paths: Sequence[np.ndarray], owners: Sequence[int]) -> list[Placement]:
    """Gives rows to paths, those with the longest cached prefix first; marks the rows busy.

    Paths that wait for a prefix which another path of this call will only now compute are left out: place them again
    once that is done, and they get a copy. The copies are to be made before anything is written, all at once.

    Args:
      paths: tokens to be cached for each, at most as many as there are rows that are not busy.
      owners: the episode of each.
    """
    placements, left = [], list(range(len(paths)))
    targets, sources, planned = set(), set(), []
    shared = {(item, row.index): common_prefix(paths[item], row.tokens) for item in left for row in self.rows}
    while left:
      best = {item: self._best(item, owners[item], shared, targets) for item in left}
      item = max(left, key=lambda i: (best[i][1], -i))
      left.remove(item)
      ahead = max((common_prefix(paths[item], path) for path in planned), default=0)
      row, here, source = best[item]
      if ahead - here >= FORK_MIN:
        continue
      if row is None:
        row = self._victim(owners[item], avoid=sources | {source.index if source else None})
      if row is None:
        continue  # every other row is being copied from: next time
      if source is not None:
        sources.add(source.index)
      targets.add(row.index)
      planned.append(paths[item])
      self._take(row, owners[item], paths[item][:here])
      placements.append(Placement(item, row, here, source))
    return placements

  def _best(self, item, owner, shared, targets):
    """(row or None, tokens it will share, row to copy from or None) for one path."""
    fresh = [row for row in self.rows if row.index not in targets]
    free = [row for row in fresh if not row.busy and row.owner in (None, owner)]
    most = max(fresh, key=lambda row: shared[item, row.index], default=None)
    mine = max(free, key=lambda row: (shared[item, row.index], -row.used), default=None)
    most_shared = shared[item, most.index] if most else 0
    mine_shared = shared[item, mine.index] if mine else 0
    if most_shared - mine_shared >= FORK_MIN:
      return None, most_shared, most
    return (mine, mine_shared, None) if mine_shared else (None, 0, None)

  def _victim(self, owner, avoid):
    """The row whose content is least likely to be missed: nobody's, then the episode's own, then the longest unused."""
    free = [row for row in self.rows if not row.busy and row.index not in avoid]
    return min(free, key=lambda row: (0 if row.owner is None else 1 if row.owner == owner else 2, row.used), default=None)

  def _take(self, row, owner, tokens):
    self._clock += 1
    self.evicted += row.owner not in (None, owner)
    row.tokens, row.busy, row.owner, row.used = tokens, True, owner, self._clock
