"""Responses of paid or slow servers, kept on disk by request: JSON in an SQLite file.

Threads and processes may share a file. Not `diskcache` or `sqlitedict`: both unpickle what they read, and
neither is maintained.
"""

import hashlib
import json
import os
import pathlib
import sqlite3
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_MISSING = object()


class NotRecorded(LookupError):
  """A response that is not in a cache which is replayed."""


class Cache:
  """A file of responses, made with its folder if it is not there; without a path (None or '') nothing is
  kept.

  With `replay` nothing is fetched: what is not in the file raises NotRecorded. Raises ValueError if the file
    is something
  else; names it.
  """

  def __init__(self, path: str | os.PathLike | None, replay: bool = False):
    self._path, self._db, self._replay = path, None, replay
    if not path:
      return
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._fetching: dict[bytes, Future] = {}  # the responses that threads are fetching
    # The timeout is for another process to finish writing.
    self._db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    columns = 'key BLOB PRIMARY KEY, answer TEXT'
    try:
      with self._db:
        self._db.execute(f'CREATE TABLE IF NOT EXISTS answers ({columns}) WITHOUT ROWID')
    except sqlite3.DatabaseError as error:
      raise ValueError(f'{path} is no file of cached responses: {error}') from error

  def __bool__(self) -> bool:
    return self._db is not None

  def get(self, request: object, fetch: Callable[[], Any]) -> Any:
    """Returns the response kept for `request`, else that of `fetch()`, which is kept unless it raises.

    Threads that want the same response at the same time, as the trees of a group do, fetch it once; if that
    fails, it fails for all of them, who would else try a dead server one after the other. Both are JSON;
    `request` holds all that the response depends on. A file that cannot be read or written any more only
    warns.
    """
    if self._db is None:
      return fetch()
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
    with self._lock:
      first, future = key not in self._fetching, self._fetching.setdefault(key, Future())
    if not first:
      return future.result()
    try:
      response = self._read(key)
      if response is _MISSING and self._replay:
        raise NotRecorded(f'not in the recording {self._path}: {str(request)[:200]}')
      if response is _MISSING:
        response = fetch()
        self._write(key, response)
      future.set_result(response)
      return response
    except BaseException as error:
      future.set_exception(error)
      raise
    finally:
      with self._lock:
        del self._fetching[key]

  def _read(self, key: bytes) -> Any:
    try:
      with self._lock:
        row = self._db.execute('SELECT answer FROM answers WHERE key = ?', (key,)).fetchone()
      return _MISSING if row is None else json.loads(row[0])
    except (sqlite3.Error, ValueError) as error:
      warnings.warn(f'{self._path}: a kept response cannot be read: {error}', stacklevel=1)
      return _MISSING

  def _write(self, key: bytes, response: Any) -> None:
    try:
      with self._lock, self._db:
        self._db.execute('INSERT OR REPLACE INTO answers VALUES (?, ?)', (key, json.dumps(response)))
    except sqlite3.Error as error:
      warnings.warn(f'{self._path}: responses are not kept: {error}', stacklevel=1)
