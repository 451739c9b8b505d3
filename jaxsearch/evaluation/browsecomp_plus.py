"""BrowseComp-Plus (arXiv 2508.06600): its judge, its run files and its summary, from the records of answers.

A record is of this benchmark if it has `evidence`, the ids of documents; its spans then have `calls`.
"""

import collections
import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.evaluation.answers import Kept
from jaxsearch.evaluation.calibration import root_mean_square_error
from jaxsearch.evaluation.figures import Record
from jaxsearch.rewards import judge
from jaxsearch.trees import templates

PER_REQUEST = 32  # responses asked of the judge at a time
NOT_OURS = 'change me when submitting'


def verdict(reply: str) -> dict[str, Any]:
  """Reads a judge's reply, bold or not: `judged`, 1 if it says correct else 0, and `confidence` in percent.

  Without a verdict the response counts as wrong and has no confidence.
  """
  correct = re.search(r'correct\**:\**\s*(yes|no)', reply, re.IGNORECASE)
  stated = re.search(r'confidence\**:\**\s*(\d+(?:\.\d+)?)', reply, re.IGNORECASE)
  confidence = min(float(stated[1]), 100.0) if correct and stated else None
  return {'judged': float(bool(correct) and correct[1].lower() == 'yes'), 'confidence': confidence,
          'judge_reply': reply}


def judged(answer: Callable, opened: judge.LanguageJudge, questions: Sequence[Question], key, kept: Kept,
           **options) -> None:
  """Answers as `answer` does, then keeps a verdict on every response to a question whose evidence is known.

  A response that is not complete is wrong, and has no confidence. Raises what the judge raised, once the
  other verdicts are kept.
  """
  answer(questions, key, kept, **options)
  missing = [number for number in kept.missing('judged') if 'evidence' in kept.records[number]]
  for start in range(0, len(missing), PER_REQUEST):
    asked = {number: kept.records[number] for number in missing[start:start + PER_REQUEST]}
    whole = {number: record for number, record in asked.items() if is_completed(record)}
    said = opened.replies([_prompt(record, opened.files['response']) for record in whole.values()])
    kept.add({number: {'judged': 0.0, 'confidence': None} for number in asked.keys() - whole.keys()} |
             {number: verdict(reply) for number, reply in zip(whole, said) if isinstance(reply, str)})
    for error in said:
      if isinstance(error, Exception):
        raise error


def _prompt(record: Record, template: str) -> str:
  golds = ' or '.join(map(judge.quoted, record['golden_answers']))
  return templates.fill(template, question=judge.quoted(record['question']), golds=golds,
                        answer=judge.quoted(record['prediction']))


def is_completed(record: Record) -> bool:
  """Tells whether an episode ended with a response."""
  return record['stop'] == 'answered' and bool((record['prediction'] or '').strip())


def run_of(record: Record, model: str = '') -> dict[str, Any]:
  """Returns the answer to a question as a run file of the benchmark has it."""
  result, calls = [], []
  entry = lambda kind, output, **more: {'type': kind, 'tool_name': None, 'arguments': None} | more | {
    'output': output}
  for span in record['spans']:
    if span['role'] == 'policy':
      result.append(entry('reasoning', [span['text']]))
    for call in span.get('calls', ()):
      calls.append(call)
      result.append(entry('tool_call', _output(call), tool_name=call['tool'], arguments=call['query']))
  if is_completed(record):
    result.append(entry('output_text', record['prediction']))
  return {'metadata': {'model': model}, 'query_id': record['id'],
          'tool_call_counts': dict(collections.Counter(call['tool'] for call in calls)),
          'status': 'completed' if is_completed(record) else str(record['stop']),
          'retrieved_docids': record['retrieved'], 'result': result}


def _output(call: Mapping[str, Any]) -> str:
  """Returns what a tool replied: of a search, JSON of its hits."""
  if 'documents' not in call:
    return call.get('reply', call.get('failure', ''))
  return json.dumps([{'docid': document['id'], 'score': document['score'], 'snippet': document['text']}
                     for document in call['documents']], ensure_ascii=False)


def summary(records: Sequence[Record], model: str = '') -> dict[str, Any]:
  """Returns the authors' `evaluation_summary.json` of records, plus the calibration error with the last bin.

  They leave that bin out. Without a judge there is neither accuracy nor calibration.
  """
  percent = lambda values: round(100 * float(np.mean(list(values))), 2)
  judged, counts = all('judged' in record for record in records), collections.Counter()
  for record in records:
    counts.update(run_of(record)['tool_call_counts'])
  said = [(record['confidence'] / 100, record['judged']) for record in records
          if record.get('confidence') is not None]
  error = {'Calibration Error (%)': False, 'Calibration Error with the last bin (%)': True}
  figures = {'Accuracy (%)': percent(record['judged'] for record in records)} if judged else {}
  figures |= {name: round(100 * root_mean_square_error(*zip(*said), last=last), 2) if said else 0.0
              for name, last in error.items()} if judged else {}
  return {'LLM': model or NOT_OURS, **figures,
          'Recall (%)': percent(record['evidence_recall'] for record in records),
          'avg_tool_stats': {name: count / len(records) for name, count in counts.items()},
          'Retriever': NOT_OURS, 'Link': NOT_OURS, 'Evaluation Date': datetime.date.today().isoformat(),
          'per_query_metrics': [
            {'query_id': record['id'], 'correct': bool(record.get('judged')),
             'recall': round(100 * record['evidence_recall'], 2)} for record in records]}
