"""The KV cache: its arrays, and the host's record of which token path each of its rows holds.

One pair of arrays a layer, keys [rows, kv_heads, head_dim, length] and values [rows, kv_heads, length, head_dim], so that
XLA updates every layer's cache in place. There are more rows than are decoded at a time: a path that waits for a tool
keeps its row while another is decoded. The last row is scratch: whatever a program must write but nobody wants goes there.
A cache can be split over its heads; devices that are left form further lanes, each with as many rows of its own, a scratch row
among them. What an episode caches stays in one lane.

To append is to write behind the length, to fork is to copy a row (`segment.fork`), to rewind is to lower the length,
which only the host knows: `CacheRows` holds the valid tokens of each row and decides which row serves a path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxsearch.models.decoder import DecoderConfig

FORK_MIN = 16  # a shorter common prefix is computed again rather than copied


def allocate(config: DecoderConfig, rows: int, length: int, sharding: Sharding) -> list:
  """Zeros in the compute dtype: a list over layers of (keys, values)."""
  def zeros(*shape):
    return jnp.zeros(shape, config.dtype, device=sharding)

  K, h = config.num_kv_heads, config.head_dim
  return [(zeros(rows, K, h, length), zeros(rows, K, length, h)) for _ in range(config.num_layers)]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """How many leading tokens two paths share."""
  size = min(len(a), len(b))
  differ = a[:size] != b[:size]
  first = int(differ.argmax()) if size else 0
  return first if size and differ[first] else size


@dataclasses.dataclass
class CacheRow:
  """One row: the tokens whose keys and values it holds, who uses it and who may come back to it."""
  index: int  # among the rows of all lanes
  lane: int = 0
  place: int = 0  # in the cache of its lane
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  busy: bool = False
  owner: int | None = None  # the episode whose path it holds, until that episode has ended
  used: int = 0  # when it was last given out


@dataclasses.dataclass(frozen=True)
class Placement:
  """Row `row` shall serve path number `item`; `shared` leading tokens are there, after a copy from `source` if given."""
  item: int
  row: CacheRow
  shared: int
  source: CacheRow | None


class CacheRows:
  """Decides which row serves which path: `count` rows in each lane. `evicted` counts rows taken from episodes that still run."""

  def __init__(self, count: int, lanes: int = 1):
    self.count, self.lanes = count, lanes
    self.scratch = count  # place of the row behind them in each lane
    self.evicted = 0
    self.forget()

  def forget(self) -> None:
    """Everything cached is void, as after a change of the parameters."""
    self.rows = [CacheRow(index, *divmod(index, self.count)) for index in range(self.lanes * self.count)]
    self._clock = 0

  def release(self, owner: int) -> None:
    """The episode has ended: its rows are anyone's, what they hold may still serve others."""
    for row in self.rows:
      if row.owner == owner:
        row.owner = None

  def place(self, paths: Sequence[np.ndarray], owners: Sequence[int], lanes: Sequence[int] | None = None) -> list[Placement]:
    """Gives rows to paths, those with the longest cached prefix first; marks the rows busy.

    Paths that wait for a prefix which another path of this call will only now compute are left out: place them again
    once that is done, and they get a copy. The copies are to be made before anything is written.

    Args:
      paths: tokens to be cached for each, at most as many as there are rows in its lane that are not busy.
      owners: the episode of each.
      lanes: the lane of each; the first by default.
    """
    lanes = [0] * len(paths) if lanes is None else lanes
    shared = np.array([[common_prefix(path, row.tokens) if row.lane == lane else -1 for row in self.rows]
                       for path, lane in zip(paths, lanes)])  # [paths, rows]
    belongs = np.array([-1 if row.owner is None else row.owner for row in self.rows])
    theirs = (belongs >= 0) & (belongs != np.asarray(owners)[:, None])
    used = np.array([row.used for row in self.rows])
    free = ~np.array([row.busy for row in self.rows])
    given, left = np.zeros(len(self.rows), bool), list(range(len(paths)))
    sources, placements = set(), []
    while left:
      anywhere = np.where(given, -1, shared)
      direct = np.where(free & ~given & ~theirs, shared, -1)
      forked = anywhere.max(axis=1) - np.maximum(direct.max(axis=1), 0) >= FORK_MIN
      here = np.where(forked, anywhere.max(axis=1), np.maximum(direct.max(axis=1), 0))
      item = max(left, key=lambda i: (here[i], -i))
      left.remove(item)
      path, size = paths[item], int(here[item])
      here_too = (paths[p.item] for p in placements if p.row.lane == lanes[item])
      if max((common_prefix(path, other) for other in here_too), default=0) - size >= FORK_MIN:
        continue
      source = self.rows[int(anywhere[item].argmax())] if forked[item] else None
      if source is None and size:  # of equals the longest unused
        row = self.rows[int(np.where(direct[item] == size, -used, -np.inf).argmax())]
      else:
        row = self._victim(owners[item], lanes[item], free & ~given, sources | {source and source.index})
      if row is None:
        continue  # every other row is being copied from
      if source is not None:
        sources.add(source.index)
      given[row.index] = True
      self._take(row, owners[item], path[:size])
      placements.append(Placement(item, row, size, source))
    return placements

  def _victim(self, owner: int, lane: int, free: np.ndarray, avoid: set) -> CacheRow | None:
    """The row whose content is least likely to be missed: nobody's, then the episode's own, then the longest unused."""
    rows = [row for row in self.rows if row.lane == lane and free[row.index] and row.index not in avoid]
    return min(rows, key=lambda row: (0 if row.owner is None else 1 if row.owner == owner else 2, row.used), default=None)

  def _take(self, row, owner, tokens):
    self._clock += 1
    self.evicted += row.owner not in (None, owner)
    row.tokens, row.busy, row.owner, row.used = tokens, True, owner, self._clock
