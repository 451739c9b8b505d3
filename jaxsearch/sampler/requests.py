"""Requests of a growing tree, and their replies.

A `grow` is a generator. It yields a request, or a list of requests that are served together, and is sent the
reply, or the list of replies in the same order. A request that fails raises nothing: its reply says so, that
of a tool by a `ToolFailure`.

  Generate   -> the new POLICY node below `node`; its `stop` says why it ends (see `Generate`)
  Score      -> a list of log-probabilities for each continuation
  Ask        -> the reply of another model
  Search     -> list of documents, best first (tools/calls.py)
  RunPython  -> what the program printed (tools/python_sandbox.py)
  Call       -> what any other function on the host returned (tools/calls.py)
"""

import dataclasses
import types
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxsearch.tools.calls import (
  SEARCHES,
  TOOLS,
  Call,
  Kind,
  Refused,
  Request,
  Search,
  ToolFailure,
  Tools,
  failure_of,
)
from jaxsearch.tools.python_sandbox import RunPython
from jaxsearch.trees.tree import Node, Role, Stop

__all__ = [
  'END', 'GREEDY', 'LENGTH', 'Ask', 'Call', 'Generate', 'Growth', 'NoLogprobs', 'Refused', 'Request',
  'RunPython', 'Sampling', 'Score', 'Search', 'ToolFailure', 'Tools', 'failure_of']

Growth = Generator[Request, Any, TypeVar('T')]  # what a generator function returns: `grow` a Growth[None]

END = 'end'  # the policy chose an end token, which belongs to the span
LENGTH = 'length'  # `max_tokens` were generated
# Beside these, `node.stop` is the stop string that was found, Stop.CONTEXT_FULL or Stop.DEADLINE.


class NoLogprobs(Refused):
  """Raised where a method needs log-probabilities and the policy is behind a chat server."""

  def __init__(self):
    super().__init__('this method needs log-probabilities, which a chat server does not give: '
                     'take a model folder')


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Says how tokens are sampled; temperature 0 is greedy."""
  temperature: float = 1.0

  def __post_init__(self):
    if not self.temperature >= 0:
      raise ValueError(f'temperature={self.temperature} must be 0 (greedy) or more')


GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Generate(Request):
  """Samples a span after `node`.

  It ends with the token that completes a stop string. That token is never split, since the sampled ids are
  the ids to train on: the text may carry a few characters past the stop string. A stop string counts only if
  it lies in this span entirely.

  Without room for `max_tokens` the span is shorter and its `stop` is Stop.CONTEXT_FULL. Without any room, or
  past the deadline of the episode (Stop.DEADLINE), it is empty.
  """
  node: Node  # the span to follow; all tokens from the root to its end are the context, at least one
  stop: tuple[str, ...] = ()
  max_tokens: int = 256
  forgets: bool = False  # whether the tree goes on from here alone: other pages of its cache may go first

  def __post_init__(self):
    if self.max_tokens < 1:
      raise ValueError(f'max_tokens={self.max_tokens}: a span has at least one token')
    if isinstance(self.stop, str) or not all(self.stop):
      raise ValueError(f'stop={self.stop!r} is no tuple of non-empty strings')

  def submit(self, schedule, pending):
    room = schedule.policy.length - self.node.length
    if room > 0 and schedule.seconds_left(pending.episode) > 0:
      schedule.policy.generate(pending, min(self.max_tokens, room))
    else:
      schedule.set_reply(pending, self.span([], Stop.CONTEXT_FULL if room <= 0 else Stop.DEADLINE, []))

  def span(self, tokens: Sequence[int], stop: str, logprobs: Sequence[float] | None) -> Node:
    """Appends what was sampled, and returns it."""
    node = self.node.append(tokens, Role.POLICY, sampler_logprobs=logprobs)
    node.stop = stop
    return node

  def finish(self, schedule, pending, result, seconds):
    return schedule.policy.finish(pending, result)


@dataclasses.dataclass(frozen=True)
class Score(Request):
  """Asks for log-probabilities of continuations of `node`, each text or ids.

  The temperature is the rollout's, as in training; 1 where the rollout is greedy. The reply has a list for
  each continuation, one number a token, or None where it does not fit.
  """
  node: Node
  continuations: tuple[str | Sequence[int], ...]
  cue: str = ''  # text between the node and the continuations, which stays out of the tree
  tool = 'score'

  @property
  def query(self) -> str:
    return ' | '.join(map(str, self.continuations))

  def summary(self, reply):
    return [None if logprobs is None else round(float(np.sum(logprobs)), 4) for logprobs in reply]

  def describe(self, reply):
    return super().describe(reply) | ({'cue': self.cue} if self.cue else {})

  def submit(self, schedule, pending):
    schedule.policy.score(pending)

  finish = Generate.finish


@dataclasses.dataclass(frozen=True)
class Ask(Request):
  """Asks another model, `tools.services[service]`: a function from a list of items to a list of replies.

  A model on a sampler of its own gets the items of many episodes at a time, once nothing is left to decode. A
  service with a `concurrency` above 0, such as a judge behind a server, gets each item at once, on threads
  while other slots decode, that many at a time. It has a timeout of its own; the deadline of tools does not
  apply. An exception in place of a reply is a failure, None a reply that cannot be read.
  """
  service: str
  item: Any
  node: Node | None = None  # the span that it is about, for the record

  @property
  def tool(self) -> str:
    return self.service

  def summary(self, reply):
    return (self.item if isinstance(self.item, Request) else super()).summary(reply)

  @property
  def about(self) -> str:
    return '' if isinstance(self.item, str) else type(self.item).__name__.lower()

  @property
  def query(self) -> str:
    if isinstance(self.item, str):
      return self.item
    fields = vars(self.item).items()
    return '\n'.join(text for name, text in fields if isinstance(text, str) and name != 'context')

  def submit(self, schedule, pending):
    service = schedule.tools.services.get(self.service)
    if service is None:  # an agent that only answers goes without
      schedule.set_reply(pending, ToolFailure(f'there is no {self.service}'))
    elif concurrency := getattr(service, 'concurrency', 0):
      schedule.start(pending, lambda: service([self.item])[0], self.service, concurrency)
    else:
      schedule.join(pending, self.service, service)

  def finish(self, schedule, pending, result, seconds):
    if result is None:
      result = ToolFailure(f'{self.service}: a reply that cannot be read', 'malformed')
    elif isinstance(result, BaseException):
      result = failure_of(result, self.service)
    schedule.counts['seconds_services'] += seconds
    schedule.count(SERVICES, pending.episode, [result])
    return result


SERVICES = Kind('service_calls', 'service_calls_failed', 'last_service_failure', 'calls of judge or reader')
JUDGEMENTS = Kind('judgements', 'judge_failed', 'last_judge_failure', 'judgements')  # see training/judging.py


def mostly_failed(metrics: Mapping[str, Any], names: Kind = SEARCHES) -> bool:
  """Tells whether more than half of the searches of a rollout failed, or of its other requests."""
  return 2 * metrics.get(names.failed, 0) > metrics.get(names.asked, 0)


def failing(metrics: Mapping[str, Any], before: Mapping[str, Any] = types.MappingProxyType({}), *,
            most: bool = True) -> str | None:
  """Returns a message about searches, tool calls, calls of services and judgements that failed, or None.

  Args:
    metrics: see `Schedule.metrics`; a row that has them, or what `add_failures` returns.
    before: the metrics of the last message: its reason is not repeated.
    most: leaves out those of which no more than half failed.
  """
  failed = lambda names: mostly_failed(metrics, names) if most else metrics.get(names.failed, 0) > 0
  others = metrics.get(TOOLS.failed, 0) > metrics.get(SEARCHES.failed, 0)  # searches are tool calls
  tools = [] if failed(SEARCHES) and (most or not others) else [TOOLS]
  messages = []
  for names in filter(failed, [SEARCHES, *tools, SERVICES, JUDGEMENTS]):
    last = metrics.get(names.last, '')
    again = mostly_failed(before, names) and before.get(names.last, '') == last
    reason = ', as before' if again else f'; the last: {last}'
    messages.append(f'{metrics[names.failed]} of {metrics[names.asked]} {names.what} failed{reason}')
  return '; '.join(messages) or None


def add_failures(several: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Adds up what failed in several rollouts, rows or records: counts, and the last of the reasons."""
  total = dict.fromkeys((SEARCHES.asked, SEARCHES.failed, TOOLS.asked, TOOLS.failed), 0)
  for metrics in several:
    for name, value in metrics.items():
      if isinstance(value, str) and name.startswith('last_'):
        total[name] = value
      elif name.startswith(('tool_calls', 'searches_', 'service_calls', 'judgements', 'judge_failed')):
        total[name] = total.get(name, 0) + value
  return total | {'searches_failed_share': total[SEARCHES.failed] / max(total[SEARCHES.asked], 1)}
