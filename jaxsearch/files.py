"""Writes files so that a kill or a full disk leaves no partial file, and a link that somebody planted is not
followed."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

# Of a network, and of disks, which may be a network's: what failed so may work when it is tried again.
NETWORK, DISK = ({getattr(errno, name, None) for name in names} - {None} for names in (
  ('ESTALE', 'EAGAIN', 'ETIMEDOUT', 'ECONNRESET', 'ENETUNREACH', 'EHOSTUNREACH'), ('EIO', 'EREMOTEIO')))


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
  """Writes a file as a whole or not at all, its folder too if there is none. A device such as /dev/stdout is
  written to."""
  path, content = pathlib.Path(path), content.encode() if isinstance(content, str) else content
  if path.exists() and (path.parts[:2] == ('/', 'dev') or not path.is_file()):
    path.write_bytes(content)
    return
  path = path.resolve()  # a link: write the file that it points to
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.part')
  with naming(path):
    part.unlink(missing_ok=True)  # which a kill or somebody else may have left
    try:
      with open(part, 'xb') as file:  # follows no link
        file.write(content)
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object from `path`; errors name the file."""
  if not path.is_file():
    raise FileNotFoundError(f'{path}: missing')
  try:
    value = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not valid JSON ({error})') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: not a JSON object')
  return value


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  write_whole(path, json.dumps(value, indent=2) + '\n')


def no_link(path: str, flags: int) -> int:
  """Opens, as an `opener`, a file whose name jaxsearch chose; raises OSError if it is a link."""
  return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def appended(path: pathlib.Path, length: int) -> IO[bytes]:
  """Opens a file to write behind its first `length` bytes; what is there is cut off."""
  file = open(path, 'ab', opener=no_link)
  file.truncate(length)
  return file


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """Adds the path to an OSError that names no file, such as that of a full disk."""
  try:
    yield
  except OSError as error:
    if error.errno is None:  # a library's, which says in its own words what is wrong
      raise
    raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
