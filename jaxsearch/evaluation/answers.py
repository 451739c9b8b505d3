"""Answering questions with an agent, and the record that is kept of each answer.

Records are JSON objects that say what was asked, answered and retrieved, what that took and what failed.
`Kept` is the file from which an evaluation that was stopped resumes.
"""

import collections
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections

from jaxsearch.config_check import fields
from jaxsearch.data.jsonl import shortened
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import competence
from jaxsearch.evaluation.figures import Record, means, record_of
from jaxsearch.evaluation.question_sets import read_held_out
from jaxsearch.evaluation.results import records_of
from jaxsearch.files import naming, no_link
from jaxsearch.flags import say
from jaxsearch.parallel import transfer
from jaxsearch.rewards.match import answer_found
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.requests import Request, Sampling, add_failures, failing
from jaxsearch.tools.calls import ToolCall, paid as paid_since, texts_of
from jaxsearch.training import row_files
from jaxsearch.training.rollout_file import note_call
from jaxsearch.training.run_folder import FREE_FIELDS, check_searches, failures_of_all
from jaxsearch.trees.tree import Tree

CALLS = ('tool_calls', 'searches_', 'calls_', 'service_calls', 'last_')  # how counts of calls begin
SAMPLES = 24  # records kept of an evaluation during training
CHUNK = 512  # rollouts that `sample` makes between two writes
PART = '.part.jsonl'  # ends the name of the file in which eval and bench save as they go
# Fields that may differ when an evaluation resumes: those that only training reads, and those that a resumed
# run may change, except `eval`, which has questions and prompt.
FREE = tuple(f'config.{name}.' for name in (*FREE_FIELDS, 'credit', 'loss', 'sft') if name != 'eval')


class Watch:
  """The observer of a rollout that answers questions: it knows the record of every tree that has ended."""

  def __init__(self):
    self.ended: list[Tree] = []
    self._counts, self._retrieved = {}, set()

  def __call__(self, tree: Tree, request: Request | None, reply: Any) -> None:
    if evidence_of(tree.question):
      note_call(tree, request, reply)
    if request is None:
      self.ended.append(tree)
      self._counts[tree] = reply
    elif isinstance(request, ToolCall) and any(
        answer_found(tree.question.golden_answers, text) for text in texts_of(reply)):
      self._retrieved.add(tree)

  def record(self, tree: Tree, timed: bool = False) -> dict[str, Any]:
    """Returns `record_of` with the counts of its calls, and what they took.

    answer_recall: 1 if a tool returned a gold answer; model_calls: spans, scores, replies of other models;
    tokens: generated, those of dropped branches included; with `timed` the seconds from the start to the end,
    without which a record is the same whenever it is made.
    """
    counts = self._counts[tree]
    record = record_of(tree) | {name: count for name, count in counts.items() if name.startswith(CALLS)}
    record |= {'answer_recall': float(tree in self._retrieved), 'tokens': counts.get('tokens_decoded', 0),
               'model_calls': counts['requests'] + counts.get('service_calls', 0)}
    return record | _evidence(tree, record['spans']) | ({'seconds': counts['seconds']} if timed else {})


def evidence_of(question: Question) -> Sequence[str]:
  """Returns the ids of BrowseComp-Plus's evidence documents; other data sets use this key otherwise."""
  of_benchmark = question.metadata.get('match') == 'stated'
  return question.metadata.get('evidence', ()) if of_benchmark else ()


def _evidence(tree: Tree, shown: Sequence[dict]) -> dict[str, Any]:
  """Returns what a record says of a question whose evidence is known; its spans get their calls.

  evidence: ids of documents; retrieved: those that searches returned; evidence_recall: the share of the first
  among the second.
  """
  if not (evidence := evidence_of(tree.question)):
    return {}
  spans, calls = iter(shown), []
  for node in tree.walk():
    span = next(spans) if node.tokens else shown[0]  # calls of the root are the first span's
    if asked := node.data.get('calls'):
      span['calls'] = span.get('calls', []) + asked
      calls += asked
  retrieved = sorted({document['id'] for call in calls for document in call.get('documents', ())})
  return {'evidence': list(evidence), 'retrieved': retrieved,
          'evidence_recall': len(set(evidence) & set(retrieved)) / len(set(evidence))}


class Kept:
  """The records of an evaluation by the number of their question, in a file from which it resumes.

  The file has JSON lines, first the identity: all that the records depend on. With another it is begun anew.
  """

  def __init__(self, out: str | None, identity: Mapping[str, Any], total: int):
    """Reads the file beside the result `out`, or begins it; None keeps none. `total` is that of questions."""
    self.path = path = out + PART if out else ''
    self.total, self.records = total, collections.defaultdict(dict)
    if not path:
      return
    first, *rows = row_files.read(path) or [{}]
    differing = _differing(first['identity'], identity) if 'identity' in first else 'it does not say which'
    if not differing:
      with naming(path), open(path, 'rb+', opener=no_link) as file:
        file.truncate(file.read().rfind(b'\n') + 1)  # a line that a kill cut short
      self.records = records_of(rows)
      say(f'resuming: {path} has {len(self.records)} answers')
      return
    if rows:
      os.replace(path, f'{path}.old')
    if first:
      kept = f', its answers are in {path}.old' * bool(rows)
      say(f'{path} is of another evaluation ({differing}); starting again{kept}')
    row_files.write(path, [{'identity': identity}])

  def add(self, records: Mapping[int, Record]) -> None:
    """Keeps records by number, or adds fields to records that are kept."""
    if self.path:
      row_files.append(self.path, [{'number': number, 'record': of} for number, of in records.items()])
    for number, record in records.items():
      self.records[number].update(record)

  def missing(self, field: str = 'id') -> list[int]:
    """Returns the numbers of the questions whose record has no such field yet."""
    return [number for number in range(self.total) if field not in self.records.get(number, ())]

  def all(self) -> list[dict]:
    """Returns the records in the order of the questions."""
    return [self.records[number] for number in range(self.total)]


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Names the first fields in which two identities differ, with their values."""
  then, now = (dict(fields(identity)) for identity in (then, json.loads(json.dumps(now))))
  names = [name for name in sorted(then.keys() | now.keys())
           if then.get(name) != now.get(name) and not isinstance(now.get(name, then.get(name)), dict)
           and not f'{name}.'.startswith(FREE)]
  return ', '.join(f'{name} was {shortened(then.get(name))}, now {shortened(now.get(name))}'
                   for name in names[:5])


def answer(agent: Agent, questions: Sequence[Question], key, kept: Kept, *, sampling: Sampling,
           on_progress: Callable[[int, int, dict], object],
           assess: Callable[[Sequence[Tree]], object] | None = None, timed: bool = False) -> None:
  """Answers the questions of which there is no record yet, and keeps the record of each as it is found.

  The records are those of an evaluation that was never stopped. Where searches cost money, each also says
  what was paid since the one before it: the total is exact, the split per question is not.

  Args:
    on_progress: called with (questions answered, questions, metrics so far) at the start and every end.
    assess: writes a critic's values onto finished trees, see `agents.open_critic`.
    timed: see `Watch.record`.
  """
  asked = {number: dataclasses.replace(questions[number]) for number in kept.missing()}  # a copy per sample
  numbers = {id(question): number for number, question in asked.items()}
  watch, search = Watch(), agent.tools.search
  paid = getattr(search, 'paid', 0)
  on_progress(len(kept.records), kept.total, {})

  def save(_done: int, _total: int, metrics: dict) -> None:
    """Keeps what has ended. Not in the observer: an error in there would be the method's."""
    nonlocal paid
    while watch.ended:
      tree = watch.ended.pop(0)
      if assess:
        assess([tree])
      costs = paid_since(search, paid)  # read once: other threads go on searching
      paid += costs.get('searches_paid', 0)
      kept.add({numbers[id(tree.question)]: watch.record(tree, timed) | costs})
    on_progress(len(kept.records), kept.total, metrics)

  rollout(agent, list(asked.values()), key, sampling=sampling, numbers=list(asked), on_progress=save,
          observer=watch)


def sample(agent: Agent, questions: Sequence[Question], number: int, key, kept: Kept,
           record: Callable[[Sequence[Tree]], Record], *, sampling: Sampling,
           on_progress: Callable[[int, int, dict], object]) -> None:
  """Rolls out `number` trees of each question of which there is no record yet, and keeps `record(trees)`.

  They are those of one rollout that was never stopped. Raises RunStopped if most searches of a chunk failed,
  which is then not kept.
  """
  missing, size = kept.missing(), max(1, CHUNK // number)
  for start in range(0, len(missing), size):
    part, done = missing[start:start + size], number * len(kept.records)
    trees, metrics = rollout(
      agent, [questions[place] for place in part for _ in range(number)], key, sampling=sampling,
      numbers=[number * place + copy for place in part for copy in range(number)],
      on_progress=lambda ended, _, metrics, done=done: on_progress(done + ended, 0, metrics))
    check_searches(metrics, 'stopped')
    kept.add({place: record(trees[number * index:number * (index + 1)]) for index, place in enumerate(part)})


def outcomes(records: Sequence[Record]) -> dict[str, Any]:
  """Returns how rollouts ended, stop_X for every reason X (`Stop`), and what failed (`add_failures`)."""
  stops = collections.Counter(f'stop_{record["stop"]}' for record in records if record['stop'])
  return add_failures(records) | dict(stops.most_common())


def summary(outcomes: Mapping[str, Any]) -> Iterator[str]:
  """Yields lines for a person of what `outcomes` returns."""
  if stops := [f'{count} {name[5:].replace("_", " ")}' for name, count in outcomes.items()
               if name.startswith('stop_')]:
    yield f'stops: {", ".join(stops)}'
  if 'searches_paid' in outcomes:
    yield f'paid for {outcomes["searches_paid"]} searches: {outcomes["searches_cost"]:g}'
  if said := failing(outcomes, most=False):
    yield said


def held_out(agent: Agent, config: ml_collections.ConfigDict, step: int,
             assess: Callable[[Sequence[Tree]], None] | None = None) -> Iterator[dict]:
  """Evaluates on `config.eval` at each of its temperatures; yields the rows of evaluations.jsonl.

  The questions and the random key are the same at every step, so that runs and steps can be compared. A row
  has the means over all questions, the figures of competence.py, what failed, `em_each` of the questions in
  their order, and `samples`: the first records. `assess` writes a critic's values onto the trees; all
  processes call it at once.
  """
  questions, tiers = read_held_out(config)
  part = transfer.local_part()  # every process answers some of them
  for temperature in config.eval.temperatures:
    watch = Watch()
    trees, counts = rollout(agent, questions[part], jax.random.key(config.seed), observer=watch,
                            sampling=Sampling(temperature), numbers=range(len(questions))[part])
    if assess:
      assess(trees)
    records, _ = transfer.gather_items([watch.record(tree) for tree in trees])
    tables = competence.tables(records, tiers, config.eval.right)
    numbers = {name: value for name, value in tables.items() if isinstance(value, (int, float))}
    row = {'step': step, 'temperature': temperature} | means(records) | numbers | failures_of_all(counts)
    yield row | {'em_each': [record['em'] for record in records], 'samples': records[:SAMPLES]}
