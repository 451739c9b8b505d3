"""BrowseComp-Plus (arXiv 2508.06600) as published: questions encrypted against leaks, with their evidence.

Rows are those of the data set Tevatron/browsecomp-plus, in parquet or as JSON lines, encrypted or as the
authors' script decrypts them. The password is theirs to give: it is read from the environment variable KEY.
"""

import base64
import hashlib
import itertools
import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

from jaxsearch.data import tables
from jaxsearch.data.jsonl import DataError, read_records, shortened

KEY = 'BROWSECOMP_PLUS_KEY'
QRELS = ('qrel_evidence.txt', 'topics-qrels/qrel_evidence.txt')  # beside the questions


def decrypt(text: str, password: str) -> str:
  """Decrypts a text: base64, XOR with the SHA-256 of the password, repeated. Raises ValueError."""
  key = hashlib.sha256(password.encode()).digest()
  data = bytes(map(int.__xor__, base64.b64decode(text, validate=True), itertools.cycle(key)))
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f'{KEY} is not the password of this file') from error


def rows(path: str | os.PathLike) -> Iterator[tuple[str, dict]]:
  """Yields (place, row); a row gets its `relevant` documents from a file of QRELS beside it."""
  qrels = _qrels(pathlib.Path(path).parent)
  if tables.is_table(path):
    found = ((f'{path}: row {number}', row) for number, row in enumerate(tables.rows(pathlib.Path(path)), 1))
  else:
    found = read_records(path)
  for place, row in found:
    yield place, row | {'relevant': qrels.get(str(row.get('query_id')))}


def record(row: dict) -> dict:
  """Changes a row to what `tables.question_of_row` reads: answers are what a response states.

  `metadata` holds the ids of the documents with `evidence`. Raises ValueError for a row that is encrypted
  with another password, or without one.
  """
  text, key = str, os.environ.get(KEY, '')
  if re.fullmatch('[A-Za-z0-9+/]{8,}={0,2}', row['query']):  # no question
    if not key:
      raise ValueError(f'it is encrypted: set {KEY} to the canary in their decrypt_dataset.py')
    text = lambda encrypted: decrypt(encrypted, key)
  evidence = row['relevant'] or [text(document['docid']) for document in row['evidence_docs']]
  return {'id': str(row['query_id']), 'question': text(row['query']), 'answer': text(row['answer']),
          'metadata': {'match': 'stated', 'evidence': evidence}}


def _qrels(folder: pathlib.Path) -> dict[str, list[str]]:
  """Returns query id -> ids of documents, of lines `id Q0 docid 1`."""
  relevant = defaultdict(list)
  path = next((folder / name for name in QRELS if (folder / name).is_file()), None)
  for number, line in enumerate(path.read_text().splitlines() if path else (), 1):
    if fields := line.split():
      if len(fields) != 4:
        raise DataError(f"{path}:{number}: not a line 'id Q0 docid 1': {shortened(line)}")
      relevant[fields[0]].append(fields[2])
  return relevant
