"""What the commands of the command line do; each takes its own name and the arguments after it.

JAX and the rest are imported where they are used, so that a mistyped flag is told of at once.
"""

import json
import pathlib
import sys
import time
from collections.abc import Sequence

from jaxsearch import flags
from jaxsearch.flags import UsageError

QUICKSTART = 'configs/quickstart.py'


def train(name: str, arguments: Sequence[str]) -> None:
  """Reinforcement learning; with `config.eval.every` set it ends with one JSON line about held-out questions."""
  config, _, words = flags.parse(name, arguments, QUICKSTART)
  _no_words(name, words)
  start = time.perf_counter()
  from jaxsearch.training import loop
  loop.train(config)
  from jaxsearch.parallel.mesh import process_index
  if process_index() == 0:
    from jaxsearch.evaluation.report import read_rows, write_report
    page = write_report(config.out)
    evaluations = read_rows(pathlib.Path(config.out) / 'evaluations.jsonl')
    if evaluations:
      print(json.dumps(_outcome(evaluations, config, time.perf_counter() - start, page)))
    else:
      print(f'report: {page}')


def _outcome(evaluations: list[dict], config, seconds: float, page: pathlib.Path) -> dict:
  """EM on held-out questions before and after: sampled at the first of `config.eval.temperatures`, and greedy if it is there."""
  def em(temperature):
    return [round(row['em'], 4) for row in evaluations if row['temperature'] == temperature]

  own, greedy = em(config.eval.temperatures[0]), em(0.0)
  result = {'em_before': own[0], 'em_after': own[-1], 'steps': evaluations[-1]['step'], 'seconds': round(seconds, 1),
            'report': str(page)}
  return result | ({'em_before_greedy': greedy[0], 'em_after_greedy': greedy[-1]} if greedy else {})


def sft(name: str, arguments: Sequence[str]) -> None:
  """Supervised training on a file of demonstrations."""
  config, _, words = flags.parse(name, arguments, 'configs/sft.py')
  _no_words(name, words)
  from jaxsearch.training import warmup
  warmup.train(config)
  print(f'run folder: {config.out}')


def eval(name: str, arguments: Sequence[str]) -> None:
  """Answers a file of questions and writes scores, predictions and a manifest."""
  config, flag, words = flags.parse(
    name, arguments, QUICKSTART, checkpoint=(str, 'run folder, checkpoint or Hugging Face folder'),
    questions=(str, 'FlashRAG JSONL file, or world:SPLIT'), corpus=(str, 'Search-R1 JSONL file, or world'),
    out=(str, 'JSON file to write'), temperature=(str, 'of sampling; greedy if not given'),
    limit=(str, 'only the first so many questions'))
  _no_words(name, words)
  temperature = _number(flag['temperature'], 'temperature', float, 0.0)
  limit = _number(flag['limit'], 'limit', int, None)
  import jax

  from jaxsearch.data.sources import load_questions
  from jaxsearch.evaluation import run
  questions = load_questions(flag['questions'] or config.eval.questions, hops=config.data.hops,
                             arithmetic=config.data.arithmetic)[:limit]
  agent = run.open_agent(config, flag['checkpoint'], flag['corpus'])
  with _progress(len(questions)) as report:
    trees, sampler = agent.answer(questions, jax.random.key(config.seed), temperature=temperature, on_progress=report)
  scores = run.scores(trees)
  manifest = run.manifest(config, checkpoint=flag['checkpoint'], questions=flag['questions'], corpus=flag['corpus'])
  result = scores | {'manifest': manifest | {'temperature': temperature, 'sampler': sampler},
                     'predictions': run.predictions(trees)}
  if flag['out']:
    out = pathlib.Path(flag['out'])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
  print(json.dumps({key: round(value, 4) for key, value in scores.items()}))


def ask(name: str, arguments: Sequence[str]) -> None:
  """Answers one question on the terminal, span by span."""
  config, flag, words = flags.parse(
    name, arguments, QUICKSTART, checkpoint=(str, 'run folder, checkpoint or Hugging Face folder'),
    corpus=(str, 'Search-R1 JSONL file, or world'), temperature=(str, 'of sampling; greedy if not given'))
  question = ' '.join(words).strip()
  if not question:
    raise UsageError('ask what? usage: jaxsearch ask "Which currency is used in the country of Oviedo?"')
  temperature = _number(flag['temperature'], 'temperature', float, 0.0)
  import jax
  from rich.console import Console

  from jaxsearch.data.questions import Question
  from jaxsearch.evaluation import run
  from jaxsearch.evaluation.terminal import Transcript
  agent = run.open_agent(config, flag['checkpoint'], flag['corpus'])
  transcript = Transcript(Console(highlight=False))
  trees, _ = agent.answer([Question('ask', question, ())], jax.random.key(config.seed), temperature=temperature,
                          watch=transcript.show)
  transcript.close(trees[0])


def compare(name: str, arguments: Sequence[str]) -> None:
  """Trains what is left of a grid of variants x seeds, then writes its tables and curves; exit status 1 if a run failed."""
  config, flag, words = flags.parse(name, arguments, 'configs/claims/cusearch.py',
                                    **{'report-only': (bool, 'train nothing: the report of the runs that are finished')})
  _no_words(name, words)
  from jaxsearch.evaluation import compare, compare_report
  trials = compare.plan(config)
  failed = [] if flag['report-only'] else compare.train_all(trials, config.parallel)
  print(f'table: {compare_report.write(config, trials)}')
  if failed:
    raise SystemExit(1)


def export(name: str, arguments: Sequence[str]) -> None:
  """Writes the parameters of a checkpoint as a Hugging Face folder."""
  _, flag, words = flags.parse(
    name, arguments, QUICKSTART, checkpoint=(str, 'run folder or a checkpoint in it'), out=(str, 'folder to write'),
    dtype=(str, 'of the weights: float32 or bfloat16; as they are if not given'))
  _no_words(name, words)
  for needed in ('checkpoint', 'out'):
    if not flag[needed]:
      raise UsageError(f'export needs --{needed}')
  import ml_collections

  from jaxsearch.models import hub
  from jaxsearch.models.decoder import Decoder
  from jaxsearch.training import policy
  from jaxsearch.training.checkpoint import load_params
  numbers, params, host = load_params(flag['checkpoint'])
  tokenizer = policy.load_tokenizer(ml_collections.ConfigDict(host['config']))
  hub.save(Decoder(numbers, params=params), flag['out'], tokenizer, dtype=flag['dtype'] or None)
  print(f'step {host["step"]} written to {flag["out"]}')


def world(name: str, arguments: Sequence[str]) -> None:
  """Makes the files of the embedded world again, and with --policy its warm-started policy."""
  config, flag, words = flags.parse(
    name, arguments, 'configs/world_policy.py', out=(str, 'folder for the files of the world'),
    policy=(bool, 'train the policy into config.out'))
  _no_words(name, words)
  if not (flag['out'] or flag['policy']):
    raise UsageError('say what to make: --out FOLDER for the files of the world, --policy for its policy')
  if flag['out']:
    from jaxsearch.data import world_build
    world_build.build(flag['out'])
    print(f'world: {flag["out"]}')
  if flag['policy']:
    from jaxsearch.training import world_policy
    print(f'policy: {world_policy.make(config)}')


def _no_words(name: str, words: Sequence[str]) -> None:
  if words:
    raise UsageError(f'{name} does not know what to do with {" ".join(map(repr, words))}')


def _number(text: str, name: str, kind, default):
  if not text:
    return default
  try:
    return kind(text)
  except ValueError as error:
    raise UsageError(f'--{name}={text}: not a number') from error


def _progress(total: int):
  """A progress bar over episodes: a context that gives the callback of `Engine.run`."""
  import contextlib

  from rich import progress

  @contextlib.contextmanager
  def bar():
    columns = [progress.TextColumn('questions'), progress.MofNCompleteColumn(), progress.BarColumn(),
               progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]
    with progress.Progress(*columns, disable=not sys.stderr.isatty()) as shown:
      task = shown.add_task('', total=total)
      yield lambda done, *_: shown.update(task, completed=done)

  return bar()
