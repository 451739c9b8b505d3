"""The KV cache: its arrays, and the host's record of which token path each of its rows holds.

One pair of arrays a layer, keys [rows, kv_heads, head_dim, length] and values [rows, kv_heads, length,
head_dim], so that XLA updates every layer's cache in place; where a kernel decodes, one array [rows,
kv_heads, length, 2 head_dim] of both. There are more rows than slots: a path that waits for a tool keeps its
row while another is decoded. The last row is scratch: what a program must write but nobody wants goes there.
With lanes, each has as many rows of its own, a scratch row among them, and an episode's rows are all in one
lane.

To append is to write behind the length, to fork is to copy a row, to rewind is to lower the length, which
only the host knows: `CacheRows` holds the valid tokens of each row and decides which row serves a path.
`Prefixes` finds the rows that share the beginning of a path without a look at the others.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.sampler.segment import Slots
from jaxsearch.trees.layout import common_prefix

FORK_MIN = 16  # a shorter common prefix is computed again rather than copied or found
NOBODY = -1


def allocate(config: DecoderConfig, rows: int, length: int, sharding: Sharding | None,
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


def idle_slots(count: int, scratch: int) -> Slots:
  """Returns idle slots [count] on the host."""
  return Slots(*(np.full(count, value, np.float32 if isinstance(value, float) else np.int32)
                 for value in Slots(scratch)))


class Prefixes:
  """Paths by their beginnings: under each whole number of blocks of FORK_MIN tokens those that begin so."""

  def __init__(self):
    self.beginning: dict[int, dict[int, np.ndarray]] = {}  # hash of the blocks -> paths by name

  def add(self, name: int, path: np.ndarray) -> None:
    """Adds a path, also in place of one that it begins with."""
    for key in _beginnings(path):
      self.beginning.setdefault(key, {})[name] = path

  def remove(self, name: int, path: np.ndarray, start: int = 0) -> None:
    """Removes a path, but for its first `start` tokens."""
    for key in itertools.islice(_beginnings(path), start // FORK_MIN, None):
      del self.beginning[key][name]
      if not self.beginning[key]:
        del self.beginning[key]

  def longest(self, path: np.ndarray,
              allowed: Callable[[int], bool] = lambda name: True) -> tuple[int, list[int]]:
    """Returns (length, names) of the allowed paths that share most of a path's beginning; (0, []) if none."""
    for key in reversed(list(itertools.takewhile(self.beginning.__contains__, _beginnings(path)))):
      sizes = {name: common_prefix(path, other) for name, other in self.beginning[key].items()
               if allowed(name)}
      if sizes:
        most = max(sizes.values())
        return most, [name for name, size in sizes.items() if size == most]
    return 0, []


def _beginnings(path: np.ndarray) -> Iterator[int]:
  key = 0
  for end in range(FORK_MIN, len(path) + 1, FORK_MIN):
    key = hash((key, path[end - FORK_MIN:end].tobytes()))
    yield key


@dataclasses.dataclass(eq=False)
class CacheRow:
  """One row: the tokens whose keys and values it holds, who uses it and who may come back to it."""
  index: int  # among the rows of all lanes
  lane: int = 0
  place: int = 0  # in the cache of its lane
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # see CacheRows.hold
  busy: bool = False
  owner: int = NOBODY  # the episode whose path it holds, until that episode has ended
  used: int = 0  # when it was last given out
  seat: int = -1  # in the front, see device.py; -1 without one
  copied: int = 0  # how many of its entries are there


@dataclasses.dataclass(eq=False)
class Path:
  """A path that wants a row, which is to hold all of its tokens but the last: that is a program's next input.

  `CacheRows.place` gives it its `row`, which holds `shared` of its leading tokens already, or will once they
  are copied from `source`.
  """
  tokens: np.ndarray
  owner: int  # its episode
  lane: int = 0
  pending: Any = None  # the request
  slot: Slots | None = None  # of a span: what its first segment knows of it
  row: CacheRow | None = None
  shared: int = 0
  source: CacheRow | None = None

  @property
  def context(self) -> np.ndarray:
    """Returns the tokens that are to be cached."""
    return self.tokens[:-1]


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
    prefixes = self.prefixes[row.lane]
    prefixes.remove(row.index, row.tokens, common_prefix(row.tokens, tokens))
    prefixes.add(row.index, tokens)
    row.tokens = tokens

  def place(self, paths: Sequence[Path]) -> list[Path]:
    """Gives rows to paths, those with the longest cached prefix first; marks the rows busy.

    Returns those that got one. A path whose prefix another one of this call is about to compute is left out:
    place it again afterwards, and it gets a copy. Make the copies before anything is written. At most as many
    paths as their lane has rows that are not busy.
    """
    given, sources, placed = set(), set(), []
    to_compute = [Prefixes() for _ in range(self.lanes)]

    def best(path: Path) -> tuple[int, CacheRow | None, CacheRow | None]:
      """Returns (length, row to go on in or None, row to copy from or None) of what serves a path."""
      prefixes = self.prefixes[path.lane]
      size, names = prefixes.longest(path.context, lambda name: name not in given)
      free = lambda name: (name not in given and not self.rows[name].busy
                           and self.rows[name].owner in (NOBODY, path.owner))
      in_place, names_in_place = prefixes.longest(path.context, free) if size else (0, [])
      if size - in_place >= FORK_MIN:
        return size, None, self.rows[min(names)]
      rows = (self.rows[name] for name in names_in_place)
      return in_place, min(rows, key=lambda row: row.used, default=None), None

    # Rows that are given away can only shorten what is left for others, so the first of the heap that is
    # still up to date is the longest.
    heap = [(-best(path)[0], item) for item, path in enumerate(paths)]
    heapq.heapify(heap)
    while heap:
      before, item = heapq.heappop(heap)
      path = paths[item]
      size, row, source = best(path)
      if -size != before:
        heapq.heappush(heap, (-size, item))
        continue
      if to_compute[path.lane].longest(path.context)[0] - size >= FORK_MIN:
        continue
      row = row or self._least_missed(path, sources | {source and source.index})
      if row is None:
        continue  # every other row is being copied from
      if source is not None:
        sources.add(source.index)
      given.add(row.index)
      to_compute[path.lane].add(item, path.context)
      self._clock += 1
      self.evicted += row.owner not in (NOBODY, path.owner)
      self.hold(row, path.context[:size])
      row.busy, row.owner, row.used = True, path.owner, self._clock
      path.row, path.shared, path.source = row, size, source
      placed.append(path)
    return placed

  def _least_missed(self, path: Path, kept: set) -> CacheRow | None:
    """Returns a row to evict, not busy nor `kept`: a free one, else the episode's, else the oldest used."""
    rows = self.rows[path.lane * self.count:(path.lane + 1) * self.count]
    spare = [row for row in rows if not row.busy and row.index not in kept]
    return min(spare, key=lambda row: (row.owner != NOBODY, row.owner != path.owner, row.used), default=None)
