"""Rollouts as evaluations record them and as the report shows them: branches below their parents, spans coloured by advantage."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from jaxsearch.trees.tree import Node, Role, Tree

GOOD, BAD = (0x1F, 0x6F, 0xB2), (0xC8, 0x45, 0x2F)  # distinct for the colour-blind too
FULL = 0.5  # the advantage with the strongest colour; the same for all rollouts, so that they can be compared


def spans(tree: Tree) -> list[dict]:
  """The record of a tree: its spans depth first, each with role and text.

  Where present also `segment`, its kind; `value`, the critic's value of the state before the span; `advantage`, if all its tokens
  share one; `parent`, the index of the span that it follows, if that is not the one before it; `dropped`: true in branches that
  the rollout did not continue from.
  """
  recorded, dropped = [], _dropped(tree)
  last = {None: -1}  # node -> index of the last span on its path
  for node in tree.walk():
    # The copy of a context follows, in time, the span that it was copied from.
    parent = len(recorded) - 1 if node.role is Role.CONTEXT else last[node.parent]
    last[node] = len(recorded) if node.tokens else parent
    if not node.tokens:
      continue
    span = {'role': node.role.value, 'text': node.text}
    if 'segment' in node.data:
      span['segment'] = node.data['segment']
    if node.values is not None:
      span['value'] = float(node.values[0])
    if node.advantages is not None and np.ndim(node.advantages) == 0:
      span['advantage'] = float(node.advantages)
    if parent != len(recorded) - 1:
      span['parent'] = parent
    if node in dropped:
      span['dropped'] = True
    recorded.append(span)
  return recorded


def blocks(recorded: Sequence[dict]) -> list[dict]:
  """Recorded spans in the order of the page, without the first prompt: below a span its dropped branches, then the kept one.

  Each gets `depth`: in how many dropped branches it is nested; `branch`: '2 of 5' at the start of a branch, else '';
  `forgotten`: whether it is tool output that the policy saw only while it wrote the next segment.
  """
  children = collections.defaultdict(list)
  for i, span in enumerate(recorded):
    children[span.get('parent', i - 1)].append(i)
  found, stack = [], [(i, 0, '') for i in reversed(children[-1])]
  while stack:
    i, depth, branch = stack.pop()
    if i or recorded[i]['role'] != Role.PROMPT.value:
      forgotten = recorded[i + 1:i + 2] and recorded[i + 1].get('segment') == 'assimilate'
      found.append({'dropped': False} | recorded[i] | {'depth': depth, 'branch': branch, 'forgotten': forgotten})
    number = len(children[i])
    branches = [(recorded[child].get('dropped', False), -place, child) for place, child in enumerate(children[i], start=1)]
    for dropped, place, child in sorted(branches):  # the kept one first: it is popped last
      stack.append((child, depth + (dropped and number > 1), f'{-place} of {number}' if number > 1 else ''))
  return found


def colour(advantage: float) -> str:
  """White at 0, towards blue above and red below; never so dark that black text on it is hard to read."""
  share = 0.62 * min(abs(advantage) / FULL, 1.0)
  return '#' + ''.join(f'{round(255 + share * (hue - 255)):02x}' for hue in (GOOD if advantage > 0 else BAD))


def _dropped(tree: Tree) -> set[Node]:
  """The nodes in branches that the rollout did not continue from.

  Of several children one is kept: a trained one before one taken out of training, then one that leads to the answer, then one
  with spans below it; none, if nothing tells them apart and none was answered or continued. Children beside a copied context
  are no alternatives: they were read and forgotten.
  """
  dropped = set()
  for node in tree.walk():
    children = node.children
    if node in dropped or len(children) < 2 or any(child.role is Role.CONTEXT for child in children):
      continue
    answers = [tree.answer is not None and any(tree.answer in below.text for below in child.walk() if below.role is Role.POLICY)
               for child in children]
    ranks = [(child.trained or child.role is not Role.POLICY, answer, bool(child.children))
             for child, answer in zip(children, answers)]
    best = max(ranks)
    kept = children[ranks.index(best)] if any(best[1:]) or ranks.count(best) == 1 else None
    dropped.update(below for child in children if child is not kept for below in child.walk())
  return dropped
