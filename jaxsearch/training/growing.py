"""Grows the trees of a step on a thread: at once, or while the step before is trained.

`begin` decides which trees a process grows and with what random numbers. With `config.train.async_steps=1` a
checkpoint of step n holds the trees of step n + 1, which older parameters grew; `restore` makes them again.

With `config.train.carry=K` a rollout ends once all but K of its questions have their trees. These K go on in
the next step, with its parameters, and count for the step they finish in. So the first step of a run has
K questions less than the others. A checkpoint holds what their generators were told, see held.py.
"""

import dataclasses
import statistics
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxsearch.data.questions import QuestionBatches
from jaxsearch.methods import Context
from jaxsearch.parallel import transfer
from jaxsearch.sampler import driver
from jaxsearch.sampler.driver import Agent, Episode
from jaxsearch.sampler.requests import Request
from jaxsearch.training import held
from jaxsearch.training.batch import Groups
from jaxsearch.training.learner import Learner
from jaxsearch.training.rollout_file import note_call
from jaxsearch.training.update import prepare
from jaxsearch.trees.tree import Tree

CARRIED = 1 << 20  # what the number of a tree grows by with each step that it goes on in


@dataclasses.dataclass
class Asked:
  """A question with the trees that this process grows for it."""
  step: int   # that drew it
  place: int  # in the batch of that step
  index: int  # of the question among all that were drawn
  episodes: list[Episode]
  told: dict[Tree, list] = dataclasses.field(default_factory=dict)  # what held.py keeps of unfinished trees

  @property
  def is_done(self) -> bool:
    return all(episode.done for episode in self.episodes)


@dataclasses.dataclass(frozen=True)
class Growing:
  """Holds a step's rollout, running or finished."""
  context: Context
  asked: Sequence[Asked]  # of this process
  outcome: Future         # metrics of the sampler
  carry: int = 0          # `config.train.carry`
  abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)

  def abandon(self) -> None:
    """Ends it, so that its thread touches no device while the process exits."""
    self.abandoned.set()
    wait([self.outcome], timeout=10)

  def groups(self) -> Groups:
    """Waits for the trees of this process, pruned, and grouped by their questions."""
    self.outcome.result()
    done = [asked for asked in self.asked if asked.is_done]
    groups = [[episode.tree for episode in asked.episodes] for asked in done]
    for tree in (tree for group in groups for tree in group):
      tree.prune()
    if self.carry:
      older = sum(len(asked.episodes) for asked in done if asked.step < self.context.step)
      self.context.metrics.update(questions_carried=len(self.carried()), trees_older=older)
    return groups

  def carried(self) -> list[Asked]:
    """Returns, once `groups` has, the questions that go on in the next step."""
    return [asked for asked in self.asked if not asked.is_done]

  @property
  def sampled(self) -> dict[str, Any]:
    """Returns the metrics of this process's sampler."""
    metrics = self.outcome.result()
    # With `async_steps`, most of these seconds pass while the step before is trained.
    return metrics | {'seconds_rollout': metrics['seconds'], 'tokens_generated': metrics['tokens_decoded']}

  def state(self) -> dict[str, Any]:
    """Returns, as JSON, what `restore` needs, of all processes; each must call it. Waits for the end."""
    metrics = self.outcome.result()
    done = [to_json(asked) for asked in self.asked if asked.is_done]
    grown = transfer.gather_objects((done, metrics))
    return {'step': self.context.step, 'metrics': dict(self.context.metrics),
            'rng': self.context.rng.bit_generator.state, 'sampled': [metrics for _, metrics in grown],
            'asked': [record for done, _ in grown for record in done]}


def begin(learner: Learner, method: types.ModuleType, stream: QuestionBatches, step: int,
          carried: Sequence[Asked] = ()) -> Growing:
  """Begins the rollout of a step on its next questions, with what is `carried` over from the one before.

  Of the questions of the whole batch each process has every n-th, beginning with its own number. Their
  trees stay with it. How many trees a question gets, and what they draw, depends on its place in the batch,
  not on the processes.
  """
  config = learner.config
  context = Context(step, np.random.default_rng([config.seed, step]), learner.memory)
  agent, abandoned = prepare(learner, step), threading.Event()
  first, questions = stream.drawn, next(stream)
  sizes = [config.group_size] * len(questions)
  if hasattr(method, 'sizes'):
    sizes = method.sizes(questions, config.group_size, context, **config.sizes)
  key = key_of(config, step)
  new = [Asked(step, place, first + place, [
           driver.new_episode(agent, questions[place], key, number) for number in numbers])
         for place, numbers in local_trees(sizes, config.group_size).items()]
  asked = [*carried, *new]
  for one in carried:
    for episode in one.episodes:
      episode.number += CARRIED
  episodes = [episode for one in asked for episode in one.episodes if not episode.done]
  observer, enough = watch(asked, config.train.carry)
  thread = ThreadPoolExecutor(1, thread_name_prefix='growing')
  outcome = thread.submit(driver.run, agent, episodes, key, observer=observer, cancelled=abandoned.is_set,
                          enough=enough)
  thread.shutdown(wait=False)
  return Growing(context, asked, outcome, config.train.carry, abandoned)


def watch(asked: Sequence[Asked], carry: int) -> tuple[driver.Observer, Callable[[], bool]]:
  """Returns (observer of a rollout, function that tells whether the unfinished questions may all be carried).

  Each process may carry its part of the `carry` questions, so that none waits for another.
  """
  carry = len(range(carry)[transfer.local_part()])
  owner = {episode.tree: one for one in asked for episode in one.episodes}
  missing = {id(one): sum(not episode.done for episode in one.episodes) for one in asked}

  def observer(tree: Tree, request: Request | None, reply: Any) -> None:
    note_call(tree, request, reply)
    one = owner[tree]
    if request is None:
      one.told.pop(tree, None)
      missing[id(one)] -= 1
      if not missing[id(one)]:
        del missing[id(one)]
    elif carry:
      one.told.setdefault(tree, []).append(held.to_json(request, reply))

  return observer, lambda: len(missing) <= carry


def key_of(config: ConfigDict, step: int) -> jax.Array:
  """Returns the random key of a step's rollout."""
  return jax.random.fold_in(jax.random.key(config.seed), step)


def local_trees(sizes: Sequence[int], group_size: int) -> dict[int, list[int]]:
  """Returns {place of a question: numbers of its trees} of what this process grows; `sizes` are of the batch.

  Random numbers come from a tree's number, which depends on the place of its question and its own in the
  group alone: the first `group_size` trees of all questions come first, then the next of those with more.
  """
  batch, places = len(sizes) * group_size, range(len(sizes))[transfer.local_part()]
  return {place: [member // group_size * batch + place * group_size + member % group_size
                  for member in range(sizes[place])] for place in places}


# As checkpoints hold them.

def to_json(asked: Asked) -> dict[str, Any]:
  """Returns what `from_json` needs: finished trees, and what unfinished ones were told."""
  tree = lambda episode: episode.tree.to_json() if episode.done else None
  return {'step': asked.step, 'place': asked.place, 'index': asked.index, 'trees': [
    [episode.number, tree(episode), held.episode_to_json(episode, asked.told.get(episode.tree, []))]
    for episode in asked.episodes]}


def from_json(records: Sequence[dict[str, Any]], config: ConfigDict, agent: Agent,
              questions: QuestionBatches) -> list[Asked]:
  """Restores this process's part of what `to_json` described in all processes, now any number of them."""
  restored = []
  for record in sorted(records, key=lambda record: (record['step'], record['place'])):
    step, place, index = (record[name] for name in ('step', 'place', 'index'))
    if place not in range(place + 1)[transfer.local_part()]:
      continue
    question, asked = questions.drawn_at(index), Asked(step, place, index, [])
    for number, tree, said in record['trees']:
      episode = driver.new_episode(agent, question, key_of(config, step), number % CARRIED)
      if tree:
        episode.done = True
        episode.tree = Tree.from_json(tree, agent.engine.tokenizer, question, agent.grammar)
      else:
        asked.told[episode.tree] = held.replay(episode, said, note_call)
      episode.number = number
      asked.episodes.append(episode)
    restored.append(asked)
  return restored


def restore(saved: dict[str, Any], learner: Learner, questions: QuestionBatches,
            carried: Sequence[Asked]) -> Growing:
  """Returns the finished rollout that `Growing.state` described, on any number of processes."""
  context = Context(saved['step'], np.random.default_rng(0), learner.memory, dict(saved['metrics']))
  context.rng.bit_generator.state = saved['rng']
  everywhere = saved['sampled']
  taken = everywhere[transfer.local_part()]  # of the processes whose place this one takes, if any
  metrics = {name: value for row in [*everywhere, *taken] for name, value in row.items()}
  for name, value in metrics.items():
    if isinstance(value, int) or name == 'searches_cost':
      metrics[name] = sum(row.get(name, 0) for row in taken)
    elif isinstance(value, float):  # seconds, rates, shares
      metrics[name] = statistics.fmean(row.get(name, 0.0) for row in taken or everywhere)
  outcome = Future()
  outcome.set_result(metrics)
  done = from_json(saved['asked'], learner.config, learner.agent, questions)
  return Growing(context, [*done, *carried], outcome, learner.config.train.carry)
