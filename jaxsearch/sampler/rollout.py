"""The one rollout driver: questions in, grown trees out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Request, Sampling, Tools
from jaxsearch.sampler.schedule import Schedule
from jaxsearch.trees.tree import Tree

Grow = Callable[[Question, Tree], Iterator[Request]]


@dataclasses.dataclass(frozen=True)
class Agent:
  """A policy with its method and tools.

  Attributes:
    engine: the policy, with its parameters loaded.
    grow: a method's `grow` with its settings bound, see jaxsearch/methods.
    tools: search, sandbox, other models.
    sampling: temperature, top-p and top-k where a request names none.
  """
  engine: Engine
  grow: Grow
  tools: Tools
  sampling: Sampling


def rollout(agent: Agent, questions: Sequence[Question], key, *, sampling: Sampling | None = None, tools: Tools | None = None,
            numbers: Sequence[int] | None = None, on_progress: Callable[[int, int, dict], None] | None = None,
            watch: Callable[[Tree, Any], None] | None = None) -> tuple[list[Tree], dict[str, float]]:
  """Grows one tree for each of `questions` to its end.

  Args:
    questions: one for each tree; repeat a question to roll it out several times.
    key: a JAX random key. A tree's tokens, and its `rng`, are a function of the key and of the tree's number alone.
    sampling, tools: replace the agent's.
    numbers: of the trees, their places in the global batch; 0, 1, 2, … by default.
    on_progress, watch: see `Schedule`.
  Returns:
    (trees in the order of `questions`, metrics: see `Schedule.metrics`).
  Raises:
    GrowthError: a `grow` raised; the message names its question.
  """
  numbers = range(len(questions)) if numbers is None else numbers
  words = np.asarray(jax.random.key_data(key)).ravel().tolist()
  trees = [Tree(agent.engine.tokenizer, question, np.random.default_rng([*words, number]))
           for question, number in zip(questions, numbers, strict=True)]
  growths = [(number, agent.grow(tree.question, tree), tree) for number, tree in zip(numbers, trees)]
  schedule = Schedule(agent.engine, growths, agent.engine.put(key), sampling or agent.sampling, tools or agent.tools,
                      on_progress, watch)
  return trees, schedule.run()
