"""Reads policy spans as actions (a search, an answer, or neither) and runs their searches, one or several at a time."""

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
  observation: str = ''  # what the policy sees next: the documents, or that the action is not valid
  found: bool = False    # whether its search returned documents

  @property
  def is_valid(self) -> bool:
    """Whether it searches or answers."""
    return self.query is not None or self.answer is not None


def read(node: Node, tags: grammar.Tags = grammar.SEARCH_R1) -> Action:
  """Reads a policy span as an action."""
  thoughts = [element.content for element in grammar.elements(node.text, tags) if element.name == tags.think]
  answer = grammar.answer(node.text, tags)
  return Action(node, ' '.join(thoughts), None if answer is not None else grammar.search_query(node.text, tags), answer)


def search(actions: Sequence[Action], tree: Tree, tags: grammar.Tags = grammar.SEARCH_R1) -> Generator[Request, Any, None]:
  """Runs these actions' searches together; sets observations, `node.data['documents']`, and the counts of what went wrong."""
  searching, special = [action for action in actions if action.query is not None], tree.tokenizer.special_tokens
  show = lambda documents: grammar.information(documents, special, tags)
  replies = (yield [Search(action.node, action.query, show=show) for action in searching]) if searching else []
  for action, reply in zip(searching, replies):
    if isinstance(reply, ToolFailure):
      tree.metrics['tool_failures'] += 1
      action.observation = grammar.failure(reply.reason, special, tags)
    else:
      action.node.data['documents'], action.found = reply, bool(reply)
      action.observation = show(reply)
  for action in actions:
    if not action.is_valid:
      tree.metrics['malformed'] += 1
      action.observation = grammar.invalid_action(tags)


def ask_judge(tree: Tree, items: Sequence[judge.Item], unreadable: int | None = 0) -> Generator[Request, Any, list[int | None]]:
  """The judge's scores of the items. One that is missing or cannot be read is `unreadable` and counts in `judge_unreadable`."""
  replies = yield [Ask('judge', item) for item in items]
  bad = [reply is None or isinstance(reply, ToolFailure | Exception) for reply in replies]
  tree.metrics['judge_unreadable'] += sum(bad)
  return [unreadable if one else reply for one, reply in zip(bad, replies)]
