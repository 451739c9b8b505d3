"""Reads result files that others wrote: checks the fields that are used, and names the first fault."""

import collections
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pydantic
from typing_extensions import TypedDict

from jaxsearch.data.jsonl import DataError
from jaxsearch.training import row_files


class _Figures(pydantic.BaseModel, extra='allow'):
  intervals: dict[str, tuple[float, float]]

  @pydantic.model_validator(mode='after')
  def _has_them(self):
    for name in self.intervals:
      if not isinstance(self.model_extra.get(name), int | float):
        raise ValueError(f'no {name}')
    return self


def _object(**fields):
  """Returns the type of a JSON object with at least these fields."""
  return TypedDict('_Object', fields)


class _Result(pydantic.BaseModel):
  """Names what a table reads of a result of bench."""
  benchmarks: dict[str, _Figures]
  macro: _Figures
  hops: dict[str, _Figures] = {}
  manifest: _object(
    method=str, questions=dict[str, _object(ids=str, golds=str, n=int, split=str | None)],
    corpus=_object(name=str | None, sha256=str | None), searched=bool, index=_object(backend=str), k=int,
    turns=int | None, metric=str, decoding=dict)
  predictions: list[_object(benchmark=str, id=str, question=str, em=float)]

  @pydantic.model_validator(mode='after')
  def _agree(self):
    if missing := self.benchmarks.keys() - self.manifest['questions'].keys():
      raise ValueError(f'manifest.questions has no {min(missing)}')
    return self


class _Predictions(pydantic.BaseModel):
  """Names what the viewer and a judge read of a result of eval or bench."""
  predictions: list[_object(id=str, question=str, golden_answers=list[str],
                            spans=list[_object(role=str, text=str)])]


def read_result(path: str | os.PathLike, command: str = 'bench', model: type = _Result) -> dict[str, Any]:
  """Reads a result of `jaxsearch bench --out`; of an unfinished one (its .part.jsonl file) the predictions.

  Raises DataError, which names the first fault, for a file that does not fit the model; OSError.
  """
  path, fault = pathlib.Path(path), f'{path}: not a result of jaxsearch {command}'
  try:
    if path.name.endswith('.jsonl'):
      first, *rows = row_files.read(path) or [{}]
      result = {'predictions': list(records_of(rows).values())} if 'identity' in first else {}
    else:
      result = json.loads(path.read_bytes())
    model.model_validate(result)
  except pydantic.ValidationError as error:
    first = error.errors(include_url=False, include_input=False)[0]
    raise DataError(f'{fault} ({".".join(map(str, first["loc"]))}: {first["msg"]})') from error
  except (ValueError, TypeError, RecursionError) as error:
    raise DataError(f'{fault}: not JSON') from error
  return result


def read_predictions(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the records of a result of eval or bench, finished or not. Raises as `read_result`."""
  return read_result(path, 'eval or bench', _Predictions)['predictions']


def records_of(rows: Sequence[Mapping]) -> collections.defaultdict[int, dict[str, Any]]:
  """Returns number -> record of the rows that an evaluation has kept; a later row adds to its record."""
  records = collections.defaultdict(dict)
  for row in rows:
    records[row['number']].update(row['record'])
  return records


def read_closed_book(path: str) -> dict[tuple[str, str, str], float]:
  """Returns (benchmark, id, question) -> EM of a result of bench by an agent that never searched.

  Raises DataError for another.
  """
  result = read_result(path)
  if result['manifest']['searched']:
    raise DataError(f'{path}: this agent searched, so its answers are not closed-book')
  return by_question(result['predictions'], 'em')


def by_question(records: Sequence[Mapping[str, Any]], figure: str) -> dict[tuple[str, str, str], float]:
  """Returns (benchmark, id, question) -> the mean of a figure over its answers, where they have it."""
  values = collections.defaultdict(list)
  for record in records:
    if figure in record:
      values[record['benchmark'], record['id'], record['question']].append(record[figure])
  return {question: float(np.mean(of)) for question, of in values.items()}
