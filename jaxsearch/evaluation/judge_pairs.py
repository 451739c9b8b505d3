"""`jaxsearch judge`: a language model compares two results of `jaxsearch eval`, question by question.

`rewards/trajectory_judge.py` has the rubrics and prompts and reads the replies. The judge sees all spans of a
prediction but its prompts; for a method that branches (Search-R2 with its refiner on) these are all branches,
the discarded ones included.
"""

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxsearch.data.jsonl import DataError, shortened
from jaxsearch.evaluation.figures import Record
from jaxsearch.rewards import trajectory_judge
from jaxsearch.rewards.trajectory_judge import NEUTRAL, RUBRICS, TIE, Scores, TrajectoryPair

BATCH = 16  # pairs, of two prompts each, between two updates of the progress bar
SIGNS = {'win': 1, 'tie': 0, 'loss': -1}  # of the lead of `a`

Verdict = tuple[Scores, Scores, str]


def pair_up(first: Sequence[Record], second: Sequence[Record]) -> dict[str, TrajectoryPair]:
  """Returns question id -> pair, for every question in both results, in the order of the first.

  Raises DataError for results that do not fit: of several answers to a question, or of other questions.
  """
  a, b = ({record['id']: record for record in records} for records in (first, second))
  if len(a) < len(first) or len(b) < len(second):
    raise DataError('a result has several predictions with one id: take results of eval')
  pairs = {}
  for name in filter(b.__contains__, a):
    both = a[name], b[name]
    question, other = (record['question'] for record in both)
    if question != other:
      raise DataError(f'the results are of different questions: {name!r} is {shortened(question)} and '
                      f'{shortened(other)}')
    spans = (tuple((span['role'], span['text']) for span in record['spans']) for record in both)
    pairs[name] = TrajectoryPair(question, *spans, str(a[name].get('source', '')))
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
    (figures, a record for each pair). Figures: the `tally` of all pairs; `datasets`, that of each data set;
    `average`, the mean counts over the data sets (table 9), both only where the results name some; n pairs,
    `neutral` of them; `unreadable` and `failed` of the 2 n replies.
  """
  queue, replies = list(pairs.values()), []
  for start in range(0, len(queue), BATCH):
    replies += replies_to([prompt for pair in queue[start:start + BATCH]
                           for prompt in trajectory_judge.prompts(pair, template)])
    if start == 0 and all(isinstance(reply, Exception) for reply in replies):
      raise replies[0]
    on_progress(len(replies) // 2)
  replies = [reply if isinstance(reply, str) else None for reply in replies]
  by_set, records = collections.defaultdict(list), []
  for (name, pair), both in zip(pairs.items(), zip(replies[::2], replies[1::2])):
    read = trajectory_judge.averaged(both)
    a, b, winner = verdict = read or (NEUTRAL, NEUTRAL, TIE)
    by_set[pair.dataset].append(verdict)
    records.append({'id': name, 'question': pair.question, 'a': a, 'b': b, 'winner': winner,
                    'neutral': read is None, 'replies': list(both)})
  figures = tally([verdict for verdicts in by_set.values() for verdict in verdicts])
  if datasets := {name: tally(of) for name, of in sorted(by_set.items()) if name}:
    average = lambda rubric, count: float(np.mean([of[rubric][count] for of in datasets.values()]))
    figures |= {'datasets': datasets, 'average': {
      rubric: {count: average(rubric, count) for count in SIGNS} for rubric in (*RUBRICS, 'overall')}}
  return figures | {
    'unreadable': sum(reply is not None and trajectory_judge.read(reply) is None for reply in replies),
    'failed': replies.count(None), 'neutral': sum(record['neutral'] for record in records),
    'n': len(pairs)}, records


def tally(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
  """Returns for each rubric and `overall` the mean scores of `a` and `b` (0 to 2) and the counts of `SIGNS`.

  A rubric goes to the higher score. `overall` has the mean over the rubrics, but its wins are those that the
  judge names.
  """
  a, b = (np.array([[verdict[side][name] for name in RUBRICS] for verdict in verdicts]) for side in (0, 1))
  named = [{'a': 1, TIE: 0, 'b': -1}[winner] for *_, winner in verdicts]
  columns = {'overall': (a.mean(axis=1), b.mean(axis=1), np.array(named))}
  columns |= {name: (a[:, i], b[:, i], np.sign(a[:, i] - b[:, i])) for i, name in enumerate(RUBRICS)}
  return {name: {'a': float(of_a.mean()), 'b': float(of_b.mean())}
          | {count: int((leads == sign).sum()) for count, sign in SIGNS.items()}
          for name, (of_a, of_b, leads) in columns.items()}
