"""BM25 over any number of passages: postings in files that are mapped into memory, built in bounded memory, searched exactly.

Scores are those of `tools.bm25`, ties included. A posting is a word of a passage: the passage's number and how often it has the
word. Words are 64-bit hashes, so that no vocabulary has to fit in memory. Building: `write_block` for every block of passages,
then `merge`, which sorts a range of hashes at a time. Searching reads the postings of a query's rare words; of the common ones
only what decides between the passages that are still in question (MaxScore, Turtle and Flood 1995).
"""

import functools
import hashlib
import itertools
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxsearch.files import no_link
from jaxsearch.tools.bm25 import words

POSTING = np.dtype([('word', 'u8'), ('passage', 'u4'), ('count', 'u2')])
MERGED = 10_000_000    # postings sorted at a time: about half a GB
KEPT, SHORT = 2048, 2**14  # words whose postings stay in memory, if they are no more than SHORT: half a GB at worst
ROUNDING = 1e-6        # of sums of weights, far above it


def hashed(word: str) -> int:
  return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), 'little')


def write_block(folder: pathlib.Path, number: int, first: int, texts: Sequence[str]) -> None:
  """Writes the postings of passages `first`, `first` + 1, …, sorted by word, then passage, and their lengths, as a block."""
  documents = [words(text) for text in texts]
  lengths = np.array([len(document) for document in documents], np.uint32)
  local = {word: number for number, word in enumerate(dict.fromkeys(itertools.chain.from_iterable(documents)))}
  hashes = np.fromiter(map(hashed, local), np.uint64, len(local))
  order = np.argsort(hashes)
  rank = np.empty_like(order)
  rank[order] = np.arange(len(order))
  found = np.fromiter(map(local.__getitem__, itertools.chain.from_iterable(documents)), np.int64, int(lengths.sum()))
  keys = rank[found] * len(texts) + np.repeat(np.arange(len(texts)), lengths)
  keys, counts = np.unique(keys, return_counts=True)
  postings = np.empty(len(keys), POSTING)
  postings['word'], postings['passage'] = hashes[order][keys // len(texts)], first + keys % len(texts)
  postings['count'] = np.minimum(counts, 2**16 - 1)
  np.save(folder / f'block-{number:06}.npy', postings)
  np.save(folder / f'lengths-{number:06}.npy', lengths)


def merge(folder: pathlib.Path) -> None:
  """Turns all blocks in `folder` into the files that `Sparse` reads. It may be repeated after a kill."""
  blocks = sorted(folder.glob('block-*.npy'))
  total = sum(np.load(block, mmap_mode='r').size for block in blocks)
  ranges = -(-max(total, 1) // MERGED)
  bounds = np.array([2**64 * number // ranges for number in range(1, ranges)], np.uint64)  # hashes are uniform
  cuts = [[0, *np.searchsorted(np.load(block, mmap_mode='r')['word'], bounds), None] for block in blocks]
  names = ('words.uint64', 'sizes.uint64', 'most.uint16', 'passages.uint32', 'counts.uint16')
  files = {name.split('.')[0]: open(folder / name, 'wb', opener=no_link) for name in names}
  for number in range(ranges):
    parts = [np.load(block, mmap_mode='r')[cut[number]:cut[number + 1]] for block, cut in zip(blocks, cuts)]
    postings = np.concatenate(parts) if parts else np.empty(0, POSTING)
    postings = postings[np.argsort(postings['word'], kind='stable')]  # passages stay in order
    found, starts, sizes = np.unique(postings['word'], return_index=True, return_counts=True)
    files['words'].write(found.tobytes())
    files['sizes'].write(sizes.astype(np.uint64).tobytes())
    files['most'].write(np.maximum.reduceat(postings['count'], starts).tobytes() if len(starts) else b'')
    files['passages'].write(postings['passage'].tobytes())
    files['counts'].write(postings['count'].tobytes())
  for file in files.values():
    file.close()
  (folder / 'lengths.uint32').write_bytes(b''.join(np.load(part).tobytes() for part in sorted(folder.glob('lengths-*.npy'))))


def delete_blocks(folder: pathlib.Path) -> None:
  for file in [*folder.glob('block-*.npy'), *folder.glob('lengths-*.npy')]:
    file.unlink()


def mapped(path: pathlib.Path) -> np.ndarray:
  """A file of numbers, whose kind is its suffix, mapped into memory."""
  return np.asarray(np.memmap(path, path.suffix[1:], 'r')) if path.stat().st_size else np.empty(0, path.suffix[1:])


class Sparse:
  """Ranks passages by BM25 over the files of `merge`; `search` may be called from several threads.

  Args:
    folder: of the files.
    k1, b: how soon more occurrences of a word stop counting; how much a long passage is marked down, 0 to 1.
  """

  def __init__(self, folder: pathlib.Path, k1: float = 0.9, b: float = 0.4):
    self._words, self._sizes = np.array(mapped(folder / 'words.uint64')), np.array(mapped(folder / 'sizes.uint64'), np.int64)
    self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
    self._most = np.array(mapped(folder / 'most.uint16'))
    self._passages, self._counts = mapped(folder / 'passages.uint32'), mapped(folder / 'counts.uint16')
    lengths = np.array(mapped(folder / 'lengths.uint32'), np.float64)
    self.size, self._k1 = len(lengths), k1
    self._lengths, self._b, self._average = lengths, b, lengths.mean(dtype=np.float64)
    self._least = k1 * (1 - b + b * lengths.min() / self._average)
    self._kept = functools.lru_cache(maxsize=KEPT)(self._postings)
    self._number_of = functools.lru_cache(maxsize=2**16)(self._find)

  def _find(self, word: str) -> tuple[float, int, float]:
    """(what it may add to a score at most, its number, its weight) of a word; (0, -1, 0) if no passage has it."""
    key = np.uint64(hashed(word))
    number = int(np.searchsorted(self._words, key))
    if number == len(self._words) or self._words[number] != key:
      return 0.0, -1, 0.0
    held, most = int(self._sizes[number]), float(self._most[number])
    weight = math.log1p((self.size - held + 0.5) / (held + 0.5)) * (self._k1 + 1)
    return weight * most / (most + self._least), number, weight

  def _postings(self, number: int, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """(passages [n], what the word adds to their scores [n] float64)."""
    part = slice(self._starts[number], self._starts[number + 1])
    passages = self._passages[part]
    return passages.astype(np.int64), self._added(weight, passages, self._counts[part])

  def _added(self, weight: float, passages: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return weight * counts / (counts + self._k1 * (1 - self._b + self._b * self._lengths[passages] / self._average))

  def search(self, query: str, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers [n], scores [n] float64) of the best `topk` passages with a word of the query, best first, ties by number."""
    found = sorted((self._number_of(word) for word in dict.fromkeys(words(query))), reverse=True)
    found = [one for one in found if one[1] >= 0]
    rest = list(itertools.accumulate([one[0] for one in reversed(found)], initial=0.0))[::-1]  # what words from i on may add
    scores, added, least, i = np.zeros(self.size), [], 0.0, 0
    while i < len(found) and rest[i] >= least:  # passages that have none of the words so far may still be among the best
      _, number, weight = found[i]
      short = self._sizes[number] <= SHORT
      passages, weights = self._kept(number, weight) if short else self._postings(number, weight)
      scores[passages] += weights
      added.append(passages)
      if len(passages) >= topk:
        least = max(least, float(np.partition(scores[passages], -topk)[-topk]) - ROUNDING)
      i += 1
    bound, parts = least - rest[i], [(np.empty(0, np.int64), np.empty(0))]
    for passages in added:
      passages = passages[scores[passages] >= bound]
      parts.append((passages, scores[passages]))
      scores[passages] = -np.inf  # each is taken once
    candidates, own = map(np.concatenate, zip(*parts))
    for j in range(i, len(found)):  # common words, looked up for the candidates alone
      _, number, weight = found[j]
      start, end = self._starts[number], self._starts[number + 1]
      at = start + np.minimum(np.searchsorted(self._passages[start:end], candidates.astype(np.uint32)), end - start - 1)
      has = self._passages[at] == candidates
      own[has] += self._added(weight, candidates[has], self._counts[at[has]])
      if len(own) > topk:
        least = max(least, float(np.partition(own, -topk)[-topk]) - ROUNDING)
        stays = own >= least - rest[j + 1]
        candidates, own = candidates[stays], own[stays]
    own = np.round(own, 9)  # sums that are equal on paper are equal here, whatever the order of additions
    best = np.lexsort((candidates, -own))[:topk]
    return candidates[best], own[best]
