"""BM25 over any number of passages: postings in files that are mapped into memory, built in bounded memory,
searched exactly.

Scores are those of tools/bm25.py, ties included. A posting is a word of a passage: the passage's number and
how often it has the word. Words are 64-bit hashes, so that no vocabulary has to fit in memory. Building:
`write_block` for every block of passages, then `merge`, which sorts a range of hashes at a time. Searching
reads the postings of a query's rare words; of the common ones only what decides between the passages that are
still in question (MaxScore, Turtle and Flood 1995).
"""

import contextlib
import hashlib
import itertools
import math
import pathlib
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.files import no_link

K1, B = 0.9, 0.4  # how soon more occurrences stop counting, how much a long passage is marked down
POSTING = np.dtype([('word', 'u8'), ('passage', 'u4'), ('count', 'u2')])
FILES = ('words.uint64', 'sizes.uint64', 'most.uint16', 'passages.uint32', 'counts.uint16')
BLOCK = 2**14          # passages of a block
MERGED = 10_000_000    # postings sorted at a time: about half a GB
ROUNDING = 1e-6        # of sums of weights, far above it
Ranking = tuple[np.ndarray, np.ndarray]  # (numbers [n], scores [n]) of passages, best first


def indexed(document: Document) -> str:
  """Returns what of a document is searched."""
  return f'{document.title}\n{document.text}'


def words(text: str) -> list[str]:
  """Returns the words of a text as they are indexed: case folded, without accents or punctuation."""
  text = text.casefold()
  if not text.isascii():
    text = ''.join(c for c in unicodedata.normalize('NFKD', text) if not unicodedata.combining(c))
  return re.findall(r'\w+', text)


def hashed(word: str) -> int:
  return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), 'little')


def write_block(folder: pathlib.Path, number: int, first: int, texts: Sequence[str]) -> None:
  """Writes the postings of passages from `first` on, sorted by word, then passage, and their lengths."""
  documents = [words(text) for text in texts]
  lengths = np.array([len(document) for document in documents], np.uint32)
  distinct = dict.fromkeys(itertools.chain.from_iterable(documents))
  vocabulary = {word: number for number, word in enumerate(distinct)}
  hashes = np.fromiter(map(hashed, vocabulary), np.uint64, len(vocabulary))
  order = np.argsort(hashes)
  rank = np.empty_like(order)
  rank[order] = np.arange(len(order))
  occurring = map(vocabulary.__getitem__, itertools.chain.from_iterable(documents))
  ranks = rank[np.fromiter(occurring, np.int64, int(lengths.sum()))]
  keys, counts = np.unique(ranks * len(texts) + np.repeat(np.arange(len(texts)), lengths), return_counts=True)
  postings = np.empty(len(keys), POSTING)
  postings['word'], postings['passage'] = hashes[order][keys // len(texts)], first + keys % len(texts)
  postings['count'] = np.minimum(counts, 2**16 - 1)
  np.save(folder / f'block-{number:06}.npy', postings)
  np.save(folder / f'lengths-{number:06}.npy', lengths)


def merge(folder: pathlib.Path) -> None:
  """Turns all blocks in `folder` into the files that `Sparse` reads. It may be repeated after a kill."""
  blocks = [np.load(block, mmap_mode='r') for block in sorted(folder.glob('block-*.npy'))]
  ranges = -(-max(sum(map(len, blocks)), 1) // MERGED)
  # Hashes are uniform.
  bounds = np.array([2**64 * number // ranges for number in range(1, ranges)], np.uint64)
  cuts = [[0, *np.searchsorted(block['word'], bounds), None] for block in blocks]
  with contextlib.ExitStack() as stack:
    files = [stack.enter_context(open(folder / name, 'wb', opener=no_link)) for name in FILES]
    for number in range(ranges):
      parts = [block[cut[number]:cut[number + 1]] for block, cut in zip(blocks, cuts)]
      postings = np.concatenate([np.empty(0, POSTING), *parts])
      postings = postings[np.argsort(postings['word'], kind='stable')]  # passages stay in order
      found, starts, sizes = np.unique(postings['word'], return_index=True, return_counts=True)
      most = np.maximum.reduceat(postings['count'], starts) if len(starts) else np.empty(0, np.uint16)
      values = found, sizes.astype(np.uint64), most, postings['passage'], postings['count']
      for file, part in zip(files, values):
        file.write(part.tobytes())
  lengths = [np.load(part).tobytes() for part in sorted(folder.glob('lengths-*.npy'))]
  (folder / 'lengths.uint32').write_bytes(b''.join(lengths))


def delete_blocks(folder: pathlib.Path) -> None:
  for file in [*folder.glob('block-*.npy'), *folder.glob('lengths-*.npy')]:
    file.unlink()


def mapped(path: pathlib.Path) -> np.ndarray:
  """Maps a file of numbers, whose kind is its suffix, into memory."""
  kind = path.suffix[1:]
  return np.asarray(np.memmap(path, kind, 'r')) if path.stat().st_size else np.empty(0, kind)


class Sparse:
  """Ranks passages by BM25 over the files of `merge`; `search` may be called from several threads."""

  def __init__(self, folder: pathlib.Path):
    found, sizes, most, self._passages, self._counts = (mapped(folder / name) for name in FILES)
    self._words, self._sizes, self._most = np.array(found), np.array(sizes, np.int64), np.array(most)
    self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
    lengths = np.array(mapped(folder / 'lengths.uint32'), np.float64)
    self._norms = K1 * (1 - B + B * lengths / lengths.mean())  # [N]: see tools/bm25.py
    self._least_norm, self.size = self._norms.min(), len(lengths)

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

  def _added(self, weight: float, passages: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return weight * counts / (counts + self._norms[passages])

  def search(self, query: str, topk: int) -> Ranking:
    """Returns the best `topk` passages with a word of the query, ties by number; scores are float64."""
    found = sorted(filter(None, map(self._look_up, dict.fromkeys(words(query)))), reverse=True)
    # What the words from i on may add to a score.
    rest = list(itertools.accumulate([most for most, *_ in reversed(found)], initial=0.0))[::-1]
    scores, met, least, i = np.zeros(self.size), [], 0.0, 0
    while i < len(found) and rest[i] >= least:  # passages without the words so far may be among the best
      _, number, weight = found[i]
      passages, counts = self._postings(number)
      scores[passages] += self._added(weight, passages, counts)
      met.append(passages)
      least = self._least_of(scores[passages], topk, least)
      i += 1
    bound, parts = least - rest[i], [(np.empty(0, np.int64), np.empty(0))]
    for passages in met:
      passages = passages[scores[passages] >= bound]
      parts.append((passages, scores[passages]))
      scores[passages] = -np.inf  # each is taken once
    candidates, totals = map(np.concatenate, zip(*parts))
    for j in range(i, len(found)):  # common words, looked up for the candidates alone
      _, number, weight = found[j]
      passages, counts = self._postings(number)
      at = np.minimum(np.searchsorted(passages, candidates.astype(np.uint32)), len(passages) - 1)
      has = passages[at] == candidates
      totals[has] += self._added(weight, candidates[has], counts[at[has]])
      least = self._least_of(totals, topk, least)
      stays = totals >= least - rest[j + 1]
      candidates, totals = candidates[stays], totals[stays]
    totals = np.round(totals, 9)  # sums that are equal on paper are equal here
    best = np.lexsort((candidates, -totals))[:topk]
    return candidates[best].astype(np.int64), totals[best]

  def _postings(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (passages [n], how often each has the word) of a word, mapped."""
    part = slice(self._starts[number], self._starts[number + 1])
    return self._passages[part], self._counts[part]

  @staticmethod
  def _least_of(scores: np.ndarray, topk: int, least: float) -> float:
    """Returns the score that one of the best has at least, from scores so far."""
    return max(least, float(np.partition(scores, -topk)[-topk]) - ROUNDING) if len(scores) >= topk else least
