"""Threads that stand in for processes, for what runs on the host."""

import pickle
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxsearch.parallel import mesh as meshes


def as_processes(count: int, monkeypatch, run: Callable[[], Any]) -> list[Any]:
  """What `run` returns in each of `count` processes, which exchange by `meshes.gather_objects` alone."""
  local, exchange, barrier = threading.local(), {}, threading.Barrier(count, timeout=60)

  def gather(own):
    exchange[local.process] = zlib.compress(pickle.dumps(own), level=1)
    meshes.exchanged['bytes'] += len(exchange[local.process])
    barrier.wait()
    found = [pickle.loads(zlib.decompress(exchange[process])) for process in range(count)]
    barrier.wait()
    return found

  def begin(process):
    local.process = process
    return run()

  with monkeypatch.context() as patch:
    patch.setattr(jax, 'process_count', lambda: count)
    patch.setattr(jax, 'process_index', lambda: local.process)
    patch.setattr(meshes, 'gather_objects', gather)
    with ThreadPoolExecutor(count) as pool:
      return list(pool.map(begin, range(count)))
