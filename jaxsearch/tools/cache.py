"""Answers of paid or slow servers, kept on disk by request: JSON in an SQLite file.

Threads and processes may share a file. Not `diskcache` or `sqlitedict`: both unpickle what they read, and neither is
kept up.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

_WAIT = 30.0  # seconds for another process to finish writing


class Cache:
  """A file of answers; it and its folder are made if they are not there.

  Raises:
    ValueError: the file is something else; names it.
  """

  def __init__(self, path: str | os.PathLike):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._asking = [threading.Lock() for _ in range(256)]  # by the first byte of the key
    self._file = sqlite3.connect(path, timeout=_WAIT, check_same_thread=False)
    try:
      with self._file:
        self._file.execute('CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID')
    except sqlite3.DatabaseError as error:
      raise ValueError(f'{path} is no file of cached answers: {error}') from error

  def close(self) -> None:
    self._file.close()

  def answer(self, request: object, ask: Callable[[], Any]) -> Any:
    """The answer kept for `request`, else that of `ask()`, which is kept unless it raises.

    Threads that want the same answer at the same time, as the trees of a group do, ask once.

    Args:
      request: JSON with all that the answer depends on.
      ask: returns JSON.
    """
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
    with self._asking[key[0]]:
      with self._lock:
        row = self._file.execute('SELECT answer FROM answers WHERE key = ?', (key,)).fetchone()
      if row is not None:
        return json.loads(row[0])
      answer = ask()
      with self._lock, self._file:
        self._file.execute('INSERT OR REPLACE INTO answers VALUES (?, ?)', (key, json.dumps(answer)))
      return answer


class NoCache:
  """Keeps nothing."""

  def answer(self, request: object, ask: Callable[[], Any]) -> Any:
    return ask()


def open_cache(path: str | os.PathLike | None) -> Cache | NoCache:
  """The cache in a file; None or '' keeps nothing."""
  return Cache(path) if path else NoCache()
