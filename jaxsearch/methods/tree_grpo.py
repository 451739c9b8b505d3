"""Tree-GRPO (arXiv 2509.21240): chains branch off earlier ones, and are compared within and between trees.

A question has `group_size` trees (M). A tree begins with one chain; then, L times, N of its turns are drawn
and the policy goes on from each to the end. Every chain hangs below the prompt as a whole: up to where it
branches off it repeats the tokens of the chain before. The sampler has them in its cache and a training row
holds them once, yet each chain has its own credit on them, as in the paper, where each is a row of its own.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import abreast
from jaxsearch.methods.credit import credit_groups
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Node, Role, Stop, Tree

BRANCHES = True
ONE_TREE = True


def grow(question: Question, tree: Tree, *, rounds: int = 1, branches: int = 2, max_turns: int = 4,
         max_tokens: int = 500, template: str = 'search_r1', chat: bool = False) -> Growth[None]:
  """Grows a chain, then `rounds` times (L) `branches` more (N), each from a turn drawn with replacement.

  Turns are drawn from the prompt and all observations so far. The tree's answer is that of the first chain;
  `branches=0` is Search-R1, for evaluation.
  """
  tree.metrics['found'] = 0
  prompt = start(tree, question, template, chat, tools=max_turns > 0)
  turns = [prompt, *(yield from chain(tree, prompt, max_turns, max_tokens))]
  answer, stop = tree.answer, tree.stop
  for _ in range(rounds):
    drawn = [turns[place] for place in tree.rng.integers(len(turns), size=branches)]
    grown = yield from abreast([chain(tree, node, max_turns, max_tokens) for node in drawn])
    turns += itertools.chain(*grown)
  tree.answer, tree.stop = answer, stop


def chain(tree: Tree, node: Node, max_turns: int, max_tokens: int) -> Growth[list[Node]]:
  """Grows a chain that begins like the path to `node`; returns its new observations.

  Notes on its first span `data['outcome']`, 1 or 0, and `data['answered']`, whether it has an answer.
  """
  begun = repeated(node)
  taken = sum(span.role is Role.POLICY for span in begun.path())
  leaf = yield from act(tree, begun, turns=max_turns - taken, max_tokens=max_tokens)
  path = leaf.path()
  path[2].data.update(outcome=tree.question.score(tree.answer), answered=int(tree.stop is Stop.ANSWERED))
  return [span for span in path[len(begun.path()):] if span.role is Role.OBSERVATION]


def repeated(node: Node) -> Node:
  """Appends copies of the spans from the prompt to `node` below the prompt; returns the last."""
  _, copy, *spans = node.path()
  for span in spans:
    copy = copy.append(span.tokens, span.role, sampler_logprobs=span.sampler_logprobs)
    copy.stop, copy.data = span.stop, dict(span.data)
  return copy


def rewards(tree: Tree, no_answer: float) -> list[tuple[Sequence[Node], float]]:
  """Returns (spans, outcome) of each chain, less `no_answer` if it has no answer."""
  chains = [[node for node in first.walk() if node.role is Role.POLICY]
            for prompt in tree.root.children for first in prompt.children]
  return [(spans, spans[0].data['outcome'] - no_answer * (not spans[0].data['answered'])) for spans in chains]


def credit(groups: Groups, context: Context, *, no_answer: float = 0.2, normalize_std: bool = True,
           singleton: str = 'zero') -> None:
  """Sets `A = A_intra + A_inter` on a chain: relative to those of its tree, and of all trees of its question.

  Logs the mean of a tree's chains as its reward; a group is alike if all chains of the question are.
  configs/tree_grpo.py explains the settings.
  """
  earned = [[rewards(tree, no_answer) for tree in group] for group in groups]
  questions = [[chain for chains in of_trees for chain in chains] for of_trees in earned]
  settings = dict(normalize_std=normalize_std, singleton=singleton)
  credit_groups([chains for of_trees in earned for chains in of_trees], **settings)
  credit_groups(questions, **settings, added=1.0)
  for tree, chains in zip(itertools.chain(*groups), itertools.chain(*earned)):
    tree.reward = float(np.mean([value for _, value in chains])) if chains else None
  values = [{value for _, value in chains} for chains in questions if chains]
  if values:
    same, wrong = np.array([(len(of) == 1, max(of) < 1) for of in values]).T
    context.metrics.update(groups_alike=float(same.mean()), groups_alike_wrong=float((same & wrong).mean()))
