"""Indexes in folders: built once from a corpus of any size, in bounded memory, and opened by any number of processes.

`build` runs in three stages, and resumes in any of them after a kill:

  scan    reads the corpus in blocks: passages.jsonl, where each ends (ends.int64), a hash of its id, the postings of the block
  sparse  merges the postings (tools/sparse.py)
  dense   encodes the passages (models/encoder.py) and writes their vectors (tools/dense.py)

progress.json says how far it is; manifest.json is written last, and a folder without it is no index. A whole index can get lists
for approximate search (tools/approximate.py), which its manifest then names. `Index` is the search back end over a folder. Where
the index has both parts, their rankings are fused, by score or by rank.
"""

import gzip
import hashlib
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import filelock
import numpy as np

from jaxsearch.data.corpus import Document, stream_corpus
from jaxsearch.data.jsonl import DataError, opened
from jaxsearch.files import naming, no_link, write_whole
from jaxsearch.tools import Backend, check_search, sparse
from jaxsearch.tools.dynamic_batcher import DynamicBatcher

KINDS = ('bm25', 'dense', 'hybrid')
BLOCK = 2**14  # passages that are scanned at a time
SAMPLE = 2048  # passages by which `estimate` judges all
DEPTH = 100    # of the rankings that are fused
FUSIONS = {'scores': 12.0, 'ranks': 0.4}  # and the weight of the dense part
Report = Callable[[str, int], None]  # called with (stage, passages done)


class Encoder(Protocol):
  """What `models.encoder.TextEncoder` is: texts -> vectors [number, width] float32 of length 1."""
  width: int
  identity: dict  # what the vectors depend on, JSON; 'hash' decides whether two are the same

  def passages(self, texts: Sequence[str]) -> np.ndarray: ...
  def queries(self, texts: Sequence[str]) -> np.ndarray: ...


def build(corpus: str | os.PathLike, out: str | os.PathLike, kind: str, *, encoder: Encoder | None = None,
          precision: str = 'float16', approximate: bool = False, report: Report = lambda stage, done: None) -> dict:
  """Builds an index, or goes on where a build with the same arguments was stopped; returns its manifest.

  Args:
    corpus: JSONL file in the Search-R1 format, gzipped if its name ends in '.gz'.
    out: folder. If there is a whole index of the same corpus in it, that stays as it is.
    kind: one of KINDS; all but 'bm25' need an `encoder`.
    precision: of the vectors, 'float16' or 'int8'.
    approximate: whether to make lists of the vectors for approximate search; an index that has none gets them.
  Raises:
    DataError: a line that is no passage, an id given twice, or a folder with something else in it.
    OSError: the corpus cannot be read or the index not written; names the file.
  """
  if approximate and kind == 'bm25':
    raise ValueError("an index of kind 'bm25' has no vectors to search approximately")
  out, file = pathlib.Path(out), os.stat(corpus)
  settings = {'format': 1, 'kind': kind, 'corpus': os.path.abspath(corpus), 'corpus_bytes': file.st_size,
              'corpus_modified': file.st_mtime_ns}
  if kind != 'bm25':
    settings['dense'] = encoder.identity | {'width': encoder.width, 'precision': precision}
  out.mkdir(parents=True, exist_ok=True)
  try:
    with filelock.FileLock(out / 'lock', timeout=0), naming(out):
      manifest = _build(corpus, out, settings, encoder, report)
      return _with_lists(out, manifest, report) if approximate and 'approximate' not in manifest else manifest
  except filelock.Timeout as error:
    raise DataError(f'{out}: another process is building an index here') from error


def _build(corpus, out: pathlib.Path, settings: dict, encoder: Encoder | None, report: Report) -> dict:
  if (out / 'manifest.json').exists():
    manifest = read_manifest(out)
    if any(manifest.get(name) != value for name, value in settings.items()):
      raise DataError(f'{out}: holds an index of another corpus or with other settings; delete it or name another folder')
    return manifest
  state = _resumed(out, settings)

  def save(**changes) -> None:
    state.update(changes)
    write_whole(out / 'progress.json', json.dumps(state))

  save()  # from now on the folder says that it is half-built
  if state['stage'] == 'scan':
    _scan(corpus, out, state, save, report)
    _check_ids(corpus, out)
    save(stage='sparse')
  if state['stage'] == 'sparse':
    report('sparse', 0)
    if settings['kind'] != 'dense':
      sparse.merge(out)
    save(stage='dense')
    sparse.delete_blocks(out)
  if settings['kind'] != 'bm25':
    from jaxsearch.tools import dense
    passages, width = Passages(out), encoder.width
    vectors = dense.Vectors(out, len(passages), width, settings['dense']['precision'], create=True)
    for first in range(state['encoded'], len(passages), dense.BLOCK):
      report('dense', first)
      found = passages.read(range(first, min(first + dense.BLOCK, len(passages))))
      vectors.write(first, encoder.passages([indexed(document) for document in found]))
      save(encoded=first + len(found))
  (out / 'ids.uint64').unlink(missing_ok=True)
  manifest = settings | {name: state[name] for name in ('passages', 'corpus_hash')} | {'files': _files(out)}
  write_whole(out / 'manifest.json', json.dumps(manifest, indent=1))
  (out / 'progress.json').unlink()
  return manifest


def _with_lists(out: pathlib.Path, manifest: dict, report: Report) -> dict:
  from jaxsearch.tools import approximate, dense
  own = manifest['dense']
  found = approximate.build(out, dense.Vectors(out, manifest['passages'], own['width'], own['precision']), report)
  manifest = manifest | {'approximate': found, 'files': _files(out)}
  write_whole(out / 'manifest.json', json.dumps(manifest, indent=1))
  return manifest


def _resumed(out: pathlib.Path, settings: dict) -> dict:
  """How far the build in a folder is. DataError if it is one with other settings that has cost more than reading the corpus."""
  start = {'settings': settings, 'stage': 'scan', 'passages': 0, 'lines': 0, 'bytes': 0, 'encoded': 0, 'corpus_hash': ''}
  try:
    state = json.loads((out / 'progress.json').read_text())
  except FileNotFoundError:
    if others := sorted(file.name for file in out.iterdir() if file.name != 'lock'):
      raise DataError(f'{out}: holds {others[0]!r} and is no index; name an empty folder or a new one') from None
    return start
  if state['settings'] == settings:
    return state
  if state['encoded']:
    raise DataError(f'{out}: holds a half-built index of another corpus or with other settings; delete it or name another folder')
  sparse.delete_blocks(out)
  return start


def _scan(corpus, out: pathlib.Path, state: dict, save: Callable, report: Report) -> None:
  """Reads the rest of the corpus; after every block the files and `state` agree."""
  def appended(name, length):
    file = open(out / name, 'ab', opener=no_link)
    file.truncate(length)
    return file

  stream = stream_corpus(corpus, state['lines'])
  with (appended('passages.jsonl', state['bytes']) as contents, appended('ends.int64', 8 * state['passages']) as ends,
        appended('ids.uint64', 8 * state['passages']) as ids):
    while block := list(itertools.islice(stream, BLOCK)):
      report('scan', state['passages'])
      lines = [json.dumps([one.id, one.title, one.text], ensure_ascii=False).encode() + b'\n' for _, one in block]
      contents.write(b''.join(lines))
      ends.write((state['bytes'] + np.cumsum([len(line) for line in lines], dtype=np.int64)).tobytes())
      ids.write(np.array([sparse.hashed(one.id) for _, one in block], np.uint64).tobytes())
      if state['settings']['kind'] != 'dense':
        sparse.write_block(out, state['passages'] // BLOCK, state['passages'], [indexed(one) for _, one in block])
      for file in (contents, ends, ids):
        file.flush()
      # A chain, since a hash that is half-way cannot be saved.
      chained = hashlib.sha256(state['corpus_hash'].encode() + b''.join(lines)).hexdigest()
      save(passages=state['passages'] + len(block), bytes=state['bytes'] + sum(map(len, lines)), corpus_hash=chained,
           lines=int(block[-1][0].rpartition(':')[2]))
  if not state['passages']:
    raise DataError(f'{corpus}: no documents in it')


def _check_ids(corpus, out: pathlib.Path) -> None:
  """DataError for an id that stands twice in the corpus."""
  ids = np.sort(sparse.mapped(out / 'ids.uint64'))
  if twice := set(ids[1:][ids[1:] == ids[:-1]].tolist()):
    places = {}
    for place, document in stream_corpus(corpus):
      if sparse.hashed(document.id) in twice and document.id in places:
        raise DataError(f'{place}: id {document.id!r} was already used at {places[document.id]}')
      places |= {document.id: place} if sparse.hashed(document.id) in twice else {}


def _files(out: pathlib.Path) -> dict[str, int]:
  """File -> bytes of those that an index consists of; of a folder of vectors all together."""
  size = lambda path: sum(one.stat().st_size for one in path.iterdir()) if path.is_dir() else path.stat().st_size
  return {path.name: size(path) for path in sorted(out.iterdir())
          if path.name not in ('lock', 'manifest.json', 'progress.json') and path.suffix != '.part'}  # which a kill may leave


def indexed(document: Document) -> str:
  """What of a document is searched."""
  return f'{document.title}\n{document.text}'


def read_manifest(folder: str | os.PathLike) -> dict:
  """The manifest of a whole index, its files checked against it. Raises DataError."""
  folder = pathlib.Path(folder)
  try:
    manifest = json.loads((folder / 'manifest.json').read_text())
    recorded, found = manifest['files'], _files(folder)
  except FileNotFoundError:
    half = (folder / 'progress.json').exists()
    raise DataError(f'{folder}: ' + ('the index is half-built: rerun `jaxsearch index` to finish it' if half else
                                     'no index here (no manifest.json); `jaxsearch index` makes one')) from None
  except (ValueError, KeyError, TypeError) as error:
    raise DataError(f'{folder / "manifest.json"}: not the manifest of an index ({error!r})') from error
  for name, size in recorded.items():
    if found.get(name) != size:
      raise DataError(f'{folder / name}: {found.get(name, 0)} bytes, but manifest.json says {size}; build the index again')
  return manifest


def estimate(corpus: str | os.PathLike, kind: str, encoder: Encoder | None = None, precision: str = 'float16',
             approximate: bool = False) -> dict:
  """What an index would cost, judged by the first passages: bytes of memory and of disk, and seconds on this machine.

  'bytes_on_devices' is for the vectors of an exact search; 'bytes_in_memory' is what a server needs besides. Postings and lists
  of vectors lie on disk, and are the faster the more of them the operating system can cache: 'bytes_cached' is all of them.
  """
  with opened(corpus) as file:
    lines = list(itertools.islice(file, SAMPLE))
  documents = [document for _, document in itertools.islice(stream_corpus(corpus), SAMPLE)]
  read = b''.join(lines)
  share = len(gzip.compress(read) if str(corpus).endswith('.gz') else read) / os.path.getsize(corpus)
  total = len(documents) if len(lines) < SAMPLE else round(len(documents) / share)
  scale, postings, word_bytes, start = total / len(documents), 0, 0, time.perf_counter()
  if kind != 'dense':
    with tempfile.TemporaryDirectory() as folder:
      sparse.write_block(pathlib.Path(folder), 0, 0, list(map(indexed, documents)))
      found = np.load(pathlib.Path(folder) / 'block-000000.npy')
    postings, word_bytes = len(found) * scale, 34 * len(np.unique(found['word'])) * scale**0.6  # Heaps' law
  seconds, width = (time.perf_counter() - start) * scale * 1.3, encoder.width if kind != 'bm25' else 0
  if width:
    some = [indexed(document) for document in documents[::max(1, len(documents) // 128)]]
    encoder.passages(some)  # compiles
    start = time.perf_counter()
    encoder.passages(some)
    seconds += (time.perf_counter() - start) * total / len(some)
  each = (2 * width if precision == 'float16' else width + 4) if width else 0
  lists = {'bytes': 0, 'bytes_in_memory': 0, 'seconds': 0}
  if approximate:
    from jaxsearch.tools.approximate import cost
    lists = cost(total, width, precision)
  stored = total * (len(read) / len(documents) + 8)
  building = max(20 * postings, 6 * postings + 2 * lists['bytes'])
  return {'passages': total, 'bytes_on_disk': round(stored + 6 * postings + word_bytes + total * each + lists['bytes']),
          'bytes_on_disk_while_building': round(stored + building + total * (each + 8)),
          'bytes_in_memory': round(0.5e9 + word_bytes + 8 * total * (postings > 0) + lists['bytes_in_memory']),
          'bytes_cached': round(6 * postings + lists['bytes']), 'bytes_on_devices': 0 if approximate else round(total * each),
          'seconds': round(seconds + lists['seconds'], 1)}


class Passages:
  """The passages of an index by number, read from disk; several threads may read."""

  def __init__(self, folder: pathlib.Path):
    self._file, self._ends = open(folder / 'passages.jsonl', 'rb'), sparse.mapped(folder / 'ends.int64')

  def __len__(self) -> int:
    return len(self._ends)

  def read(self, numbers: Sequence[int], scores: Sequence[float] | None = None) -> list[Document]:
    found = []
    for number, score in zip(numbers, itertools.repeat(0.0) if scores is None else scores):
      start = int(self._ends[number - 1]) if number else 0
      line = os.pread(self._file.fileno(), int(self._ends[number]) - start, start)
      found.append(Document(*json.loads(line), float(score)))
    return found


Ranking = tuple[np.ndarray, np.ndarray]  # (numbers [n], scores [n]) of passages, best first


def fuse_ranks(rankings: Sequence[Sequence[int]], weights: Sequence[float], constant: float = 60.0) -> Ranking:
  """Reciprocal-rank fusion (Cormack et al. 2009): a passage scores the sum of weight / (constant + rank) over its rankings."""
  scores: dict[int, float] = {}
  for numbers, weight in zip(rankings, weights):
    for rank, number in enumerate(numbers, start=1):
      scores[int(number)] = scores.get(int(number), 0.0) + weight / (constant + rank)
  order = sorted(scores, key=lambda number: (-scores[number], number))
  return np.array(order, np.int64), np.array([scores[number] for number in order])


def fuse_scores(bm25: Ranking, dense: Ranking, dense_weight: float) -> Ranking:
  """A passage scores BM25 + dense_weight * cosine. `dense` has all passages that count, best first or not, each once or more;
  those that are not in `bm25` have its lowest score."""
  numbers, first = np.unique(dense[0], return_index=True)
  order = np.argsort(bm25[0])
  at = np.minimum(np.searchsorted(bm25[0], numbers, sorter=order), max(len(order) - 1, 0))
  own = np.full(len(numbers), bm25[1].min() if len(order) else 0.0)
  if len(order):
    known = bm25[0][order[at]] == numbers
    own[known] = bm25[1][order[at[known]]]
  scores = own + dense_weight * dense[1][first]
  best = np.argsort(-scores, kind='stable')
  return numbers[best], scores[best]


class Index:
  """A search back end over the folder of an index; may be called from several threads, whose queries are encoded together.

  Args:
    folder: of the index.
    encoder: that of the manifest if not given, or a folder to which that one has moved.
    kind: which part to search of a hybrid index; its own kind if not given.
    exact: search all vectors, even if there are lists for approximate search.
    fusion: of a hybrid index: 'scores' or 'ranks', see `fuse_scores` and `fuse_ranks`.
    dense_weight: in the fusion, where BM25 has 1; 12 for scores and 0.4 for ranks if not given: the best for all-MiniLM-L6-v2 on
      training questions of HotpotQA and 2WikiMultiHopQA (benchmarks/RESULTS.md). A better encoder deserves more.
    rerank: (query, documents) -> their scores, higher is better; puts the best `rerank_depth` of a query in a new order.
  Raises:
    DataError: no whole index, or an encoder that is not that of the manifest.
  """

  def __init__(self, folder: str | os.PathLike, *, encoder: Encoder | str | None = None, kind: str = '', exact: bool = False,
               fusion: str = 'scores', dense_weight: float | None = None,
               rerank: Callable[[str, list[Document]], Sequence[float]] | None = None, rerank_depth: int = 20):
    folder = pathlib.Path(folder)
    self.manifest = read_manifest(folder)
    if fusion not in FUSIONS:
      raise ValueError(f'fusion={fusion!r} must be one of {", ".join(FUSIONS)}')
    self._kind, self._fusion = kind or self.manifest['kind'], fusion
    self._dense_weight = FUSIONS[fusion] if dense_weight is None else dense_weight
    if self._kind != self.manifest['kind'] != 'hybrid' or self._kind not in KINDS:
      raise DataError(f'{folder}: an index of kind {self.manifest["kind"]!r} cannot be searched as {self._kind!r}')
    self._passages, self._rerank, self._rerank_depth = Passages(folder), rerank, rerank_depth
    self.encodes = self._kind != 'bm25'
    if self._kind != 'dense':
      self._sparse = sparse.Sparse(folder)
    if self.encodes:
      from jaxsearch.tools import dense
      own = self.manifest['dense']
      self._encoder = _open_encoder(folder, own, encoder)
      if 'approximate' in self.manifest and not exact:
        from jaxsearch.tools import approximate
        self._dense = approximate.Lists(folder, self.manifest['approximate']['probes'])
      else:
        self._dense = dense.Dense(dense.Vectors(folder, len(self._passages), own['width'], own['precision']))
      self._batched = DynamicBatcher(self._nearest)

  @property
  def corpus_hash(self) -> str:
    return self.manifest['corpus_hash']

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """The best `topk` passages for each query or fewer, best first, with their scores."""
    check_search(queries, topk)
    depth = max(topk, self._rerank_depth) if self._rerank else topk
    found = [self._passages.read(numbers[:depth], scores[:depth]) for numbers, scores in self.rank(queries, depth)]
    if self._rerank:
      found = [self._reranked(query, documents) for query, documents in zip(queries, found)]
    return [documents[:topk] for documents in found]

  def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
    """The numbers of the best passages for each query, and their scores."""
    if not queries:
      return []
    depth = max(topk, DEPTH) if self._kind == 'hybrid' else topk
    none = np.empty(0, np.int64), np.empty(0)
    by_words = [none if self._kind == 'dense' else self._sparse.search(query, depth) for query in queries]
    if self._kind == 'bm25':
      return by_words
    further = self._kind == 'hybrid' and self._fusion == 'scores'
    nearest = self._batched([(query, depth, numbers if further else none[0]) for query, (numbers, _) in zip(queries, by_words)])
    if self._kind == 'dense':
      return nearest
    if self._fusion == 'ranks':
      return [fuse_ranks([one[0], other[0]], [1.0, self._dense_weight]) for one, other in zip(by_words, nearest)]
    return [fuse_scores(one, other, self._dense_weight) for one, other in zip(by_words, nearest)]

  def _nearest(self, asked: list[tuple[str, int, np.ndarray]]) -> list[Ranking]:
    """For each (query, depth, further passages): the nearest, then the further ones, with their scores."""
    vectors = self._encoder.queries([query for query, _, _ in asked])
    numbers, scores = self._dense.search(vectors, max(depth for _, depth, _ in asked))
    sizes = [min(depth, np.count_nonzero(own >= 0)) for own, (_, depth, _) in zip(numbers, asked)]  # lists may hold fewer
    found = [(own[:size], score[:size]) for own, score, size in zip(numbers, scores, sizes)]
    if most := max(len(further) for _, _, further in asked):
      padded = np.array([np.pad(further, (0, 2 ** (most - 1).bit_length() - len(further))) for _, _, further in asked])
      found = [(np.concatenate([own, further]), np.concatenate([score, more[:len(further)]]))
               for (own, score), (_, _, further), more in zip(found, asked, self._dense.scores(vectors, padded))]
    return found

  def _reranked(self, query: str, documents: list[Document]) -> list[Document]:
    scores = self._rerank(query, documents)
    order = sorted(range(len(documents)), key=lambda number: -scores[number])
    return [Document(documents[i].id, documents[i].title, documents[i].text, float(scores[i])) for i in order]


def _open_encoder(folder: pathlib.Path, own: dict, encoder: Encoder | str | None) -> Encoder:
  """The encoder of a manifest's `dense`, at the place that it names or in the folder `encoder`; or `encoder` itself."""
  if encoder is None or isinstance(encoder, str):
    from jaxsearch.models.encoder import TextEncoder
    place = encoder or own['folder']
    if not os.path.isdir(place):
      raise DataError(f'{folder}: its encoder is not at {place}; say where it is with --config.search.encoder=FOLDER')
    encoder = TextEncoder(place, own['recipe'])
  if encoder.identity['hash'] != own['hash']:
    raise DataError(f'{folder}: built with another encoder than that in {encoder.identity["folder"]} (the hashes differ)')
  return encoder


def _identity(settings: Any) -> dict[str, Any]:
  manifest = read_manifest(settings.index)
  return {name: value for name, value in manifest.items() if name not in ('files', 'passages')}


BACKEND = Backend(lambda settings, **_: Index(settings.index, encoder=settings.encoder or None), by_source=True,
                  needs=lambda settings: {'index': 'path'} | ({'encoder': 'path'} if settings.encoder else {}),
                  identity=_identity)
