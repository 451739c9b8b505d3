"""Dynamic sampling that fills up: groups with nothing to compare are replaced by trees of new questions.

DAPO (arXiv:2503.14476) drops groups in which all rewards are equal. Here they may still have credit, that of
their turns, and are kept then; with a critic nearly all have some, so it is refused there. With
`config.train.refill=N` a step draws up to N more questions, and grows trees for them in place of such
groups until none is left; those left once the N are spent stay as they are. New questions take the places of
the old ones, so that nothing depends on how many processes there are.
"""

import copy
import types
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxsearch.data.questions import QuestionBatches
from jaxsearch.methods import Context
from jaxsearch.parallel import transfer
from jaxsearch.sampler import driver
from jaxsearch.training.batch import Groups
from jaxsearch.training.growing import Growing, key_of
from jaxsearch.training.learner import Learner
from jaxsearch.training.rollout_file import note_call
from jaxsearch.training.update import assess, prepare
from jaxsearch.trees.tree import Tree


def refill(learner: Learner, method: types.ModuleType, current: Growing,
           questions: QuestionBatches) -> Groups:
  """Returns the groups of a step, those of this process; adds to the metrics of its context and sampler."""
  config, context, groups = learner.config, current.context, current.groups()
  left, turn = config.train.refill, 0
  while left:
    flags, places = transfer.gather_items(alike(learner, method, groups, context))
    replaced = [place for place, is_alike in enumerate(flags) if is_alike][:left]
    if not replaced:
      break
    left, turn = left - len(replaced), turn + 1
    agent = prepare(learner, context.step) if config.train.async_steps and turn == 1 else learner.agent
    key = jax.random.fold_in(key_of(config, context.step), turn)
    size = config.group_size
    episodes = {places.index(place): [
                  driver.new_episode(agent, question, key, place * size + member) for member in range(size)]
                for place, question in zip(replaced, questions.take(len(replaced))) if place in places}
    asked = [episode for several in episodes.values() for episode in several]
    more = driver.run(agent, asked, key, observer=note_call)
    add_metrics(current.outcome.result(), more, getattr(agent.engine, 'figures', ()))
    for index, several in episodes.items():
      groups[index] = [episode.tree for episode in several]
      for tree in groups[index]:
        tree.prune()
  if config.train.refill:
    context.metrics['questions_refilled'] = config.train.refill - left if jax.process_index() == 0 else 0
  return groups


def alike(learner: Learner, method: types.ModuleType, groups: Groups, context: Context) -> list[bool]:
  """Tells of each group whether its rewards are equal and no span has credit.

  Credits the groups to find out, and takes the credit back.
  """
  trees = [tree for group in groups for tree in group]
  assess(learner, trees)
  credit = ('advantages', 'returns', 'trained')
  before = [(node, [getattr(node, name) for name in credit], dict(node.data))
            for tree in trees for node in tree.walk()]
  trial = Context(context.step, copy.deepcopy(context.rng), copy.deepcopy(context.memory))
  method.credit(groups, trial, **learner.config.credit)
  found = [len({tree.reward for tree in group}) == 1 and not any(map(has_credit, group)) for group in groups]
  for node, values, data in before:
    vars(node).update(zip(credit, values), data=data)
  return found


def has_credit(tree: Tree) -> bool:
  """Tells whether any trained span of a tree has an advantage other than 0."""
  return any(node.trained and np.any(node.advantages) for node in tree.walk() if node.advantages is not None)


def add_metrics(total: dict[str, Any], more: dict[str, Any], newest: Collection[str] = ()) -> None:
  """Adds the counts and seconds of a further rollout of the same step; its shares are left out.

  Of what is in `newest`, as a server's counts since the start, it takes the place.
  """
  for name, value in more.items():
    if isinstance(value, str) or name not in total or name in newest:
      total[name] = value
    elif isinstance(value, int) or name.startswith('seconds') or name == 'searches_cost':
      total[name] += value
