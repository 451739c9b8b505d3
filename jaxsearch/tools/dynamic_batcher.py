"""Dynamic batching: threads share a function that is slow for few prompts and runs one batch at a time."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor


class DynamicBatcher:
  """Calls `generate` with one batch at a time; prompts that arrive meanwhile, from any thread, form the next
  batch.

  Which prompts share a batch depends on timing; a model that is greedy, or seeded by prompt, replies the same
  in any, but for rounding.
  """

  def __init__(self, generate: Callable[[list], Sequence]):
    self._generate, self._waiting = generate, []
    self._lock, self._worker = threading.Lock(), ThreadPoolExecutor(1)

  def __call__(self, prompts: list) -> list:
    """Returns the replies to `prompts`. An error of the batch is raised for all who had prompts in it."""
    replies = Future()
    with self._lock:
      self._waiting.append((prompts, replies))
    self._worker.submit(self._run_batch)
    return replies.result()

  def _run_batch(self) -> None:
    """Runs all that waits; nothing, if it has gone with an earlier batch."""
    with self._lock:
      batch, self._waiting = self._waiting, []
    try:
      replies = iter(self._generate([prompt for prompts, _ in batch for prompt in prompts]) if batch else ())
      for prompts, future in batch:
        future.set_result(list(itertools.islice(replies, len(prompts))))
    except Exception as error:
      for _, future in batch:
        future.set_exception(error)
