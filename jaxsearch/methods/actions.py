"""Policy spans as actions: grown, read, served and judged; and how an episode ends."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Ask, Generate, Growth, Search, ToolFailure
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node, Stop, Tree

NO_ROOM = (Stop.CONTEXT_FULL, Stop.DEADLINE)


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
    """Tells whether it searches or answers."""
    return self.query is not None or self.answer is not None


def read(node: Node, tags: grammar.Tags = grammar.SEARCH_R1) -> Action:
  """Reads a policy span as an action."""
  thoughts = [element.content for element in grammar.elements(node.text, tags) if element.name == tags.think]
  answer = grammar.answer(node.text, tags)
  query = grammar.search_query(node.text, tags) if answer is None else None
  return Action(node, ' '.join(thoughts), query, answer)


def search(actions: Sequence[Action], tree: Tree, tags: grammar.Tags = grammar.SEARCH_R1) -> Growth[None]:
  """Runs the searches of actions together; sets observations, `node.data['documents']` and counts."""
  special = tree.tokenizer.special_tokens
  show = lambda documents: grammar.information(documents, special, tags)
  searching = [action for action in actions if action.query is not None]
  requests = [Search(action.node, action.query, show=show) for action in searching]
  replies = (yield requests) if requests else []
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


def write_until(node: Node, stop: tuple[str, ...], max_tokens: int,
                ends: Callable[[Node], bool]) -> Growth[Node]:
  """Grows one span to the first of the stop strings at which `ends` holds, past the others."""
  span = yield Generate(node, stop=stop, max_tokens=max_tokens)
  while span.stop in stop and not ends(span) and len(span.tokens) < max_tokens:
    yield Generate(span, stop=stop, max_tokens=max_tokens - len(span.tokens))
    span.absorb()
  return span


def finish(tree: Tree, last: Node, answer: str | None, *, spent: bool = False) -> None:
  """Ends the episode with the answer of its last span, or says why not; `spent`: its budget is."""
  tree.answer = answer
  if answer is not None:
    tree.stop = Stop.ANSWERED
  elif last.stop in NO_ROOM:
    tree.stop = Stop(last.stop)
  elif tree.metrics['tool_failures']:
    tree.stop = Stop.TOOL_FAILED
  else:
    tree.stop = Stop.BUDGET if spent else Stop.MALFORMED


def ask_judge(tree: Tree, items: Sequence[tuple[judge.Item, Node]],
              unreadable: int | None = 0) -> Growth[list[int | None]]:
  """Returns the judge's scores of items, each about a span; `unreadable`, which is counted, for none."""
  scores = []
  for reply in (yield [Ask('judge', item, node) for item, node in items]):
    failed = not isinstance(reply, int)
    tree.metrics['judge_unreadable'] += failed
    scores.append(unreadable if failed else reply)
  return scores
