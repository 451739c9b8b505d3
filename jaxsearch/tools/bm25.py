"""BM25 over passages in memory, the search back end of small and middle-sized corpora.

A passage is indexed as its title and text together. Scores are Lucene's BM25, which Search-R1 used through
Pyserini (k1 = 0.9, b = 0.4), a sum over the distinct words w of the query:

  log(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f_w (k1 + 1) / (f_w + k1 (1 - b + b |d| / avg|d|))

Two libraries compute them, with the same ranking: `rank_bm25`, always installed, and `bm25s`, an optional extra whose
sparse matrix suits a million passages better.
"""

import dataclasses
import functools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.tools import Backend, check_search


def words(text: str) -> list[str]:
  """The words of a text as they are indexed: case folded, without accents or punctuation."""
  text = text.casefold()
  if not text.isascii():
    text = ''.join(c for c in unicodedata.normalize('NFKD', text) if not unicodedata.combining(c))
  return re.findall(r'\w+', text)


class BM25:
  """Ranks passages by BM25; `search` may be called from several threads.

  Args:
    corpus: passages; their order breaks ties.
    engine: 'rank_bm25', or 'bm25s' for larger corpora.
    k1, b: how soon more occurrences of a word stop counting; how much a long passage is marked down, 0 to 1.
    cache_size: how many of the latest queries keep their results.

  Raises ValueError for a corpus without a word in it or an unknown engine, ImportError for bm25s where it is not installed.
  """

  def __init__(self, corpus: Sequence[Document], *, engine: str = 'rank_bm25', k1: float = 0.9, b: float = 0.4,
               cache_size: int = 4096):
    if engine not in ENGINES:
      raise ValueError(f'unknown BM25 engine {engine!r}; known: {", ".join(ENGINES)}')
    documents = [words(f'{passage.title}\n{passage.text}') for passage in corpus]
    if not any(documents):
      raise ValueError(f'cannot index a corpus of {len(documents)} passages without a word in them')
    self._passages, self._vocabulary = list(corpus), frozenset().union(*documents)
    self._scores = ENGINES[engine](documents, k1, b)
    self._ranked = functools.lru_cache(maxsize=cache_size)(self._rank)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """The best `topk` passages for each query, best first, equal scores in corpus order.

    Only passages with a word of the query are returned, so there may be fewer. A repeated word counts once.
    """
    check_search(queries, topk)
    # The cache is keyed by what matters to the ranking, so spelling variants of a query share an entry.
    return [list(self._ranked(tuple(dict.fromkeys(words(query))), topk)) for query in queries]

  def _rank(self, query: tuple[str, ...], topk: int) -> tuple[Document, ...]:
    known = [word for word in query if word in self._vocabulary]
    if not known:
      return ()
    # Rounded, so that sums equal on paper are equal here, whatever the engine's order of additions.
    scores = np.round(self._scores(known), 9)
    count = min(topk, np.count_nonzero(scores > 0))
    best = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    best = best[np.argsort(-scores[best], kind='stable')][:count]
    return tuple(dataclasses.replace(self._passages[i], score=float(scores[i])) for i in best)


def _rank_bm25(documents: list[list[str]], k1: float, b: float) -> Callable[[list[str]], np.ndarray]:
  """Indexes documents; returns a function from known words to a score for every passage, [N] float64."""
  import rank_bm25

  index = rank_bm25.BM25Okapi(documents, k1=k1, b=b)
  index.doc_len = np.array(index.doc_len)  # else converted again for every word
  holders: dict[str, list[int]] = {}
  for number, frequencies in enumerate(index.doc_freqs):
    for word in frequencies:
      holders.setdefault(word, []).append(number)
  # Okapi's own weight is zero or less for a word in half of the passages, and is then lifted above that of rarer words:
  # in a corpus of two nothing would be found, in a large one 'of' would outweigh real words.
  index.idf = {word: math.log1p((len(documents) - len(held) + 0.5) / (len(held) + 0.5)) for word, held in holders.items()}

  # rank_bm25's own `get_scores` visits every passage for every word, milliseconds each with the interpreter held.
  # Called once a word, for the passages that hold it, the library gives the same sums.
  @functools.cache
  def weights(word: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array(holders[word]), np.array(index.get_batch_scores([word], holders[word]))

  def scores(query: list[str]) -> np.ndarray:
    total = np.zeros(len(documents))
    for numbers, added in map(weights, query):
      total[numbers] += added
    return total

  return scores


def _bm25s(documents: list[list[str]], k1: float, b: float) -> Callable[[list[str]], np.ndarray]:
  """The same function from bm25s."""
  try:
    import bm25s  # runs a small JAX program when imported: after `jax.distributed.initialize`, not before
  except ImportError as error:
    raise ImportError("engine 'bm25s' needs the package bm25s: pip install 'jaxsearch[bm25s]'") from error

  logging.getLogger('bm25s').setLevel(logging.WARNING)  # it logs every index at DEBUG
  index = bm25s.BM25(k1=k1, b=b, method='lucene', dtype='float64')
  index.index(documents, show_progress=False)
  # bm25s leaves out the constant factor (k1 + 1), as Lucene does; with it both engines give the same scores.
  return lambda query: index.get_scores(query) * (k1 + 1)


ENGINES = {'rank_bm25': _rank_bm25, 'bm25s': _bm25s}

BACKEND = Backend(lambda settings, corpus, **_: BM25(corpus, engine=settings.engine), corpus=lambda settings: True,
                  by_source=True, identity=lambda settings: {'engine': settings.engine})
