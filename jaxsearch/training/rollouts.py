"""The trees of a training step: shared between processes, cut down to what is trained, and summed up for the log."""

import pickle
from collections.abc import Sequence

import jax
import numpy as np

from jaxsearch.parallel import mesh as meshes
from jaxsearch.trees.tree import Role, Stop, Tree

Groups = list[list[Tree]]  # the trees of each question


def share(groups: Groups, tokenizer) -> Groups:
  """The groups of all processes, in the order of the global batch (each process has every n-th question of it)."""
  if jax.process_count() == 1:
    return groups
  for tree in (tree for group in groups for tree in group):
    tree.tokenizer = None  # every process has its own
  everyone = [pickle.loads(own) for own in meshes.gather_bytes(pickle.dumps(groups))]
  groups = [group for turn in zip(*everyone, strict=True) for group in turn]
  for tree in (tree for group in groups for tree in group):
    tree.tokenizer = tokenizer
  return groups


def agreed(trees: Sequence[Tree], tokenizer) -> list[Tree]:
  """The trees of the first process on all: what each grew for the same questions may differ where the clock decides."""
  if jax.process_count() == 1:
    return list(trees)
  for tree in trees:
    tree.tokenizer = None
  trees = pickle.loads(meshes.gather_bytes(pickle.dumps(list(trees)) if jax.process_index() == 0 else b'')[0])
  for tree in trees:
    tree.tokenizer = tokenizer
  return trees


def trainable(groups: Groups, length: int) -> Groups:
  """The trees that fit into a training row of `length` tokens, each cut down to what is trained and what leads to it.

  A tree with branches may be longer than the longest path. Groups without any tree left drop out.
  """
  for tree in (tree for group in groups for tree in group):
    tree.prune()
  fitting = [[tree for tree in group if tree.count() <= length] for group in groups]
  return [group for group in fitting if group]


def credited(groups: Groups) -> list[Tree]:
  """Those of the trees that the method gave credit: what training rows hold."""
  return [tree for group in groups for tree in group
          if any(node.trained and node.advantages is not None for node in tree.walk())]


def summary(groups: Groups) -> dict[str, float]:
  """What came of the trees: means of reward, exact match and the method's notes (`searches` …), shares of stop reasons."""
  trees = [tree for group in groups for tree in group]
  names = sorted({name for tree in trees for name in tree.metrics})
  noted = {name: float(np.mean([tree.metrics[name] for tree in trees if name in tree.metrics])) for name in names}
  stops = {f'stop_{reason}': float(np.mean([tree.stop == reason for tree in trees])) for reason in Stop}
  rewards = [found for group in groups if (found := [tree.reward for tree in group if tree.reward is not None])]
  return noted | stops | {
    'reward': float(np.mean(np.concatenate(rewards))) if rewards else 0.0,
    'groups_alike': float(np.mean([len(set(found)) == 1 for found in rewards])) if rewards else 1.0,  # nothing to compare
    'trees': len(trees),
    'em': float(np.mean([tree.question.score(tree.answer) for tree in trees])),
    'tokens_generated': sum(tree.count(Role.POLICY) for tree in trees),
    'tokens_per_tree': float(np.mean([tree.count() for tree in trees])),
  }  # fmt: skip
