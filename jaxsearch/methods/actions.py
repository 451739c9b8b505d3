"""What a policy span says in Search-R1's tags and what comes of it, for methods that sample several actions at a time."""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Ask, Request, Search, ToolFailure
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node, Tree


@dataclasses.dataclass
class Action:
  """A policy span as a search, an answer, or neither."""
  node: Node
  thinking: str
  query: str | None
  answer: str | None
  observation: str = ''  # what its search returned
  found: bool = False    # whether that holds documents

  @property
  def is_valid(self) -> bool:
    """Whether it searches or answers."""
    return self.query is not None or self.answer is not None


def read(node: Node) -> Action:
  """The action that a policy span is."""
  thoughts = [element.content for element in grammar.elements(node.text) if element.name == grammar.SEARCH_R1.think]
  answer = grammar.answer(node.text)
  return Action(node, ' '.join(thoughts), None if answer is not None else grammar.search_query(node.text), answer)


def search(actions: Sequence[Action], tree: Tree) -> Generator[Request, Any, None]:
  """Runs the searches of all actions and notes what they found; counts failed searches and invalid actions."""
  searching, special = [action for action in actions if action.query is not None], tree.tokenizer.special_tokens
  replies = yield [Search(action.node, action.query) for action in searching]
  for action, reply in zip(searching, replies):
    if isinstance(reply, ToolFailure):
      tree.metrics['tool_failures'] += 1
      action.observation = grammar.failure(reply.reason, special)
    else:
      action.observation, action.found = grammar.information(reply, special), bool(reply)
  tree.metrics['malformed'] += sum(not action.is_valid for action in actions)


def ask_judge(tree: Tree, items: Sequence[judge.Item]) -> Generator[Request, Any, list[int]]:
  """The judge's scores of the items. One that cannot be read is 0 and is counted in `judge_unreadable`."""
  replies = yield [Ask('judge', item) for item in items]
  unreadable = [reply is None or isinstance(reply, ToolFailure) for reply in replies]
  tree.metrics['judge_unreadable'] += sum(unreadable)
  return [0 if bad else reply for bad, reply in zip(unreadable, replies)]
