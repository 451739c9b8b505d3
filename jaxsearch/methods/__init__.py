"""One file per system: how its trees grow, what they earn, and which nodes are credited with it.

A method is a module with two functions, and a third where it needs one:

  grow(question, tree, **config.grow)              generator that grows the tree, see jaxsearch/sampler/requests.py
  credit(groups, context, **config.credit)         sets tree.reward and node.advantages; trees without any are not trained on
  SERVICES = ('reader', …)                         optional: frozen models that its trees `Ask`, opened from config.reader …
  ONE_TREE = True                                  optional: credit compares nothing between the trees of a question
  sizes(questions, group_size, context, **config.sizes) -> [int]   optional: trees to grow for each question

`groups` holds the trees of each question of the whole batch. Where `config.critic.enabled` is set, trained spans come to
`credit` with `node.values` and leave it with `node.returns`.
"""

import dataclasses
import importlib
import types
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Context:
  """What a method may know besides the trees.

  Attributes:
    step: number of the training step, from 1.
    rng: random numbers, a function of the seed and the step.
    memory: what the method keeps from step to step; part of the checkpoint, so it holds what JSON can.
    metrics: figures of the step, which end up in its row of metrics.jsonl.
  """
  step: int
  rng: np.random.Generator
  memory: dict[str, Any]
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def find_method(name: str) -> types.ModuleType:
  """The module jaxsearch/methods/NAME.py; ValueError if there is none, or if it has no `grow` or no `credit`."""
  try:
    method = importlib.import_module(f'jaxsearch.methods.{name}')
  except ModuleNotFoundError as error:
    if error.name != f'jaxsearch.methods.{name}':
      raise  # the method is there, but something that it imports is not
    raise ValueError(f'method={name!r}: there is no jaxsearch/methods/{name}.py') from error
  if not (hasattr(method, 'grow') and hasattr(method, 'credit')):
    raise ValueError(f'method={name!r}: jaxsearch/methods/{name}.py is no method, it has no grow and credit')
  return method
