"""Files of JSON lines that a run appends to and reads back, whole lines alone."""

import json
import pathlib
from collections.abc import Iterable, Mapping

from jaxsearch.files import naming, no_link, write_whole


def keep_steps(path: str | pathlib.Path, last_step: int) -> None:
  """Drops the rows after `last_step` from a file of rows, or all of them if that is 0; atomic."""
  write(path, [row for row in read(path) if row['step'] <= last_step] if last_step else [])


def write(path: str | pathlib.Path, rows: Iterable[Mapping]) -> None:
  """Writes a JSON line for each row; the file is replaced as a whole or not at all."""
  write_whole(path, ''.join(map(line, rows)))


def append(path: str | pathlib.Path, rows: Iterable[Mapping]) -> None:
  """Appends a JSON line for each row; an OSError names the file."""
  with naming(path), open(path, 'a', encoding='utf-8', opener=no_link) as file:
    file.write(''.join(map(line, rows)))


def line(row: Mapping) -> str:
  """Returns a row as a line of JSON."""
  return json.dumps(row, ensure_ascii=False) + '\n'


def read(path: str | pathlib.Path) -> list[dict]:
  """Reads the rows of such a file, [] if there is none; an unfinished last line is left out.

  Raises ValueError if another line is no JSON.
  """
  path, rows = pathlib.Path(path), []
  lines = path.read_bytes().split(b'\n') if path.exists() else [b'']
  # What follows the last line end was never finished, and may end within a character.
  for number, line in enumerate(lines[:-1], start=1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      raise ValueError(f'{path}:{number}: not JSON: {error}') from error
  return rows
