"""Tool calls: host functions that run on threads of their own while the device decodes.

Daemon threads rather than a `ThreadPoolExecutor`: a call that hangs must not keep the process from ending.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from jaxsearch.sampler.requests import ToolFailure


@dataclasses.dataclass(eq=False)
class ToolCall:
  """A call that was started: `future` will hold (seconds it took, result)."""
  future: Future
  started: float
  deadline: float | None  # seconds
  step: int  # decode steps of the run when it was started

  def seconds_left(self) -> float | None:
    """Until the deadline, 0 once it has passed; None without one."""
    return None if self.deadline is None else max(0.0, self.started + self.deadline - time.monotonic())

  def outcome(self) -> tuple[float, Any]:
    """(seconds, result or ToolFailure); waits for the reply, no longer than the deadline."""
    try:
      return self.future.result(timeout=self.seconds_left())
    except FutureTimeout:
      return time.monotonic() - self.started, ToolFailure(f'no reply within {self.deadline:g} seconds')


class Caller:
  """Starts calls, at most `workers` of them running at a time; the deadline of a call includes its wait for a place."""

  def __init__(self, workers: int):
    self._places = threading.Semaphore(workers)

  def start(self, function: Callable[[], Any], step: int, deadline: float | None) -> ToolCall:
    future = Future()
    threading.Thread(target=self._serve, args=(function, future), daemon=True).start()
    return ToolCall(future, time.monotonic(), deadline, step)

  def _serve(self, function, future):
    with self._places:
      start = time.monotonic()
      try:
        result = function()
      except BaseException as error:  # whatever a tool does, the run goes on and the policy is told
        result = ToolFailure(f'{type(error).__name__}: {error}')
      future.set_result((time.monotonic() - start, result))
