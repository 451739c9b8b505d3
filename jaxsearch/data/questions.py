"""Questions with their gold answers, and the endless stream of batches that training draws from.

Files are FlashRAG JSONL: `{"id": "7", "question": "Who?", "golden_answers": ["A"], "metadata": {…}}`, the
last key optional. Grain is imported when a stream is made, so that reading questions costs nothing.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from jaxsearch.data.jsonl import DataError, field, read_records, shortened, text_field, unique
from jaxsearch.files import write_whole
from jaxsearch.rewards.match import RULES, matches


@dataclasses.dataclass(frozen=True)
class Question:
  """A question, the answers that count as right, and whatever else its file holds (hops, gold passages)."""
  id: str
  question: str
  golden_answers: tuple[str, ...]
  metadata: dict = dataclasses.field(default_factory=dict, hash=False)

  def score(self, answer: str | None) -> float:
    """Returns 1.0 for a right answer, else 0.0, by the rule that `metadata` names ('match', 'tolerance')."""
    rule, tolerance = self.metadata.get('match', 'exact'), self.metadata.get('tolerance', 0.0)
    return matches(answer, self.golden_answers, rule, tolerance)


def read_questions(path: str | os.PathLike) -> list[Question]:
  """Reads a question file in the FlashRAG format, in file order.

  Raises DataError that names file, line and key, and OSError.
  """
  questions = ((place, _question(record, place)) for place, record in read_records(path))
  return unique(path, questions, 'questions')


def _question(record: dict, place: str) -> Question:
  name, text = (text_field(record, key, place) for key in ('id', 'question'))
  golds = texts(field(record, 'golden_answers', (list, str, int, float), place))
  if not golds or not all(gold.strip() for gold in golds):  # an empty answer would match a blank one
    raise DataError(f"{place}: 'golden_answers' must hold text that is not blank, not "
                    f'{shortened(record["golden_answers"])}')
  metadata = {} if record.get('metadata') is None else field(record, 'metadata', dict, place)
  return Question(name, text, tuple(golds), checked(metadata, place))


def checked(metadata: dict, place: str) -> dict:
  """Returns metadata without what is null. Raises DataError where what we read of it is of another kind."""
  metadata = {key: value for key, value in metadata.items() if value is not None}
  for key, kind in ('source', str), ('match', str), ('tolerance', (int, float)):
    if key in metadata:
      field(metadata, key, kind, f'{place}: metadata')
  if not 0 <= metadata.get('tolerance', 0) < math.inf:
    raise DataError(f"{place}: metadata: 'tolerance' must be finite and >= 0, not {metadata['tolerance']!r}")
  if metadata.get('match', 'exact') not in RULES:
    given = metadata['match']
    raise DataError(f"{place}: metadata: 'match' must be one of {', '.join(RULES)}, not {given!r}")
  return metadata


def texts(golds: Any) -> list[str]:
  """Returns the golds in a cell: a text, a number, a list, or under 'target', 'text' or 'value'."""
  match golds:
    case {'target': inner} | {'text': inner}:
      return texts(inner)
    case {'value': value}:
      return list(dict.fromkeys([*texts(value), *texts(golds.get('aliases'))]))
    case list():
      return [text for gold in golds for text in texts(gold)]
    case None | '<unk>' | bool() | dict():  # of splits without answers; none that a policy would write
      return []
  return [str(golds)]


def write_questions(questions: Sequence[Question], path: str | os.PathLike) -> None:
  """Writes questions in the FlashRAG format; the inverse of `read_questions`."""
  write_whole(path, ''.join(json.dumps(vars(question), ensure_ascii=False) + '\n' for question in questions))


class QuestionBatches:
  """An endless stream of lists of questions: a new seeded order every epoch, resumable.

  Every process draws the whole batch of a step, so neither their number nor a restart on another number of
  them changes which questions a step sees. An epoch ends where the questions do, inside a batch if need be;
  none is left out.
  """

  def __init__(self, questions: Sequence[Question], batch_size: int, *, seed: int = 0):
    """Args: questions: the same list on every process. batch_size: questions a step over all processes."""
    import grain

    if not questions:
      raise ValueError('no questions to draw batches from')
    digest = hashlib.sha256()
    for question in questions:
      digest.update(ascii((question.id, question.question, question.golden_answers)).encode())
    self._stream = {'questions': digest.hexdigest()[:16], 'batch_size': batch_size, 'seed': seed}
    # `.seed` mixes the seed; `.shuffle(seed)` would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    self._order = grain.MapDataset.source(questions).seed(seed).shuffle().repeat()
    self.drawn = 0  # questions so far

  def __next__(self) -> list[Question]:
    return self.take(self._stream['batch_size'])

  def take(self, number: int) -> list[Question]:
    """Returns the next questions, as many as `number` says."""
    self.drawn += number
    return list(map(self.drawn_at, range(self.drawn - number, self.drawn)))

  def drawn_at(self, index: int) -> Question:
    """Returns the question that is drawn after `index` others."""
    return self._order[index]

  def get_state(self) -> dict:
    """Returns where the stream stands, as JSON can hold it; the same on every process."""
    return {**self._stream, 'position': self.drawn}

  def set_state(self, state: dict) -> None:
    """Resumes where `get_state` was called. Raises ValueError that names what differs."""
    for key, value in self._stream.items():
      if (was := state.get(key)) != value:
        raise ValueError(f'cannot resume this stream of questions: {key} was {was!r}, now it is {value!r}')
    self.drawn = state['position']
