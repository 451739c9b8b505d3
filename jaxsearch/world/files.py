"""The embedded world as shipped:

An encyclopedia of real facts in short documents, questions on them, models.
"""

import functools
from pathlib import Path

from jaxsearch.data.corpus import Document, read_corpus
from jaxsearch.data.jsonl import read_records
from jaxsearch.data.questions import Question, read_questions
from jaxsearch.world.facts import read_back
from jaxsearch.world.questions import restore

SPLITS = ('warm', 'rl', 'dev', 'test')
ARITHMETIC = ('sum', 'difference')  # operations that want an answer worked out: too hard for a small policy


def folder() -> Path:
  """Returns where the files of the world lie; also a tokenizer folder in the Hugging Face sense."""
  return Path(__file__).parent / 'shipped'


POLICY, REVIEWER, CODER, READER = (folder() / name for name in ('', 'review', 'carl', 'reader'))  # the models


@functools.cache
def corpus() -> list[Document]:
  """Returns all documents, one an entity. They are read once and shared: do not change the list."""
  return read_corpus(folder() / 'corpus.jsonl.gz')


@functools.cache
def _questions(split: str) -> list[Question]:
  path = folder() / f'questions_{split}.jsonl.gz'
  if split != 'warm':
    return read_questions(path)
  # These questions are kept as id and text only.
  entities = {entity.id: entity for entity in read_back(corpus())}
  return [restore(entities, record['id'], record['question'], split) for _, record in read_records(path)]


def questions(split: str, hops: tuple[int, ...] = (), arithmetic: bool = True) -> list[Question]:
  """Returns the questions of a split ('warm', 'rl', 'dev' or 'test'), in a fixed shuffled order.

  They are read once and shared: do not write to their metadata.

  Args:
    hops: takes only questions with one of these numbers of hops; () is all.
    arithmetic: takes questions that want a sum or a difference, too.

  Raises ValueError: no such split, or no question is left.
  """
  if split not in SPLITS:
    raise ValueError(f'the world has no split {split!r}; it has {", ".join(SPLITS)}')
  found = [question for question in _questions(split) if (not hops or question.metadata['hops'] in hops)
           and (arithmetic or question.metadata.get('operation') not in ARITHMETIC)]
  if not found:
    raise ValueError(f'world:{split}: no questions of {hops} hops')
  return found
