"""A frozen model that replies to prompts: R-Search's reader, a judge. Batched on a sampler of its own."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxsearch.data.questions import Question
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import END, GREEDY, Generate, Tools
from jaxsearch.sampler.rollout import Agent, rollout
from jaxsearch.trees.tree import Role, Tree


@dataclasses.dataclass(frozen=True)
class Assistant:
  """A service for `Ask`: prompts in, greedy replies out.

  Attributes:
    engine: with parameters loaded.
    max_tokens: of a reply.
    stop: stop strings; a reply ends before the first of them.
    chat: whether a prompt is wrapped into the chat template of the tokenizer.
  """
  engine: Engine
  max_tokens: int = 64
  stop: tuple[str, ...] = ()
  chat: bool = False

  def __call__(self, prompts: Sequence[str]) -> list[str]:
    """The replies, stripped; a prompt that leaves no room for one gets an empty reply."""
    agent = Agent(self.engine, self._grow, Tools(), GREEDY)
    trees, _ = rollout(agent, [Question(str(i), prompt, ()) for i, prompt in enumerate(prompts)], jax.random.key(0))
    return [tree.answer for tree in trees]

  def _grow(self, question: Question, tree: Tree):
    tokenizer, prompt = tree.tokenizer, question.question
    if self.chat:
      prompt = tokenizer.chat([{'role': 'user', 'content': prompt}])
    node = yield Generate(tree.root.append(prompt, Role.PROMPT), stop=self.stop, max_tokens=self.max_tokens)
    text = tokenizer.decode(node.tokens[:-1] if node.stop == END else node.tokens)
    ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
    tree.answer = text[:min(ends, default=None)].strip()
