"""Questions with their gold answers, and the endless stream of batches that training draws from.

Files are FlashRAG JSONL: `{"id": "7", "question": "Who ...?", "golden_answers": ["A", "B"], "metadata": {...}}`, the last key
optional. `read_questions` checks a file; `QuestionBatches` shuffles, repeats, batches and shards it with grain and resumes where
it was. Grain is imported when a stream is made, so that reading questions costs nothing.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence

from jaxsearch.data.jsonl import DataError, field, read_records, shortened, text_field, unique
from jaxsearch.files import write_whole
from jaxsearch.rewards.match import matches


@dataclasses.dataclass(frozen=True)
class Question:
  """A question, the answers that count as right, and whatever else its file holds (hops, gold passages)."""
  id: str
  question: str
  golden_answers: tuple[str, ...]
  metadata: dict = dataclasses.field(default_factory=dict, hash=False)

  def score(self, answer: str | None) -> float:
    """1.0 if an answer is right, else 0.0: exactly, or by the rule in `metadata` ('match', 'tolerance': rewards/match.py)."""
    return matches(answer, self.golden_answers, self.metadata.get('match', 'exact'), self.metadata.get('tolerance', 0.0))


def read_questions(path: str | os.PathLike) -> list[Question]:
  """Reads a question file in the FlashRAG format, in file order.

  Raises:
    DataError: bad JSON, a missing key, a value of the wrong kind, a blank gold, an id given twice, no question at all; names
      file, line and key.
    OSError: the file cannot be opened.
  """
  return unique(path, ((place, question_of(record, place)) for place, record in read_records(path)), 'questions')


def question_of(record: dict, place: str) -> Question:
  """The question of a record in the FlashRAG format; `place` is for messages. Raises DataError."""
  metadata = {} if record.get('metadata') is None else field(record, 'metadata', dict, place)
  return Question(text_field(record, 'id', place), text_field(record, 'question', place), _golds(record, place), metadata)


def write_questions(questions: Sequence[Question], path: str | os.PathLike) -> None:
  """Writes questions in the FlashRAG format; the inverse of `read_questions`."""
  write_whole(path, ''.join(json.dumps(vars(question), ensure_ascii=False) + '\n' for question in questions))


def _golds(record: dict, place: str) -> tuple[str, ...]:
  value = field(record, 'golden_answers', (list, str, int, float), place)
  golds = value if isinstance(value, list) else [value]  # a bare string is one gold, not its letters
  if not golds:
    raise DataError(f"{place}: 'golden_answers' is empty: no answer could be right")
  for gold in golds:
    # Some files hold numbers as numbers. A blank gold would be matched by an empty answer.
    number = isinstance(gold, (int, float)) and not isinstance(gold, bool)
    if not number and not (isinstance(gold, str) and gold.strip()):
      raise DataError(f"{place}: 'golden_answers' must hold text that is not blank, not {shortened(gold)}")
  return tuple(str(gold) for gold in golds)


class QuestionBatches:
  """An endless iterator over lists of questions: a new seeded order every epoch, resumable.

  Every process draws the whole batch of a step, so neither their number nor a restart on another number of them changes which
  questions a step sees. An epoch ends where the questions do, inside a batch if need be; none is left out.
  """

  def __init__(self, questions: Sequence[Question], batch_size: int, *, seed: int = 0):
    """Args:
      questions: the same list, in the same order, on every process.
      batch_size: questions a step over all processes.
      seed: 0 to 2**32 - 1; decides the order of every epoch.
    """
    import grain

    if not questions:
      raise ValueError('no questions to draw batches from')
    if batch_size < 1:
      raise ValueError(f'batch_size={batch_size} must be at least 1')
    if not 0 <= seed < 2**32:
      raise ValueError(f'seed={seed} must be between 0 and 2**32 - 1')
    digest = hashlib.sha256()
    for question in questions:
      digest.update(ascii((question.id, question.question, question.golden_answers)).encode())
    self._stream = {'questions': digest.hexdigest()[:16], 'batch_size': batch_size, 'seed': seed}
    # `.seed` mixes the seed; `.shuffle(seed)` would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    order = grain.MapDataset.source(questions).seed(seed).shuffle().repeat()
    # Questions lie in memory: threads that read ahead would only cost.
    batches = order.batch(batch_size, batch_fn=list)
    self._batches = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

  def __iter__(self) -> 'QuestionBatches':
    return self

  def __next__(self) -> list[Question]:
    return next(self._batches)

  def get_state(self) -> dict:
    """Where the stream stands, as JSON can hold it; the same on every process."""
    return {**self._stream, 'position': self._batches.get_state()}

  def set_state(self, state: dict) -> None:
    """Resumes where `get_state` was called; ValueError names what differs: the questions, the batch size or the seed."""
    for key, value in self._stream.items():
      if state.get(key) != value:
        raise ValueError(f'cannot resume this stream of questions: {key} was {state.get(key)!r}, now it is {value!r}')
    self._batches.set_state(state['position'])
