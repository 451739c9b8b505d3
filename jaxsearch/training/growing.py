"""Grows the trees of a step, at once or on a thread while the step before is trained.

`begin` decides which trees a process grows and with what random numbers. With `config.train.async_steps=1` a
checkpoint of step n holds the trees of step n + 1, which older parameters grew; `restore` makes them again.
"""

import dataclasses
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.training.rollouts import note_call
from jaxsearch.trees.tree import Tree

Groups = list[list[Tree]]  # the trees of each question


@dataclasses.dataclass
class Growing:
  """Holds a step's rollout: not started, running on a thread, or finished."""
  context: Context
  sizes: Sequence[int]      # trees of each question of the whole batch
  numbers: Sequence[int]    # of this process's trees, their places in the batch
  rollout: Callable[[], tuple[list[Tree], dict]]  # runs it: trees, metrics of the sampler
  abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)
  outcome: Future = dataclasses.field(default_factory=Future)
  thread: threading.Thread | None = None

  def start(self) -> None:
    """Begins to run it on a thread."""
    self.thread = threading.Thread(target=self._run, name='growing', daemon=True)  # `gather_objects` knows it
    self.thread.start()

  def wait(self) -> tuple[list[Tree], dict]:
    """Returns (trees, metrics of the sampler) at its end; runs it, if that was not begun."""
    if self.thread is None and not self.outcome.done():
      self._run()
    return self.outcome.result()

  def abandon(self) -> None:
    """Ends it, so that its thread touches no device while the process exits."""
    self.abandoned.set()
    if self.thread:
      self.thread.join(timeout=10)

  def state(self) -> dict[str, Any]:
    """Returns, as JSON, what `restore` needs, of all processes; each must call it. Waits for the end."""
    trees, metrics = self.wait()
    context = self.context
    records = [[number, tree.to_json()] for number, tree in zip(self.numbers, trees)]
    grown = meshes.gather_objects((records, metrics))
    return {'step': context.step, 'sizes': list(self.sizes), 'rng': context.rng.bit_generator.state,
            'metrics': dict(context.metrics), 'trees': [pair for pairs, _ in grown for pair in pairs],
            'sampled': [metrics for _, metrics in grown]}

  def _run(self) -> None:
    try:
      self.outcome.set_result(self.rollout())
    except BaseException as error:  # for the thread that waits
      self.outcome.set_exception(error)


def begin(config: ConfigDict, method: types.ModuleType, agent: Agent, key: jax.Array,
          questions: Sequence[Question], context: Context) -> Growing:
  """Prepares the rollout of a step.

  Of the `questions` of the whole batch each process has every n-th, beginning with its own number. Their
  trees stay with it. How many trees a question gets, and what they draw, depends on its place in the batch,
  not on the processes.

  Args:
    agent: with the parameters that sample.
    key: of the run; the step is folded in.
  """
  sizes = [config.group_size] * len(questions)
  if hasattr(method, 'sizes'):
    sizes = method.sizes(questions, config.group_size, context, **config.sizes)
  trees, abandoned = local_trees(questions, sizes, config.group_size), threading.Event()
  key = jax.random.fold_in(key, context.step)
  grow = lambda: rollout(agent, list(trees.values()), key, numbers=list(trees), observer=note_call,
                         cancelled=abandoned.is_set)
  return Growing(context, sizes, list(trees), grow, abandoned)


def restore(saved: dict[str, Any], config: ConfigDict, tokenizer,
            questions: Sequence[Question], context: Context) -> Growing:
  """Returns the finished rollout that `Growing.state` described, on any number of processes."""
  context.rng.bit_generator.state = saved['rng']
  context.metrics.update(saved['metrics'])
  asked, grown = local_trees(questions, saved['sizes'], config.group_size), dict(saved['trees'])
  trees = [Tree.from_json(grown[number], tokenizer, question) for number, question in asked.items()]
  growing = Growing(context, saved['sizes'], list(asked), lambda: (trees, _merged(saved['sampled'])))
  growing.wait()
  return growing


def _merged(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Merges metrics of the processes whose place this process takes: sums of numbers, the first of texts."""
  taken = metrics[meshes.local_part()]
  return {name: sum(row.get(name, 0) for row in taken) if isinstance(value, (int, float)) else value
          for name, value in metrics[0].items()}


def local_trees(questions: Sequence[Question], sizes: Sequence[int], group_size: int) -> dict[int, Question]:
  """Returns {number: question} of the trees that this process grows."""
  local = meshes.local_part()
  numbered = zip(questions[local], tree_numbers(sizes, group_size)[local])
  return {number: question for question, numbers in numbered for number in numbers}


def tree_numbers(sizes: Sequence[int], group_size: int) -> list[list[int]]:
  """Returns the numbers of each question's trees, from which their random numbers come; `sizes` are those of
  the whole batch.

  A number depends on the place of the question and of the tree in its group alone: the first `group_size`
  trees of all questions come first, then the next of questions that have more.
  """
  batch = len(sizes) * group_size
  return [[member // group_size * batch + place * group_size + member % group_size for member in range(size)]
          for place, size in enumerate(sizes)]


def groups_of(growing: Growing, trees: Sequence[Tree]) -> Groups:
  """Returns the trees of this process, grouped by their questions."""
  rest = iter(trees)
  return [list(itertools.islice(rest, size)) for size in growing.sizes[meshes.local_part()]]
