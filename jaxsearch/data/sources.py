"""Where questions and passages come from, by name: the embedded world, or files."""

from jaxsearch.data import world
from jaxsearch.data.corpus import Passage, read_corpus
from jaxsearch.data.questions import Question, read_questions

ARITHMETIC = ('sum', 'difference')  # operations whose answer has to be worked out, which a small policy cannot do


def load_questions(name: str, *, hops: tuple[int, ...] = (), arithmetic: bool = True) -> list[Question]:
  """The questions that `name` stands for.

  Args:
    name: 'world:SPLIT', or a file in the FlashRAG format.
    hops: of the world's questions only those with so many hops; () is all.
    arithmetic: whether the world's questions that want a sum or a difference are among them.
  Raises:
    ValueError: no such split, or no question is left; names it.
    DataError: a file that is not in the format; names file and line.
  """
  if not name.startswith('world:'):
    return read_questions(name)
  found = [
    question for question in world.questions(name.removeprefix('world:'))
    if (not hops or question.metadata['hops'] in hops)
    and (arithmetic or question.metadata.get('operation') not in ARITHMETIC)
  ]
  if not found:
    raise ValueError(f'{name}: no questions of {hops} hops')
  return found


def load_corpus(name: str) -> list[Passage]:
  """The passages that `name` stands for: 'world', or a file in the Search-R1 format."""
  return world.corpus() if name == 'world' else read_corpus(name)
