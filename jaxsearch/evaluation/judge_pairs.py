"""`jaxsearch judge`: a language model compares two result files of `jaxsearch eval --out`, question by question.

`rewards/trajectory_judge.py` has the rubrics and prompts and reads the replies. The judge sees all spans of a prediction but its
prompts; for a method that branches (Search-R2 with its refiner on) these are all branches, the discarded ones included.
"""

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxsearch.data.jsonl import DataError, shortened, text_field
from jaxsearch.rewards import trajectory_judge
from jaxsearch.rewards.trajectory_judge import NEUTRAL, RUBRICS, TIE, Scores, Spans, TrajectoryPair

BATCH = 16  # pairs, of two prompts each, between two updates of the progress bar
COUNTS = {'win': 1, 'tie': 0, 'loss': -1}  # of `a`: the sign of its lead

Trajectories = dict[str, tuple[str, Spans, str]]  # question id -> (question, trajectory, data set)


def read_result(path: str | os.PathLike) -> Trajectories:
  """The trajectories of a result file of `jaxsearch eval`, in file order. DataError names file and prediction if it is none."""
  try:
    found = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise DataError(f'{path}: not JSON: {error}') from error
  predictions = found.get('predictions') if isinstance(found, dict) else None
  if not isinstance(predictions, list) or not predictions:
    raise DataError(f"{path}: no 'predictions' in it: not a result of jaxsearch eval --out")
  result = {}
  for number, record in enumerate(predictions, start=1):
    place = f'{path}: prediction {number}'
    if not isinstance(record, dict):
      raise DataError(f'{place}: expected a JSON object, not {shortened(record)}')
    name, question, spans = text_field(record, 'id', place), text_field(record, 'question', place), record.get('spans')
    if name in result:
      raise DataError(f'{place}: id {name!r} was already used')
    if not isinstance(spans, list) or not all(
        isinstance(span, dict) and all(isinstance(span.get(key), str) for key in ('role', 'text')) for span in spans):
      raise DataError(f"{place}: 'spans' must be a list of {{'role', 'text'}}; results of eval --as-tool have none")
    result[name] = question, tuple((span['role'], span['text']) for span in spans), str(record.get('source', ''))
  return result


def pair_up(a: Trajectories, b: Trajectories) -> dict[str, TrajectoryPair]:
  """Question id -> pair, for every question in both results, in the order of `a`; DataError for results that do not fit."""
  pairs = {name: TrajectoryPair(question, first, b[name][1], dataset)
           for name, (question, first, dataset) in a.items() if name in b}
  for name, pair in pairs.items():
    if pair.question != (other := b[name][0]):
      raise DataError(f'the results are of different questions: {name!r} is {shortened(pair.question)} and {shortened(other)}')
  if not pairs:
    raise DataError('the results have no question in common')
  return pairs


def judge(replies_to: Callable[[Sequence[str]], Sequence[object]], pairs: Mapping[str, TrajectoryPair],
          on_progress: Callable[[int], object], template: str = '') -> tuple[dict, list[dict]]:
  """Judges every pair in both orders. Raises the first failure if all replies about the first batch failed.

  A pair with a missing or unreadable reply is neutral: 1 for both on every rubric, a tie.

  Args:
    replies_to: prompts in, replies out; a failed one returns an exception in its place.
    on_progress: called with the number of pairs done.
    template: the user's text of the prompt, see `trajectory_judge.prompts`.
  Returns:
    (figures, a record for each pair). Figures: the `tally` of all pairs; `datasets`, that of each data set; `average`, the mean
    counts over the data sets (table 9), both only where the results name some; n pairs, `neutral` of them; `unreadable` and
    `failed` of the 2 n replies.
  """
  queue, replies = list(pairs.values()), []
  for start in range(0, len(queue), BATCH):
    replies += replies_to([prompt for pair in queue[start:start + BATCH] for prompt in trajectory_judge.prompts(pair, template)])
    if start == 0 and all(isinstance(reply, Exception) for reply in replies):
      raise replies[0]
    on_progress(len(replies) // 2)
  orders = list(zip(replies[::2], replies[1::2], strict=True))
  verdicts = [trajectory_judge.averaged(both) for both in orders]
  found = [verdict or (NEUTRAL, NEUTRAL, TIE) for verdict in verdicts]
  texts = [reply for reply in replies if isinstance(reply, str)]
  figures = tally(found)
  if names := sorted({pair.dataset for pair in queue} - {''}):
    own = {name: tally([one for one, pair in zip(found, queue) if pair.dataset == name]) for name in names}
    figures['datasets'] = own
    figures['average'] = {rubric: {count: float(np.mean([of[rubric][count] for of in own.values()])) for count in COUNTS}
                          for rubric in (*RUBRICS, 'overall')}
  figures |= {'unreadable': sum(trajectory_judge.read(text) is None for text in texts), 'failed': len(replies) - len(texts),
              'neutral': verdicts.count(None), 'n': len(pairs)}
  return figures, [
    {'id': name, 'question': pair.question, 'a': a, 'b': b, 'winner': winner, 'neutral': verdict is None,
     'replies': [reply if isinstance(reply, str) else None for reply in both]}
    for (name, pair), (a, b, winner), verdict, both in zip(pairs.items(), found, verdicts, orders)]


def tally(found: Sequence[tuple[Scores, Scores, str]]) -> dict[str, dict[str, float]]:
  """For each rubric and for `overall`, the mean scores of `a` and `b` (0 to 2) and how many pairs `a` wins, ties and loses.

  A rubric goes to the higher score. `overall` has the mean over the rubrics, but its wins are those that the judge names.
  """
  a, b = (np.array([[own[side][name] for name in RUBRICS] for own in found]) for side in (0, 1))
  named = np.array([{'a': 1, TIE: 0, 'b': -1}[winner] for *_, winner in found])
  columns = {'overall': (a.mean(axis=1), b.mean(axis=1), named)} | {
    name: (a[:, i], b[:, i], np.sign(a[:, i] - b[:, i])) for i, name in enumerate(RUBRICS)}
  return {name: {'a': float(a.mean()), 'b': float(b.mean())} | {count: int((signs == of).sum()) for count, of in COUNTS.items()}
          for name, (a, b, signs) in columns.items()}
