"""Threads that share a function of batches."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsearch.tools.dynamic_batcher import DynamicBatcher


def test_calls_of_threads_share_batches_and_batches_do_not_overlap():
  batches, running, entered, resumed = [], threading.Lock(), threading.Event(), threading.Event()

  def generate(prompts):
    assert running.acquire(blocking=False)
    batches.append(len(prompts))
    entered.set()
    assert resumed.wait(20)
    running.release()
    return [prompt.upper() for prompt in prompts]

  batched = DynamicBatcher(generate)
  with ThreadPoolExecutor(8) as pool:
    first = pool.submit(batched, ['a', 'b'])
    assert entered.wait(20)
    others = [pool.submit(batched, [f'x{i}'] * i) for i in range(1, 7)]
    while len(batched._waiting) < 21:
      time.sleep(0.001)
    resumed.set()
    replies = [future.result(20) for future in others]
  assert first.result() == ['A', 'B'] and replies == [[f'X{i}'] * i for i in range(1, 7)]
  assert batches == [2, 21]


def test_a_batch_that_fails_fails_for_all_in_it_and_the_next_one_runs():
  answers = iter([RuntimeError('out of memory'), ['good']])

  def generate(prompts):
    answer = next(answers)
    if isinstance(answer, Exception):
      raise answer
    return answer

  batched = DynamicBatcher(generate)
  with pytest.raises(RuntimeError, match='out of memory'):
    batched(['a'])
  assert batched(['a']) == ['good']


def test_no_batch_is_larger_than_the_most():
  batches = []
  batched = DynamicBatcher(lambda prompts: batches.append(len(prompts)) or prompts, workers=2, most=3)
  assert batched([*range(8)]) == [*range(8)] and sorted(batches) == [2, 3, 3] and batched([]) == []
