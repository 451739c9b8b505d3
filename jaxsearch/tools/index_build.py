"""Builds indexes in folders from a corpus of any size, in bounded memory; tools/index.py searches them.

`build` reads the corpus in blocks and writes passages.jsonl, where each ends (ends.int64), and their postings
(tools/sparse.py). Then it encodes the passages (models/encoder.py, tools/dense.py), and resumes there after a
kill. manifest.json says what is built, see `index.read_manifest`. A whole index can get lists for approximate
search (tools/approximate.py).
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

from jaxsearch.data.corpus import indexed, line_of, stream_corpus
from jaxsearch.data.jsonl import LINE, DataError, opened
from jaxsearch.files import naming, no_link, write_whole
from jaxsearch.tools import sparse
from jaxsearch.tools.index import FORMAT, Encoder, Passages, read_manifest, sizes

ENCODED = 2**12  # passages that are encoded at a time
SAMPLE = 2048    # passages by which `estimate` judges all
Report = Callable[[str, int], None]  # called with (stage, passages done)


def build(corpus: str | os.PathLike, out: str | os.PathLike, kind: str, *, encoder: Encoder | None = None,
          precision: str = 'float16', approximate: bool = False,
          report: Report = lambda stage, done: None) -> dict:
  """Builds an index, or resumes a stopped build with the same arguments; returns its manifest.

  Args:
    corpus: file in the Search-R1 format.
    kind: 'bm25', 'dense' (needs an `encoder`) or 'hybrid' (both).
    precision: of the vectors, one of `dense.PRECISIONS`.
    approximate: makes lists of the vectors for approximate search; an index that has none gets them.

  Raises DataError for a line that is no passage and a folder with something else in it, OSError with the
  file.
  """
  out, file = pathlib.Path(out), os.stat(corpus)
  settings = {'format': FORMAT, 'kind': kind, 'corpus': os.path.abspath(corpus), 'corpus_bytes': file.st_size,
              'corpus_modified': file.st_mtime_ns}
  if kind != 'bm25':
    settings['dense'] = encoder.identity | {'width': encoder.width, 'precision': precision}
  out.mkdir(parents=True, exist_ok=True)
  try:
    with filelock.FileLock(out / 'lock', timeout=0), naming(out):
      manifest = _started(out, settings)
      save = lambda: write_whole(out / 'manifest.json', json.dumps(manifest, indent=1))
      save()  # where its encoder lies may have changed
      if 'passages' not in manifest:
        manifest |= _scan(corpus, out, kind, report)
        save()
      if 'files' not in manifest:
        if kind != 'bm25':
          _encode(out, encoder, precision, report)
        manifest['files'] = sizes(out)
        save()
      if approximate and 'approximate' not in manifest:
        from jaxsearch.tools import approximate as lists
        from jaxsearch.tools.dense import Vectors
        manifest['approximate'] = lists.build(out, Vectors(out, encoder.width, precision), precision, report)
        manifest['files'] = sizes(out)
        save()
      return manifest
  except filelock.Timeout as error:
    raise DataError(f'{out}: another process is building an index here') from error


def _started(out: pathlib.Path, settings: dict) -> dict:
  """Returns the manifest of a folder as far as it is built, `settings` where nothing is.

  Raises DataError for another index whose passages are written, or anything else in the folder.
  """
  if not (out / 'manifest.json').exists():
    if others := sorted(file.name for file in out.iterdir() if file.name != 'lock'):
      raise DataError(f'{out}: holds {others[0]!r} and is no index; name an empty folder or a new one')
    return settings
  started = read_manifest(out, half_built=True)
  if 'dense' in settings and 'dense' in started:  # the encoder may lie elsewhere: its hash is compared
    started['dense']['folder'] = settings['dense']['folder']
  if all(started.get(name) == value for name, value in settings.items()):
    return started
  if 'passages' not in started:
    return settings
  kind = 'an' if 'files' in started else 'a half-built'
  raise DataError(f'{out}: holds {kind} index of another corpus or with other settings; delete it or name '
                  'another folder')


def _scan(corpus, out: pathlib.Path, kind: str, report: Report) -> dict:
  """Writes passages and postings; returns how many passages there are, and the hash of all."""
  sparse.delete_blocks(out)  # of a build that was killed
  stream, corpus_hash, size, end = stream_corpus(corpus), hashlib.sha256(), 0, 0
  with (open(out / 'passages.jsonl', 'wb', opener=no_link) as passages,
        open(out / 'ends.int64', 'wb', opener=no_link) as ends):
    while documents := [document for _, document in itertools.islice(stream, sparse.BLOCK)]:
      report('scan', size)
      lines = list(map(line_of, documents))
      ends.write((end + np.cumsum([len(line) for line in lines], dtype=np.int64)).tobytes())
      content = b''.join(lines)
      passages.write(content)
      corpus_hash.update(content)
      end += len(content)
      if kind != 'dense':
        sparse.write_block(out, size, list(map(indexed, documents)))
      size += len(documents)
  if not size:
    raise DataError(f'{corpus}: no documents in it')
  if kind != 'dense':
    report('sparse', 0)
    sparse.merge(out)
  return {'passages': size, 'corpus_hash': corpus_hash.hexdigest()}


def _encode(out: pathlib.Path, encoder: Encoder, precision: str, report: Report) -> None:
  """Encodes the passages that have no vectors yet, in whole blocks."""
  from jaxsearch.tools.dense import write_vectors
  passages, row = Passages(out), encoder.width * np.dtype(precision).itemsize
  sizes_of = (('scales.float32', 4), (f'vectors.{precision}', row))
  # A copy of a half-built folder may have less of one file.
  blocks = min((out / name).stat().st_size // each // ENCODED if (out / name).exists() else 0
               for name, each in sizes_of)
  for first in range(blocks * ENCODED, len(passages), ENCODED):
    report('dense', first)
    documents = passages.read(range(first, min(first + ENCODED, len(passages))))
    write_vectors(out, first, encoder.passages(list(map(indexed, documents))), precision)


def estimate(corpus: str | os.PathLike, kind: str, encoder: Encoder | None = None, precision: str = 'float16',
             approximate: bool = False) -> dict:
  """Estimates what an index would cost by the first passages: bytes of memory and of disk, and seconds on
  this machine.

  'bytes_on_devices' is for the vectors of an exact search; 'bytes_in_memory' is what a server needs besides.
  Postings and lists of vectors lie on disk, and are the faster the more of them the operating system can
  cache: 'bytes_cached' is all of them.
  """
  with opened(corpus) as file:
    lines = list(itertools.islice(iter(lambda: file.readline(LINE + 1), b''), SAMPLE))
  texts = [indexed(document) for _, document in itertools.islice(stream_corpus(corpus), SAMPLE)]
  if not texts:
    raise DataError(f'{corpus}: no passages in it')
  read = b''.join(lines)
  share = len(gzip.compress(read) if str(corpus).endswith('.gz') else read) / os.path.getsize(corpus)
  total = len(texts) if len(lines) < SAMPLE else round(len(texts) / share)
  scale, postings, word_bytes, start = total / len(texts), 0, 0, time.perf_counter()
  if kind != 'dense':
    with tempfile.TemporaryDirectory() as folder:
      block = np.load(sparse.write_block(pathlib.Path(folder), 0, texts))
    postings, word_bytes = len(block) * scale, 34 * len(np.unique(block['word'])) * scale**0.6  # Heaps' law
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
  building = max(20 * postings, 6 * postings + lists['bytes'])
  return {'passages': total,
          'bytes_on_disk': round(stored + 6 * postings + word_bytes + total * each + lists['bytes']),
          'bytes_on_disk_while_building': round(stored + building + total * each),
          'bytes_in_memory': round(memory), 'bytes_cached': round(6 * postings + lists['bytes']),
          'bytes_on_devices': 0 if approximate else round(total * each),
          'seconds': round(seconds + lists['seconds'], 1)}
