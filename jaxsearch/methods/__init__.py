"""One file per method: how its trees grow, what they earn, and which spans are credited with it.

  grow(question, tree, **config.grow)        a generator: appends prompts and observations, yields requests
  credit(groups, context, **config.credit)   `groups` holds the trees of each question of the batch

CONTRIBUTING.md has the contract. Methods without `credit`, such as those in prompted/, are for evaluation
only. Files without `grow` hold what methods share.
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

from jaxsearch.parallel import transfer
from jaxsearch.trees.tree import Tree

Groups = Sequence[Sequence[Tree]]  # the trees of each question


@dataclasses.dataclass(frozen=True)
class Context:
  """Holds what a method may know besides the trees."""
  step: int  # number of the training step, from 1; 0 in an evaluation
  rng: np.random.Generator  # a function of the seed and the step
  memory: dict[str, Any]  # kept from step to step and in checkpoints, so it holds only what JSON can
  # Figures for the step's row of metrics.jsonl. Over several processes a whole number is summed, any other is
  # a mean, weighted by their numbers of trees.
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def gather(self, of_groups: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Gathers the items of all processes in batch order; returns them and the places of this process's own.

    For methods that compare across questions. An item should be a few numbers: it goes to every process. All
    processes must call it equally often, those without groups too.
    """
    return transfer.gather_items(of_groups)

  def of_all(self, trees: int) -> dict[str, float]:
    """Returns `metrics` of all processes; `trees` is how many this one has."""
    gathered = collections.defaultdict(list)
    for metrics, number in transfer.gather_objects((self.metrics, trees)):
      for name, value in metrics.items():
        gathered[name].append((value, number))
    return {name: _joined(*zip(*pairs)) for name, pairs in gathered.items()}


def _joined(values: Sequence[float], weights: Sequence[int]) -> float:
  if len(values) == 1 or not any(weights):
    return values[0]
  if all(isinstance(value, numbers.Integral) for value in values):
    return sum(values)
  return float(np.average(values, weights=weights))


def find_method(name: str) -> types.ModuleType:
  """Returns the module of a method ('prompted.cot': prompted/cot.py); ValueError if there is none."""
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
  """Lists the names of all methods."""
  files = pkgutil.walk_packages(__path__, f'{__name__}.')
  return sorted(file.name.removeprefix(f'{__name__}.') for file in files
                if hasattr(importlib.import_module(file.name), 'grow'))
