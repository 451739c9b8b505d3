"""One file per method: how its trees grow, what they earn, and which spans are credited with it.

A method is a module with two functions. Their settings are keyword-only, with defaults. credit.py holds shared credit.
Methods without `credit`, such as those in prompted/, are for evaluation only.

  grow(question, tree, **config.grow)        a generator: appends prompts and observations, yields requests (sampler/requests.py)
  credit(groups, context, **config.credit)   `groups` holds the trees of each question of the batch

CONTRIBUTING.md has the contract: what `grow` and `credit` set, what they may rely on, and what else a method may define.
"""

import collections
import dataclasses
import importlib
import numbers
import pkgutil
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsearch.parallel import mesh as meshes


@dataclasses.dataclass(frozen=True)
class Context:
  """What a method may know besides the trees.

  Attributes:
    step: number of the training step, from 1; 0 in an evaluation.
    rng: random numbers, a function of the seed and the step.
    memory: what the method keeps from step to step; part of the checkpoint, so it holds only what JSON can.
    metrics: figures of the step, for its row of metrics.jsonl. With several processes each has its own groups: a whole number is
      a count and is added up over them, any other is a mean and is averaged by their numbers of trees.
  """
  step: int
  rng: np.random.Generator
  memory: dict[str, Any]
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def gather(self, of_groups: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """What all processes say of their groups, in the order of the batch, and which of these this process said.

    For methods that compare across questions. An item should be a few numbers: it goes to every process. All processes must
    call it equally often, those without groups too.
    """
    return meshes.gather_items(of_groups)

  def of_all(self, trees: int) -> dict[str, float]:
    """`metrics` of all processes; `trees` is how many this one has."""
    found = collections.defaultdict(list)
    for metrics, number in meshes.gather_objects((self.metrics, trees)):
      for name, value in metrics.items():
        found[name].append((value, number))

    def joined(values, weights):
      if len(values) == 1 or not any(weights):
        return values[0]
      if all(isinstance(value, numbers.Integral) for value in values):
        return sum(values)
      return float(np.average(values, weights=weights))

    return {name: joined(*zip(*pairs)) for name, pairs in found.items()}


def find_method(name: str) -> types.ModuleType:
  """The module jaxsearch/methods/NAME.py ('prompted.cot' is prompted/cot.py); ValueError without one, or if it has no `grow`."""
  file = f'jaxsearch/methods/{name.replace(".", "/")}.py'
  try:
    method = importlib.import_module(f'jaxsearch.methods.{name}')
  except ModuleNotFoundError as error:
    if not f'jaxsearch.methods.{name}.'.startswith(f'{error.name}.'):
      raise  # the method is there, but something that it imports is not
    raise ValueError(f'method={name!r}: there is no {file}') from error
  if not hasattr(method, 'grow'):
    raise ValueError(f'method={name!r}: {file} is no method, it has no grow')
  return method


def known_methods() -> list[str]:
  """The names of all methods."""
  files = (file.name.removeprefix(f'{__name__}.') for file in pkgutil.walk_packages(__path__, f'{__name__}.'))
  return sorted(name for name in files if hasattr(importlib.import_module(f'{__name__}.{name}'), 'grow'))
