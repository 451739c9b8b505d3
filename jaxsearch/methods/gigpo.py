"""GiGPO (arXiv 2505.10978): compares chains with chains, and steps with steps from the same state.

Rollouts are Search-R1's. The state of a step is what the policy saw last: the question before the first one,
then the observation. Search gives the same documents for the same query, so states recur across the chains of
a question, and are equal or not, token for token; the authors' code also takes texts that are 90 % alike.
"""

import collections

from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import read
from jaxsearch.methods.credit import credit_groups, credit_relative
from jaxsearch.methods.search_r1 import grow
from jaxsearch.trees.tree import Node, Role, Tree

__all__ = ['credit', 'grow']

JUDGED = True


def rewards(tree: Tree, invalid: float) -> list[float]:
  """Returns what the spans of a chain earn: `invalid` without a call or an answer; the last the outcome."""
  earned = [0.0 if read(node).is_valid else invalid for node in tree.turns()]
  if earned:
    earned[-1] += tree.score()
  return earned


def state(node: Node) -> tuple[int, ...]:
  """Returns the tokens a span saw last; () for a chain's first: a fold may have cut the prompt in two."""
  begun = any(above.role in (Role.POLICY, Role.CONTEXT) for above in node.parent.path())
  return tuple(node.parent.tokens) if begun else ()


def credit(groups: Groups, context: Context, *, gamma: float = 0.95, weight: float = 1.0,
           invalid: float = -0.01, normalize_std: bool = True, singleton: str = 'raw') -> None:
  """Sets `A = A_E + weight A_S`; A_S is 0 in a state that no other step began in.

  A_E compares what the chains of a question earned, A_S the discounted returns of steps from one state.
  configs/gigpo.py explains the settings.
  """
  states = [collections.defaultdict(list) for _ in groups]  # of each question: state -> ([span], return)
  for group, of_question in zip(groups, states):
    for tree in group:
      earned, later = rewards(tree, invalid), 0.0
      tree.reward = sum(earned)
      for node, own in reversed(list(zip(tree.turns(), earned))):
        later = own + gamma * later
        of_question[state(node)].append(([node], later))
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
  steps = [alike for of_question in states for alike in of_question.values()]
  credit_groups(steps, normalize_std=normalize_std, added=weight)
