"""BM25 over passages in memory, the search back end of small and middle-sized corpora.

Scores are Lucene's BM25, which Search-R1 used through Pyserini (k1 = 0.9, b = 0.4), a sum over the distinct
words w of the query:

  log(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f_w (k1 + 1) / (f_w + k1 (1 - b + b |d| / avg|d|))
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from jaxsearch.data.corpus import Document, indexed, line_of, words
from jaxsearch.tools import Backend, sparse
from jaxsearch.tools.names import Names
from jaxsearch.tools.sparse import K1, NOTHING, B, Ranking


class BM25:
  """Ranks passages by BM25; `search` may be called from several threads.

  Args:
    corpus: passages; their order breaks ties.
    engine: 'rank_bm25', the library, or 'sparse', the files of an index, for larger corpora: the same
      ranking.

  Raises ValueError for a corpus without a word in it.
  """

  def __init__(self, corpus: Sequence[Document], *, engine: str = 'rank_bm25'):
    self._passages = list(corpus)
    texts = list(map(indexed, self._passages))
    if not any(map(words, texts)):
      raise ValueError(f'cannot index a corpus of {len(texts)} passages without a word in them')
    self._rank = ENGINES[engine](texts)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """Returns the best `topk` passages for each query, best first, equal scores in corpus order.

    Only passages with a word of the query are returned, so there may be fewer. A repeated word counts once.
    """
    return [[dataclasses.replace(self._passages[number], score=float(score))
             for number, score in zip(*self._rank(query, topk))] for query in queries]

  @functools.cached_property
  def known(self) -> dict[str, str]:
    """Identifies the ranking, as a server reports it: 'corpus' by the hash that an index of it has."""
    digest = hashlib.sha256()
    for passage in self._passages:
      digest.update(line_of(passage))
    return {'corpus': digest.hexdigest(), 'index': 'bm25'}

  def open(self, name: str) -> list[Document]:
    """Returns the passage with this id, else those with this title."""
    return self._names.open(name)

  @functools.cached_property
  def _names(self) -> Names:
    return Names(((passage.id, passage.title) for passage in self._passages),
                 lambda numbers: [self._passages[number] for number in numbers])


def _rank_bm25(texts: list[str]) -> Callable[[str, int], Ranking]:
  """Indexes texts; returns a function (query, topk) -> ranking."""
  import rank_bm25

  class Lucene(rank_bm25.BM25Okapi):
    def _calc_idf(self, holders: dict[str, int]) -> None:
      # Okapi's own weight is zero or less for a word in half of the passages, and is then lifted above that
      # of rarer words: in a corpus of two nothing would be found, in a large one 'of' would outweigh real
      # words.
      self.idf = {word: math.log1p((self.corpus_size - n + 0.5) / (n + 0.5)) for word, n in holders.items()}

  index = Lucene(list(map(words, texts)), k1=K1, b=B)

  # Cached: for each word the library visits every passage, which takes milliseconds and holds the GIL.
  @functools.cache
  def weights(word: str) -> Ranking:
    scores = index.get_scores([word])
    return (numbers := np.flatnonzero(scores)), scores[numbers]

  def rank(query: str, topk: int) -> Ranking:
    scores = np.zeros(len(texts))
    for word in dict.fromkeys(words(query)):
      numbers, added = weights(word) if word in index.idf else NOTHING
      scores[numbers] += added
    scores = np.round(scores, 9)  # sums equal on paper are equal here
    best = np.argsort(-scores, kind='stable')[:min(topk, np.count_nonzero(scores))]
    return best, scores[best]

  return rank


def _sparse(texts: list[str]) -> Callable[[str, int], Ranking]:
  """Does the same by the files of an index, which stay mapped when the folder is gone."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for first in range(0, len(texts), sparse.BLOCK):
      sparse.write_block(folder, first, texts[first:first + sparse.BLOCK])
    sparse.merge(folder)
    return sparse.Sparse(folder).search


ENGINES = {'rank_bm25': _rank_bm25, 'sparse': _sparse}
BACKEND = Backend(lambda settings, corpus, **_: BM25(corpus, engine=settings.engine), by_source=True,
                  corpus=lambda settings: True,
                  identity=lambda settings: {
                    name: settings[name] for name in ('engine', 'noise', 'noise_each')})
