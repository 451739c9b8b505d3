"""Iter-RetGen (Shao et al. 2023, arXiv 2305.15294): search for question and last answer, answer, repeat."""

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import ENDS, find, finish, marked_answer, plain, short_answer, write
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees.tree import Tree


def grow(question: Question, tree: Tree, *, rounds: int = 3, reason: bool = True, max_tokens: int = 256,
         prompts: str = '', chat: bool = False) -> Growth[None]:
  """Grows an answer in each round; each round sees its own documents only, and the last one counts.

  Args:
    rounds: searches, and answers.
    reason: answers are chains of thought, as in the paper; else a few words, as in FlashRAG. All of an answer
      enters the next query.
  """
  call, read = ('reasoned', marked_answer) if reason else ('documents', short_answer)
  query = question.question
  for _ in range(rounds):
    documents = yield from find(tree, query)
    asked = write(tree, call, prompts, chat, documents=documents)
    node = yield Generate(asked, stop=ENDS, max_tokens=max_tokens)
    query = f'{question.question} {plain(node.text_without_end)}'
  finish(tree, node, read(node.text_without_end))
