"""The search back end over the folder of an index, which tools/index_build.py makes: BM25, vectors, or both.

Where the index has both parts, their scores are added.
"""

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError
from jaxsearch.tools import Backend, sparse
from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.names import Names
from jaxsearch.tools.sparse import NOTHING, Ranking

FORMAT = 3       # of the files
DEPTH = 100      # of the rankings of a hybrid index
MOST_QUERIES = 64  # that are encoded and searched for together
# Weight of the cosine beside BM25: the best for all-MiniLM-L6-v2 on training questions of HotpotQA and
# 2WikiMultiHopQA (benchmarks/RESULTS.md).
DENSE_WEIGHT = 12.0


class Encoder(Protocol):
  """Turns texts into vectors [number, width] float32 of length 1, as `models.encoder.TextEncoder` does."""
  width: int
  identity: dict  # what the vectors depend on, JSON; 'hash' decides whether two are the same

  def passages(self, texts: Sequence[str]) -> np.ndarray: ...
  def queries(self, texts: Sequence[str]) -> np.ndarray: ...


def sizes(out: pathlib.Path) -> dict[str, int]:
  """Returns file -> bytes of those that an index consists of; a kill may leave a '.part'."""
  return {path.name: path.stat().st_size for path in sorted(out.iterdir())
          if path.name not in ('lock', 'manifest.json') and path.suffix != '.part'}


def read_manifest(folder: str | os.PathLike, half_built: bool = False) -> dict:
  """Returns the manifest of an index, its files checked against it. Raises DataError.

  It has 'passages' once they are written, and 'files' once the index is whole, which it has to be unless
  `half_built`.
  """
  folder = pathlib.Path(folder)
  try:
    manifest = json.loads((folder / 'manifest.json').read_text())
  except FileNotFoundError:
    raise DataError(f'{folder}: no index here (no manifest.json); `jaxsearch index` makes one') from None
  except ValueError as error:
    raise DataError(f'{folder / "manifest.json"}: not the manifest of an index ({error!r})') from error
  if not isinstance(manifest, dict) or manifest.get('format') != FORMAT:
    raise DataError(f'{folder}: an index of another version of jaxsearch; build it again')
  if 'files' not in manifest and not half_built:
    raise DataError(f'{folder}: the index is half-built: rerun `jaxsearch index` to finish it')
  there = sizes(folder)
  for name, size in manifest.get('files', {}).items():
    if there.get(name, 0) != size:
      raise DataError(f'{folder / name}: {there.get(name, 0)} bytes, but manifest.json says {size}; '
                      'build the index again')
  return manifest


# Id and title in a line of passages.jsonl.
_HEAD = re.compile(rb'\["[^"\\]*(?:\\.[^"\\]*)*", "[^"\\]*(?:\\.[^"\\]*)*"')


class Passages:
  """The passages of an index by number, read from disk; several threads may read."""

  def __init__(self, folder: pathlib.Path):
    self._file, self._ends = open(folder / 'passages.jsonl', 'rb'), sparse.mapped(folder / 'ends.int64')
    self._lock = threading.Lock()  # the names are read once

  def __len__(self) -> int:
    return len(self._ends)

  def read(self, numbers: Sequence[int], scores: Sequence[float] | None = None) -> list[Document]:
    """Returns the documents of these numbers, with their scores."""
    documents = []
    for number, score in zip(numbers, itertools.repeat(0.0) if scores is None else scores):
      start = int(self._ends[number - 1]) if number else 0
      line = os.pread(self._file.fileno(), int(self._ends[number]) - start, start)
      documents.append(Document(*json.loads(line), float(score)))
    return documents

  def open(self, name: str) -> list[Document]:
    """Returns the passage with this id, else those with this title. The first call reads all names."""
    with self._lock:
      return self._names.open(name)

  @functools.cached_property
  def _names(self) -> Names:
    with open(self._file.name, 'rb') as file:
      return Names((json.loads(_HEAD.match(line)[0] + b']') for line in file), self.read)


def fuse(bm25: Ranking, dense: Ranking, weight: float = DENSE_WEIGHT, *, depth: int = DEPTH) -> Ranking:
  """Scores passages by BM25 + weight * cosine.

  Args:
    dense: all candidates, in any order, each once or more. One that `bm25` lacks gets the lowest score of
      `bm25`, or 0 if `bm25` has fewer than `depth` passages: then no word of the query is in it.
  """
  numbers, first = np.unique(dense[0], return_index=True)
  by_words = dict(zip(bm25[0].tolist(), bm25[1].tolist()))
  lowest = min(by_words.values()) if len(by_words) >= depth else 0.0
  scores = np.array([by_words.get(number, lowest) for number in numbers.tolist()]) + weight * dense[1][first]
  best = np.argsort(-scores, kind='stable')
  return numbers[best], scores[best]


class Index:
  """A search back end over the folder of an index; queries of several threads are encoded together.

  `sparse` and `dense` are its parts (`dense` a `dense.Dense` or `approximate.Lists`), None if it lacks one.

  Args:
    encoder: that of the manifest if not given, or a folder to which that one has moved.

  Raises DataError: no whole index, or an encoder that is not that of the manifest.
  """

  def __init__(self, folder: str | os.PathLike, *, encoder: Encoder | str | None = None):
    folder, self.dense = pathlib.Path(folder), None
    manifest = read_manifest(folder)
    self._passages = Passages(folder)
    self.open = self._passages.open
    ranks = json.dumps(identity(manifest), sort_keys=True)
    self.known = {'corpus': manifest['corpus_hash'], 'index': hashlib.sha256(ranks.encode()).hexdigest()}
    self.sparse = None if manifest['kind'] == 'dense' else sparse.Sparse(folder)
    self._by_words = threading.BoundedSemaphore(4)  # each search by BM25 has 8 bytes for every passage
    if manifest['kind'] != 'bm25':
      from jaxsearch.tools import dense
      settings = manifest['dense']
      self._encoder = _open_encoder(folder, settings, encoder)
      self._vectors = dense.Vectors(folder, settings['width'], settings['precision'])
      if 'approximate' in manifest:
        from jaxsearch.tools import approximate
        self.dense = approximate.Lists(folder, manifest['approximate']['probes'])
      else:
        self.dense = dense.Dense(self._vectors)
      self._batched = DynamicBatcher(self._nearest, most=MOST_QUERIES)
      self.threads = 64  # threads that wait for the encoder's next batch cost nothing

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """Returns the best `topk` passages for each query or fewer, best first, with their scores."""
    rankings = self.rank(queries, topk)
    return [self._passages.read(numbers[:topk], scores[:topk]) for numbers, scores in rankings]

  def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
    """Returns the numbers of the best passages for each query, and their scores."""
    depth = max(topk, DEPTH) if self.sparse and self.dense else topk
    with self._by_words:
      by_words = [self.sparse.search(query, depth) if self.sparse else NOTHING for query in queries]
    if not self.dense or not queries:
      return by_words
    nearest = self._batched([(query, depth, numbers) for query, (numbers, _) in zip(queries, by_words)])
    return [fuse(*both, depth=depth) for both in zip(by_words, nearest)] if self.sparse else nearest

  def _nearest(self, asked: list[tuple[str, int, np.ndarray]]) -> list[Ranking]:
    """Ranks for each (query, depth, further passages) the nearest passages, then the further ones."""
    queries, depths, _ = zip(*asked)
    vectors, rankings = self._encoder.queries(queries), []
    nearest = self.dense.search(vectors, max(depths))
    for (_, depth, further), vector, numbers, scores in zip(asked, vectors, *nearest):
      size = min(depth, np.count_nonzero(numbers >= 0))  # lists may hold fewer
      rankings.append((np.concatenate([numbers[:size], further]),
                       np.concatenate([scores[:size], self._vectors[further] @ vector])))
    return rankings


def _open_encoder(folder: pathlib.Path, settings: dict, encoder: Encoder | str | None) -> Encoder:
  """Returns `encoder`, or that of a manifest's `dense`, from where it names or from the folder `encoder`."""
  if encoder is None or isinstance(encoder, str):
    from jaxsearch.models.encoder import TextEncoder
    place = encoder or settings['folder']
    if not os.path.isdir(place):
      raise DataError(f'{folder}: its encoder is not at {place}; '
                      'say where it is with --config.search.encoder=FOLDER')
    encoder = TextEncoder(place, settings['recipe'])
  if encoder.identity['hash'] != settings['hash']:
    place = encoder.identity['folder']
    raise DataError(f'{folder}: built with another encoder than that in {place} (the hashes differ)')
  return encoder


def identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what decides how the index of a manifest ranks, wherever it and its encoder lie."""
  dense = {name: value for name, value in manifest.get('dense', {}).items() if name != 'folder'}
  ranks = {name: manifest[name] for name in ('kind', 'approximate', 'corpus_hash') if name in manifest}
  return ranks | ({'dense': dense} if dense else {})


def _identity(settings: Any) -> dict[str, Any]:
  """Returns the identity of the index; where there is one for each source, of all that are there."""
  before, each, after = settings.index.partition('{source}')
  if not each:
    return identity(read_manifest(settings.index))
  parts, end = {}, f'{after}/manifest.json'
  for name in '*', '*/*':  # a file of several is a source such as 'nq/test'
    for path in sorted(glob.glob(f'{glob.escape(before)}{name}{glob.escape(end)}')):
      with contextlib.suppress(DataError):  # said where a question needs it
        parts[path.removeprefix(before).removesuffix(end)] = identity(read_manifest(os.path.dirname(path)))
  return {'sources': parts}


BACKEND = Backend(lambda settings, **_: Index(settings.index, encoder=settings.encoder or None),
                  by_source=True, identity=_identity, needs=lambda settings: {'index': 'path'} | (
                    {'encoder': 'path'} if settings.encoder else {}))
