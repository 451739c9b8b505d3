"""The KV cache: its arrays, and the host's record of which token path each of its rows holds.

One pair of arrays a layer, keys [rows, kv_heads, head_dim, length] and values [rows, kv_heads, length, head_dim], so that
XLA updates every layer's cache in place. There are more rows than slots: a path that waits for a tool keeps its row while
another is decoded. The last row is scratch: what a program must write but nobody wants goes there. With lanes, each has as many
rows of its own, a scratch row among them, and an episode's rows are all in one lane.

To append is to write behind the length, to fork is to copy a row (`segment.fork`), to rewind is to lower the length, which
only the host knows: `CacheRows` holds the valid tokens of each row and decides which row serves a path.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxsearch.models.decoder import DecoderConfig

FORK_MIN = 16  # a shorter common prefix is computed again rather than copied
NOBODY = -1


def allocate(config: DecoderConfig, rows: int, length: int, sharding: Sharding) -> list:
  """Zeros in the compute dtype: a list over layers of (keys, values)."""
  zeros = lambda *shape: jnp.zeros(shape, config.dtype, device=sharding)
  K, h = config.num_kv_heads, config.head_dim
  return [(zeros(rows, K, h, length), zeros(rows, K, length, h)) for _ in range(config.num_layers)]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """How many leading tokens two paths share."""
  size = min(len(a), len(b))
  differ = np.flatnonzero(a[:size] != b[:size])
  return int(differ[0]) if len(differ) else size


@dataclasses.dataclass
class CacheRow:
  """One row: the tokens whose keys and values it holds, who uses it and who may come back to it."""
  index: int  # among the rows of all lanes
  lane: int = 0
  place: int = 0  # in the cache of its lane
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  busy: bool = False
  owner: int = NOBODY  # the episode whose path it holds, until that episode has ended
  used: int = 0  # when it was last given out


@dataclasses.dataclass(frozen=True)
class Placement:
  """Row `row` serves path number `item` and has `shared` of its leading tokens, once copied from `source` if that is given."""
  item: int
  row: CacheRow
  shared: int
  source: CacheRow | None


class CacheRows:
  """Decides which of `count` rows in each lane serves which path. `evicted` counts rows taken from episodes that still run."""

  def __init__(self, count: int, lanes: int = 1):
    self.count, self.lanes, self.evicted = count, lanes, 0
    self.scratch = count  # place of the row behind them in each lane
    self.forget()

  def forget(self) -> None:
    """Drops all that is cached, as after a change of the parameters."""
    self.rows = [CacheRow(index, *divmod(index, self.count)) for index in range(self.lanes * self.count)]
    self._clock = 0

  def release(self, owner: int) -> None:
    """Frees the rows of an episode that has ended; what they hold may still serve others."""
    for row in self.rows:
      if row.owner == owner:
        row.owner = NOBODY

  def place(self, paths: Sequence[np.ndarray], owners: Sequence[int], lanes: Sequence[int] | None = None) -> list[Placement]:
    """Gives rows to paths, those with the longest cached prefix first; marks the rows busy.

    A path whose prefix another path of this call is about to compute is left out: place it again afterwards, and it gets a
    copy. Make the copies before anything is written.

    Args:
      paths: tokens to be cached for each, at most as many as its lane has rows that are not busy.
      owners: the episode of each.
      lanes: the lane of each; the first by default.
    """
    lanes = [0] * len(paths) if lanes is None else lanes
    shared = np.array([[common_prefix(path, row.tokens) if row.lane == lane else -1 for row in self.rows]
                       for path, lane in zip(paths, lanes)])  # [paths, rows]; -1 once the row is given away
    belongs = np.array([row.owner for row in self.rows])
    theirs = (belongs != NOBODY) & (belongs != np.asarray(owners)[:, None])
    used = np.array([row.used for row in self.rows])
    free = ~np.array([row.busy for row in self.rows])
    left, sources, placements = list(range(len(paths))), set(), []
    while left:
      direct = np.where(free & ~theirs, shared, -1)
      longest, in_place = shared.max(axis=1), np.maximum(direct.max(axis=1), 0)
      forked = longest - in_place >= FORK_MIN
      here = np.where(forked, longest, in_place)
      item = max(left, key=lambda i: (here[i], -i))
      left.remove(item)
      path, owner, lane, size = paths[item], owners[item], lanes[item], int(here[item])
      here_too = (paths[p.item] for p in placements if p.row.lane == lane)
      if max((common_prefix(path, other) for other in here_too), default=0) - size >= FORK_MIN:
        continue
      source = self.rows[int(shared[item].argmax())] if forked[item] else None
      if source is None and size:  # of equals the longest unused
        row = self.rows[int(np.where(direct[item] == size, -used, -np.inf).argmax())]
      else:  # what is least likely to be missed: nobody's, then the episode's own, then the longest unused
        spare = [row for row in self.rows
                 if row.lane == lane and free[row.index] and row is not source and row.index not in sources]
        row = min(spare, key=lambda row: (row.owner != NOBODY, row.owner != owner, row.used), default=None)
      if row is None:
        continue  # every other row is being copied from
      if source is not None:
        sources.add(source.index)
      shared[:, row.index], free[row.index] = -1, False
      self._clock += 1
      self.evicted += row.owner not in (NOBODY, owner)
      row.tokens, row.busy, row.owner, row.used = path[:size], True, owner, self._clock
      placements.append(Placement(item, row, size, source))
    return placements
