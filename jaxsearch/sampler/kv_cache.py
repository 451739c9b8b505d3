"""The KV cache: its arrays, and the host's record of which token path each of its rows holds.

One pair of arrays a layer, keys [rows, kv_heads, head_dim, length] and values [rows, kv_heads, length,
head_dim], so that XLA updates every layer's cache in place; where a kernel decodes, one array [rows,
kv_heads, length, 2 head_dim] of both. There are more rows than slots: a path that waits for a tool keeps its
row while another is decoded. The last row is scratch: what a program must write but nobody wants goes there.
With lanes, each has as many rows of its own, a scratch row among them, and an episode's rows are all in one
lane.

To append is to write behind the length, to fork is to copy a row (`segment.fork`), to rewind is to lower the
length, which only the host knows: `CacheRows` holds the valid tokens of each row and decides which row serves
a path. `Prefixes` finds the rows that share the beginning of a path without a look at the others.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxsearch.models.decoder import DecoderConfig

FORK_MIN = 16  # a shorter common prefix is computed again rather than copied or found
NOBODY = -1
NONE = np.zeros(0, np.int32)
T = TypeVar('T')


def allocate(config: DecoderConfig, rows: int, length: int, sharding: Sharding,
             together: bool = False) -> list:
  """Returns zeros in the compute dtype: a list over layers of (keys, values), or of (both,) if `together`."""
  return _zeros(config, rows, length, sharding, together)()


@functools.cache
def _zeros(config, rows, length, sharding, together):
  """Compiles a program, so that it may run where transfers are forbidden."""
  K, h = config.num_kv_heads, config.head_dim
  shapes = ((rows, K, length, 2 * h),) if together else ((rows, K, h, length), (rows, K, length, h))
  layer = lambda: tuple(jnp.zeros(shape, config.dtype) for shape in shapes)
  return jax.jit(lambda: [layer() for _ in range(config.num_layers)], out_shardings=sharding)


def by_lane(items: Sequence[T], lanes: int, lane_of: Callable[[T], int]) -> list[list[T]]:
  """Returns the items of each lane, in order."""
  return [[item for item in items if lane_of(item) == lane] for lane in range(lanes)]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """Returns how many leading tokens two paths share."""
  size = min(len(a), len(b))
  differ = np.flatnonzero(a[:size] != b[:size])
  return int(differ[0]) if len(differ) else size


class Prefixes:
  """Paths by their beginnings: a trie whose edges are blocks of FORK_MIN tokens."""

  def __init__(self):
    self.root = ({}, {})  # a node: (next nodes by block, the paths that pass it by name)

  def add(self, name: int, path: np.ndarray) -> None:
    """Adds a path, also in place of one that it begins with."""
    for _, passing in self._walk(path, create=True):
      passing[name] = path

  def remove(self, name: int, path: np.ndarray, start: int = 0) -> None:
    """Removes a path, but for its first `start` tokens."""
    nodes = [self.root, *self._walk(path)]
    for number in range(len(nodes) - 1, start // FORK_MIN, -1):
      del nodes[number][1][name]
      if not nodes[number][1]:
        del nodes[number - 1][0][_block(path, number - 1)]

  def longest(self, path: np.ndarray,
              allowed: Callable[[int], bool] = lambda name: True) -> tuple[int, list[int]]:
    """Returns (length, names) of the allowed paths that share most of a path's beginning; (0, []) if none."""
    for number, (_, passing) in reversed(list(enumerate(self._walk(path), 1))):
      if names := [name for name in passing if allowed(name)]:
        done = number * FORK_MIN
        block = slice(done, done + FORK_MIN)
        sizes = [common_prefix(path[block], passing[name][block]) for name in names]
        return done + max(sizes), [name for name, size in zip(names, sizes) if size == max(sizes)]
    return 0, []

  def _walk(self, path: np.ndarray, create: bool = False):
    node = self.root
    for number in range(len(path) // FORK_MIN):
      block = _block(path, number)
      node = node[0].setdefault(block, ({}, {})) if create else node[0].get(block)
      if node is None:
        return
      yield node


def _block(path: np.ndarray, number: int) -> bytes:
  return path[number * FORK_MIN:(number + 1) * FORK_MIN].tobytes()


@dataclasses.dataclass
class CacheRow:
  """One row: the tokens whose keys and values it holds, who uses it and who may come back to it."""
  index: int  # among the rows of all lanes
  lane: int = 0
  place: int = 0  # in the cache of its lane
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: NONE)  # set by CacheRows.hold alone
  busy: bool = False
  owner: int = NOBODY  # the episode whose path it holds, until that episode has ended
  used: int = 0  # when it was last given out


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens to be cached behind `start` tokens of a row.

  With `targets`, what follows each of them, `prefill` scores these at a `temperature` that all chunks of a
  call share.
  """
  row: CacheRow
  start: int
  tokens: np.ndarray
  targets: np.ndarray | None = None
  temperature: float = 1.0
  logprobs: list[float] = dataclasses.field(default_factory=list)  # of the targets, once prefilled


@dataclasses.dataclass(frozen=True)
class Placement:
  """Row `row` serves path `item` and has `shared` of its leading tokens, copied from `source` if given."""
  item: int
  row: CacheRow
  shared: int
  source: CacheRow | None


class CacheRows:
  """Decides which of `count` rows in each lane serves which path.

  `evicted` counts rows taken from episodes that still run.
  """

  def __init__(self, count: int, lanes: int = 1):
    self.count, self.lanes, self.evicted = count, lanes, 0
    self.forget()

  def forget(self) -> None:
    """Drops all that is cached, as after a change of the parameters."""
    self.rows = [CacheRow(index, *divmod(index, self.count)) for index in range(self.lanes * self.count)]
    self.prefixes = [Prefixes() for _ in range(self.lanes)]
    self._clock = 0

  def release(self, owner: int) -> None:
    """Frees the rows of an episode that has ended; what they hold may still serve others."""
    for row in self.rows:
      if row.owner == owner:
        row.owner = NOBODY

  def hold(self, row: CacheRow, tokens: np.ndarray) -> None:
    """Notes what a row holds now."""
    shared, prefixes = common_prefix(row.tokens, tokens), self.prefixes[row.lane]
    prefixes.remove(row.index, row.tokens, shared)
    prefixes.add(row.index, tokens)
    row.tokens = tokens

  def place(self, paths: Sequence[np.ndarray], owners: Sequence[int],
            lanes: Sequence[int] | None = None) -> list[Placement]:
    """Gives rows to paths, those with the longest cached prefix first; marks the rows busy.

    A path whose prefix another path of this call is about to compute is left out: place it again afterwards,
    and it gets a copy. Make the copies before anything is written.

    Args:
      paths: tokens to be cached for each, at most as many as its lane has rows that are not busy.
      owners: the episode of each.
      lanes: the lane of each; the first by default.
    """
    lanes = [0] * len(paths) if lanes is None else lanes
    given, sources, placements = set(), set(), []
    placed = [Prefixes() for _ in range(self.lanes)]  # of this call

    def best(item):
      """Returns (length, row to go on in or None, row to copy from or None) of what serves a path."""
      path, owner, prefixes = paths[item], owners[item], self.prefixes[lanes[item]]
      size, names = prefixes.longest(path, lambda name: name not in given)
      free = lambda name: (name not in given and not self.rows[name].busy
                           and self.rows[name].owner in (NOBODY, owner))
      in_place, names_in_place = prefixes.longest(path, free) if size else (0, [])
      if size - in_place >= FORK_MIN:
        return size, None, self.rows[min(names)]
      rows = (self.rows[name] for name in names_in_place)
      return in_place, min(rows, key=lambda row: row.used, default=None), None

    # Rows that are given away can only shorten what is left for others, so the first of the heap that is
    # still up to date is the longest.
    heap = [(-best(item)[0], item) for item in range(len(paths))]
    heapq.heapify(heap)
    while heap:
      before, item = heapq.heappop(heap)
      size, row, source = best(item)
      if -size != before:
        heapq.heappush(heap, (-size, item))
        continue
      path, owner, lane = paths[item], owners[item], lanes[item]
      if placed[lane].longest(path)[0] - size >= FORK_MIN:
        continue
      row = row or self._least_missed(lane, owner, sources | {source and source.index})
      if row is None:
        continue  # every other row is being copied from
      if source is not None:
        sources.add(source.index)
      given.add(row.index)
      placed[lane].add(item, path)
      self._clock += 1
      self.evicted += row.owner not in (NOBODY, owner)
      self.hold(row, path[:size])
      row.busy, row.owner, row.used = True, owner, self._clock
      placements.append(Placement(item, row, size, source))
    return placements

  def _least_missed(self, lane: int, owner: int, kept: set) -> CacheRow | None:
    """Returns a row to evict, not busy nor `kept`: a free one, else the episode's, else the oldest used."""
    rows = self.rows[lane * self.count:(lane + 1) * self.count]
    spare = [row for row in rows if not row.busy and row.index not in kept]
    return min(spare, key=lambda row: (row.owner != NOBODY, row.owner != owner, row.used), default=None)
