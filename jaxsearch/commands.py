"""What the commands of the command line do; each takes its own name and the arguments after it.

JAX and the rest are imported where they are used, so that a mistyped flag is told of at once.
"""

import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence

from jaxsearch import flags, registry
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
  """Supervised training on demonstrations."""
  config, _, words = flags.parse(name, arguments, 'configs/sft.py')
  _no_words(name, words)
  from jaxsearch.training import sft
  sft.train(config)
  print(f'run folder: {config.out}')


def critic_warmup(name: str, arguments: Sequence[str]) -> None:
  """Warms up a critic; exit status 1 if it does not pass its gate."""
  config, _, words = flags.parse(name, arguments, 'configs/carl.py')
  _no_words(name, words)
  from jaxsearch.training import critic_warmup
  if 'critic_warmup' not in config:
    raise UsageError('this config has no warmup: its method has no critic, or see configs/carl.py')
  try:
    figures = critic_warmup.warm_up(config)
  except critic_warmup.GateFailed as error:
    print(f'jaxsearch: {error}', file=sys.stderr)
    raise SystemExit(1) from error
  print(json.dumps({'run': config.out} | {key: None if math.isnan(value) else round(value, 4) for key, value in figures.items()}))


def tiers(name: str, arguments: Sequence[str]) -> None:
  """Rolls questions out by heart, several times each, and writes which tier each is of."""
  config, flag, words = flags.parse(
    name, arguments, 'configs/carl.py', checkpoint=(str, 'run folder, checkpoint or Hugging Face folder'),
    questions=(str, 'question file, or world:SPLIT; config.eval.questions if not given'), out=(str, 'JSONL file to write'),
    limit=(str, 'only the first so many questions; config.eval.number if not given'),
    mixed=(str, 'question file to write: half of each tier, as many as there are of the smaller one'))
  _no_words(name, words)
  if not flag['out']:
    raise UsageError('tiers needs --out')
  if 'critic_warmup' not in config:
    raise UsageError('this config does not say how to answer by heart (config.critic_warmup.closed_book), see configs/carl.py')
  from jaxsearch.data.questions import write_questions
  from jaxsearch.data.sources import load_questions
  from jaxsearch.evaluation import run
  from jaxsearch.training import critic_warmup
  limit = _number(flag['limit'], 'limit', int, config.eval.number or None)
  questions = load_questions(flag['questions'] or config.eval.questions, hops=config.data.hops,
                             arithmetic=config.data.arithmetic)[:limit]
  found = critic_warmup.tiers_of(config, run.open_agent(config, flag['checkpoint']), questions)
  out = pathlib.Path(flag['out'])
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(''.join(json.dumps({'id': key, 'tier': tier}) + '\n' for key, tier in found.items()), encoding='utf-8')
  if flag['mixed']:
    write_questions(critic_warmup.mixed(questions, found), flag['mixed'])
  share = sum(tier == 2 for tier in found.values()) / len(found)
  print(json.dumps({'questions': len(found), 'tier_2': round(share, 4), 'out': str(out)}))


def eval(name: str, arguments: Sequence[str]) -> None:
  """Answers a file of questions and writes scores, predictions and a manifest; with --as-tool a second model answers."""
  config, flag, words = flags.parse(
    name, arguments, QUICKSTART, checkpoint=(str, 'run folder, checkpoint or Hugging Face folder'),
    questions=(str, 'FlashRAG JSONL file, or world:SPLIT'), corpus=(str, 'Search-R1 JSONL file, or world'),
    out=(str, 'JSON file to write'), temperature=(str, 'of sampling; greedy if not given'),
    limit=(str, 'only the first so many questions'),
    **{'as-tool': (bool, 'a second model, config.reader, answers: alone, with one search, with the evidence of the policy'),
       'tool-url': (str, 'a server of evidence (serve --as-tool) in place of the policy; its token in JAXSEARCH_TOKEN'),
       'reader-url': (str, 'a chat server in place of config.reader, such as http://HOST/v1; its key in OPENAI_API_KEY'),
       'reader-model': (str, 'the name of the model at --reader-url')})
  _no_words(name, words)
  if not flag['as-tool']:
    _unused(flag, ('tool-url', 'reader-url', 'reader-model'), 'without --as-tool')
  temperature = _number(flag['temperature'], 'temperature', float, 0.0)
  limit = _number(flag['limit'], 'limit', int, None)
  from jaxsearch.data.sources import load_questions
  from jaxsearch.evaluation import run
  questions = load_questions(flag['questions'] or config.eval.questions, hops=config.data.hops,
                             arithmetic=config.data.arithmetic)[:limit]
  answered = _answered_with_tool if flag['as-tool'] else _answered
  scores, predictions, made_with = answered(config, flag, questions, temperature)
  manifest = run.manifest(config, checkpoint=flag['checkpoint'], questions=flag['questions'], corpus=flag['corpus'])
  result = scores | {'manifest': manifest | {'temperature': temperature} | made_with, 'predictions': predictions}
  _write(flag['out'], result)
  print(json.dumps({key: round(value, 4) for key, value in scores.items()}))


def _answered(config, flag: dict, questions: Sequence, temperature: float) -> tuple[dict, list[dict], dict]:
  """(scores, predictions, what the manifest tells besides) of a policy."""
  import jax

  from jaxsearch.evaluation import run
  agent = run.open_agent(config, flag['checkpoint'], flag['corpus'])
  with _progress(len(questions)) as report:
    trees, sampler = agent.answer(questions, jax.random.key(config.seed), temperature=temperature, on_progress=report)
  return run.scores(trees), run.predictions(trees), {'sampler': sampler}


def _answered_with_tool(config, flag: dict, questions: Sequence, temperature: float) -> tuple[dict, list[dict], dict]:
  """The same of a second model, asked with and without the evidence that a policy or a server finds."""
  from jaxsearch.evaluation import rstool
  from jaxsearch.tools.evidence_client import EvidenceClient
  from jaxsearch.tools.http_client import RequestError, secret_from_env
  from jaxsearch.training.rollouts import open_backend
  reader = rstool.open_reader(config, flag['reader-url'], flag['reader-model'])
  asked = [question.question for question in questions]
  try:
    with _progress(len(questions)) as report:
      if flag['tool-url']:
        _unused(flag, ('checkpoint', 'temperature'), 'with --tool-url')
        search = open_backend(config, flag['corpus'] or config.data.corpus)
        found = rstool.find_by_server(EvidenceClient(flag['tool-url'], token=secret_from_env('JAXSEARCH_TOKEN')), asked, report)
      else:
        agent = rstool.open_tool(config, flag['checkpoint'], flag['corpus'])
        search = agent.engine.search
        found = rstool.find(agent, asked, temperature=temperature, seed=config.seed, on_progress=report)
    scores, predictions = rstool.evaluate_reader(reader, questions, found, search, config.search.topk)
  except RequestError as error:
    raise UsageError(str(error)) from error
  return scores, predictions, {'tool': flag['tool-url'] or flag['checkpoint'] or config.model,
                               'reader': flag['reader-model'] or config.reader.model}


def judge(name: str, arguments: Sequence[str]) -> None:
  """Compares two result files of `eval`, question by question, by the rubrics of Search-R2's trajectory judge."""
  config, flag, words = flags.parse(
    name, arguments, 'configs/search_r2.py', a=(str, 'result file of eval --out'), b=(str, 'the one to compare it with'),
    out=(str, 'JSON file to write'))
  _no_words(name, words)
  for needed in ('a', 'b'):
    if not flag[needed]:
      raise UsageError(f'judge needs --{needed}')
  if 'judge' not in config:
    raise UsageError('the config has no judge: take --config configs/search_r2.py')
  if config.judge.kind == 'world':
    raise UsageError("config.judge.kind='world' knows gold chains but has no opinion on style: take 'local' with "
                     "config.judge.model, or 'chat' with config.judge.url and config.judge.model")
  from jaxsearch.evaluation import judge_pairs, run
  from jaxsearch.tools.http_client import RequestError
  from jaxsearch.training.policy import load_judge
  a, b = judge_pairs.read_result(flag['a']), judge_pairs.read_result(flag['b'])
  pairs = judge_pairs.pair_up(a, b)
  opened = load_judge(config.judge, config.dtype)
  try:
    with _progress(len(pairs), 'pairs') as report:
      figures, records = judge_pairs.judge(opened.replies, pairs, report, opened.files['pair'])
  except RequestError as error:
    raise UsageError(str(error)) from error
  figures |= {'only_a': len(a) - len(pairs), 'only_b': len(b) - len(pairs)}
  _write(flag['out'], figures | {'manifest': run.manifest(config, a=flag['a'], b=flag['b']), 'comparisons': records})
  print(json.dumps({key: {name: round(share, 4) for name, share in value.items()} if isinstance(value, dict) else value
                    for key, value in figures.items()}))


def serve(name: str, arguments: Sequence[str]) -> None:
  """Serves the search of a config over the retrieval protocol, or with --as-tool the evidence that a policy finds."""
  config, flag, words = flags.parse(
    name, arguments, 'configs/r_search.py', checkpoint=(str, 'run folder, checkpoint or Hugging Face folder'),
    corpus=(str, 'Search-R1 JSONL file, or world'), host=(str, 'address to listen on; 127.0.0.1, this machine alone'),
    port=(str, '8000, with --as-tool 8001'), token=(str, 'that requests must bring; that in JAXSEARCH_TOKEN'),
    **{'as-tool': (bool, 'question in, evidence out, for other models')})
  _no_words(name, words)
  if not flag['as-tool']:
    _unused(flag, ('checkpoint',), 'without --as-tool')
  port = _number(flag['port'], 'port', int, 8001 if flag['as-tool'] else 8000)
  try:
    from jaxsearch.tools import http_server
  except ImportError as error:
    raise UsageError(f"serving needs the package {error.name!r}: pip install 'jaxsearch[serve]'") from error
  from jaxsearch.tools.http_client import check_secret, secret_from_env
  token = check_secret(flag['token'], '--token') or secret_from_env('JAXSEARCH_TOKEN')
  with http_server.bind(flag['host'] or '127.0.0.1', port) as listener:
    if flag['as-tool']:
      from jaxsearch.evaluation import rstool
      agent = rstool.open_tool(config, flag['checkpoint'], flag['corpus'])
      print('compiling the sampler: a minute or two …', file=sys.stderr)
      agent.engine.compile_all()  # no request is to wait for that
      app = http_server.evidence_app(lambda questions: rstool.find(agent, questions), token=token,
                                     check=lambda question: rstool.check_room(agent, question))
    else:
      from jaxsearch.training.rollouts import open_backend
      app = http_server.search_app(open_backend(config, flag['corpus'] or config.data.corpus), token=token)
    http_server.run(app, listener, 'evidence' if flag['as-tool'] else 'retrieval')


def sample(name: str, arguments: Sequence[str]) -> None:
  """Samples several chains for each question and writes the right ones as demonstrations for `sft`."""
  config, flag, words = flags.parse(
    name, arguments, QUICKSTART, checkpoint=(str, 'run folder, checkpoint or Hugging Face folder'),
    questions=(str, 'FlashRAG JSONL file, or world:SPLIT; config.data.questions if not given'),
    corpus=(str, 'Search-R1 JSONL file, or world'), out=(str, 'JSONL file to write'),
    n=(str, 'chains for each question; 5 if not given'), keep=(str, 'at most so many of a question; all if not given'),
    temperature=(str, 'of sampling; config.sampler.temperature if not given'),
    limit=(str, 'only the first so many questions'))
  _no_words(name, words)
  if not flag['out']:
    raise UsageError('sample needs --out')
  number, most, limit = (_number(flag[key], key, int, default) for key, default in (('n', 5), ('keep', None), ('limit', None)))
  if number < 1 or (most is not None and most < 1):
    raise UsageError(f'--n={number} --keep={most}: at least one chain'.replace(' --keep=None', ''))
  temperature = _number(flag['temperature'], 'temperature', float, config.sampler.temperature)
  import jax

  from jaxsearch.data.sources import load_questions
  from jaxsearch.evaluation.run import open_agent
  from jaxsearch.training import rejection
  questions = load_questions(flag['questions'] or config.data.questions, hops=config.data.hops,
                             arithmetic=config.data.arithmetic)[:limit]
  agent = open_agent(config, flag['checkpoint'], flag['corpus'])
  with _progress(len(questions) * number, 'chains') as report:
    groups = rejection.sample(agent, questions, number, jax.random.key(config.seed), temperature=temperature,
                              on_progress=report)
  selected = rejection.select(groups, most)
  rejection.write(flag['out'], [tree for group in selected for tree in group])
  figures = rejection.figures(groups, selected)
  print(json.dumps({key: round(value, 4) for key, value in figures.items()} | {'out': flag['out']}))


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


def sweep(name: str, arguments: Sequence[str]) -> None:
  """Trains what is left of a grid of variants x seeds, then writes its tables and curves; exit status 1 if a run failed."""
  config, flag, words = flags.parse(name, arguments, 'configs/claims/cusearch.py',
                                    **{'report-only': (bool, 'train nothing: the report of the runs that are finished')})
  _no_words(name, words)
  from jaxsearch.evaluation import sweep as grid
  from jaxsearch.evaluation import sweep_report
  trials = grid.plan(config)
  failed = [] if flag['report-only'] else grid.train_all(trials, config.parallel)
  print(f'table: {sweep_report.write(config, trials)}')
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
  model_config, params, host = load_params(flag['checkpoint'])
  tokenizer = policy.load_tokenizer(ml_collections.ConfigDict(host['config']))
  hub.save(Decoder(model_config, params=params), flag['out'], tokenizer, dtype=flag['dtype'] or None)
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
    registry.find('recipe', 'files')(flag['out'])
    print(f'world: {flag["out"]}')
  if flag['policy']:
    print(f'policy: {registry.find("recipe", "policy")(config)}')


def _write(path: str, result: dict) -> None:
  """Writes a result file, if one was asked for."""
  if path:
    out = pathlib.Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


def _no_words(name: str, words: Sequence[str]) -> None:
  if words:
    raise UsageError(f'{name} does not know what to do with {" ".join(map(repr, words))}')


def _unused(flag: dict, names: Sequence[str], where: str) -> None:
  for name in names:
    if flag[name]:
      raise UsageError(f'--{name} means nothing {where}')


def _number(text: str, name: str, kind, default):
  if not text:
    return default
  try:
    return kind(text)
  except ValueError as error:
    raise UsageError(f'--{name}={text}: not a number') from error


def _progress(total: int, what: str = 'questions'):
  """A progress bar over episodes: a context that gives the callback of `Engine.run`."""
  import contextlib

  from rich import progress

  @contextlib.contextmanager
  def bar():
    columns = [progress.TextColumn(what), progress.MofNCompleteColumn(), progress.BarColumn(),
               progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]
    with progress.Progress(*columns, disable=not sys.stderr.isatty()) as shown:
      task = shown.add_task('', total=total)
      yield lambda done, *_: shown.update(task, completed=done)

  return bar()
