"""Trees as JSON, with their token ids: for rollouts that are grown once and trained on many times."""

from typing import Any

from jaxsearch.data.questions import Question
from jaxsearch.trees.tree import Role, Stop, Tree


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
