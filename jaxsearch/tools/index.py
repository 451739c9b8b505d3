"""Indexes in folders: built once from a corpus of any size, in bounded memory, and opened by any number of processes.

`build` runs in three stages, and resumes in any of them after a kill:

  scan    reads the corpus in blocks: passages.jsonl, where each ends (ends.int64), a hash of its id, the postings of the block
  sparse  merges the postings (tools/sparse.py)
  dense   encodes the passages (models/encoder.py) and writes their vectors (tools/dense.py)

progress.json says how far it is; manifest.json is written last, and a folder without it is no index. A whole index can get
lists for approximate search (tools/approximate.py), which its manifest then names. `Index` is the search back end over a
folder. Where the index has both parts, their scores are added.
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
from jaxsearch.files import appended, naming, write_whole
from jaxsearch.tools import Backend, check_search, sparse
from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.sparse import Ranking, indexed

KINDS = ('bm25', 'dense', 'hybrid')
FORMAT = 2       # of the files
ENCODED = 2**12  # passages that are encoded at a time
SAMPLE = 2048    # passages by which `estimate` judges all
DEPTH = 100      # of the rankings of a hybrid index
# The cosine beside BM25: the best for all-MiniLM-L6-v2 on training questions of HotpotQA and 2WikiMultiHopQA
# (benchmarks/RESULTS.md).
DENSE_WEIGHT = 12.0
UNFIT = 'of another corpus or with other settings; delete it or name another folder'
Report = Callable[[str, int], None]  # called with (stage, passages done)


class Encoder(Protocol):
  """Turns texts into vectors [number, width] float32 of length 1, as `models.encoder.TextEncoder` does."""
  width: int
  identity: dict  # what the vectors depend on, JSON; 'hash' decides whether two are the same

  def passages(self, texts: Sequence[str]) -> np.ndarray: ...
  def queries(self, texts: Sequence[str]) -> np.ndarray: ...


def build(corpus: str | os.PathLike, out: str | os.PathLike, kind: str, *, encoder: Encoder | None = None,
          precision: str = 'float16', approximate: bool = False, report: Report = lambda stage, done: None) -> dict:
  """Builds an index, or goes on where a build with the same arguments was stopped; returns its manifest.

  Args:
    corpus: file in the Search-R1 format.
    out: folder of the index.
    kind: 'bm25', 'dense' (needs an `encoder`) or 'hybrid' (both).
    precision: of the vectors, one of `dense.PRECISIONS`.
    approximate: makes lists of the vectors for approximate search; an index that has none gets them.
  Raises:
    DataError: a line that is no passage, an id given twice, or a folder with something else in it.
    OSError: the corpus cannot be read or the index not written; names the file.
  """
  out, file = pathlib.Path(out), os.stat(corpus)
  settings = {'format': FORMAT, 'kind': kind, 'corpus': os.path.abspath(corpus), 'corpus_bytes': file.st_size,
              'corpus_modified': file.st_mtime_ns}
  if kind != 'bm25':
    settings['dense'] = encoder.identity | {'width': encoder.width, 'precision': precision}
  out.mkdir(parents=True, exist_ok=True)
  try:
    with filelock.FileLock(out / 'lock', timeout=0), naming(out):
      manifest = _built(out, settings) or _build(corpus, out, settings, encoder, report)
      if approximate and 'approximate' not in manifest:
        from jaxsearch.tools import approximate as lists
        manifest['approximate'] = lists.build(out, _vectors(out, settings['dense']), precision, report)
        _write_manifest(out, manifest)
      return manifest
  except filelock.Timeout as error:
    raise DataError(f'{out}: another process is building an index here') from error


def _built(out: pathlib.Path, settings: dict) -> dict | None:
  """Returns the manifest of an index that is whole. Raises DataError for one with other settings."""
  if not (out / 'manifest.json').exists():
    return None
  manifest = read_manifest(out)
  if any(manifest.get(name) != value for name, value in settings.items()):
    raise DataError(f'{out}: holds an index {UNFIT}')
  return manifest


def _build(corpus, out: pathlib.Path, settings: dict, encoder: Encoder | None, report: Report) -> dict:
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
  if encoder and settings['kind'] != 'bm25':
    _encode(out, state, encoder, save, report)
  (out / 'ids.uint64').unlink(missing_ok=True)
  manifest = settings | {name: state[name] for name in ('passages', 'corpus_hash')}
  _write_manifest(out, manifest)
  (out / 'progress.json').unlink()
  return manifest


def _resumed(out: pathlib.Path, settings: dict) -> dict:
  """Returns how far the build in a folder is.

  Raises DataError for one with other settings that has cost more than reading the corpus.
  """
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
    raise DataError(f'{out}: holds a half-built index {UNFIT}')
  sparse.delete_blocks(out)
  return start


def _scan(corpus, out: pathlib.Path, state: dict, save: Callable, report: Report) -> None:
  """Reads the rest of the corpus; after every block the files and `state` agree."""
  stream = stream_corpus(corpus, state['lines'])
  while block := list(itertools.islice(stream, sparse.BLOCK)):
    report('scan', state['passages'])
    documents = [document for _, document in block]
    lines = [json.dumps([one.id, one.title, one.text], ensure_ascii=False).encode() + b'\n' for one in documents]
    ends = state['bytes'] + np.cumsum([len(line) for line in lines], dtype=np.int64)
    ids = np.array([sparse.hashed(document.id) for document in documents], np.uint64)
    for name, before, content in (('passages.jsonl', state['bytes'], b''.join(lines)),
                                  ('ends.int64', 8 * state['passages'], ends.tobytes()),
                                  ('ids.uint64', 8 * state['passages'], ids.tobytes())):
      with appended(out / name, before) as file:
        file.write(content)
    if state['settings']['kind'] != 'dense':
      number = state['passages'] // sparse.BLOCK
      sparse.write_block(out, number, state['passages'], list(map(indexed, documents)))
    # A chain, since a hash that is half-way cannot be saved.
    chained = hashlib.sha256(state['corpus_hash'].encode() + b''.join(lines)).hexdigest()
    save(passages=state['passages'] + len(block), bytes=int(ends[-1]), corpus_hash=chained,
         lines=int(block[-1][0].rpartition(':')[2]))
  if not state['passages']:
    raise DataError(f'{corpus}: no documents in it')


def _check_ids(corpus, out: pathlib.Path) -> None:
  """Raises DataError for an id that stands twice in the corpus."""
  ids = np.sort(sparse.mapped(out / 'ids.uint64'))
  if twice := set(ids[1:][ids[1:] == ids[:-1]].tolist()):
    places = {}
    for place, document in stream_corpus(corpus):
      if sparse.hashed(document.id) in twice and document.id in places:
        raise DataError(f'{place}: id {document.id!r} was already used at {places[document.id]}')
      places |= {document.id: place} if sparse.hashed(document.id) in twice else {}


def _encode(out: pathlib.Path, state: dict, encoder: Encoder, save: Callable, report: Report) -> None:
  """Encodes the rest of the passages."""
  from jaxsearch.tools.dense import write_vectors
  passages = Passages(out)
  for first in range(state['encoded'], len(passages), ENCODED):
    report('dense', first)
    texts = [indexed(document) for document in passages.read(range(first, min(first + ENCODED, len(passages))))]
    write_vectors(out, first, encoder.passages(texts), state['settings']['dense']['precision'])
    save(encoded=first + len(texts))


def _vectors(folder: pathlib.Path, settings: dict) -> 'dense.Vectors':  # noqa: F821
  from jaxsearch.tools import dense
  return dense.Vectors(folder, settings['width'], settings['precision'])


def _sizes(out: pathlib.Path) -> dict[str, int]:
  """Returns file -> bytes of those that an index consists of."""
  return {path.name: path.stat().st_size for path in sorted(out.iterdir())
          if path.name not in ('lock', 'manifest.json', 'progress.json') and path.suffix != '.part'}  # which a kill leaves


def _write_manifest(out: pathlib.Path, manifest: dict) -> None:
  manifest['files'] = _sizes(out)
  write_whole(out / 'manifest.json', json.dumps(manifest, indent=1))


def read_manifest(folder: str | os.PathLike) -> dict:
  """Returns the manifest of a whole index, its files checked against it. Raises DataError."""
  folder = pathlib.Path(folder)
  try:
    manifest = json.loads((folder / 'manifest.json').read_text())
    recorded, found = manifest['files'], _sizes(folder)
  except FileNotFoundError:
    half = (folder / 'progress.json').exists()
    raise DataError(f'{folder}: ' + ('the index is half-built: rerun `jaxsearch index` to finish it' if half else
                                     'no index here (no manifest.json); `jaxsearch index` makes one')) from None
  except (ValueError, KeyError, TypeError) as error:
    raise DataError(f'{folder / "manifest.json"}: not the manifest of an index ({error!r})') from error
  if manifest.get('format') != FORMAT:
    raise DataError(f'{folder}: an index of another version of jaxsearch; build it again')
  for name, size in recorded.items():
    if found.get(name) != size:
      raise DataError(f'{folder / name}: {found.get(name, 0)} bytes, but manifest.json says {size}; build the index again')
  return manifest


def estimate(corpus: str | os.PathLike, kind: str, encoder: Encoder | None = None, precision: str = 'float16',
             approximate: bool = False) -> dict:
  """Estimates what an index would cost by the first passages: bytes of memory and of disk, and seconds on this machine.

  'bytes_on_devices' is for the vectors of an exact search; 'bytes_in_memory' is what a server needs besides. Postings and lists
  of vectors lie on disk, and are the faster the more of them the operating system can cache: 'bytes_cached' is all of them.
  """
  with opened(corpus) as file:
    lines = list(itertools.islice(file, SAMPLE))
  texts = [indexed(document) for _, document in itertools.islice(stream_corpus(corpus), SAMPLE)]
  read = b''.join(lines)
  share = len(gzip.compress(read) if str(corpus).endswith('.gz') else read) / os.path.getsize(corpus)
  total = len(texts) if len(lines) < SAMPLE else round(len(texts) / share)
  scale, postings, word_bytes, start = total / len(texts), 0, 0, time.perf_counter()
  if kind != 'dense':
    with tempfile.TemporaryDirectory() as folder:
      sparse.write_block(pathlib.Path(folder), 0, 0, texts)
      found = np.load(pathlib.Path(folder) / 'block-000000.npy')
    postings, word_bytes = len(found) * scale, 34 * len(np.unique(found['word'])) * scale**0.6  # Heaps' law
  seconds, each = (time.perf_counter() - start) * scale * 1.3, 0
  if kind != 'bm25':
    some = texts[::max(1, len(texts) // 128)]
    encoder.passages(some)  # compiles
    start = time.perf_counter()
    encoder.passages(some)
    seconds += (time.perf_counter() - start) * total / len(some)
    each = encoder.width * (2 if precision == 'float16' else 1) + 4
  lists = {'bytes': 0, 'bytes_in_memory': 0, 'seconds': 0}
  if approximate:
    from jaxsearch.tools.approximate import cost
    lists = cost(total, encoder.width, precision)
  stored = total * (len(read) / len(texts) + 8)
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
    """Returns the documents of these numbers, with their scores."""
    documents = []
    for number, score in zip(numbers, itertools.repeat(0.0) if scores is None else scores):
      start = int(self._ends[number - 1]) if number else 0
      line = os.pread(self._file.fileno(), int(self._ends[number]) - start, start)
      documents.append(Document(*json.loads(line), float(score)))
    return documents


def fuse(bm25: Ranking, dense: Ranking, weight: float = DENSE_WEIGHT) -> Ranking:
  """Scores passages by BM25 + weight * cosine.

  Args:
    dense: all passages that count, best first or not, each once or more; those that are not in `bm25` have its lowest score.
  """
  numbers, first = np.unique(dense[0], return_index=True)
  by_words = dict(zip(bm25[0].tolist(), bm25[1].tolist()))
  lowest = min(by_words.values(), default=0.0)
  scores = np.array([by_words.get(number, lowest) for number in numbers.tolist()]) + weight * dense[1][first]
  best = np.argsort(-scores, kind='stable')
  return numbers[best], scores[best]


class Index:
  """A search back end over the folder of an index; may be called from several threads, whose queries are encoded together.

  Args:
    folder: of the index.
    encoder: that of the manifest if not given, or a folder to which that one has moved.

  Attributes:
    sparse, dense: its parts, `sparse.Sparse` and `dense.Dense` or `approximate.Lists`; None if it lacks one.

  Raises DataError: no whole index, or an encoder that is not that of the manifest.
  """

  def __init__(self, folder: str | os.PathLike, *, encoder: Encoder | str | None = None):
    folder = pathlib.Path(folder)
    self.manifest = read_manifest(folder)
    kind, self._passages, self.dense = self.manifest['kind'], Passages(folder), None
    self.corpus_hash = self.manifest['corpus_hash']
    self.sparse = None if kind == 'dense' else sparse.Sparse(folder)
    if kind != 'bm25':
      from jaxsearch.tools import dense
      settings = self.manifest['dense']
      self._encoder, self._vectors = _open_encoder(folder, settings, encoder), _vectors(folder, settings)
      if 'approximate' in self.manifest:
        from jaxsearch.tools import approximate
        self.dense = approximate.Lists(folder, self.manifest['approximate']['probes'])
      else:
        self.dense = dense.Dense(self._vectors)
      self._batched = DynamicBatcher(self._nearest)
      self.threads = 64  # that wait for the next batch of the encoder cost nothing

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """Returns the best `topk` passages for each query or fewer, best first, with their scores."""
    check_search(queries, topk)
    return [self._passages.read(numbers[:topk], scores[:topk]) for numbers, scores in self.rank(queries, topk)]

  def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
    """Returns the numbers of the best passages for each query, and their scores."""
    if not queries:
      return []
    if self.dense is None:
      return [self.sparse.search(query, topk) for query in queries]
    if self.sparse is None:
      return self._batched([(query, topk, np.empty(0, np.int64)) for query in queries])
    depth = max(topk, DEPTH)
    by_words = [self.sparse.search(query, depth) for query in queries]
    nearest = self._batched([(query, depth, numbers) for query, (numbers, _) in zip(queries, by_words)])
    return list(map(fuse, by_words, nearest))

  def _nearest(self, asked: list[tuple[str, int, np.ndarray]]) -> list[Ranking]:
    """Returns for each (query, depth, further passages) the nearest, then the further ones, with their scores."""
    vectors = self._encoder.queries([query for query, _, _ in asked])
    found = zip(asked, vectors, *self.dense.search(vectors, max(depth for _, depth, _ in asked)))
    rankings = []
    for (_, depth, further), vector, numbers, scores in found:
      size = min(depth, np.count_nonzero(numbers >= 0))  # lists may hold fewer
      rankings.append((np.concatenate([numbers[:size], further]),
                       np.concatenate([scores[:size], self._vectors[further] @ vector])))
    return rankings


def _open_encoder(folder: pathlib.Path, settings: dict, encoder: Encoder | str | None) -> Encoder:
  """Returns the encoder of a manifest's `dense`, from where it names or from the folder `encoder`; or `encoder` itself."""
  if encoder is None or isinstance(encoder, str):
    from jaxsearch.models.encoder import TextEncoder
    place = encoder or settings['folder']
    if not os.path.isdir(place):
      raise DataError(f'{folder}: its encoder is not at {place}; say where it is with --config.search.encoder=FOLDER')
    encoder = TextEncoder(place, settings['recipe'])
  if encoder.identity['hash'] != settings['hash']:
    raise DataError(f'{folder}: built with another encoder than that in {encoder.identity["folder"]} (the hashes differ)')
  return encoder


def _identity(settings: Any) -> dict[str, Any]:
  manifest = read_manifest(settings.index)
  return {name: value for name, value in manifest.items() if name not in ('files', 'passages')}


BACKEND = Backend(lambda settings, **_: Index(settings.index, encoder=settings.encoder or None), by_source=True,
                  needs=lambda settings: {'index': 'path'} | ({'encoder': 'path'} if settings.encoder else {}),
                  identity=_identity)
