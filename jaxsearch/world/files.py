"""The embedded world as shipped: real facts in short documents, questions on them, models."""

import functools
from pathlib import Path

from jaxsearch.data import questions as question_files
from jaxsearch.data.corpus import Document, read_corpus
from jaxsearch.data.questions import Question

SPLITS = ('warm', 'rl', 'dev', 'test')
ARITHMETIC = ('sum', 'difference')  # operations that want an answer worked out: too hard for a small policy


def folder() -> Path:
  """Returns the folder of the world's files, also the Hugging Face folder of policy and tokenizer."""
  return Path(__file__).parent / 'shipped'


POLICY, REVIEWER, CODER, READER = (folder() / name for name in ('', 'review', 'carl', 'reader'))  # the models


@functools.cache
def corpus() -> list[Document]:
  """Returns all documents, one an entity. They are read once and shared: do not change the list."""
  return read_corpus(folder() / 'corpus.jsonl.gz')


@functools.cache
def _questions(split: str) -> list[Question]:
  return question_files.read_questions(folder() / f'questions_{split}.jsonl.gz')


def questions(split: str, hops: tuple[int, ...] = (), arithmetic: bool = True) -> list[Question]:
  """Returns the questions of a split in a fixed shuffled order, read once: do not write to their metadata.

  Args:
    hops: takes only questions with one of these numbers of hops; () is all.
    arithmetic: takes questions that want a sum or a difference, too.
  Raises ValueError: no such split, or no question is left.
  """
  if split not in SPLITS:
    raise ValueError(f'the world has no split {split!r}; it has {", ".join(SPLITS)}')
  selected = [question for question in _questions(split) if (not hops or question.metadata['hops'] in hops)
              and (arithmetic or question.metadata.get('operation') not in ARITHMETIC)]
  if not selected:
    raise ValueError(f'world:{split}: no questions of {hops} hops')
  return selected
