"""A frozen model that replies to prompts: R-Search's reader, a judge. Batched on a sampler of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxsearch.data.questions import Question
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import GREEDY, Generate, Sampling, Tools
from jaxsearch.sampler.rollout import Agent, rollout
from jaxsearch.trees.tree import Role, Tree


@dataclasses.dataclass(frozen=True)
class Assistant:
  """A service for `Ask`: prompts in, replies out.

  Attributes:
    engine: with parameters loaded.
    max_tokens: of a reply.
    stop: stop strings; what follows the first of them is cut off.
    chat: whether a prompt is wrapped into the chat template of the tokenizer.
    sampling: greedy by default.
  """
  engine: Engine
  max_tokens: int = 64
  stop: tuple[str, ...] = ()
  chat: bool = False
  sampling: Sampling = GREEDY

  def __call__(self, prompts: Sequence[str], seed: int = 0) -> list[str]:
    """The replies, stripped; a prompt that leaves no room for one gets an empty reply."""
    agent = Agent(self.engine, self._grow, Tools(), self.sampling)
    trees, _ = rollout(agent, [Question(str(i), prompt, ()) for i, prompt in enumerate(prompts)], jax.random.key(seed))
    return [_before(tree.answer, self.stop).strip() for tree in trees]

  def _grow(self, question: Question, tree: Tree):
    tokenizer, prompt = tree.tokenizer, question.question
    if self.chat:
      prompt = tokenizer.chat([{'role': 'user', 'content': prompt}])
    node = yield Generate(tree.root.append(prompt, Role.PROMPT), stop=self.stop, max_tokens=self.max_tokens)
    ids = node.tokens
    while ids and ids[-1] in tokenizer.eos_ids:
      ids = ids[:-1]
    tree.answer = tokenizer.decode(ids)


def _before(text: str, stops: Sequence[str]) -> str:
  return text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
