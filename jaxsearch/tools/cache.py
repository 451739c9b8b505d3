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
import weakref
from collections.abc import Callable
from typing import Any


class Cache:
  """A file of responses, made with its folder if it is not there; without a path (None or '') nothing is
  kept.

  With `replay` nothing is fetched: what is not in the file raises LookupError. Raises ValueError if the file
  is something else; names it.
  """

  def __init__(self, path: str | os.PathLike | None, replay: bool = False):
    self._path, self._db, self._replay, self._lock = path, None, replay, threading.Lock()
    self._fetching = weakref.WeakValueDictionary()  # key -> held by the thread that fetches the response
    if not path:
      return
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    columns = 'key BLOB PRIMARY KEY, answer TEXT'
    try:
      # The timeout is for another process to finish writing.
      self._db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
      self._run(f'CREATE TABLE IF NOT EXISTS answers ({columns}) WITHOUT ROWID')
    except sqlite3.DatabaseError as error:
      if error.sqlite_errorname.startswith(('SQLITE_BUSY', 'SQLITE_IOERR')):  # of another process, of a disk
        raise ConnectionError(f'{path} cannot be opened now: {error}') from error
      raise ValueError(f'{path} is no file of cached responses: {error}') from error

  def __bool__(self) -> bool:
    return self._db is not None

  def get(self, request: object, fetch: Callable[[], Any], *, again: bool = False) -> Any:
    """Returns the response kept for `request`, else that of `fetch()`, which is kept unless it raises.

    Threads that want the same response at the same time, as the trees of a group do, fetch it once. Request
    and response are JSON; `request` holds all that the response depends on. With `again` it is fetched anew;
    what is kept is then used only by a replay, or if `fetch` raises.
    """
    if self._db is None:
      return fetch()
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
    with self._lock:
      fetching = self._fetching.setdefault(key, threading.Lock())
    with fetching:
      try:
        row = self._run('SELECT answer FROM answers WHERE key = ?', key)
      except sqlite3.DatabaseError:  # another process writes for longer than the timeout, or it is damaged
        if self._replay:
          raise
        row = None
      if row and (self._replay or not again):
        return json.loads(row[0])
      if self._replay:
        raise LookupError(f'not in the recording {self._path}: {str(request)[:200]}')
      try:
        response = fetch()
      except Exception:
        if not row:
          raise
        return json.loads(row[0])
      try:
        self._run('INSERT OR REPLACE INTO answers VALUES (?, ?)', key, json.dumps(response))
      except sqlite3.DatabaseError as error:  # a full disk is no reason to lose what was paid for
        warnings.warn(f'{self._path} does not keep responses: {error}', stacklevel=2)
      return response

  def _run(self, statement: str, *values: Any) -> tuple | None:
    with self._lock, self._db:
      return self._db.execute(statement, values).fetchone()
