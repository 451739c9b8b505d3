"""Retrieval-augmented generation (Lewis et al. 2020, arXiv 2005.11401): one search, one answer."""

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import find, say_answer, write
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Tree


def grow(question: Question, tree: Tree, *, max_tokens: int = 64, prompts: str = '',
         chat: bool = False) -> Growth[None]:
  """Grows one answer after the documents."""
  documents = yield from find(tree, question.question)
  yield from say_answer(tree, write(tree, 'documents', prompts, chat, documents=documents), max_tokens)
