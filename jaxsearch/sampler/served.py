"""The policy of a rollout behind a server, as a `Schedule` drives it: requests are calls on threads.

`chat_policy.ChatServer` and `remote.RemoteEngine` are such servers. What they send back becomes part of the
tree on the schedule's own thread, so nothing is added to a tree whose episode is over.
"""

import collections
import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxsearch.sampler.driver import Episode, Pending, Schedule
from jaxsearch.sampler.requests import LENGTH, Generate, Sampling, ToolFailure
from jaxsearch.trees.tree import Stop


class Span(NamedTuple):
  """A span as a server wrote it. `cached` counts the tokens of context that the server still had, `prefilled`
  those that it computed; `version` is the number of the weights that sampled it."""
  tokens: Sequence[int]
  stop: str
  logprobs: Sequence[float] | None = None
  cached: int = 0
  prefilled: int = 0
  version: int | None = None


class ServedDecoding(contextlib.nullcontext):
  """One rollout by a `server`, which has:

  - `length`, tokens of the longest path; `slots`, requests in flight; `episodes` under way at most;
    `episode_deadline`, seconds;
  - `generate(request, most, sampling, seed) -> Span` of at most `most` tokens;
  - `score(request, temperature) -> (reply, cached, prefilled)`;
  - `figures`, metrics of its own.
  """
  deterministic = False
  room = True  # replies wait for nothing
  busy = decodes = False
  evicted = seconds_waited = 0

  def __init__(self, server: Any, key: jax.Array, sampling: Sampling, schedule: Schedule):
    super().__init__()
    self.server, self.sampling, self.schedule, self.length = server, sampling, schedule, server.length
    self.seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
    self.episode_deadline = server.episode_deadline
    self.active = self.asked = 0  # episodes under way; requests without a reply

  figures = property(lambda self: self.server.figures)

  def claim(self, waiting: collections.deque[Episode]) -> Episode | None:
    """Takes the first of the episodes that wait, unless enough are under way."""
    free = self.active < self.server.episodes and self.asked < self.server.slots
    self.active += free
    return waiting.popleft() if free else None

  def release(self, episode: Episode) -> None:
    """Notes that an episode has ended."""
    self.active -= 1

  def generate(self, pending: Pending, most: int) -> None:
    """Asks the server for a span of at most `most` tokens.

    Each request has a seed of its own: samples of one question differ, and a repeated rollout asks the same.
    """
    episode = pending.episode
    seed = np.random.SeedSequence([*self.seed, episode.number, episode.requests]).generate_state(1)[0] >> 1
    self._start(pending, self.server.generate, pending.request, most, self.sampling, int(seed))

  def score(self, pending: Pending) -> None:
    """Asks the server for log-probabilities."""
    self._start(pending, self.server.score, pending.request, self.sampling.temperature or 1.0)

  def _start(self, pending: Pending, ask, *arguments) -> None:
    pending.episode.requests += 1
    self.asked += 1
    self.schedule.start(pending, functools.partial(ask, *arguments), 'spans', self.server.slots)

  def finish(self, pending: Pending, result: Any) -> Any:
    """Returns the reply; raises what a server raised, since without spans the rollout cannot go on."""
    self.asked -= 1
    if isinstance(result, BaseException):
      raise result
    late, counts = isinstance(result, ToolFailure), self.schedule.counts  # the episode's time is up
    request = pending.request
    if isinstance(request, Generate):
      span = Span([], Stop.DEADLINE) if late else result
      counts.update(tokens_reused=span.cached, tokens_prefilled=span.prefilled)
      self.schedule.add(pending.episode, tokens_decoded=len(span.tokens))
      cut = span.stop == LENGTH and self.length - request.node.length < request.max_tokens
      logprobs = span.logprobs if span.tokens else []  # as our own engine has them
      node = request.span(span.tokens, Stop.CONTEXT_FULL if cut else span.stop, logprobs)
      if span.version is not None:
        node.data['weights'] = span.version
      return node
    reply, cached, prefilled = ([None] * len(request.continuations), 0, 0) if late else result
    counts.update(tokens_reused=cached, tokens_prefilled=prefilled)
    return reply

  def place(self) -> list:
    """Does nothing: a server has no cache of ours."""
    return []
