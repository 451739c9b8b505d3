"""Threads that stand in for processes, for what runs on the host; a port for real ones, and a limit on their files."""

import contextlib
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxsearch.parallel import transfer


def free_port() -> int:
  """A port of this machine that nothing listens on."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


@contextlib.contextmanager
def small_files(limit: int = 4096):
  """No file may have more bytes: the system refuses to write, as it does where a disk is full."""
  limits, least = resource.getrlimit(resource.RLIMIT_FSIZE), jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 1e9)  # a program cut off in its cache would stay so
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', least)


class Store:
  """The key-value store of `jax.distributed`."""

  def __init__(self):
    self.values, self.changed = {}, threading.Condition()

  def key_value_set_bytes(self, key, value):
    with self.changed:
      assert key not in self.values
      self.values[key] = value
      self.changed.notify_all()

  def blocking_key_value_get_bytes(self, key, timeout_in_ms):
    with self.changed:
      assert self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000)
      return self.values[key]

  def key_value_delete(self, key):
    with self.changed:
      del self.values[key]


def as_processes(count: int, monkeypatch, run: Callable[[], Any]) -> list[Any]:
  """What `run` returns in each of `count` processes, which exchange by `transfer.gather_objects` and
  `transfer.pass_on` alone."""
  local, exchange, barrier, kept = threading.local(), {}, threading.Barrier(count, timeout=60), Store()

  def gather(own):
    exchange[local.process] = transfer._packed(own, count - 1)
    barrier.wait()
    found = [transfer._unpacked(exchange[process]) for process in range(count)]
    barrier.wait()
    return found

  def begin(process):
    local.process = process
    return run()

  with monkeypatch.context() as patch:
    patch.setattr(jax, 'process_count', lambda: count)
    patch.setattr(jax, 'process_index', lambda: local.process)
    patch.setattr(transfer, 'gather_objects', gather)
    patch.setattr(transfer, 'store', lambda: kept)
    with ThreadPoolExecutor(count) as pool:
      return list(pool.map(begin, range(count)))
