"""Search-R1 with GRPO (Jin et al. 2025, arXiv 2503.09516): search while reasoning, rewarded for the right answer alone.

`grow` is the rollout of the paper's algorithm 1, as its code runs it (`llm_agent/generation.py`): up to `max_turns` actions,
then one last span in which a search is no longer served. An action that is neither search nor answer costs a turn and
gets an observation that says so. Other methods grow their trees with it too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jaxsearch.advantages import group_relative
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context
from jaxsearch.sampler.requests import Generate, Request, Search, ToolFailure
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Node, Role, Stop, Tree


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500, template: str = 'search_r1',
         chat: bool = False, tags: grammar.Tags = grammar.SEARCH_R1) -> Generator[Request, Any, None]:
  """Grows one chain below the root: prompt, policy span, observation, policy span, …

  Sets tree.answer, tree.stop and in tree.metrics the counts of searches, of those that found documents (`found`), of
  malformed actions and of failed searches; a span that searched keeps what it got in node.data['documents'].

  Args:
    max_turns: actions that get an observation; one more span follows.
    max_tokens: of each policy span.
    template: a name or a file, see trees/templates.py.
    chat: puts the prompt into the tokenizer's chat template, for instruct models.
  """
  tree.metrics.update(searches=0, found=0, malformed=0, tool_failures=0)
  node = start(tree, question, template, chat)
  yield from act(tree, node, turns=max_turns, max_tokens=max_tokens, tags=tags)


def start(tree: Tree, question: Question, template: str, chat: bool) -> Node:
  """The prompt of a question below the root."""
  return tree.root.append(templates.prompt(question.question, template, tree.tokenizer if chat else None), Role.PROMPT)


def act(tree: Tree, node: Node, *, turns: int, max_tokens: int,
        tags: grammar.Tags = grammar.SEARCH_R1) -> Generator[Request, Any, Node]:
  """Goes on behind `node` with actions and observations until an answer or the end of the budget; returns the last span.

  Sets tree.answer and tree.stop, and adds to the counts in tree.metrics.
  """
  special, counts = tree.tokenizer.special_tokens, tree.metrics
  tree.stop = None
  for turn in range(turns + 1):
    node = yield Generate(node, stop=tags.stops, max_tokens=max_tokens)
    tree.answer = grammar.answer(node.text, tags)
    query = grammar.search_query(node.text, tags)
    if tree.answer is not None:
      tree.stop = Stop.ANSWERED
    elif node.stop in (Stop.CONTEXT_FULL, Stop.DEADLINE):
      tree.stop = Stop(node.stop)
    elif turn == turns:
      tree.stop = Stop.BUDGET if query else Stop.MALFORMED
    if tree.stop is not None:
      break
    if query is None:
      counts['malformed'] += 1
      observation = grammar.invalid_action(tags)
    else:
      counts['searches'] += 1
      found = yield Search(node, query)
      if isinstance(found, ToolFailure):
        counts['tool_failures'] += 1
        observation = grammar.failure(found.reason, special, tags)
      else:
        counts['found'] += bool(found)
        node.data['documents'] = found
        observation = grammar.information(found, special, tags)
    node = node.append(observation, Role.OBSERVATION)
  if tree.stop in (Stop.BUDGET, Stop.MALFORMED) and counts['tool_failures']:
    tree.stop = Stop.TOOL_FAILED
  return node


def reward(tree: Tree) -> float:
  """1 if the answer is right by the rule of its question (an exact match after normalisation, mostly), else 0."""
  return tree.question.score(tree.answer)


def credit(groups: Sequence[Sequence[Tree]], context: Context, *, normalize_std: bool = True) -> None:
  """GRPO: every policy span of a chain gets the chain's reward relative to the other chains of its question."""
  for tree in (tree for group in groups for tree in group):
    tree.reward = reward(tree)
  credit_relative(groups, normalize_std=normalize_std)


def credit_relative(groups: Sequence[Sequence[Tree]], *, normalize_std: bool = True) -> None:
  """Every policy span gets its tree's reward relative to the other trees of its group."""
  trees = [tree for group in groups for tree in group]
  ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
  rewards = np.array([tree.reward for tree in trees], np.float32)
  advantages = group_relative(rewards, ids, len(groups), normalize_std=normalize_std)
  for tree, advantage in zip(trees, np.asarray(advantages)):
    for node in tree.nodes(Role.POLICY):
      node.advantages = float(advantage)
