"""BM25 over any number of passages: postings in files that are mapped into memory, built in bounded memory,
searched exactly.

Scores are those of tools/bm25.py, ties included. A posting is a passage's number and how often it has a word.
Words are 64-bit hashes, so that no vocabulary has to fit in memory. Searching reads the postings of a query's
rare words; of the common ones only what decides between the passages that are still in question (MaxScore,
Turtle and Flood 1995).
"""

import contextlib
import functools
import hashlib
import itertools
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxsearch.data.corpus import words
from jaxsearch.files import appended, no_link

K1, B = 0.9, 0.4  # how soon more occurrences stop counting, how much a long passage is marked down
POSTING = np.dtype([('word', 'u8'), ('passage', 'u4'), ('count', 'u2')])
FILES = ('words.uint64', 'sizes.uint64', 'most.uint16', 'passages.uint32', 'counts.uint16')
BLOCK = 2**14          # passages of a block
MERGED = 10_000_000    # postings sorted at a time: about half a GB
ROUNDING = 1e-6        # slack for sums of weights, far above their rounding errors
Ranking = tuple[np.ndarray, np.ndarray]  # (numbers [n], scores [n]) of passages, best first
NOTHING = np.empty(0, np.int64), np.empty(0)


@functools.lru_cache(2**17)
def hashed(word: str) -> int:
  return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), 'little')


def write_block(folder: pathlib.Path, first: int, texts: Sequence[str]) -> pathlib.Path:
  """Writes the postings of passages from `first` on, sorted by word, then passage; appends their lengths.

  Returns the file of the postings.
  """
  documents = [words(text) for text in texts]
  lengths = np.array([len(document) for document in documents], np.uint32)
  occurring = np.fromiter(map(hashed, itertools.chain.from_iterable(documents)), np.uint64, lengths.sum())
  passages = np.repeat(np.arange(first, first + len(texts)), lengths)
  order = np.argsort(occurring, kind='stable')
  occurring, passages = occurring[order], passages[order]
  begins = np.ones(len(order), bool)
  begins[1:] = (occurring[1:] != occurring[:-1]) | (passages[1:] != passages[:-1])
  starts = np.flatnonzero(begins)
  postings = np.empty(len(starts), POSTING)
  postings['word'], postings['passage'] = occurring[starts], passages[starts]
  postings['count'] = np.minimum(np.diff(starts, append=len(order)), 2**16 - 1)
  with appended(folder / 'lengths.uint32', 4 * first) as file:
    file.write(lengths.tobytes())
  block = folder / f'block-{first:010}.npy'
  np.save(block, postings)
  return block


def merge(folder: pathlib.Path) -> None:
  """Turns all blocks in `folder` into the files that `Sparse` reads, and deletes them."""
  # Each is mapped anew and copied from: a mapping is an open file, of which there may be too many.
  read, blocks = functools.partial(np.load, mmap_mode='r'), sorted(folder.glob('block-*.npy'))
  ranges = -(-max(sum(len(read(block)) for block in blocks), 1) // MERGED)
  # Hashes are uniform.
  bounds = np.array([2**64 * number // ranges for number in range(1, ranges)], np.uint64)
  cuts = [[0, *np.searchsorted(read(block)['word'], bounds), None] for block in blocks]
  with contextlib.ExitStack() as stack:
    files = [stack.enter_context(open(folder / name, 'wb', opener=no_link)) for name in FILES]
    for number in range(ranges):
      parts = [np.array(read(block)[cut[number]:cut[number + 1]]) for block, cut in zip(blocks, cuts)]
      postings = np.concatenate([np.empty(0, POSTING), *parts])
      postings = postings[np.argsort(postings['word'], kind='stable')]  # passages stay in order
      distinct, starts, sizes = np.unique(postings['word'], return_index=True, return_counts=True)
      most = np.maximum.reduceat(postings['count'], starts) if len(starts) else np.empty(0, np.uint16)
      values = distinct, sizes.astype(np.uint64), most, postings['passage'], postings['count']
      for file, part in zip(files, values):
        file.write(part.tobytes())
  delete_blocks(folder)


def delete_blocks(folder: pathlib.Path) -> None:
  for block in folder.glob('block-*.npy'):
    block.unlink()


def mapped(path: pathlib.Path) -> np.ndarray:
  """Maps a file of numbers, whose kind is its suffix, into memory."""
  kind = path.suffix[1:]
  return np.asarray(np.memmap(path, kind, 'r')) if path.stat().st_size else np.empty(0, kind)


class Sparse:
  """Ranks passages by BM25 over the files of `merge`; `search` may be called from several threads."""

  def __init__(self, folder: pathlib.Path):
    distinct, sizes, most, self._passages, self._counts = (mapped(folder / name) for name in FILES)
    self._words, self._sizes, self._most = np.array(distinct), np.array(sizes, np.int64), np.array(most)
    self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
    lengths = np.array(mapped(folder / 'lengths.uint32'), np.float64)
    self._norms = K1 * (1 - B + B * lengths / lengths.mean())  # [N]: see tools/bm25.py
    self._least_norm, self.size = self._norms.min(), len(lengths)

  def search(self, query: str, topk: int) -> Ranking:
    """Returns the best `topk` passages with a word of the query, ties by number; scores are float64."""
    # The query's indexed words, those first that may add most to a score.
    known = sorted(filter(None, map(self._look_up, dict.fromkeys(words(query)))), reverse=True)
    # The most that each word and all after it may add together.
    rest = list(itertools.accumulate([most for most, *_ in reversed(known)], initial=0.0))[::-1]
    scores, met, least = np.zeros(self.size), [np.empty(0, np.uint32)], 0.0
    among_best = lambda coming: np.unique(
      np.concatenate([passages[scores[passages] >= least - coming] for passages in met]))
    for (_, number, weight), coming in zip(known, rest):
      part = slice(self._starts[number], self._starts[number + 1])
      passages, counts = self._passages[part], self._counts[part]  # how often each has the word
      added = lambda passages, counts, weight=weight: weight * counts / (counts + self._norms[passages])
      if coming >= least:  # passages without the words so far may be among the best
        scores[passages] += added(passages, counts)
        met.append(passages)
      else:  # common words, looked up for the candidates alone
        met = [candidates := among_best(coming)]
        at = np.minimum(np.searchsorted(passages, candidates), len(passages) - 1)
        has = passages[at] == candidates
        scores[candidates[has]] += added(candidates[has], counts[at[has]])
      best = scores[met[-1]]  # their k-th best score is a lower bound of the final one
      if len(best) >= topk:
        least = max(least, float(np.partition(best, -topk)[-topk]) - ROUNDING)
    candidates = among_best(0.0)
    totals = np.round(scores[candidates], 9)  # sums that are equal on paper are equal here
    best = np.argsort(-totals, kind='stable')[:topk]
    return candidates[best].astype(np.int64), totals[best]

  def _look_up(self, word: str) -> tuple[float, int, float] | None:
    """Returns (what it may add to a score at most, its number, its weight) of a word.

    None if no passage has it.
    """
    key = np.uint64(hashed(word))
    number = int(np.searchsorted(self._words, key))
    if number == len(self._words) or self._words[number] != key:
      return None
    holders, most = int(self._sizes[number]), float(self._most[number])
    weight = math.log1p((self.size - holders + 0.5) / (holders + 0.5)) * (K1 + 1)
    return weight * most / (most + self._least_norm), number, weight
