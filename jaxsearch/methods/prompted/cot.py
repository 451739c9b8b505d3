"""Chain of thought (Wei et al. 2022, arXiv 2201.11903; without examples Kojima et al. 2022)."""

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import marked_answer, say_answer, write
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Tree


def grow(question: Question, tree: Tree, *, max_tokens: int = 512, prompts: str = '',
         chat: bool = False) -> Growth[None]:
  """Grows one chain of thought with 'the answer is' at its end."""
  yield from say_answer(tree, write(tree, 'cot', prompts, chat), max_tokens, marked_answer)
