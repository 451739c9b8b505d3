"""Frozen models that serve `Ask`, each on an engine of its own. `first_requests` asks a method before a
rollout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.sampler.driver import Agent, Grow, rollout
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import (
  GREEDY,
  Generate,
  Growth,
  Refused,
  Sampling,
  Score,
  Search,
  ToolFailure,
  Tools,
)
from jaxsearch.trees.tree import Role, Tree


def first_requests(grow: Grow, question: Question, tokenizer: Any,
                   grammar: Any = None) -> list[Generate | Score]:
  """Returns what `grow` first asks of the policy, if searches find nothing and other tools fail."""
  tree = Tree(tokenizer, question, np.random.default_rng(0), grammar)
  growth, reply = grow(question, tree), None
  while True:
    try:
      yielded = growth.send(reply)
    except (StopIteration, Refused):  # a probe has no services and no other questions
      return []
    asked = yielded if isinstance(yielded, (list, tuple)) else [yielded]
    if of_policy := [request for request in asked if isinstance(request, (Generate, Score))]:
      growth.close()
      return of_policy
    replies = [[] if isinstance(request, Search) else ToolFailure('a probe') for request in asked]
    reply = replies if asked is yielded else replies[0]


@dataclasses.dataclass(frozen=True)
class Assistant:
  """A frozen model on its own sampler that replies to prompts: a service for `Ask`, a reader or a judge."""
  engine: Engine              # with parameters loaded
  max_tokens: int = 64        # of a reply
  stop: tuple[str, ...] = ()  # a reply ends before the first of these
  chat: bool = False          # whether a prompt is wrapped into the tokenizer's chat template
  temperature: float = 0.0    # of the replies; 0 is greedy

  def __call__(self, prompts: Sequence[str], seeds: Sequence[int] | None = None) -> list[str]:
    """Returns the replies, stripped; a prompt that leaves no room for one gets an empty reply.

    Above temperature 0 a reply depends on its prompt and on its seed (0 to 2**31 - 1), by default its place.
    """
    agent = Agent(self.engine, self._grow, Tools(), Sampling(self.temperature))
    questions = [Question(str(i), prompt, ()) for i, prompt in enumerate(prompts)]
    trees, _ = rollout(agent, questions, jax.random.key(0), numbers=seeds)
    return [tree.answer for tree in trees]

  def _grow(self, question: Question, tree: Tree) -> Growth[None]:
    prompt = question.question
    if self.chat:
      prompt = tree.tokenizer.chat([{'role': 'user', 'content': prompt}])
    asked = tree.root.append(prompt, Role.PROMPT)
    node = yield Generate(asked, stop=self.stop, max_tokens=self.max_tokens)
    text = node.text_without_end
    ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
    tree.answer = text[:min(ends, default=None)].strip()


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A frozen model with the policy's tokenizer that serves `Score` by `Ask`: Search-R2's frozen refiner.

  It has a cache of its own, so it prefills the whole path of every request.
  """
  engine: Engine

  def __call__(self, scores: Sequence[Score]) -> list[list[list[float] | None]]:
    if scores and scores[0].node.tree.tokenizer.pieces() != self.engine.tokenizer.pieces():
      raise ValueError("its tokenizer is another than the policy's")

    def grow(question: Question, tree: Tree) -> Growth[None]:
      score = scores[int(question.id)]
      path = tree.root.append(score.node.path_tokens(), Role.PROMPT)
      tree.answer = yield dataclasses.replace(score, node=path)

    questions = [Question(str(i), '', ()) for i in range(len(scores))]
    trees, _ = rollout(Agent(self.engine, grow, Tools(), GREEDY), questions, jax.random.key(0))
    return [tree.answer for tree in trees]
