"""Responses of paid or slow servers, kept on disk by request: JSON in an SQLite file.

Threads and processes may share a file. Not `diskcache` or `sqlitedict`: both unpickle what they read, and neither is
maintained.
"""

import hashlib
import json
import os
import pathlib
import sqlite3
import threading
from collections.abc import Callable
from typing import Any


class Cache:
  """A file of responses, made with its folder if it is not there; without a path (None or '') nothing is kept.

  Raises ValueError if the file is something else; names it.
  """

  def __init__(self, path: str | os.PathLike | None):
    self._db = None
    if not path:
      return
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    self._lock, self._fetching = threading.Lock(), [threading.Lock() for _ in range(256)]  # by the first byte of the key
    self._db = sqlite3.connect(path, timeout=30.0, check_same_thread=False)  # seconds for another process to finish writing
    try:
      with self._db:
        self._db.execute('CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID')
    except sqlite3.DatabaseError as error:
      raise ValueError(f'{path} is no file of cached responses: {error}') from error

  def get(self, request: object, fetch: Callable[[], Any]) -> Any:
    """The response kept for `request`, else that of `fetch()`, which is kept unless it raises.

    Threads that want the same response at the same time, as the trees of a group do, fetch it once. Both are JSON;
    `request` holds all that the response depends on.
    """
    if self._db is None:
      return fetch()
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
    with self._fetching[key[0]]:
      with self._lock:
        row = self._db.execute('SELECT answer FROM answers WHERE key = ?', (key,)).fetchone()
      if row is not None:
        return json.loads(row[0])
      response = fetch()
      with self._lock, self._db:
        self._db.execute('INSERT OR REPLACE INTO answers VALUES (?, ?)', (key, json.dumps(response)))
      return response
