"""Sums up the trees of a step for its row, over all processes, in one exchange between them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsearch.parallel import transfer
from jaxsearch.sampler import requests
from jaxsearch.training.batch import Groups
from jaxsearch.trees.tree import Role, Stop

COSTS = ('tokens_generated', 'tokens_prefilled')  # of the sampler, which are added up


def credited(groups: Groups) -> Groups:
  """Returns the trees of each group that the method gave credit: what training rows hold."""
  has_credit = lambda tree: any(node.trained and node.advantages is not None for node in tree.walk())
  return [[tree for tree in group if has_credit(tree)] for group in groups]


def summary(groups: Groups, trained: Groups, sampled: Mapping[str, Any]) -> dict[str, Any]:
  """Returns figures of a step's rollouts; all processes must call it.

  Means of reward, exact match, `searches` and the method's other notes (`…_per_tree`), shares of stop
  reasons; of the `trained` trees their mean reward, and the tokens that a row for each path would have.
  Tokens that were sampled count with pruned branches, which have cost as much.

  Args:
    groups, trained, sampled: trees of this process, those with credit, and the metrics of its sampler.
  """
  trees = [tree for group in groups for tree in group]
  kept = [tree for group in trained for tree in group]
  written = [node for tree in trees for node in tree.nodes(Role.POLICY)]
  right = [[tree.question.score(tree.answer) for tree in group] for group in groups]
  rewards = [[tree.reward for tree in group if tree.reward is not None] for group in groups]
  values = {
    'reward': [reward for group in rewards for reward in group],
    'reward_retained': [tree.reward for tree in kept],
    'groups_alike': [len(set(group)) == 1 for group in rewards if group],  # nothing to compare
    'groups_alike_wrong': [len({tree.reward for tree in group}) == 1 and not any(scores)
                           for group, scores in zip(groups, right) if len(group) > 1],
    'em': [score for scores in right for score in scores],
    'logprob': [logprob for node in written for logprob in node.sampler_logprobs or ()],
    'tokens_per_tree': [tree.count() for tree in trees],
  }  # fmt: skip
  values |= {f'stop_{reason}_share': [tree.stop == reason for tree in trees] for reason in Stop}
  for name in sorted({name for tree in trees for name in tree.metrics}):
    key = name if name == 'searches' else f'{name}_per_tree'
    values[key] = [tree.metrics[name] for tree in trees if name in tree.metrics]
  means = {name: (float(np.sum(numbers, dtype=np.float64)), len(numbers)) for name, numbers in values.items()}
  on_paths = sum(leaf.length for tree in kept for leaf in tree.leaves())
  counts = {'trees': len(trees), 'tokens_on_paths': on_paths}
  counts |= {name: sampled[name] for name in COSTS if name in sampled}
  everywhere = transfer.gather_objects((means, counts, requests.add_failures([sampled])))
  row = dict(sampled) | requests.add_failures(failures for *_, failures in everywhere)
  row |= {name: sum(part[name] for _, part, _ in everywhere) for name in counts}
  empty = {'groups_alike': 1.0, 'logprob': math.nan}  # where there are no values
  for name in dict.fromkeys(name for part, *_ in everywhere for name in part):
    total, count = map(sum, zip(*(part[name] for part, *_ in everywhere if name in part)))
    row[name] = total / count if count else empty.get(name, 0.0)
  return row
