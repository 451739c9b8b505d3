"""Documents to search in: the Search-R1 corpus format, read whole into memory or one by one.

One JSON object a line, `{"id": "7", "contents": "\\"Title\\"\\ntext"}`; files that end in `.gz` are unpacked
on the way. Indexing them is the business of `jaxsearch.tools`.
"""

import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from jaxsearch.data.jsonl import read_records, text_field, unique


@dataclass(frozen=True, slots=True)
class Document:
  """A text of a corpus; in search results with a score (higher is better, 0 without one)."""
  id: str
  title: str
  text: str
  score: float = 0.0


def split_contents(contents: str) -> tuple[str, str]:
  """Returns title and text of `'"Title"\\ntext'`; the quotes may be missing."""
  title, _, text = contents.strip().partition('\n')
  title = title.strip()
  if len(title) >= 2 and title[0] == title[-1] == '"':
    title = title[1:-1]
  return title, text.strip()


def join_contents(title: str, text: str) -> str:
  """Returns the `contents` of a document; the inverse of `split_contents`."""
  return f'"{title}"\n{text}'


def line_of(document: Document) -> bytes:
  """Returns the line of a document in an index; the hash of a corpus is that of its lines."""
  return json.dumps([document.id, document.title, document.text], ensure_ascii=False).encode() + b'\n'


def first_words(text: str, number: int) -> str:
  """Returns the first `number` words of a text; all of it for 0."""
  following = next(itertools.islice(re.finditer(r'\S+', text), number, None), None) if number else None
  return text if following is None else text[:following.start()].rstrip()


def indexed(document: Document) -> str:
  """Returns what of a document is searched."""
  return f'{document.title}\n{document.text}'


UNSPACED = re.compile('[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]')  # kana and Han


def words(text: str) -> list[str]:
  """Returns the words of a text as they are indexed: case folded, without accents or punctuation.

  Of Chinese and Japanese, which have no spaces, every character is one.
  """
  text = text.casefold()
  if not text.isascii():
    text = ''.join(c for c in unicodedata.normalize('NFKD', text) if unicodedata.category(c)[0] != 'M')
    text = UNSPACED.sub(r' \g<0> ', text)
  return re.findall(r'\w+', text)


def stream_corpus(path: str | os.PathLike) -> Iterator[tuple[str, Document]]:
  """Yields ('file:line', document) of a corpus in the Search-R1 format.

  Raises DataError for bad JSON or a missing or blank `id` or `contents`, naming file and line; OSError.
  """
  for place, record in read_records(path):
    if 'docid' in record:  # Tevatron's; those of BrowseComp-Plus have no title
      title, text = str(record.get('title') or ''), text_field(record, 'text', place)
      yield place, Document(str(record['docid']), title, text)
      continue
    title, text = split_contents(text_field(record, 'contents', place))
    yield place, Document(text_field(record, 'id', place), title, text)


def read_corpus(path: str | os.PathLike) -> list[Document]:
  """Reads all documents of a corpus; DataError also for an id given twice and for no document at all."""
  return unique(path, stream_corpus(path), 'documents')
