"""Rejection sampling: rollouts of the policy that are right become demonstrations.

`jaxsearch sample` writes them, `jaxsearch sft` imitates them: the baseline 'Rejection Sampling' of Search-R1
(arXiv 2503.09516, section 4.2), with five candidates for each question. What is learned is what was sampled:
a chain goes into the file as text, and only if that text is tokenised back to the same ids.
"""

import itertools
import os
from collections.abc import Callable, Sequence

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.requests import Sampling
from jaxsearch.training import row_files, run_folder
from jaxsearch.training.batch import Groups
from jaxsearch.trees.tree import Role, Stop, Tree


def sample(agent: Agent, questions: Sequence[Question], number: int, key, sampling: Sampling,
           on_progress: Callable | None = None) -> Groups:
  """Returns `number` chains for each question. Raises RunStopped if most of their searches failed."""
  asked = [question for question in questions for _ in range(number)]
  trees, metrics = rollout(agent, asked, key, sampling=sampling, on_progress=on_progress)
  run_folder.check_searches(metrics, 'nothing was written')
  return [trees[start:start + number] for start in range(0, len(trees), number)]


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
  """Tells whether a chain has served searches alone, the right answer, and text that stands for its tokens.

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


def write(path: str | os.PathLike, groups: Groups) -> None:
  """Writes demonstrations, one a line, as `sft.read_demonstrations` wants them."""
  trees = itertools.chain(*groups)
  row_files.write(path, ({'id': tree.question.id, 'spans': _spans(tree)} for tree in trees))


def _spans(tree: Tree) -> list[dict]:
  """Returns role and text of the spans, depth first, and where it is not the span before it, the `parent`."""
  nodes = [node for node in tree.walk() if node.tokens]
  places, spans = {node: place for place, node in enumerate(nodes)}, []
  for place, node in enumerate(nodes):
    parent = next((places[above] for above in reversed(node.path()[:-1]) if above in places), -1)
    spans.append({'role': node.role.value, 'text': node.text})
    if parent != place - 1:
      spans[-1]['parent'] = parent
  return spans


def figures(groups: Groups, selected: Groups) -> dict[str, float]:
  """Returns shares: of the sampled chains `right` and `kept`, of the questions `covered` by a kept one."""
  trees, kept = (list(itertools.chain(*part)) for part in (groups, selected))
  return {
    'questions': len(groups), 'sampled': len(trees), 'demonstrations': len(kept),
    'right': float(np.mean([tree.question.score(tree.answer) for tree in trees])),
    'kept': len(kept) / len(trees), 'covered': float(np.mean(list(map(bool, selected)))),
    'searches': float(np.mean([tree.metrics['searches'] for tree in kept])) if kept else 0.0,
  }  # fmt: skip
