"""What a growing tree may ask of the sampler, and what it gets.

A `grow` is a generator: it yields a request, or a list of requests that are served together, and is sent the reply, or
the list of replies in the same order. A request that fails is no exception: its reply says so.

  Generate   -> the new POLICY node below `node`; its `stop` says why it ends (see `Generate`)
  Search     -> list of documents, best first, or a `ToolFailure`
  RunPython  -> what the program printed, or a `ToolFailure`
  Call       -> what the function returned, or a `ToolFailure`
  Score      -> a list of log-probabilities for each continuation
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxsearch.trees.tree import Node

END = 'end'  # the policy chose an end token, which belongs to the span
LENGTH = 'length'  # `max_tokens` were generated
# Beside these, `node.stop` is the stop string that was found, Stop.CONTEXT_FULL or Stop.DEADLINE.


def check_sampling(temperature: float | None, top_p: float | None, top_k: int | None) -> None:
  """Raises ValueError for a sampling parameter out of its range; None is not checked."""
  if temperature is not None and not temperature >= 0:
    raise ValueError(f'temperature={temperature}: 0 (greedy) or more')
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f'top_p={top_p}: more than 0, at most 1 (off)')
  if top_k is not None and not top_k >= 0:
    raise ValueError(f'top_k={top_k}: 0 (off) or more')


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are sampled where a request does not say. Temperature 0 is greedy; top_p=1 and top_k=0 are off."""
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0

  def __post_init__(self):
    check_sampling(**vars(self))


GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Generate:
  """Sample a span after `node`.

  It ends with the token in which one of the stop strings is complete. A token is never split: where the stop string
  ends in the middle of a token the span keeps that token whole, since the ids that were sampled are the ids to train
  on, and its text carries the few characters that follow. A stop string counts only if it lies in this span entirely.

  Where the room for `max_tokens` is missing the span is shorter and its `stop` is Stop.CONTEXT_FULL; without any room,
  or past the deadline of the episode (Stop.DEADLINE), it is an empty span.

  Attributes:
    node: the span to follow; all tokens from the root to its end are the context, at least one.
    stop: stop strings.
    max_tokens: at most so many tokens.
    temperature, top_p, top_k: see `Sampling`; None takes the rollout's.
    forbid: token ids that are not sampled here.
  """
  node: Node
  stop: tuple[str, ...] = ()
  max_tokens: int = 256
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  forbid: tuple[int, ...] = ()

  def __post_init__(self):
    if self.max_tokens < 1:
      raise ValueError(f'max_tokens={self.max_tokens}: a span has at least one token')
    if isinstance(self.stop, str) or not all(self.stop):
      raise ValueError(f'stop={self.stop!r} is no tuple of non-empty strings')
    check_sampling(self.temperature, self.top_p, self.top_k)


@dataclasses.dataclass(frozen=True)
class Search:
  """Ask the search back end. `node`: the span that asked; the documents are shortened to the room after it."""
  node: Node
  query: str
  topk: int | None = None  # None takes the rollout's


@dataclasses.dataclass(frozen=True)
class RunPython:
  """Run a program in the sandbox, on the tools' threads while other rows decode.

  It may call `search(query, k)`, which gives the documents of the search back end as text, and `table()`, the rows of
  `table`. The reply is shortened to the room behind `node`, the span that wrote it.
  """
  node: Node
  code: str
  table: Sequence[Sequence[str]] = ()


@dataclasses.dataclass(frozen=True)
class Call:
  """Run any other host function (a judge, a sandbox) on the tools' threads while other rows decode."""
  function: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Ask:
  """Ask another model: `tools.services[service]` gets the items of many episodes at a time, once nothing is left to decode.

  The reply is the service's for this item, or a ToolFailure. A model behind a server is better asked with `Call`.
  """
  service: str
  item: Any


@dataclasses.dataclass(frozen=True)
class Score:
  """Log-probabilities, at temperature 1 and without truncation, of given continuations of `node`.

  Each continuation is text or ids. The reply holds a list of one log-probability a token for each, or None for a
  continuation that does not fit.
  """
  node: Node
  continuations: tuple[str | Sequence[int], ...]


@dataclasses.dataclass(frozen=True)
class ToolFailure:
  """The reply to a tool request that failed."""
  reason: str


Request = Generate | Search | RunPython | Call | Ask | Score
