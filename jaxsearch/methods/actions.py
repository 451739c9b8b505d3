"""Policy spans as actions: grown, read, served and judged; and how an episode ends."""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Ask, Generate, Growth, Search, ToolFailure
from jaxsearch.tools.calls import ToolCall, is_documents
from jaxsearch.trees import grammar
from jaxsearch.trees.grammars import Called, Malformed, Tagged
from jaxsearch.trees.tree import Node, Stop, Tree

NO_ROOM = (Stop.CONTEXT_FULL, Stop.DEADLINE)


@dataclasses.dataclass
class Action:
  """A policy span as calls of tools, an answer, or neither."""
  node: Node
  thinking: str
  calls: Sequence[Called | Malformed]
  answer: str | None
  observation: str = ''  # what the policy sees next: what the calls gave, or that the action is not valid
  asked: int = 0         # requests of its calls that were served
  found: int = 0         # those that returned documents
  failed: int = 0        # those that had no reply

  @property
  def queries(self) -> list[str]:
    """Returns what it searches for; nothing if it does not."""
    searches = [call for call in self.calls if isinstance(call, Called) and call.name == 'search']
    asked = [call.arguments.get('query', []) for call in searches]  # a tool of a server's may have none
    return [str(text) for each in asked for text in (each if isinstance(each, list) else [each])]

  @property
  def query(self) -> str | None:
    """Returns its queries, on a line each; None if it does not search."""
    return '\n'.join(self.queries) or None

  @property
  def called(self) -> str:
    """Returns what it asks of its tools: the queries, or a line for each call of other tools."""
    calls = [call for call in self.calls if isinstance(call, Called)]
    return self.query or '\n'.join(f'{call.name} {json.dumps(call.arguments)}' for call in calls)

  @property
  def malformed(self) -> Malformed | None:
    """Returns the first call that cannot be served."""
    return next((call for call in self.calls if isinstance(call, Malformed)), None)

  @property
  def ends(self) -> bool:
    """Tells whether it is malformed and ends the episode."""
    return self.malformed is not None and self.node.tree.grammar.strict

  @property
  def is_valid(self) -> bool:
    """Tells whether it calls a tool or answers."""
    return self.answer is not None or any(isinstance(call, Called) for call in self.calls)


def read(node: Node) -> Action:
  """Reads a policy span as an action."""
  return Action(node, *node.tree.grammar.read(node))


def search(actions: Sequence[Action], tree: Tree) -> Growth[None]:
  """Serves the calls of actions together; sets observations, `node.data['documents']` and counts."""
  served = [(action, call, _requests(action.node, call)) for action in actions for call in action.calls]
  requests = [request for *_, of_call in served for request in of_call]
  replies, results = iter((yield requests) if requests else ()), collections.defaultdict(list)
  for action, call, of_call in served:
    if isinstance(call, Malformed):
      count_malformed(tree, call)
      results[action.node].append((call, call.message))
      continue
    given = [next(replies) for _ in of_call]
    action.asked += len(given)
    action.failed += sum(isinstance(reply, ToolFailure) for reply in given)
    for documents in filter(is_documents, given):
      action.node.data['documents'] = [*action.node.data.get('documents', ()), *documents]
      action.found += bool(documents)
    results[action.node].append((call, written(tree.grammar, call, given)))
  for action in actions:
    tree.metrics['tool_failures'] += action.failed
    action.observation = tree.grammar.observe(action.node, results[action.node])


def _requests(node: Node, call: Called | Malformed) -> Sequence[ToolCall]:
  if isinstance(call, Malformed):
    return ()
  observe = lambda text: node.tree.grammar.observe(node, [(call, text)])
  if tool := node.tree.grammar.tools.get(call.name):
    return tool.requests(node, call.arguments, lambda text: observe(node.tree.grammar.safe(text)))
  show = lambda documents: observe(written(node.tree.grammar, call, [documents]))
  return [Search(node, call.arguments['query'], show=show)]


def written(speech: Tagged, call: Called, replies: Sequence[Any]) -> str:
  """Writes the replies to a call in a grammar, inert."""
  if tool := speech.tools.get(call.name):
    return speech.safe(tool.result(replies))
  (reply,) = replies
  if isinstance(reply, ToolFailure):
    return f'The search failed: {speech.safe(reply.reason.strip())}\n'
  return grammar.listed(reply, speech.safe) or grammar.NOTHING


def count_malformed(tree: Tree, call: Malformed) -> None:
  """Counts a malformed call, and by its kind."""
  tree.metrics['malformed'] += 1
  if call.kind:
    tree.metrics[f'malformed_{call.kind}'] += 1


def write_until(node: Node, stop: tuple[str, ...], max_tokens: int,
                ends: Callable[[Node], bool]) -> Growth[Node]:
  """Grows one span to the first stop string at which `ends(span)` holds; writes on past the others."""
  span = yield Generate(node, stop=stop, max_tokens=max_tokens)
  while span.stop in stop and not ends(span) and len(span.tokens) < max_tokens:
    yield Generate(span, stop=stop, max_tokens=max_tokens - len(span.tokens))
    span.absorb()
  return span


def write_context(node: Node, max_tokens: int, stop: tuple[str, ...] = ()) -> Growth[Node]:
  """Grows one span to a `</context>` outside a thought, or to another of the stop strings."""
  tag = '</context>'
  return write_until(node, (tag, *stop), max_tokens,
                     lambda span: span.stop != tag or tag in span.tree.grammar.content(span))


def finish(tree: Tree, last: Node, answer: str | None, *, spent: bool = False) -> None:
  """Ends the episode with the answer of its last span, or says why not; `spent`: the budget is used up."""
  tree.answer = answer
  if answer is not None:
    tree.stop = Stop.ANSWERED
  elif last.stop in NO_ROOM:
    tree.stop = Stop(last.stop)
  elif tree.metrics['tool_failures']:
    tree.stop = Stop.TOOL_FAILED
  else:
    tree.stop = Stop.BUDGET if spent else Stop.MALFORMED


def ask_judge(tree: Tree, items: Sequence[tuple[judge.Item, Node]]) -> Growth[list[int | None]]:
  """Returns the judge's scores of items, each about a span; None, which is counted, for one it gave none."""
  scores = []
  for reply in (yield [Ask('judge', item, node) for item, node in items]):
    failed = not isinstance(reply, int)
    tree.metrics['judge_unreadable'] += failed
    scores.append(None if failed else reply)
  return scores


def abreast(growths: Sequence[Growth[Any]]) -> Growth[list[Any]]:
  """Advances several growths in step, so that what they request is served together; returns their results."""
  results, replies = [None] * len(growths), dict.fromkeys(range(len(growths)))
  while replies:
    asked = {}
    for place, reply in replies.items():
      try:
        asked[place] = growths[place].send(reply)
      except StopIteration as end:
        results[place] = end.value
    several = {place: each if isinstance(each, list) else [each] for place, each in asked.items()}
    served = iter((yield [request for each in several.values() for request in each]) if asked else ())
    replies = {place: [next(served) for _ in each] for place, each in several.items()}
    replies = {place: each if isinstance(asked[place], list) else each[0] for place, each in replies.items()}
  return results
