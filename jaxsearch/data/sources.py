"""Questions and documents by name: the embedded world, public benchmarks, or files of one's own.

Several names joined by '+' are one set: 'hotpotqa:A.json+2wiki:B.json+gsm8k:C.jsonl'. A file whose own name
has a '+' in it can be read alone, not as a part of a set.
"""

import collections
import dataclasses
import hashlib
import os
from collections.abc import Sequence

from jaxsearch import registry
from jaxsearch.data import benchmarks, tables
from jaxsearch.data.corpus import Document, read_corpus
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.questions import Question, read_questions


def load_questions(name: str, *, hops: tuple[int, ...] = (), arithmetic: bool = True) -> list[Question]:
  """Reads the questions that `name` stands for.

  Args:
    name: 'world:SPLIT', a file in the FlashRAG format, a table (tables.py), or one of `benchmarks.SOURCES`
      and a file as its authors publish it ('nq:FILE'); or several of them joined by '+', whose ids get their
      source in front where two are the same. A question in one of several files that names no source has
      that file as its source: 'nq/test' of 'DATA/nq/test.jsonl'.
    hops, arithmetic: of the world's questions, see `world.files.questions`.

  Raises ValueError (no such split, no question is left), or DataError with file and line.
  """
  parts = _parts(name)

  def read(source, path):
    if source in registry.ENTRIES['questions']:
      return registry.find('questions', source)(path, hops, arithmetic)
    if source == 'file':
      questions = tables.read_questions(path) if tables.is_table(path) else read_questions(path)
      return [_of_file(one, path) for one in questions] if len(parts) > 1 else questions
    return benchmarks.read_questions(source, path)

  return _joined(name, [(source, read(source, path)) for source, path in parts])


def _of_file(question: Question, path: str) -> Question:
  folder, file = os.path.split(path)
  source = os.path.join(os.path.basename(folder), file.partition('.')[0])
  return dataclasses.replace(question, metadata={'source': source} | question.metadata)


def load_corpus(name: str) -> list[Document]:
  """Reads the documents that `name` stands for; raises as `load_questions`.

  Args:
    name: 'world', a file in the Search-R1 format, or 'hotpotqa:', '2wiki:', 'musique:' or 'finqa:' and a file
      as its authors publish it, for the documents that come with its questions; or several of them joined by
      '+', where the same title and text is kept once.
  """
  return _merged(name, [(source, _documents(source, path)) for source, path in _parts(name)])


def load_corpora(name: str) -> dict[str, list[Document]]:
  """Returns source -> its documents in `name`: 'hotpotqa:A+2wiki:B' is two corpora."""
  corpora = collections.defaultdict(list)
  for source, path in _parts(name):
    corpora[source].append((source, _documents(source, path)))
  return {source: _merged(name, parts) for source, parts in corpora.items()}


def _documents(source: str, path: str) -> list[Document]:
  if source in registry.ENTRIES['corpora']:
    if path:
      raise ValueError(f"the corpus of the {source} is '{source}', not '{source}:{path}'")
    return registry.find('corpora', source)()
  return read_corpus(path) if source == 'file' else benchmarks.read_documents(source, path)


def _merged(name: str, parts: list[tuple[str, list[Document]]]) -> list[Document]:
  """Returns the documents of all parts, the same title and text once."""
  if len(parts) > 1:
    first = {}  # (title, text) -> the document that has them first
    is_first = lambda document: first.setdefault((document.title, document.text), document) is document
    parts = [(source, list(filter(is_first, documents))) for source, documents in parts]
  return _joined(name, parts)


def files_of(name: str) -> list[str]:
  """Returns the files that a name needs, there or not. Raises ValueError as the loaders do."""
  return [path for source, path in _parts(name) if source not in registry.ENTRIES['questions']]


def hash_of(name: str) -> str | None:
  """Returns the SHA-256 of the file or files in a name such as 'hotpotqa:A.json+B.jsonl'; None without."""
  digest, files = hashlib.sha256(), list(filter(os.path.isfile, files_of(name)))
  for path in files:
    with open(path, 'rb') as stream:
      hashlib.file_digest(stream, lambda: digest)
  return digest.hexdigest() if files else None


def _parts(name: str) -> list[tuple[str, str]]:
  """Returns (source, path) of every part of a name; the source of a file in our own formats is 'file'."""
  source, path = _split(name)
  if '+' not in path or os.path.exists(path):
    return [(source, path)]
  if not all(name.split('+')):
    raise ValueError(f"{name!r}: nothing stands before, between or after its '+'")
  return [_split(part) for part in name.split('+')]


def _split(name: str) -> tuple[str, str]:
  source, colon, path = name.partition(':')
  known = (*registry.ENTRIES['questions'], *benchmarks.SOURCES)
  if name in registry.ENTRIES['corpora'] or (colon and source in known):
    return source, path
  if colon and source.isidentifier() and not os.path.exists(name):
    raise ValueError(f'{name}: no such file, and no source is called {source!r}; known: {", ".join(known)}')
  return 'file', name


def _joined(name: str, parts: Sequence[tuple[str, list]]) -> list:
  """Returns the items of all parts; an id that occurs twice becomes 'gsm8k:ID', later 'gsm8k.2:ID'."""
  if len(parts) == 1:
    return parts[0][1]
  used = collections.Counter(item.id for _, items in parts for item in items)
  times, joined = collections.Counter(), []
  for source, items in parts:
    times[source] += 1
    label = source if times[source] == 1 else f'{source}.{times[source]}'
    joined += [dataclasses.replace(item, id=f'{label}:{item.id}') if used[item.id] > 1 else item
               for item in items]
  if len({item.id for item in joined}) < len(joined):
    raise DataError(f'{name}: ids that are the same in two parts, and again with the source in front')
  return joined
