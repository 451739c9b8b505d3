"""The embedded world: an encyclopedia of real facts in short passages, and questions on them, as shipped."""

import functools
from pathlib import Path

from jaxsearch.data.corpus import Document, read_corpus
from jaxsearch.data.jsonl import read_records
from jaxsearch.data.questions import Question
from jaxsearch.world.facts import read_back
from jaxsearch.world.questions import restore

FOLDER = Path(__file__).parent / 'shipped'  # also a tokenizer folder in the Hugging Face sense
POLICY, REVIEWER, CODER, READER = FOLDER, FOLDER / 'review', FOLDER / 'carl', FOLDER / 'reader'
SPLITS = ('warm', 'rl', 'dev', 'test')


def folder() -> Path:
  """Where the files of the world lie."""
  return FOLDER


def tokenizer_path() -> Path:
  """The file of the world's tokenizer, in the format of the `tokenizers` library."""
  return folder() / 'tokenizer.json'


def corpus_path() -> Path:
  """The encyclopedia, in the Search-R1 corpus format."""
  return folder() / 'corpus.jsonl.gz'


def questions_path(split: str) -> Path:
  """The file with the questions of a split; ValueError for a split that does not exist."""
  if split not in SPLITS:
    raise ValueError(f'the world has no split {split!r}; it has {", ".join(SPLITS)}')
  return folder() / f'questions_{split}.jsonl.gz'


@functools.cache
def _corpus() -> tuple[Document, ...]:
  return tuple(read_corpus(corpus_path()))


def corpus() -> list[Document]:
  """All passages, one an entity."""
  return list(_corpus())


@functools.cache
def _questions(split: str) -> tuple[Question, ...]:
  records = [record for _, record in read_records(questions_path(split))]
  if split == 'warm':  # kept as id and text only
    entities = {e.id: e for e in read_back(corpus())}
    return tuple(restore(entities, r['id'], r['question'], split) for r in records)
  return tuple(Question(r['id'], r['question'], tuple(r['golden_answers']), r['metadata']) for r in records)


def questions(split: str) -> list[Question]:
  """The questions of a split ('warm', 'rl', 'dev' or 'test'), in a fixed shuffled order.

  They are read once and shared: do not write to their metadata.
  """
  return list(_questions(split))
