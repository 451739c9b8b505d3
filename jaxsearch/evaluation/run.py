"""Answering questions with a policy, and scoring the answers: `jaxsearch eval`, `ask`, and held-out questions during training."""

import collections
import dataclasses
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

import jaxsearch
from jaxsearch import setup, tools
from jaxsearch.config_check import fields, to_saved, without_secrets
from jaxsearch.data.jsonl import DataError, read_records, shortened, text_field
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import calibration, competence
from jaxsearch.evaluation.records import predictions
from jaxsearch.files import naming, no_link
from jaxsearch.methods import find_method
from jaxsearch.models import adapter_files, hub
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.rewards.match import answer_found
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.requests import Request, Sampling
from jaxsearch.tools.calls import texts_of
from jaxsearch.training import batch as batches
from jaxsearch.training import row_files, runs
from jaxsearch.training import step as steps
from jaxsearch.training.checkpoint import is_run, load_params, load_trained
from jaxsearch.trees.layout import lay_out, take_back
from jaxsearch.trees.tree import Role, Stop, Tree

CALLS = ('tool_calls', 'searches_', 'calls_')  # how counts of calls begin
SAMPLES = 24  # rollouts kept of an evaluation during training


@dataclasses.dataclass(frozen=True)
class Policy:
  """A decoder with its tokenizer, and the step of its run; None where that is not known."""
  config: DecoderConfig
  params: dict
  tokenizer: Tokenizer
  step: int | None


@memory.named('loading the policy', 'set dtype=bfloat16')
def load_policy(config: ml_collections.ConfigDict, checkpoint: str = '') -> Policy:
  """The policy of a run folder, checkpoint in it, adapter, Hugging Face folder or GGUF file; '' is `config.model`.

  FileNotFoundError if there is none.
  It brings its tokenizer, unless `config.tokenizer` names one. What a run or an adapter began with is `config.model`, unless it
  is a model that we ship.
  """
  if checkpoint and (is_run(checkpoint) or adapter_files.is_adapter(checkpoint)):
    model_config, params, host = load_params(checkpoint, base=config.model)
    model_config = dataclasses.replace(model_config, dtype=config.dtype)
    return Policy(model_config, params, tokenizer_of(config, host, checkpoint), host['step'])
  if checkpoint:
    decoder, run = hub.load(checkpoint, config.dtype), hub.read_run(checkpoint) or {}
    hub.check_finite(decoder.params, checkpoint)
    return Policy(decoder.config, decoder.params, Tokenizer.load(config.tokenizer or checkpoint), run.get('step'))
  model_config, params = setup.load_policy(config, meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1]))
  return Policy(model_config, params, setup.load_tokenizer(config), None)


def tokenizer_of(config: ml_collections.ConfigDict, host: Mapping[str, Any], checkpoint: str) -> Tokenizer:
  """The tokenizer that `config.tokenizer` names, else the one in a checkpoint, else that of the model that it began with."""
  if host.get('tokenizer') and not config.tokenizer:
    return Tokenizer.from_json(host['tokenizer'])
  return Tokenizer.load(config.tokenizer or setup.tokenizer_of(host, setup.base_of(host, config.model, checkpoint), checkpoint))


def open_agent(config: ml_collections.ConfigDict, checkpoint: str = '', corpus: str = '', policy: Policy | None = None,
               **changes) -> Agent:
  """The agent of a config as it answers: with the arguments of `grow` that `config.eval.grow` and then `changes` change.

  Args:
    checkpoint: see `load_policy`; unless there is a `policy`.
    corpus: passages to search; '' is `config.data.corpus`.
  """
  policy = policy or load_policy(config, checkpoint)
  engine = setup.open_engine(config, policy.config, policy.tokenizer)
  engine.load(policy.params)
  method = find_method(config.method)
  services = () if hasattr(method, 'credit') else getattr(method, 'SERVICES', ())  # judges and readers serve training
  return setup.make_agent(config, engine, setup.open_tools(config, corpus, services=services), **dict(config.eval.grow) | changes)


def open_critic(config: ml_collections.ConfigDict, checkpoint: str) -> Callable[[Sequence[Tree]], None] | None:
  """What writes the values of a checkpoint's critic onto finished trees; None unless it shares the backbone of the policy."""
  if not (checkpoint and is_run(checkpoint)):
    return None
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  model_config, params, _ = load_trained(checkpoint, mesh, warn=False)  # `load_policy` warned
  if steps.HEAD not in params:
    return None
  values = steps.make_value_step(dataclasses.replace(model_config, dtype=config.dtype), mesh=mesh, shared=True)

  def assess(trees: Sequence[Tree]) -> None:
    if trees := [tree for tree in trees if any(node.tokens for node in tree.nodes(Role.POLICY))]:
      rows = lay_out(trees, config.train.row_length, pad_id=0)
      take_back(rows, trees, batches.compute_on_rows(values, params, rows, 1, mesh), 'values')

  return assess


def answer(agent: Agent, questions: Sequence[Question], key, *, sampling: Sampling, part: pathlib.Path | None = None,
           identity: Mapping[str, Any] | None = None, on_progress: Callable[[int, int, dict], object],
           assess: Callable[[Sequence[Tree]], object] | None = None, timed: bool = False) -> list[dict]:
  """Answers questions; returns a record for each, as `predictions` has them, with counts of its calls.

  Counts are the figures of `failures`; model_calls (spans, scores, replies of other models), tokens_generated (branches that
  were dropped included) and answer_retrieved (1 if a tool returned a gold answer). Where searches cost money, also what was paid
  since the record before it was kept: the total is exact, the split per question is not.

  Each is appended to the file `part` as it is found. What an evaluation of the same `identity` left there is not answered
  again; the records are those of an evaluation that was never stopped.

  Args:
    part: JSON lines, the identity first; None keeps nothing.
    identity: all that the records depend on, as JSON can hold it.
    on_progress: called with (questions answered, questions, `failures` so far) at the start and whenever a question ends.
    assess: writes a critic's values onto finished trees, see `open_critic`.
    timed: whether a record has `seconds`, from the start to the end; without them it is the same whenever it is made.
  Raises:
    OSError: `part` cannot be written; names it and says what is saved.
  """
  records = {number: record for number, record in resume(part, identity).items() if number < len(questions)}
  missing = [number for number in range(len(questions)) if number not in records]
  totals, ended, retrieved, search = collections.Counter(), [], set(), agent.tools.search
  paid = getattr(search, 'paid', 0)
  for record in records.values():
    _add(totals, record)
  on_progress(len(records), len(questions), dict(totals))

  def save(*_) -> None:
    """Not in `grow`: an error in there would be the method's."""
    nonlocal paid
    while ended:
      tree, counts = ended.pop(0)
      if assess:
        assess([tree])
      costs = tools.paid(search, paid)  # read once: other threads go on searching
      paid += costs.get('searches_paid', 0)
      number = numbers[tree.question.id]
      record = predictions([tree])[0] | _counts(counts, timed) | {'answer_retrieved': int(tree in retrieved)} | costs
      keep(part, {number: record}, f'{len(records)} of {len(questions)} answers')
      records[number] = record
      _add(totals, record)
    on_progress(len(records), len(questions), dict(totals))

  def observe(tree: Tree, request: Request | None, reply: Any) -> None:
    if request is None:
      ended.append((tree, reply))
    elif any(answer_found(tree.question.golden_answers, text) for text in texts_of(reply)):
      retrieved.add(tree)

  numbers = {questions[number].id: number for number in missing}
  rollout(agent, [questions[number] for number in missing], key, sampling=sampling, numbers=missing, on_progress=save,
          observer=observe)
  return [records[number] for number in range(len(questions))]


def resume(part: pathlib.Path | None, identity: Mapping[str, Any] | None) -> dict[int, dict]:
  """Number -> record that the evaluation of this identity kept in `part` before it was stopped; the file then ends with a whole
  line. {} with a new file, or where `part` is None. Raises OSError, which names the file, if it cannot be written."""
  if part is None:
    return {}
  rows, identity = row_files.read(part), json.loads(json.dumps(identity))
  if rows and rows[0] == {'identity': identity}:
    with naming(part), open(part, 'rb+', opener=no_link) as file:  # needs no space, so that a full disk is no obstacle
      file.truncate(file.read().rfind(b'\n') + 1)
    records = collections.defaultdict(dict)
    for row in rows[1:]:
      records[row['number']].update(row['record'])
    print(f'jaxsearch: resuming: {part} has {len(records)} answers', file=sys.stderr)
    return dict(records)
  if rows:
    then, now = (dict(fields(one)) for one in (rows[0].get('identity', {}), identity))
    differing = [name for name in sorted(then.keys() | now.keys())
                 if then.get(name) != now.get(name) and not isinstance(now.get(name, then.get(name)), dict)]
    shown = ', '.join(f'{name} was {shortened(then.get(name))}, now {shortened(now.get(name))}' for name in differing[:5])
    print(f'jaxsearch: {part} is of another evaluation ({shown}); starting again', file=sys.stderr)
  try:
    row_files.write(part, [{'identity': identity}])
  except OSError as error:
    raise OSError(error.errno, f'{error.strerror}; answers are saved there as they are found, so nothing was answered',
                  str(part)) from error
  return {}


def keep(part: pathlib.Path | None, records: Mapping[int, Mapping], saved: str) -> None:
  """Appends records by number, or more of them, for `resume`; an OSError names the file and what is `saved`."""
  if part is None:
    return
  try:
    row_files.append(part, [{'number': number, 'record': record} for number, record in records.items()])
  except OSError as error:
    raise OSError(error.errno, f'{error.strerror}; {saved} are saved, rerun the same command to resume', str(part)) from error


def _counts(counts: Mapping[str, Any], timed: bool) -> dict[str, Any]:
  """What a record keeps of the counts of its episode."""
  calls = {name: count for name, count in counts.items() if name.startswith((*CALLS, 'last_failure'))}
  return calls | {'model_calls': counts['requests'] + counts.get('service_calls', 0),
                  'tokens_generated': counts.get('tokens_decoded', 0)} | ({'seconds': counts['seconds']} if timed else {})


def _add(totals: collections.Counter, record: Mapping[str, Any]) -> None:
  """Adds the counts of a record; `last_failure` is that of the last that has one."""
  for name, value in record.items():
    if name.startswith(CALLS):
      totals[name] += value
    elif name == 'last_failure':
      totals[name] = value


def failures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Counts over records: tool_calls, tool_calls_failed, tool_calls_failed_KIND for the kinds that occurred (see `FAULTS`),
  searches_asked, searches_failed; searches_paid and searches_cost where they cost money; last_failure, the reason of the last,
  where there is one."""
  totals = collections.Counter(tool_calls=0, tool_calls_failed=0, searches_asked=0, searches_failed=0)
  for record in records:
    _add(totals, record)
  return dict(totals)


def stops(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
  """stop_X for every reason X for which rollouts ended (`Stop`); `no_room`, the questions whose prompt left room for nothing."""
  counts = collections.Counter(f'stop_{record["stop"]}' for record in records if record['stop'])
  no_room = sum(record['stop'] == Stop.CONTEXT_FULL and all(span['role'] == 'prompt' for span in record['spans'])
                for record in records)
  return dict(counts.most_common()) | {'no_room': no_room}


def summary(figures: Mapping[str, Any]) -> Iterator[str]:
  """Lines for a person: how rollouts ended, and which tool calls failed."""
  stopped = {name.removeprefix('stop_'): count for name, count in figures.items() if name.startswith('stop_')}
  if stopped:
    yield 'stops: ' + ', '.join(f'{count} {name.replace("_", " ")}' for name, count in stopped.items())
  if 'searches_paid' in figures:
    yield f'paid for {figures["searches_paid"]} searches: {figures["searches_cost"]:g}'
  kinds = {name: count for name, count in figures.items() if name.startswith('tool_calls_failed_')}
  if kinds:
    listed = ', '.join(f'{count} {name.removeprefix("tool_calls_failed_")}' for name, count in kinds.items())
    yield (f'failures: {figures["searches_failed"]} of {figures["searches_asked"]} searches, {figures["tool_calls_failed"]} of '
           f'{figures["tool_calls"]} tool calls ({listed}); the last: {figures["last_failure"]}')
  if figures.get('reader_failed'):  # of eval --as-tool
    yield (f'failures: {figures["reader_failed"]} of {figures["reader_calls"]} replies of the second model; the last: '
           f'{figures["last_reader_failure"]}')


def scores(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Means over records: em, em_entity (CARL's looser rule), f1, searches, retrieval_recall (the share that found a gold answer);
  their number n."""
  values = {name: [record[name] for record in records] for name in ('em', 'em_entity', 'f1', 'searches')} | {
    'retrieval_recall': [any(answer_found(record['golden_answers'], span['text']) for span in record['spans']
                             if span['role'] == Role.OBSERVATION.value) for record in records]}
  return {name: float(np.mean(own)) for name, own in values.items()} | {'n': len(records)}


def em_by_source(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """em_of_SOURCE: the mean EM of the questions of each data set that they name; {} where they name none."""
  sources = sorted({record['source'] for record in records} - {''})
  return {f'em_of_{source}': float(np.mean([record['em'] for record in records if record['source'] == source]))
          for source in sources}


def tables(records: Sequence[Mapping[str, Any]], tiers: Mapping[str, int], plots: str = '',
           right: str = 'em') -> dict[str, Any]:
  """The figures of CARL's tables 7 and 18; with `tiers` also of 3, 6, 14, 16 and 19, and with a critic's values of 11 and 12.

  Into the folder `plots` go figures 2a (calibration.png) and 4 (values.png) of a critic. Undefined figures are left out. For
  `right` see `competence.by_rule`; a critic is held against its reward.
  """
  by_rule = competence.by_rule(records, right)
  found = competence.hop_figures(by_rule)
  if any('hops' in record for record in records) or tiers:
    found |= {'errors': competence.errors(by_rule)}
  if tiers:
    found |= competence.use_figures(by_rule, tiers)
    values, outcomes, ids = competence.starts(records)
    if len(values):
      found |= competence.critic_figures(records, tiers) | competence.sign_figures(records)
      found |= {'reliability': competence.reliability(records)}
      if plots:
        folder = pathlib.Path(plots)
        folder.mkdir(parents=True, exist_ok=True)
        calibration.plot({'held out': (values, outcomes)}, folder / 'calibration.png')
        calibration.plot_tiers(values, np.array([tiers.get(name, 0) for name in ids]), folder / 'values.png')
  return {name: value for name, value in found.items() if not isinstance(value, float) or math.isfinite(value)}


def weights(path: str) -> dict[str, Any]:
  """What tells weights from others without reading them: path, bytes and last change of their files (none of a run folder)."""
  folder = pathlib.Path(path)
  files = [file.stat() for file in ([folder] if folder.is_file() else folder.glob('*.safetensors'))]
  return {'path': str(path), 'bytes': sum(file.st_size for file in files),
          'modified': max((file.st_mtime for file in files), default=None)}


def manifest(config: ml_collections.ConfigDict, **files: str) -> dict:
  """What an evaluation was made with: versions, device, config, and the SHA-256 of the files that it read."""
  return {'jaxsearch': jaxsearch.__version__, 'jax': jax.__version__, 'device': jax.devices()[0].device_kind,
          'config': json.loads(json.dumps(to_saved(config))),
          'files': {name: {'path': without_secrets(path), 'sha256': _sha256(path)} for name, path in files.items() if path}}


def held_out(agent: Agent, config: ml_collections.ConfigDict, step: int,
             assess: Callable[[Sequence[Tree]], None] | None = None) -> Iterator[dict]:
  """Evaluates on `config.eval` at each of its temperatures; yields the rows of evaluations.jsonl.

  The questions and the random key are the same at every step, so that runs and steps can be compared. The rows have the scores
  of all questions and the EM of each data set (by `config.eval.right`), and say what failed; with `config.eval.tiers` also what
  tools were used for; with `assess`, which writes a critic's values onto the spans, how good the critic is.
  """
  questions, tiers = read_held_out(config)
  for temperature in config.eval.temperatures:
    own = range(len(questions))[meshes.own_part()]  # every process answers some of them
    trees, metrics = rollout(agent, questions[meshes.own_part()], jax.random.key(config.seed), sampling=Sampling(temperature),
                             numbers=own)
    if assess is not None:
      assess(trees)
    records, _ = meshes.gather_items(predictions(trees))
    figures = competence.critic_figures(records, tiers) | competence.sign_figures(records) if assess is not None else {}
    by_rule = competence.by_rule(records, config.eval.right)
    figures |= em_by_source(by_rule)
    if tiers:
      figures |= competence.use_figures(by_rule, tiers)
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}  # JSON has no NaN
    finite |= runs.failures_of_all(metrics)
    yield {'step': step, 'temperature': temperature} | scores(records) | finite | {'samples': records[:SAMPLES]}


def read_held_out(config: ml_collections.ConfigDict) -> tuple[list[Question], dict[str, int]]:
  """The questions of `config.eval`, and the tiers of `config.eval.tiers`, {} without one."""
  tiers = read_tiers(config.eval.tiers) if config.eval.tiers else {}
  return first(setup.load_questions(config, config.eval.questions), config.eval.number), tiers


def first(questions: Sequence[Question], number: int) -> list[Question]:
  """The first `number` questions of every source; 0 is all."""
  met, found = collections.Counter(), []
  for question in questions:
    met[source := question.metadata.get('source')] += 1
    if not number or met[source] <= number:
      found.append(question)
  return found


def read_tiers(path: str) -> dict[str, int]:
  """Question id -> tier, from the file that `jaxsearch tiers` writes."""
  tiers = {}
  for place, record in read_records(path):
    if record.get('tier') not in (1, 2) or 'id' not in record:
      raise DataError(f"{place}: an 'id' and a 'tier' of 1 or 2 are wanted, not {shortened(record)}")
    tiers[text_field(record, 'id', place)] = record['tier']
  return tiers


def _sha256(name: str) -> str | None:
  """Of a file, or of the files in a name such as 'hotpotqa:A.json+B.jsonl', one after the other; None without a file."""
  paths = [name] if pathlib.Path(name).is_file() else [part.rpartition(':')[2] for part in name.split('+')]
  digest, found = hashlib.sha256(), [path for path in paths if pathlib.Path(path).is_file()]
  for path in found:
    with open(path, 'rb') as stream:
      hashlib.file_digest(stream, lambda: digest)
  return digest.hexdigest() if found else None
