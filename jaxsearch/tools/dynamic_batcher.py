"""Dynamic batching: threads share a function that serves many prompts about as fast as one."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor


class DynamicBatcher:
  """Calls `generate` with all that waits, from any thread, whenever a worker is free.

  Which prompts share a batch depends on timing; a model that is greedy, or seeded by prompt, replies the same
  in any, but for rounding.

  Args:
    generate: prompts -> as many replies.
    workers: batches at a time.
    most: prompts of a batch.
  """

  def __init__(self, generate: Callable[[list], Sequence], workers: int = 1, most: int = sys.maxsize):
    self._generate, self._most, self._waiting = generate, most, []  # (prompt, future of its reply)
    self._lock, self._workers = threading.Lock(), ThreadPoolExecutor(workers)

  def __call__(self, prompts: Sequence) -> list:
    """Returns the replies to `prompts`. An error of a batch is raised for all who had prompts in it."""
    futures = [Future() for _ in prompts]
    with self._lock:
      self._waiting += zip(prompts, futures)
    for _ in range(0, len(prompts), self._most):
      self._workers.submit(self._run_batch)
    return [future.result() for future in futures]

  def _run_batch(self) -> None:
    with self._lock:
      batch, self._waiting = self._waiting[:self._most], self._waiting[self._most:]
    try:
      replies = self._generate([prompt for prompt, _ in batch]) if batch else []
      for (_, future), reply in zip(batch, replies, strict=True):
        future.set_result(reply)
    except Exception as error:
      for _, future in batch:
        if not future.done():
          future.set_exception(error)
