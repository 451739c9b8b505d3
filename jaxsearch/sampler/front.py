"""The front: contiguous copies of the rows that are decoded, where no kernel decodes in the cache itself.

Each lane has `width` seats of `window` entries. A row keeps its seat from segment to segment: `seat` copies
only what was written to it since, and the decode program writes new entries to both.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import segment
from jaxsearch.sampler.kv_cache import CacheRow, allocate, by_lane

LOADED = 256  # entries that are copied at a time


class Front:
  """Seats for rows of the cache; `arrays` are those of the decode program.

  Args:
    lanes, rows: lanes, and rows of the cache in each.
    sharding: of the arrays.
    whole: of what goes to the device with a call.
  """

  def __init__(self, config: DecoderConfig, lanes: int, rows: int, sharding: Sharding, whole: Sharding,
               mesh: Mesh | None):
    self._config, self._lanes, self._rows = config, lanes, rows
    self._sharding, self._whole, self._mesh = sharding, whole, mesh
    self.clear()

  def clear(self) -> None:
    """Frees the copies; they are made again where they are needed."""
    self.arrays, self.width, self.window = None, 0, 0
    self._seats = np.full((self._lanes, self._rows), -1)  # of each row, -1 without one
    self._sizes = np.zeros((self._lanes, self._rows), np.int32)  # how many of its entries are there

  def resize(self, width: int, window: int) -> None:
    """Makes an empty front."""
    self.clear()  # frees the old one first
    self.width, self.window = width, window
    self.arrays = allocate(self._config, self._lanes * width, window, self._sharding)

  def written(self, row: CacheRow, start: int) -> None:
    """Notes that a row of the cache has new entries from `start` on, which its copy lacks."""
    if row.place < self._rows:  # not the scratch row
      self._sizes[row.lane, row.place] = min(self._sizes[row.lane, row.place], start)

  def decoded(self, lanes: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> None:
    """Notes how many entries of rows are there after a segment."""
    self._sizes[lanes, places] = sizes

  def seat(self, cache: list, rows: Sequence[CacheRow], sizes: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Seats rows with `sizes` entries each; returns their seats within their lanes.

    `every` [lanes * width] gets the entries of all that have a seat: a path that is not decoded now stays as
    it is, since what is written goes behind it.
    """
    lanes, places = np.array([(row.lane, row.place) for row in rows]).T
    for lane in set(lanes[self._seats[lanes, places] < 0].tolist()):
      self._find_seats(lane, places[lanes == lane])
    seats, held = self._seats[lanes, places], self._sizes[lanes, places]
    missing = np.flatnonzero(held < sizes)
    if len(missing):
      self.load(cache, [(rows[i], int(seats[i]), int(held[i]), int(sizes[i])) for i in missing])
    seated = self._seats >= 0
    every[(np.arange(self._lanes)[:, None] * self.width + self._seats)[seated]] = self._sizes[seated]
    return seats

  def _find_seats(self, lane: int, places: np.ndarray) -> None:
    """Gives rows without a seat that of a row that is not decoded now."""
    seats = self._seats[lane]
    free = iter(np.setdiff1d(np.arange(self.width), seats[places]).tolist())
    for row in places[seats[places] < 0].tolist():
      seat = next(free)
      seats[seats == seat] = -1
      seats[row], self._sizes[lane, row] = seat, 0

  def load(self, cache: list, missing: Sequence[tuple[CacheRow, int, int, int]]) -> None:
    """Copies entries start to end of rows, given as (row, its seat, start, end)."""
    size = min(LOADED, self.window)
    windows = [(row, seat, min(first, self.window - size)) for row, seat, start, end in missing
               for first in range(start, end, size)]
    lanes = by_lane(windows, self._lanes, lambda window: window[0].lane)
    arrays = np.zeros((3, self._lanes, self.width * -(-self.window // size)), np.int32)
    for lane, part in enumerate(lanes):
      # All lanes loop alike: one with less to do copies what is at seat 0 again.
      arrays[0, lane] = (self._seats[lane] == 0).argmax()
      for i, (row, seat, start) in enumerate(part):
        arrays[:, lane, i] = row.place, seat, start
    counts = np.full(self._lanes, max(map(len, lanes)), np.int32)
    sources, targets, starts, counts = jax.device_put((*arrays.reshape(3, -1), counts), self._whole)
    with meshes.issuing():
      self.arrays = segment.load(self.arrays, cache, sources, targets, starts, counts, window=size,
                                 mesh=self._mesh)
