"""A frozen model that replies to prompts: R-Search's reader, a judge. Batched on a sampler of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Generate
from jaxsearch.trees.tree import Role, Tree


@dataclasses.dataclass(frozen=True)
class Assistant:
  """A service for `Ask`: prompts in, replies out.

  Attributes:
    engine: with parameters loaded; its temperature holds.
    max_tokens: of a reply.
    stop: stop strings; what follows the first of them is cut off.
    chat: whether a prompt is wrapped into the chat template of the tokenizer.
  """
  engine: Engine
  max_tokens: int = 64
  stop: tuple[str, ...] = ()
  chat: bool = False

  def __call__(self, prompts: Sequence[str], seed: int = 0) -> list[str]:
    """The replies, stripped; a prompt that leaves no room for one gets an empty reply."""
    tokenizer = self.engine.tokenizer
    if self.chat:
      prompts = [tokenizer.chat([{'role': 'user', 'content': prompt}]) for prompt in prompts]
    trees = [Tree(tokenizer) for _ in prompts]
    self.engine.run([(self._grow(tree, prompt), tree) for tree, prompt in zip(trees, prompts)], jax.random.key(seed))
    return [_before(tree.answer, self.stop).strip() for tree in trees]

  def _grow(self, tree: Tree, prompt: str):
    node = yield Generate(tree.root.append(prompt, Role.PROMPT), stop=self.stop, max_tokens=self.max_tokens)
    ids = node.tokens
    while ids and ids[-1] in tree.tokenizer.eos_ids:
      ids = ids[:-1]
    tree.answer = tree.tokenizer.decode(ids)


def _before(text: str, stops: Sequence[str]) -> str:
  return text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
