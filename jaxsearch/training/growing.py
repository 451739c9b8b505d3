"""Grows the trees of a step on a thread: at once, or while the step before is trained.

`begin` decides which trees a process grows and with what random numbers. With `config.train.async_steps=1` a
checkpoint of step n holds the trees of step n + 1, which older parameters grew; `restore` makes them again.
"""

import dataclasses
import itertools
import threading
import types
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context
from jaxsearch.parallel import transfer
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.training.batch import Groups
from jaxsearch.training.learner import Learner
from jaxsearch.training.rollout_file import note_call
from jaxsearch.training.update import prepare
from jaxsearch.trees.tree import Tree


@dataclasses.dataclass(frozen=True)
class Growing:
  """Holds a step's rollout, running or finished."""
  context: Context
  sizes: Sequence[int]    # trees of each question of the whole batch
  numbers: Sequence[int]  # of this process's trees, their places in the batch
  outcome: Future         # (trees, metrics of the sampler)
  abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)

  def abandon(self) -> None:
    """Ends it, so that its thread touches no device while the process exits."""
    self.abandoned.set()
    wait([self.outcome], timeout=10)

  def groups(self) -> Groups:
    """Waits for the trees of this process, pruned, and grouped by their questions."""
    trees = iter(self.outcome.result()[0])
    for tree in self.outcome.result()[0]:
      tree.prune()
    return [list(itertools.islice(trees, size)) for size in self.sizes[transfer.local_part()]]

  @property
  def sampled(self) -> dict[str, Any]:
    """Returns the metrics of this process's sampler."""
    _, metrics = self.outcome.result()
    # One step ahead most of these seconds pass while the step before is trained.
    return metrics | {'seconds_rollout': metrics['seconds'], 'tokens_generated': metrics['tokens_decoded']}

  def state(self) -> dict[str, Any]:
    """Returns, as JSON, what `restore` needs, of all processes; each must call it. Waits for the end."""
    trees, metrics = self.outcome.result()
    records = [[number, tree.to_json()] for number, tree in zip(self.numbers, trees)]
    grown = transfer.gather_objects((records, metrics))
    return {'step': self.context.step, 'sizes': list(self.sizes), 'metrics': dict(self.context.metrics),
            'rng': self.context.rng.bit_generator.state, 'sampled': [metrics for _, metrics in grown],
            'trees': [pair for pairs, _ in grown for pair in pairs]}


def begin(learner: Learner, method: types.ModuleType, questions: Sequence[Question], step: int,
          saved: dict[str, Any] | None = None) -> Growing:
  """Begins the rollout of a step, or restores that which a checkpoint has `saved` for it.

  Of the `questions` of the whole batch each process has every n-th, beginning with its own number. Their
  trees stay with it. How many trees a question gets, and what they draw, depends on its place in the batch,
  not on the processes.
  """
  config = learner.config
  context = Context(step, np.random.default_rng([config.seed, step]), learner.memory)
  if saved and saved['step'] == step:
    return restore(saved, config.group_size, learner.agent, questions, context)
  agent = prepare(learner, step)
  sizes = [config.group_size] * len(questions)
  if hasattr(method, 'sizes'):
    sizes = method.sizes(questions, config.group_size, context, **config.sizes)
  asked, abandoned = local_trees(questions, sizes, config.group_size), threading.Event()
  thread = ThreadPoolExecutor(1, thread_name_prefix='growing')
  key = jax.random.fold_in(jax.random.key(config.seed), step)
  outcome = thread.submit(rollout, agent, list(asked.values()), key, numbers=list(asked), observer=note_call,
                          cancelled=abandoned.is_set)
  thread.shutdown(wait=False)
  return Growing(context, sizes, list(asked), outcome, abandoned)


def restore(saved: dict[str, Any], group_size: int, agent: Agent, questions: Sequence[Question],
            context: Context) -> Growing:
  """Returns the finished rollout that `Growing.state` described, on any number of processes."""
  context.rng.bit_generator.state = saved['rng']
  context.metrics.update(saved['metrics'])
  asked, grown = local_trees(questions, saved['sizes'], group_size), dict(saved['trees'])
  trees = [Tree.from_json(grown[number], agent.engine.tokenizer, question, agent.grammar)
           for number, question in asked.items()]
  taken, metrics = saved['sampled'][transfer.local_part()], dict(saved['sampled'][0])
  for name, value in metrics.items():  # counts of the processes whose place this one takes
    if isinstance(value, (int, float)):
      metrics[name] = sum(row.get(name, 0) for row in taken)
  outcome = Future()
  outcome.set_result((trees, metrics))
  return Growing(context, saved['sizes'], list(asked), outcome)


def local_trees(questions: Sequence[Question], sizes: Sequence[int], group_size: int) -> dict[int, Question]:
  """Returns {number: question} of the trees that this process grows, of `sizes` for the whole batch.

  Random numbers come from a tree's number, which depends on the place of its question and its own in the
  group alone: the first `group_size` trees of all questions come first, then the next of those with more.
  """
  batch, asked = len(sizes) * group_size, {}
  for place in range(len(questions))[transfer.local_part()]:
    for member in range(sizes[place]):
      number = member // group_size * batch + place * group_size + member % group_size
      asked[number] = questions[place]
  return asked
