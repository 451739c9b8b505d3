"""Rows of public data sets as questions, and tables of them, which need pyarrow.

Tables are parquet as Search-R1 and verl write it, and folders of `datasets.save_to_disk`. Of each row is
taken what is there first:

  question  `question`, `extra_info.question`, or the last turn of `prompt`, behind its last 'Question:'
  golds     `golden_answers`, `reward_model.ground_truth` (or its `target`), `answers`, `answer`,
            `possible_answers` (a list or JSON): see `questions.texts`. Of 'steps #### 72' the number counts.
            With `answer_aliases`; rows that are not `answerable` are left out (MuSiQue)
  id        `id`, else `extra_info`'s split and index ('test_7', as FlashRAG has it), else 'row_7'
  source    `data_source`: 'nq'; 'searchR1_nq' is 'nq', 'openai/gsm8k' is 'gsm8k'. Ids that occur twice get it
            in front
"""

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator

from jaxsearch.data.jsonl import DataError, shortened, unique
from jaxsearch.data.questions import Question, checked, texts
from jaxsearch.rewards.match import read_number

GOLDS = ('golden_answers', 'answers', 'answer', 'possible_answers')
STATE = 'state.json'  # in the folder of a split that `save_to_disk` wrote


def is_table(path: str | os.PathLike) -> bool:
  """Tells whether this is a parquet file or a folder."""
  return pathlib.Path(path).suffix == '.parquet' or os.path.isdir(path)


def read_questions(path: str | os.PathLike) -> list[Question]:
  """Reads the questions of a parquet file or a folder of `save_to_disk`, in the order of its rows.

  Raises DataError that names file, row and column, ImportError without pyarrow, OSError.
  """
  pairs = []
  for number, row in enumerate(rows(pathlib.Path(path))):
    if row.get('answerable') is not False:  # MuSiQue's, as in its own files
      place = f'{path}: row {number + 1}'
      pairs.append((place, question_of_row(row, place, f'row_{number}')))
  used = collections.Counter(question.id for _, question in pairs)
  for index, (place, question) in enumerate(pairs):
    if used[question.id] > 1 and (source := question.metadata.get('source')):
      pairs[index] = place, dataclasses.replace(question, id=f'{source}:{question.id}')
  return unique(path, pairs, 'questions')


def rows(path: pathlib.Path) -> Iterator[dict]:
  """Yields the rows of a Parquet file, or of a folder of Arrow files; ImportError without pyarrow."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as error:
    message = f"{path}: reading tables needs the package 'pyarrow': pip install 'jaxsearch[tables]'"
    raise ImportError(message) from error
  try:
    if not path.is_dir():  # pyarrow says so where there is none
      for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()
      return
    files = sorted(path.glob('data*.arrow'))
    if not files:
      raise DataError(f'{path}: no data*.arrow in it: take the folder of one split, as save_to_disk of '
                      'datasets writes it')
    for name in files:
      with pyarrow.memory_map(str(name)) as file:
        for batch in pyarrow.ipc.open_stream(file):
          yield from batch.to_pylist()
  except pyarrow.ArrowInvalid as error:
    raise DataError(f'{path}: not a table: {error}') from error


def question_of_row(row: dict, place: str, name: str) -> Question:
  """Returns the question of a row; `name` is its id if it has none. Raises DataError, naming `place`."""
  row = {name[:1].lower() + name[1:]: value for name, value in row.items()}  # Bamboogle's begin with capitals
  extra = row['extra_info'] if isinstance(row.get('extra_info'), dict) else {}
  split_and_index = f'{extra["split"]}_{extra["index"]}' if {'split', 'index'} <= extra.keys() else None
  ids = [str(each) for each in (row.get('id'), split_and_index, name) if each is not None]
  source = str(row.get('data_source') or '').removeprefix('searchR1_').removeprefix('openai/')
  golds = _golds(row, place)
  solved = any('####' in gold for gold in golds)
  metadata = {'source': source} if source else {}
  metadata |= {'match': 'numeric'} if source == 'gsm8k' or solved else {}
  if isinstance(row.get('metadata'), dict):  # in a table each row has the keys of all, some null
    metadata |= checked(row['metadata'], place)
  if solved:
    golds = [gold.rpartition('####')[2].strip().replace(',', '') for gold in golds]
    if None in map(read_number, golds):
      raise DataError(f"{place}: no number behind '####'")
  return Question(ids[0], _question(row, extra, place), tuple(golds), metadata)


def _question(row: dict, extra: dict, place: str) -> str:
  for text in (row.get('question'), extra.get('question')):
    if isinstance(text, str) and text.strip():
      return text
  match row.get('prompt'):
    case [*_, {'content': str(text)}]:
      return text.rpartition('Question:')[2].strip()
  columns = ', '.join(map(repr, row))
  raise DataError(f"{place}: no 'question', no 'extra_info.question' and no 'prompt' (found: {columns})")


def _golds(row: dict, place: str) -> list[str]:
  reward = row.get('reward_model')
  if row.get('golden_answers') is None and isinstance(reward, dict):
    row = {'golden_answers': reward.get('ground_truth')}
  column, value = next(((name, row[name]) for name in GOLDS if row.get(name) is not None), ('', None))
  if column == 'possible_answers' and isinstance(value, str):  # PopQA's
    try:
      value = json.loads(value)
    except ValueError as error:
      raise DataError(f"{place}: 'possible_answers' is no JSON: {shortened(value)}") from error
  golds = [gold for gold in [*texts(value), *texts(row.get('answer_aliases') or [])] if gold.strip()]
  if not golds:
    raise DataError(f'{place}: no gold answer in {column or " or ".join(GOLDS)!r}: {shortened(value)}')
  return golds
