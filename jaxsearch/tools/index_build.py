"""Builds indexes in folders from a corpus of any size, in bounded memory; tools/index.py searches them.

`build` runs in three stages, and resumes in any of them after a kill:

  scan    reads the corpus in blocks: passages.jsonl, where each ends (ends.int64), a hash of its id, postings
  sparse  merges the postings (tools/sparse.py)
  dense   encodes the passages (models/encoder.py) and writes their vectors (tools/dense.py)

progress.json says how far it is; manifest.json is written last, and a folder without it is no index. A whole
index can get lists for approximate search (tools/approximate.py), which its manifest then names.
"""

import gzip
import hashlib
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable

import filelock
import numpy as np

from jaxsearch.data.corpus import stream_corpus
from jaxsearch.data.jsonl import DataError, opened
from jaxsearch.files import appended, naming, write_whole
from jaxsearch.tools import sparse
from jaxsearch.tools.index import FORMAT, Encoder, Passages, open_vectors, read_manifest, sizes
from jaxsearch.tools.sparse import indexed

ENCODED = 2**12  # passages that are encoded at a time
SAMPLE = 2048    # passages by which `estimate` judges all
UNFIT = 'of another corpus or with other settings; delete it or name another folder'
Report = Callable[[str, int], None]  # called with (stage, passages done)


def build(corpus: str | os.PathLike, out: str | os.PathLike, kind: str, *, encoder: Encoder | None = None,
          precision: str = 'float16', approximate: bool = False,
          report: Report = lambda stage, done: None) -> dict:
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
        manifest['approximate'] = lists.build(out, open_vectors(out, settings['dense']), precision, report)
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
  start = {'settings': settings, 'stage': 'scan', 'corpus_hash': ''}
  start |= dict.fromkeys(('passages', 'lines', 'bytes', 'encoded'), 0)
  try:
    state = json.loads((out / 'progress.json').read_text())
  except FileNotFoundError:
    if others := sorted(file.name for file in out.iterdir() if file.name != 'lock'):
      message = f'{out}: holds {others[0]!r} and is no index; name an empty folder or a new one'
      raise DataError(message) from None
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
    fields = ([one.id, one.title, one.text] for one in documents)
    lines = [json.dumps(own, ensure_ascii=False).encode() + b'\n' for own in fields]
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
    documents = passages.read(range(first, min(first + ENCODED, len(passages))))
    vectors = encoder.passages(list(map(indexed, documents)))
    write_vectors(out, first, vectors, state['settings']['dense']['precision'])
    save(encoded=first + len(documents))


def _write_manifest(out: pathlib.Path, manifest: dict) -> None:
  manifest['files'] = sizes(out)
  write_whole(out / 'manifest.json', json.dumps(manifest, indent=1))


def estimate(corpus: str | os.PathLike, kind: str, encoder: Encoder | None = None, precision: str = 'float16',
             approximate: bool = False) -> dict:
  """Estimates what an index would cost by the first passages: bytes of memory and of disk, and seconds on
  this machine.

  'bytes_on_devices' is for the vectors of an exact search; 'bytes_in_memory' is what a server needs besides.
  Postings and lists of vectors lie on disk, and are the faster the more of them the operating system can
  cache: 'bytes_cached' is all of them.
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
  memory = 0.5e9 + word_bytes + 8 * total * (postings > 0) + lists['bytes_in_memory']
  building = max(20 * postings, 6 * postings + 2 * lists['bytes'])
  return {'passages': total,
          'bytes_on_disk': round(stored + 6 * postings + word_bytes + total * each + lists['bytes']),
          'bytes_on_disk_while_building': round(stored + building + total * (each + 8)),
          'bytes_in_memory': round(memory), 'bytes_cached': round(6 * postings + lists['bytes']),
          'bytes_on_devices': 0 if approximate else round(total * each),
          'seconds': round(seconds + lists['seconds'], 1)}
