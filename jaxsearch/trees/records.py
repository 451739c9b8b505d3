"""Trees as JSON: with their token ids, for rollouts that are grown once and trained on many times; whole, to go on with them
in another process; and as text, for people."""

import json
from typing import Any

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees.tree import Metrics, Node, Role, Stop, Tree


def to_record(tree: Tree) -> dict[str, Any]:
  """The tree without values, advantages, log-probabilities and documents; a node is [parent's index, role, tokens, notes]."""
  nodes = list(tree.walk())
  index = {node: i for i, node in enumerate(nodes)}
  rows = [[index[node.parent], node.role.value, node.tokens, {k: note for k, note in node.data.items() if k != 'documents'}]
          for node in nodes[1:]]
  return dict(id=tree.question.id, answer=tree.answer, reward=tree.reward, stop=tree.stop, metrics=tree.metrics, nodes=rows)


def from_record(record: dict[str, Any], tokenizer, question: Question) -> Tree:
  """The inverse of `to_record`."""
  tree = Tree(tokenizer, question)
  tree.answer, tree.reward, tree.stop = record['answer'], record['reward'], record['stop'] and Stop(record['stop'])
  tree.metrics.update(record['metrics'])
  nodes = [tree.root]
  for parent, role, tokens, data in record['nodes']:
    nodes.append(nodes[parent].append(tokens, Role(role)))
    nodes[-1].data.update(data)
  return tree


GROWN = ('tokens', 'logprobs', 'trained', 'stop', 'advantages')  # of a node that was grown and not yet credited


def grown_line(tree: Tree) -> str | None:
  """A tree as it was grown, as JSON on one line, from which `grown_tree` makes it again to the bit.

  None if a note of its method (`node.data`, `tree.metrics`) is not one that JSON brings back as it was: texts, finite numbers,
  booleans, None, lists, and dicts with texts as keys.
  """
  nodes = list(tree.walk())
  index = {node: i for i, node in enumerate(nodes)}
  try:
    record = dict(
      id=tree.question.id, answer=tree.answer, reward=tree.reward, stop=tree.stop, metrics=tree.metrics,
      rng=tree.rng.bit_generator.state, root=_notes(tree.root),
      nodes=[[index[node.parent], node.role.value, [getattr(node, name) for name in GROWN], _notes(node)] for node in nodes[1:]])
    line = json.dumps(record, allow_nan=False, default=lambda number: number.item())
  except (AttributeError, TypeError, ValueError):
    return None
  return line if json.loads(line) == record else None


def grown_tree(record: dict[str, Any], tokenizer, question: Question) -> Tree:
  """The tree of a line of `grown_line`."""
  tree = Tree(tokenizer, question)
  tree.answer, tree.reward, tree.stop = record['answer'], record['reward'], record['stop'] and Stop(record['stop'])
  tree.metrics = Metrics(record['metrics'])
  tree.rng.bit_generator.state = record['rng']
  tree.root.data.update(_with_documents(record['root']))
  nodes = [tree.root]
  for parent, role, values, notes in record['nodes']:
    nodes.append(nodes[parent].append(values[0], Role(role)))
    vars(nodes[-1]).update(zip(GROWN, values))
    nodes[-1].data.update(_with_documents(notes))
  return tree


def _notes(node: Node) -> dict[str, Any]:
  """The notes on a node, documents as lists."""
  documents = node.data.get('documents')
  return node.data | ({} if documents is None else {'documents': [[one.id, one.title, one.text, one.score] for one in documents]})


def _with_documents(notes: dict[str, Any]) -> dict[str, Any]:
  return notes | ({'documents': [Document(*one) for one in notes['documents']]} if 'documents' in notes else {})


def spans(tree: Tree) -> list[dict]:
  """What is shown of a tree: its spans depth first, each with role and text.

  Where present also `found`, how many documents its search found; `segment`, its kind, and then `tokens`, how many; `value`,
  the critic's value of the state before the span; `advantage`, if all its tokens share one; `parent`, the index of the span that
  it follows, if that is not the one before it; `dropped`: true in branches that the rollout did not continue from.
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
    if documents := node.data.get('documents'):
      span['found'] = len(documents)
    if 'segment' in node.data:
      span |= {'segment': node.data['segment'], 'tokens': len(node.tokens)}
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
