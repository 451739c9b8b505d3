"""Threads that share a function of batches."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.simulated import ModelWriter, SimulatedSearch


def test_calls_of_threads_share_batches_and_batches_do_not_overlap():
  batches, running, entered, resumed = [], threading.Lock(), threading.Event(), threading.Event()

  def generate(prompts):
    assert running.acquire(blocking=False)
    batches.append(len(prompts))
    entered.set()
    assert resumed.wait(20)
    running.release()
    return [f'Document 1\nTitle: Paris\nText: A city.\n\nDocument 2\nTitle: {prompt[-3:-1]}\nText: x' for prompt in prompts]

  batched = DynamicBatcher(generate)
  backend = SimulatedSearch(ModelWriter(lambda prompts, seeds: batched(prompts)))
  with ThreadPoolExecutor(8) as pool:
    first = pool.submit(backend.search, ['aa', 'bb'], 2)
    assert entered.wait(20)
    others = [pool.submit(backend.search, [f'{i}{i}'] * i, 2) for i in range(1, 7)]
    while len(batched._waiting) < 6:
      time.sleep(0.001)
    resumed.set()
    found = [future.result(20) for future in others]
  assert [documents[1].title for documents in first.result()] == ['aa', 'bb']
  assert [[documents[1].title for documents in one] for one in found] == [[f'{i}{i}'] * i for i in range(1, 7)]
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
