"""TRACE (arXiv 2606.11119): rollouts go where outcomes are open: to questions, and to prefixes of chains.

Known to us are the abstract and a summary. From these is the allocation: every rollout goes where it adds
most to the chance of seeing both outcomes. The rest is our reading: success is predicted by what a question
got before (`sizes`), at a prefix by a constant for each turn (the paper trains a predictor), and chains are
credited as in Tree-GRPO.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups, tree_grpo
from jaxsearch.methods.actions import abreast
from jaxsearch.methods.search_r1 import start
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Tree

BRANCHES = True
ONE_TREE = True


def grow(question: Question, tree: Tree, *, extra: int = 2, success: Sequence[float] = (0.3, 0.5, 0.7),
         max_turns: int = 4, max_tokens: int = 500, template: str = 'search_r1',
         chat: bool = False) -> Growth[None]:
  """Grows a chain, then `extra` more, from those of its turns at which they may well end otherwise.

  The tree's answer is that of the first chain; `extra=0` is Search-R1, for evaluation. configs/trace.py
  explains the settings.
  """
  tree.metrics['found'] = 0
  prompt = start(tree, question, template, chat, tools=max_turns > 0)
  turns = [prompt, *(yield from tree_grpo.chain(tree, prompt, max_turns, max_tokens))]
  answer, stop, right = tree.answer, tree.stop, question.score(tree.answer)
  predicted = np.array([success[min(turn, len(success) - 1)] for turn in range(len(turns))])
  numbers = allocate(lambda n: contradicted(predicted, right, n + 1) - contradicted(predicted, right, n),
                     np.zeros(len(turns), int), extra)
  begun = [node for node, number in zip(turns, numbers) for _ in range(number)]
  yield from abreast([tree_grpo.chain(tree, node, max_turns, max_tokens) for node in begun])
  tree.answer, tree.stop = answer, stop


def sizes(questions: Sequence[Question], group_size: int, context: Context, *, prior: float = 0.5,
          strength: float = 2.0) -> list[int]:
  """Gives each question one tree, and the rest, up to `group_size` on average, where `mixed` gains most.

  configs/trace.py explains the settings.
  """
  seen = context.memory.get('outcomes', {})
  right, number = np.array([seen.get(question.id, (0, 0)) for question in questions]).T
  predicted = (prior * strength + right) / (strength + number)
  return allocate(lambda m: mixed(predicted, m + 1) - mixed(predicted, m), np.ones(len(questions), int),
                  len(questions) * (group_size - 1)).tolist()


def mixed(success: np.ndarray, number: np.ndarray) -> np.ndarray:
  """Returns the chance that of `number` chains from the start some are right and some wrong."""
  return 1 - success**number - (1 - success)**number


def contradicted(success: np.ndarray, right: float, number: np.ndarray) -> np.ndarray:
  """Returns the chance that one of `number` more chains from a prefix ends otherwise than `right` did."""
  return 1 - (right * success + (1 - right) * (1 - success))**number


def allocate(marginal: Callable[[np.ndarray], np.ndarray], numbers: np.ndarray, budget: int) -> np.ndarray:
  """Adds `budget` to numbers [places], one after the other where the marginal gain [places] is largest."""
  for _ in range(budget):
    numbers[np.argmax(marginal(numbers))] += 1
  return numbers


def credit(groups: Groups, context: Context, *, no_answer: float = 0.0, normalize_std: bool = True,
           singleton: str = 'zero') -> None:
  """Credits chains as Tree-GRPO does, and remembers how many of a question's were right."""
  tree_grpo.credit(groups, context, no_answer=no_answer, normalize_std=normalize_std, singleton=singleton)
  outcomes = [[outcome for tree in group for _, outcome in tree_grpo.rewards(tree, 0.0)] for group in groups]
  counts = [(group[0].question.id, sum(of), len(of)) for group, of in zip(groups, outcomes) if group]
  memory = context.memory.setdefault('outcomes', {})
  for question, right, number in context.gather(counts)[0]:
    before = memory.get(question, (0, 0))
    memory[question] = [before[0] + right, before[1] + number]
