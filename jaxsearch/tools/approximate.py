"""Approximate nearest vectors with FAISS: inverted lists on disk, built from the stored vectors of an index in bounded memory.

k-means parts the vectors into lists. A search looks into the `probes` lists whose centres are nearest to the query; the others
are not read. Not a graph (HNSW): it answers more queries a second, but has to be in memory as a whole while it is built.

trained.faiss has the centres; lists.bytes the codes of the vectors of each list, then their numbers (int64), list by list;
list_sizes.uint64 the number of each. Needs the extra `retrieval`.
"""

import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxsearch.files import naming, no_link, write_whole
from jaxsearch.tools.dense import BLOCK, Vectors

try:
  import faiss
except ImportError as error:
  raise ImportError("approximate search needs the package faiss-cpu: pip install 'jaxsearch[retrieval]'") from error

SHARD = 2**18        # vectors encoded at a time
MOST_LISTS = 2**14
TRAINED_ON = 40      # vectors of a list, by which k-means finds its centre; FAISS wants 39 or more
SAMPLE = 512         # passages by which recall is measured
RECALL = 0.99        # of the three nearest that is enough,
PLATEAU, LITTLE = 0.9, 0.002  # or above PLATEAU, if twice as many lists bring less than LITTLE: the codes round


def lists_of(size: int) -> int:
  """How many lists so many vectors get: 4 √size balances the centres against the vectors that a search looks at."""
  return max(1, min(round(4 * size**0.5), size // TRAINED_ON, MOST_LISTS))


def cost(size: int, width: int, precision: str) -> dict[str, float]:
  """What `build` would cost: bytes of the lists, bytes of memory for a search, and seconds by a measurement of this machine."""
  lists, block = lists_of(size), np.ones((2048, width), np.float32)
  start = time.perf_counter()
  block @ block.T
  rate = 2 * len(block)**2 * width / (time.perf_counter() - start)
  # k-means goes ten times over its sample; every vector meets every centre; the sample is searched for exactly
  pairs = 10 * TRAINED_ON * lists**2 + size * lists + SAMPLE * size
  return {'bytes': size * (width * (2 if precision == 'float16' else 1) + 8) + 4 * lists * width,
          'bytes_in_memory': 8 * size + 4 * lists * width, 'seconds': 2 * width * pairs / rate}


def build(folder: pathlib.Path, vectors: Vectors, report: Callable[[str, int], None]) -> dict:
  """Writes the lists of `vectors` into `folder`, or what is missing of them after a kill; returns what the manifest says of them.

  Returns {'lists', 'probes', 'recall3', 'sample'}: recall3 is the share of the three nearest by exact search that are found, with
  a sample of the vectors as queries (each without itself). `probes` is the least power of two at which it is RECALL, or does not
  grow any more, or all lists.

  Raises OSError if the disk is full.
  """
  size = vectors.shape[0]
  if not (folder / 'list_sizes.uint64').exists():  # which is written last
    if not (folder / 'trained.faiss').exists():
      report('centres of lists', 0)
      write_whole(folder / 'trained.faiss', faiss.serialize_index(_trained(vectors)).tobytes())
    shards = [folder / f'shard-{number:06}.faiss' for number in range(-(-size // SHARD))]
    for number, shard in enumerate(shards):
      if not shard.exists():
        first, last = number * SHARD, min((number + 1) * SHARD, size)
        report('lists', first)
        index = faiss.read_index(str(folder / 'trained.faiss'))
        index.add_with_ids(vectors.read_float(first, last), np.arange(first, last))
        write_whole(shard, faiss.serialize_index(index).tobytes())
    _join(folder, shards)
  for shard in folder.glob('shard-*.faiss'):
    shard.unlink()
  report('recall', 0)
  own = np.linspace(0, size - 1, min(SAMPLE, size)).astype(np.int64)
  lists = Lists(folder)
  queries = lists.vectors(own)
  judge = without(_exact(vectors, queries, 4), own)

  def recall(probes: int) -> float:
    found = without(lists.search(queries, 4, probes)[0], own)
    return float(np.mean([len(set(row) & set(right)) / max(len(right), 1) for row, right in zip(found, judge)]))

  probes, found = 1, recall(1)
  while found < RECALL and probes < lists.number:
    more = recall(min(2 * probes, lists.number))
    if found > PLATEAU and more - found < LITTLE:
      break
    probes, found = min(2 * probes, lists.number), more
  return {'lists': lists.number, 'probes': probes, 'recall3': round(found, 4), 'sample': len(own)}


def without(rows: np.ndarray, own: np.ndarray) -> list[list[int]]:
  """The first three numbers of each row but its own and -1, which stands for none."""
  return [[one for one in row if one not in (me, -1)][:3] for row, me in zip(rows.tolist(), own.tolist())]


def _trained(vectors: Vectors) -> 'faiss.Index':
  """Empty lists with their centres, from blocks of vectors all over the index."""
  size, width = vectors.shape
  lists = lists_of(size)
  starts = np.unique(np.linspace(0, (size - 1) // BLOCK, 256).astype(int)) * BLOCK
  each = -(-TRAINED_ON * lists // len(starts))
  blocks = (vectors.read_float(first, min(first + BLOCK, size)) for first in starts.tolist())
  sample = [block[np.linspace(0, len(block) - 1, min(each, len(block))).astype(int)] for block in blocks]
  codes = 'fp16' if vectors.precision == 'float16' else '8'
  index = faiss.index_factory(width, f'IVF{lists},SQ{codes}', faiss.METRIC_INNER_PRODUCT)
  index.cp.min_points_per_centroid = 1  # else FAISS warns where all passages are too few
  index.train(np.concatenate(sample))
  return index


def _join(folder: pathlib.Path, shards: Sequence[pathlib.Path]) -> None:
  """Writes the lists of all shards as one file. FAISS's own `merge_ondisk` would die of SIGBUS where the disk is full."""
  opened = [faiss.read_index(str(shard), faiss.IO_FLAG_MMAP) for shard in shards]
  parts, code_size = [one.invlists for one in opened], opened[0].code_size
  sizes = np.array([[part.list_size(number) for part in parts] for number in range(opened[0].nlist)], np.uint64)
  with naming(folder / 'lists.bytes'), open(folder / 'lists.bytes', 'wb', opener=no_link) as file:
    for number, own in enumerate(sizes.tolist()):
      for get, each in ('get_codes', code_size), ('get_ids', 1):
        for part, size in zip(parts, own):
          if size:
            file.write(memoryview(faiss.rev_swig_ptr(getattr(part, get)(number), size * each)))
  write_whole(folder / 'list_sizes.uint64', sizes.sum(axis=1).tobytes())


def _exact(vectors: Vectors, queries: np.ndarray, topk: int) -> np.ndarray:
  """[B,k]: the numbers of the vectors nearest to queries [B,D], best first, a block at a time; -1 where there are fewer."""
  scores, numbers = np.full((len(queries), topk), -np.inf, np.float32), np.full((len(queries), topk), -1)
  for first in range(0, vectors.shape[0], BLOCK):
    found = queries @ vectors.read_float(first, min(first + BLOCK, vectors.shape[0])).T
    scores = np.concatenate([scores, found], axis=1)
    numbers = np.concatenate([numbers, np.broadcast_to(first + np.arange(found.shape[1]), found.shape)], axis=1)
    best = np.argpartition(-scores, topk - 1, axis=1)[:, :topk]
    scores, numbers = np.take_along_axis(scores, best, 1), np.take_along_axis(numbers, best, 1)
  return np.take_along_axis(numbers, np.argsort(-scores, axis=1), 1)


class Lists:
  """Searches what `build` wrote, mapped into memory; with the methods of `dense.Dense`, and may be called from several threads.

  Args:
    probes: lists that a search looks into.
  """

  def __init__(self, folder: pathlib.Path, probes: int = 1):
    self._probes, self._sizes = probes, np.fromfile(folder / 'list_sizes.uint64', np.uint64)
    self._index, self.number = faiss.read_index(str(folder / 'trained.faiss')), len(self._sizes)
    self._lists = faiss.OnDiskInvertedLists(self.number, self._index.code_size, str(folder / 'lists.bytes'))
    self._lists.set_all_lists_sizes(faiss.swig_ptr(self._sizes))
    self._lists.totsize, self._lists.read_only = (folder / 'lists.bytes').stat().st_size, True
    self._lists.do_mmap()
    self._index.replace_invlists(self._lists, False)
    self._index.ntotal = int(self._sizes.sum())
    self._index.make_direct_map()  # number -> place, 8 bytes each

  def search(self, queries: np.ndarray, topk: int, probes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(numbers [B,k] int64, scores [B,k] float32) of vectors near to queries [B,D], best first; -1 where there are fewer."""
    settings = faiss.SearchParametersIVF(nprobe=probes or self._probes)
    scores, numbers = self._index.search(queries, min(topk, self._index.ntotal), params=settings)
    return numbers, scores

  def scores(self, queries: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[B,n] float32: the scores of passages [B,n], some for each of queries [B,D]."""
    return np.einsum('bd,bnd->bn', queries, self.vectors(numbers.ravel()).reshape(*numbers.shape, -1))

  def vectors(self, numbers: np.ndarray) -> np.ndarray:
    """[n,D] float32: some of the vectors, as they are stored in the lists."""
    return self._index.reconstruct_batch(np.asarray(numbers, np.int64))
