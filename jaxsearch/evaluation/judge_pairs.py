"""`jaxsearch judge`: two result files of `jaxsearch eval --out`, compared question by question by a language model.

The rubrics, what is asked and how a reply is read are in `rewards/trajectory_judge.py`. Here predictions are paired by the id of
their question, and the scores become means and shares of wins. The judge sees all spans of a prediction but its prompts; of
a method that branches (Search-R2 with its refiner on) a file lists all branches, the cut-off ones included.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxsearch.data.jsonl import DataError, shortened, text_field
from jaxsearch.rewards import trajectory_judge
from jaxsearch.rewards.trajectory_judge import NEUTRAL, RUBRICS, Pair, Spans

AT_A_TIME = 16  # pairs, of two prompts each: the progress bar moves in between

Result = dict[str, tuple[str, Spans]]  # id -> (question, trajectory)


def read_result(path: str | os.PathLike) -> Result:
  """The trajectories in a result file of `jaxsearch eval`, in file order.

  Raises:
    DataError: the file holds something else, or an id twice; names the file and the prediction.
    OSError: the file cannot be opened.
  """
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
    if not isinstance(spans, list) or not all(map(_is_span, spans)):
      raise DataError(f"{place}: 'spans' must be a list of {{'role', 'text'}}; results of eval --as-tool have none")
    result[name] = question, tuple((span['role'], span['text']) for span in spans)
  return result


def _is_span(span: object) -> bool:
  return isinstance(span, dict) and all(isinstance(span.get(key), str) for key in ('role', 'text'))


def pair_up(a: Result, b: Result) -> dict[str, Pair]:
  """id -> pair, for every question that both results have, in the order of `a`.

  Raises:
    DataError: there is none, or an id stands for different questions.
  """
  pairs = {}
  for name in (name for name in a if name in b):
    (question, first), (other, second) = a[name], b[name]
    if question != other:
      raise DataError(f'the results are of different questions: {name!r} is {shortened(question)} and {shortened(other)}')
    pairs[name] = Pair(question, first, second)
  if not pairs:
    raise DataError('the results have no question in common')
  return pairs


def compare_pairs(ask: Callable[[Sequence[str]], Sequence[object]], pairs: Mapping[str, Pair],
                  on_progress: Callable[[int], object], template: str = '') -> tuple[dict, list[dict]]:
  """Asks a judge about every pair, twice.

  A pair of which a reply is missing or cannot be read is neutral: 1 for both on every rubric, a tie.

  Args:
    ask: prompts in, replies out; an exception stands where one failed.
    pairs: by id of their question, see `pair_up`.
    on_progress: called with the number of pairs that are done.
    template: the user's text of the prompt, see `trajectory_judge.prompts`.
  Returns:
    (figures, a record for each pair). Figures: for each rubric and for `overall`, the mean of all rubrics, the means of `a`
    and `b` (0 to 2) and the shares of pairs in which `a` wins, ties and loses; n pairs, `neutral` of them; of the 2 n replies
    those `unreadable` and those `failed`.
  Raises:
    the first failure, where all replies about the first pairs failed.
  """
  asked, replies = list(pairs.values()), []
  for start in range(0, len(asked), AT_A_TIME):
    batch = asked[start:start + AT_A_TIME]
    replies += ask([prompt for pair in batch for prompt in trajectory_judge.prompts(pair, template)])
    if start == 0 and all(isinstance(reply, Exception) for reply in replies):
      raise replies[0]
    on_progress(start + len(batch))
  both = list(zip(replies[::2], replies[1::2], strict=True))
  found = [trajectory_judge.averaged(orders) for orders in both]
  scores = [own or (NEUTRAL, NEUTRAL) for own in found]
  a, b = (np.array([[own[side][name] for name in RUBRICS] for own in scores]) for side in (0, 1))
  figures = {'overall': _figures(a.mean(axis=1), b.mean(axis=1))}
  figures |= {name: _figures(a[:, i], b[:, i]) for i, name in enumerate(RUBRICS)}
  texts = [reply for reply in replies if isinstance(reply, str)]
  figures |= {'unreadable': sum(trajectory_judge.read(text) is None for text in texts), 'failed': len(replies) - len(texts),
              'neutral': found.count(None), 'n': len(pairs)}
  return figures, [
    {'id': name, 'question': pair.question, 'a': own[0], 'b': own[1], 'neutral': verdict is None,
     'replies': [reply if isinstance(reply, str) else None for reply in orders]}
    for (name, pair), own, verdict, orders in zip(pairs.items(), scores, found, both)]


def _figures(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
  """Means of the scores [pairs] and shares of who has the higher ones."""
  return {'a': float(a.mean()), 'b': float(b.mean()), 'win': float((a > b).mean()), 'tie': float((a == b).mean()),
          'loss': float((a < b).mean())}
