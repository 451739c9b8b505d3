"""Reading JSON-lines files, plain or gzipped, so that every fault names its file and line.

Corpora and question files are both read through here; what a record must hold is theirs to check.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator

_SURROGATE = re.compile('[\ud800-\udfff]')


class DataError(ValueError):
  """A file of the user's that cannot be used; the message says where and why."""


def read_records(path: str | os.PathLike) -> Iterator[tuple[str, dict]]:
  """Yields (place, record) of every line that is not blank; `place` is 'file:line', for messages.

  Raises:
    DataError: bytes that are not UTF-8, bad JSON, a line that is not an object, half a surrogate pair, broken
      gzip.
    OSError: the file cannot be opened.
  """
  opener = gzip.open if str(path).endswith('.gz') else open
  number = 0
  try:
    with opener(path, 'rb') as lines:
      for number, line in enumerate(lines, start=1):
        if number == 1:
          line = line.removeprefix(b'\xef\xbb\xbf')
        if line.strip():
          yield f'{path}:{number}', _parse(line, f'{path}:{number}')
  except (gzip.BadGzipFile, zlib.error, EOFError) as error:
    raise DataError(f'{path}: not a whole gzip file (after line {number}): {error}') from error


def text_field(record: dict, key: str, place: str) -> str:
  """The text under `key`; whole numbers are taken as text only for ids, where files disagree."""
  if key not in record:
    raise DataError(f'{place}: no key {key!r} (found: {", ".join(map(repr, record)) or "none"})')
  value = record[key]
  if key == 'id' and isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  if not isinstance(value, str) or not value.strip():
    raise DataError(f'{place}: {key!r} must be a string that is not blank, not {shortened(value)}')
  return value


def parse(data: bytes, place: str):
  """The value that JSON text holds; DataError naming `place` if it is none."""
  try:
    return json.loads(data)
  except UnicodeDecodeError as error:
    raise DataError(f'{place}: not UTF-8: {error}') from error
  except (ValueError, RecursionError) as error:
    raise DataError(f'{place}: bad JSON: {error}') from error


def _parse(line: bytes, place: str) -> dict:
  record = parse(line, place)
  if not isinstance(record, dict):
    raise DataError(f'{place}: expected a JSON object, not {shortened(record)}')
  # Half a pair parses, but no tokenizer can encode it: better refused here than deep inside a run.
  if b'\\ud' in line.lower() and _SURROGATE.search(json.dumps(record, ensure_ascii=False)):
    raise DataError(f'{place}: text with half of a surrogate pair (\\uD800 to \\uDFFF)')
  return record


def shortened(value: object) -> str:
  shown = repr(value)
  return shown if len(shown) <= 60 else shown[:57] + '...'
