"""Rejection sampling: rollouts of the policy that are right become demonstrations.

`jaxsearch sample` writes them, `jaxsearch sft` imitates them: the baseline 'Rejection Sampling' of Search-R1
(arXiv 2503.09516, section 4.2), with five candidates for each question. What is learned is what was sampled:
a chain goes into the file as text, and only if that text is tokenised back to the same ids.
"""

import itertools
import os
from collections.abc import Sequence

import numpy as np

from jaxsearch.training import row_files
from jaxsearch.training.batch import Groups
from jaxsearch.trees.tree import Role, Stop, Tree


def select(groups: Groups, most: int | None = None) -> Groups:
  """Returns of each question the first `most` chains that are right, well-formed and not alike; None: all."""
  selected = []
  for group in groups:
    different = {}
    for tree in filter(is_demonstration, group):
      different.setdefault(tuple(token for node in tree.walk() for token in node.tokens), tree)
    selected.append(list(different.values())[:most])
  return selected


def is_demonstration(tree: Tree) -> bool:
  """Tells whether a chain is right, has no malformed or failed turn, and its text encodes to its tokens.

  A branch beside the path, as CARL's raw output, is learned as it was sampled. Raises ValueError where the
  policy wrote alternatives.
  """
  if tree.question.score(tree.answer) < 1:
    return False
  if any(sum(child.role is Role.POLICY for child in node.children) > 1 for node in tree.walk()):
    raise ValueError('a demonstration has no alternatives, but this method samples several spans after the '
                     'same path')
  bad_turns = sum(tree.metrics.get(name, 0) for name in ('malformed', 'tool_failures'))
  return tree.stop == Stop.ANSWERED and not bad_turns and all(
    tree.tokenizer.encode(node.text) == node.tokens for node in tree.walk())


def record(group: Sequence[Tree], most: int | None = None) -> dict:
  """Returns what is kept of a question's chains: how many are right, and its demonstrations, see `select`."""
  [chosen] = select([group], most)
  return {'id': group[0].question.id, 'right': sum(tree.question.score(tree.answer) for tree in group),
          'demonstrations': [demonstration(tree) for tree in chosen],
          'searches': [tree.metrics['searches'] for tree in chosen]}


def write(path: str | os.PathLike, groups: Groups) -> None:
  """Writes demonstrations, one a line, as `sft.read_demonstrations` wants them."""
  row_files.write(path, map(demonstration, itertools.chain(*groups)))


def demonstration(tree: Tree) -> dict:
  """Returns the line of a demonstration: role and text of the spans, depth first, with the `parent` of one
  that does not follow the span before it."""
  nodes = [node for node in tree.walk() if node.tokens]
  places, spans = {node: place for place, node in enumerate(nodes)}, []
  for place, node in enumerate(nodes):
    parent = next((places[above] for above in reversed(node.path()[:-1]) if above in places), -1)
    spans.append({'role': node.role.value, 'text': node.text})
    if parent != place - 1:
      spans[-1]['parent'] = parent
  return {'id': tree.question.id, 'spans': spans}


def figures(records: Sequence[dict], number: int) -> dict[str, float]:
  """Returns shares: `right` and `kept` of the chains, `number` a question, and questions `covered` by one."""
  sampled, searches = number * len(records), [count for record in records for count in record['searches']]
  return {
    'questions': len(records), 'sampled': sampled, 'demonstrations': len(searches),
    'right': sum(record['right'] for record in records) / sampled, 'kept': len(searches) / sampled,
    'covered': float(np.mean([bool(record['demonstrations']) for record in records])),
    'searches': float(np.mean(searches)) if searches else 0.0,
  }  # fmt: skip
