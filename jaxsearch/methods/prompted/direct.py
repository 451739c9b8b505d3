"""Direct inference: the question, and the answer from memory in a few words."""

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import say_answer, write
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Tree


def grow(question: Question, tree: Tree, *, max_tokens: int = 64, prompts: str = '',
         chat: bool = False) -> Growth[None]:
  """Grows one answer."""
  yield from say_answer(tree, write(tree, 'direct', prompts, chat), max_tokens)
