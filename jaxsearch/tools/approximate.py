"""Approximate nearest vectors with FAISS: inverted lists in a file of FAISS, searched from disk.

k-means parts the vectors into lists. A search looks into the `probes` lists whose centres are nearest to the
query. Not a graph (HNSW): it answers more queries a second, but has to be in memory as a whole.
"""

import pathlib
import time
from collections.abc import Callable

import numpy as np

from jaxsearch.tools.dense import Vectors

try:
  import faiss
  from faiss.contrib.exhaustive_search import knn_ground_truth
except ImportError as error:
  message = "approximate search needs the package faiss-cpu: pip install 'jaxsearch[retrieval]'"
  raise ImportError(message) from error

BLOCK = 2**12        # vectors read at a time
MOST_LISTS = 2**14
TRAINED_ON = 40      # vectors that k-means trains on for each list; FAISS wants 39 or more
SAMPLE = 512         # passages by which recall is measured
# Doubling of `probes` stops once recall of the three nearest is RECALL, or above PLATEAU while doubling gains
# less than LITTLE: the codes round.
RECALL, PLATEAU, LITTLE = 0.99, 0.9, 0.002
Report = Callable[[str, int], None]  # called with (stage, passages done)


def lists_of(size: int) -> int:
  """Returns how many lists so many vectors get; 4 √size balances centres against vectors in a search."""
  return max(1, min(round(4 * size**0.5), size // TRAINED_ON, MOST_LISTS))


def cost(size: int, width: int, precision: str) -> dict[str, float]:
  """Estimates bytes of the lists, bytes of memory for a search, and seconds to build them here."""
  lists, block = lists_of(size), np.ones((2048, width), np.float32)
  start = time.perf_counter()
  block @ block.T
  rate = 2 * len(block)**2 * width / (time.perf_counter() - start)
  # k-means: ten rounds over its sample; lists: every vector by every centre; recall: SAMPLE by every vector.
  pairs = 10 * TRAINED_ON * lists**2 + size * lists + SAMPLE * size
  return {'bytes': size * (width * (2 if precision == 'float16' else 1) + 8) + 4 * lists * width,
          'bytes_in_memory': 4 * lists * width, 'seconds': 2 * width * pairs / rate}


def build(folder: pathlib.Path, vectors: Vectors, precision: str, report: Report) -> dict:
  """Builds lists.faiss in `folder`, in memory of the same size; OSError if it cannot be written.

  Returns {'lists', 'probes', 'recall3', 'sample'}: recall3 is the share of the three nearest that are found,
  with a sample of the vectors as queries (each without itself). `probes` is the least power of two at which
  it is RECALL, or does not grow any more, or all lists.
  """
  size = len(vectors)
  report('centres of lists', 0)
  index = _trained(vectors, precision)
  for first in range(0, size, BLOCK):
    report('lists', first)
    index.add(vectors[first:first + BLOCK])
  try:
    faiss.write_index(index, str(folder / 'lists.part'))
  except RuntimeError as error:
    raise OSError(str(error)) from error
  (folder / 'lists.part').replace(folder / 'lists.faiss')
  report('recall', 0)
  numbers = np.linspace(0, size - 1, min(SAMPLE, size)).astype(np.int64)
  queries, lists = vectors[numbers], Lists(folder)
  blocks = (vectors[first:first + BLOCK] for first in range(0, size, BLOCK))
  exact = knn_ground_truth(queries, blocks, 4, faiss.METRIC_INNER_PRODUCT, ngpu=0)[1]

  def others(rows: np.ndarray) -> list[set[int]]:
    """Returns the first three of each row but the query's own number and -1, which stands for none."""
    return [set(row[(row != number) & (row >= 0)][:3].tolist()) for row, number in zip(rows, numbers)]

  def recall(probes: int) -> float:
    pairs = zip(others(lists.search(queries, 4, probes)[0]), others(exact))
    return float(np.mean([len(ours & nearest) / max(len(nearest), 1) for ours, nearest in pairs]))

  probes, reached = 1, recall(1)
  while reached < RECALL and probes < lists.number:
    more = recall(min(2 * probes, lists.number))
    if reached > PLATEAU and more - reached < LITTLE:
      break
    probes, reached = min(2 * probes, lists.number), more
  return {'lists': lists.number, 'probes': probes, 'recall3': round(reached, 4), 'sample': len(numbers)}


def _trained(vectors: Vectors, precision: str) -> 'faiss.Index':
  """Returns empty lists with their centres, from blocks of vectors all over the index."""
  size, width = vectors.shape
  lists = lists_of(size)
  starts = np.unique(np.linspace(0, (size - 1) // BLOCK, 256).astype(int)) * BLOCK
  each = -(-TRAINED_ON * lists // len(starts))
  blocks = (vectors[first:first + BLOCK] for first in starts.tolist())
  sample = [block[np.linspace(0, len(block) - 1, min(each, len(block))).astype(int)] for block in blocks]
  codes = 'fp16' if precision == 'float16' else '8'
  index = faiss.index_factory(width, f'IVF{lists},SQ{codes}', faiss.METRIC_INNER_PRODUCT)
  index.cp.min_points_per_centroid = 1  # else FAISS warns where all passages are too few
  index.train(np.concatenate(sample))
  return index


class Lists:
  """Searches `probes` of the lists in a folder, which are mapped into memory; may be called from several
  threads."""

  def __init__(self, folder: pathlib.Path, probes: int = 1):
    self._index = faiss.read_index(str(folder / 'lists.faiss'), faiss.IO_FLAG_MMAP)
    self._probes, self.number = probes, self._index.nlist

  def search(self, queries: np.ndarray, topk: int, probes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns (numbers [B,k] int64, -1 for none; scores [B,k] float32) of vectors near to queries [B,D]."""
    settings = faiss.SearchParametersIVF(nprobe=probes or self._probes)
    scores, numbers = self._index.search(queries, min(topk, self._index.ntotal), params=settings)
    return numbers, scores
