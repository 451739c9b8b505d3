"""Trees as people see them: spans with role, text and credit, and which branches were dropped."""

import numpy as np

from jaxsearch.trees.tree import Node, Role, Tree


def spans(tree: Tree) -> list[dict]:
  """Returns what is shown of a tree: its spans depth first, each with role and text.

  Where present also `found`, how many documents its search found; `segment`, its kind, and then `tokens`, how
  many; `value`, the critic's value of the state before the span; `advantage`, if all its tokens share one;
  `parent`, the index of the span that it follows, if that is not the one before it; `dropped`: true in
  branches that the rollout did not continue from.
  """
  shown, dropped = [], dropped_nodes(tree)
  last = {None: -1}  # node -> index of the last span on its path
  for node in tree.walk():
    # The copy of a context follows, in time, the span that it was copied from.
    parent = len(shown) - 1 if node.role is Role.CONTEXT else last[node.parent]
    last[node] = len(shown) if node.tokens else parent
    if not node.tokens:
      continue
    span = {'role': node.role.value, 'text': node.text}
    if documents := node.data.get('documents'):
      span['found'] = len(documents)
    if 'segment' in node.data:
      span |= {'segment': node.data['segment'], 'tokens': len(node.tokens)}
    if node.values is not None:
      span['value'] = float(node.values[0])
    if node.advantages is not None and np.ndim(node.advantages) == 0:
      span['advantage'] = float(node.advantages)
    if parent != len(shown) - 1:
      span['parent'] = parent
    if node in dropped:
      span['dropped'] = True
    shown.append(span)
  return shown


def dropped_nodes(tree: Tree) -> set[Node]:
  """Returns the nodes in branches that the rollout did not continue from.

  Of several children one is kept: a trained one before one taken out of training, then one that leads to the
  answer, then one with spans below it; none, if nothing tells them apart and none was answered or continued.
  Children beside a copied context are no alternatives: they were read and forgotten.
  """
  def rank(child: Node) -> tuple[bool, bool, bool]:
    written = (node.text for node in child.walk() if node.role is Role.POLICY)
    answers = tree.answer is not None and any(tree.answer in text for text in written)
    return child.trained or child.role is not Role.POLICY, answers, bool(child.children)

  dropped = set()
  for node in tree.walk():
    children = node.children
    if node in dropped or len(children) < 2 or any(child.role is Role.CONTEXT for child in children):
      continue
    ranks = [rank(child) for child in children]
    best = max(ranks)
    kept = children[ranks.index(best)] if any(best[1:]) or ranks.count(best) == 1 else None
    for child in children:
      if child is not kept:
        dropped.update(child.walk())
  return dropped
