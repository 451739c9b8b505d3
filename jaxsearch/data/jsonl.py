"""Reads files of JSON records, plain or gzipped, so that every fault names its file, its place and its key.

Corpora, question files and benchmarks are read through here; what a record must hold is theirs to say.
"""

import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, TypeVar

Item = TypeVar('Item')
LINE = 1 << 24  # bytes of a line at most: a rollout of 100,000 tokens has about half of that
RATIO = 200  # a file may unpack to this many times its size, plus LINE; JSON and text stay below 30
_KINDS = {list: 'a list', dict: 'an object', str: 'a string', int: 'a number', float: 'a number'}
_ESCAPE = re.compile(rb'\\u[dD][89a-fA-F]')  # only where this stands can half a surrogate pair be
_SURROGATE = re.compile('[\ud800-\udfff]')


class DataError(ValueError):
  """A file of the user's that cannot be used; the message says where and why."""


def read_records(path: str | os.PathLike) -> Iterator[tuple[str, dict]]:
  """Yields (place, record) of every line that is not blank; `place` is 'file:line'.

  Raises DataError (no UTF-8, bad JSON, no object, too long a line, half a surrogate pair, broken gzip),
  OSError.
  """
  with opened(path) as file:
    for number, line in enumerate(iter(lambda: file.readline(LINE + 1), b''), start=1):
      if len(line) > LINE:
        raise DataError(f'{path}:{number}: a line of more than {LINE >> 20} MiB')
      line = line.removeprefix(b'\xef\xbb\xbf') if number == 1 else line
      if line.strip():
        place = f'{path}:{number}'
        yield place, _record(_parsed(line, place), place, _ESCAPE.search(line))


def read_array(path: str | os.PathLike, key: str = '') -> Iterator[tuple[str, dict]]:
  """Yields ('file: record 3', record) of a JSON array of objects, or of the array under `key`.

  A file whose name ends in '.jsonl' is read as JSON lines, as Hugging Face's exports of arrays are.
  """
  if str(path).removesuffix('.gz').endswith('.jsonl'):
    yield from read_records(path)
    return
  packed, data = os.path.getsize(path), bytearray()
  with opened(path) as file:
    # By parts: `read` takes the room of all it is asked for, here many times the file.
    while len(data) <= LINE + RATIO * packed and (part := file.read(LINE)):
      data += part
  check_unpacked(path, packed, len(data))
  if data.startswith(b'\xef\xbb\xbf'):
    del data[:3]
  records, escaped = _parsed(b'[]' if not data or data.isspace() else data, str(path)), _ESCAPE.search(data)
  if key and isinstance(records, dict):
    records = field(records, key, list, str(path))
  if not isinstance(records, list):
    raise DataError(f'{path}: expected a JSON array of objects, not {shortened(records)}')
  for number, record in enumerate(records, start=1):
    place = f'{path}: record {number}'
    yield place, _record(record, place, escaped)


def unique(path: str | os.PathLike, pairs: Iterable[tuple[str, Item]], what: str) -> list[Item]:
  """Returns the items of (place, item) pairs; DataError if there are none or two have the same `id`."""
  items, places = [], {}
  for place, item in pairs:
    if item.id in places:
      raise DataError(f'{place}: id {item.id!r} was already used at {places[item.id]}')
    places[item.id] = place
    items.append(item)
  if not items:
    raise DataError(f'{path}: no {what} in it')
  return items


def field(record: dict, key: str, kind: type | tuple[type, ...], place: str) -> Any:
  """Returns the value under a key, of one of these kinds; true and false are no numbers."""
  if key not in record:
    raise DataError(f'{place}: no key {key!r} (found: {", ".join(map(repr, record)) or "none"})')
  value, kinds = record[key], kind if isinstance(kind, tuple) else (kind,)
  if not isinstance(value, kinds) or isinstance(value, bool):
    expected = ' or '.join(dict.fromkeys(_KINDS[each] for each in kinds))
    raise DataError(f'{place}: {key!r} must be {expected}, not {shortened(value)}')
  return value


def text_field(record: dict, key: str, place: str) -> str:
  """Returns the text under a key, which may not be blank; a number only for ids, where files disagree."""
  value = field(record, key, (str, int) if key == 'id' else str, place)
  if isinstance(value, str) and not value.strip():
    raise DataError(f'{place}: {key!r} must be a string that is not blank, not {shortened(value)}')
  return str(value)


def shortened(value: object) -> str:
  """Returns the value as an error message shows it."""
  shown = repr(value)
  return shown if len(shown) <= 60 else shown[:57] + '...'


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[IO[bytes]]:
  """Opens a file, unpacked where its name ends in '.gz'; DataError for gzip that is broken."""
  try:
    with gzip.open(path) if str(path).endswith('.gz') else open(path, 'rb') as file:
      yield file
  except (gzip.BadGzipFile, zlib.error, EOFError) as error:
    raise DataError(f'{path}: not a whole gzip file: {error}') from error


def check_unpacked(path: str | os.PathLike, packed: int, size: int) -> None:
  """Raises DataError if `packed` bytes of a file have become too many."""
  if size > LINE + RATIO * packed:
    raise DataError(f'{path}: unpacks to more than {RATIO} times its size')


def _parsed(data: bytes, place: str) -> Any:
  try:
    return json.loads(data.decode())  # of bytes it takes half a surrogate pair, unescaped, too
  except UnicodeDecodeError as error:
    raise DataError(f'{place}: not UTF-8: {error}') from error
  except (ValueError, RecursionError) as error:
    raise DataError(f'{place}: bad JSON: {error}') from error


def _record(record: object, place: str, escaped: object) -> dict:
  if not isinstance(record, dict):
    raise DataError(f'{place}: expected a JSON object, not {shortened(record)}')
  # Half a pair parses, but no tokenizer can encode it: better refused here than deep inside a run.
  if escaped and _SURROGATE.search(json.dumps(record, ensure_ascii=False)):
    raise DataError(f'{place}: text with half of a surrogate pair (\\uD800 to \\uDFFF)')
  return record
