"""Answers: one question or benchmarks, results side by side, rollouts as a page."""

import functools
import pathlib
import urllib.parse
from collections.abc import Callable, Sequence

from jaxsearch import registry
from jaxsearch.commands.command import (
  CHECKPOINT,
  CORPUS,
  GREEDY,
  LIMIT,
  QUESTIONS,
  check_inputs,
  command,
  flag,
  open_agent,
  print_figures,
  progress_of,
  refuse,
  saved_config,
  searched_corpus,
  write_result,
)
from jaxsearch.config_check import SHIPPED, check_files, load_file, without_secrets
from jaxsearch.flags import UsageError, address, place, say, steps


@command(
  'quickstart', CHECKPOINT, QUESTIONS, CORPUS, GREEDY, LIMIT,
  flag('--out', 'JSON file to write; none if not given', place()),
  flag('--tiers', 'file of `jaxsearch tiers`: adds figures of each tier and of a critic; none if not given'),
  flag('--plots', 'folder for plots, with --tiers or --as-tool; none if not given', place(folder=True)),
  flag('--as-tool', 'score config.reader 3 ways: alone, with one search, with evidence of the policy', bool),
  flag('--reader-url', 'a chat server, key in OPENAI_API_KEY; config.reader if not given', address),
  flag('--reader-model', 'name of the model at --reader-url; config.reader.model if not given'),
  examples=('--checkpoint runs/quickstart --limit 100 --out scores.json',
            '--config search_r1_grpo --checkpoint FOLDER --questions F.jsonl --corpus F.jsonl --out F.json'))
def eval(config, flags) -> None:
  """Answer a file of questions; write scores, predictions and a manifest.

  With --out every answer is saved as it is found; rerun the same command to resume.
  """
  if flags.as_tool:
    refuse(flags, ('tiers',), 'with --as-tool')
  else:
    refuse(flags, ('reader-url', 'reader-model'), 'without --as-tool')
    if not flags.tiers:
      refuse(flags, ('plots',), 'without --tiers or --as-tool')
  if not flags.reader_url:
    refuse(flags, ('reader-model',), 'without --reader-url; set config.reader.model')
  check_inputs(config, flags)
  from jaxsearch.evaluation import agents, answers, competence, figures, plots, question_sets
  sets = [question_sets.load(config, flags.questions or config.eval.questions, limit=flags.limit)]
  if flags.as_tool:
    _eval_as_tool(config, flags, sets)
    return
  tiers = question_sets.read_tiers(flags.tiers) if flags.tiers else {}
  assess = agents.open_critic(config, flags.checkpoint) if flags.tiers else None
  if assess is None:
    refuse(flags, ('plots',), "without a critic on the policy's backbone in --checkpoint")
  agent, _, policy = open_agent(config, flags, _questions(sets))
  answer = functools.partial(answers.answer, agent, assess=assess)
  records, outcomes, made = _answer(answer, config, flags, sets, agent, policy=policy)
  scores = figures.means(records) | competence.tables(records, tiers, config.eval.right) | outcomes
  if flags.plots:
    plots.critic(competence.starts(records, tiers), flags.plots)
  _finish(flags, scores | {'manifest': made, 'predictions': records}, scores)


def _eval_as_tool(config, flags, sets: Sequence) -> None:
  from jaxsearch.evaluation import plots, rstool
  rstool.reader_template(config)  # a mistake in it is found before the policy is loaded
  agent, _, policy = open_agent(config, flags, _questions(sets))
  reader = rstool.open_reader(config, flags.reader_url, flags.reader_model)
  name = flags.reader_model or config.reader.model
  answer = functools.partial(rstool.answer, agent, reader, search=agent.tools.search, topk=config.search.topk)
  records, outcomes, made = _answer(
    answer, config, flags, sets, agent, policy=policy, reader=name, reader_url=flags.reader_url,
    tool=flags.checkpoint or config.model)
  scores, predictions = rstool.scores(records) | outcomes, rstool.predictions(records)
  if flags.plots:
    plots.readers(pathlib.Path(name).name, predictions, pathlib.Path(flags.plots, 'rstool.png'))
  _finish(flags, scores | {'manifest': made, 'predictions': predictions}, scores)


def _questions(sets: Sequence, samples: int = 1) -> list:
  return [question for one in sets for question in one.questions for _ in range(samples)]


def _answer(answer: Callable, config, flags, sets: Sequence, agent, **about) -> tuple[list, dict, dict]:
  """Answers questions that --out has not kept, says how that went; returns records, `outcomes` and manifest.

  `answer` is `answers.answer` or `rstool.answer` with its first arguments bound, `about` is more for the
  manifest.
  """
  import jax

  from jaxsearch.evaluation import answers
  from jaxsearch.evaluation.manifest import manifest
  from jaxsearch.sampler.requests import Sampling
  sampling, samples = Sampling(flags.temperature), getattr(flags, 'samples', 1)
  questions = _questions(sets, samples)
  made = without_secrets(about | manifest(
    config, sets, agent, corpus=searched_corpus(config, flags), sampling=sampling, samples=samples,
    tiers=getattr(flags, 'tiers', '')))
  kept = answers.Kept(flags.out, made, len(questions))
  try:
    with progress_of(len(questions)) as report:
      answer(questions, jax.random.key(config.seed), kept, sampling=sampling, on_progress=report)
  except BaseException:
    if flags.out:
      say(f'{len(kept.records)} of {len(questions)} answers are saved; rerun the same command to resume')
    raise
  records = kept.all()
  judged = any('judged' in record for record in records)
  outcomes, ignored = answers.outcomes(records), _ignored(flags, '+'.join(one.source for one in sets), judged)
  for line in [*answers.summary(outcomes), *(f'ignored: {line}' for line in ignored)]:
    say(line)
  searched = any(record['searches'] for record in records)
  return records, outcomes, made | {'searched': searched, 'ignored': ignored}


def _finish(flags, result: dict, shown: dict) -> None:
  """Writes a result, removes what was saved on the way, and prints figures."""
  from jaxsearch.evaluation.answers import PART
  write_result(flags.out, result)
  if flags.out:
    pathlib.Path(flags.out + PART).unlink(missing_ok=True)
  print_figures(shown)


# ANSWERING: fields that affect the result of an evaluation. REPLACED: fields that flags take the place of.
ANSWERING = ('method', 'tokenizer', 'dtype', 'seed', 'grow', 'eval.grow', 'eval.questions', 'eval.right',
             'data', 'search', 'tools', 'mcp', 'python', 'sampler', 'reader', 'classifier', 'model',
             'optim.master_weights')
REPLACED = {'eval.number', 'eval.temperatures', 'data.questions', 'sampler.temperature'}


def _ignored(flags, source: str, judged: bool) -> list[str]:
  """Returns a line for each field of the command line that has no effect on an evaluation of this source."""
  replaced = {'data.corpus': 'corpus', 'eval.questions': 'questions', 'model': 'checkpoint'}
  began_with = (saved_config(flags) or {}).get('model', '')
  if began_with and not registry.is_shipped(began_with):
    del replaced['model']  # it says where that model is
  useless = REPLACED | {field for field, name in replaced.items() if getattr(flags, name, '')}
  if not any(part.startswith('world:') for part in source.split('+')):
    useless |= {'data.hops', 'data.arithmetic'}
  answering = tuple(f'{name}.' for name in (*ANSWERING, *['judge'] * judged))
  # A field that only this config has may set the values of others, so it is not reported.
  shared = load_file(SHIPPED / 'base.py').get_config()
  return [f'--config.{field} has no effect on an evaluation' for field in sorted(flags.changed)
          if field.split('.')[0] in shared and (field in useless or not f'{field}.'.startswith(answering))]


@command(
  'quickstart', CHECKPOINT, CORPUS, GREEDY,
  flag('--benchmarks', 'such as hotpotqa,nq or world:test; all of --folder if not given'),
  flag('--folder', 'benchmarks and a corpus, in a layout of docs/evaluation.md; none if not given'),
  flag('--out', 'JSON file to write', place(), required=True),
  flag('--limit', 'take only this many questions of each benchmark; all if not given', int, '>= 1'),
  flag('--samples', 'answers to each question, for pass@k and maj@k; 1 if not given', int, '>= 1', default=1),
  flag('--runs', 'folder for run files of BrowseComp-Plus; none if not given', place(folder=True)),
  flag('--closed-book', 'result without searches, to count needless and missing ones; none if not given'),
  flag('--url', 'a chat server, key in OPENAI_API_KEY; the policy if not given', address),
  flag('--model', 'name of the model at --url; none if not given'),
  examples=('--checkpoint runs/quickstart --benchmarks world:test --limit 100 --out mine.json',
            '--config search_r1_grpo --checkpoint FOLDER --benchmarks nq,popqa --folder DATA --out F.json'))
def bench(config, flags) -> None:
  """Score an agent on several benchmarks; write figures with intervals, a manifest and every answer.

  Every answer is saved as it is found; rerun the same command to resume. `jaxsearch table` compares results.
  """
  if flags.url:
    refuse(flags, ('checkpoint',), 'with --url: the policy is that of the server')
    if not flags.model:
      raise UsageError('--url needs --model, the name of the model at the server')
  else:
    refuse(flags, ('model',), 'without --url; set --checkpoint or --config.model')
  if flags.samples > 1 and not flags.temperature:
    raise UsageError(f'--samples={flags.samples} needs --temperature above 0: greedy answers are alike')
  from jaxsearch.evaluation import answers, browsecomp_plus, figures, question_sets, results
  from jaxsearch.setup import check_room, load_judge, of_server, open_chat_agent
  names = list(dict.fromkeys(filter(None, flags.benchmarks.split(','))))
  if not names and flags.folder:
    names = question_sets.present(flags.folder)
  if not names:
    raise UsageError('which benchmarks? set --benchmarks, or --folder to a folder that has some')
  if missing := [name for name in names if ':' not in name and not flags.folder]:
    raise UsageError(f'--benchmarks={flags.benchmarks}: where is {missing[0]}? set --folder')
  sets = [question_sets.load(config, name, flags.folder, flags.limit) for name in names]
  sets = list({one.name: one for one in sets}.values())  # '2wiki' is '2wikimultihopqa'
  if not flags.corpus and searched_corpus(config, flags):
    flags.corpus = question_sets.corpus_beside(config, sets, flags.folder)
  check_inputs(config, flags, policy=not flags.url)
  corpus = searched_corpus(config, flags)
  if corpus in registry.ENTRIES['corpora'] and flags.folder:
    say(f'no corpus in {flags.folder}: set --corpus, or searches find passages of the embedded world')
  closed_book = results.read_closed_book(flags.closed_book) if flags.closed_book else None
  is_judged = any(map(answers.evidence_of, _questions(sets)))
  if not is_judged:
    refuse(flags, ('runs',), 'without questions of BrowseComp-Plus')
  is_judged = is_judged and config.judge.kind != 'world' and config.judge.model
  if is_judged:
    check_files(config, ('judge',), services=('judge',))
  judge = load_judge(config.judge, config.dtype) if is_judged else None
  if flags.url:
    agent = open_chat_agent(config, flags.url, flags.model, corpus=flags.corpus)
    policy = {'url': flags.url, 'model': flags.model}
    check_room(config, agent.engine.tokenizer, _questions(sets), say,
               **dict(config.eval.grow) | of_server(config))
  else:
    agent, _, policy = open_agent(config, flags, _questions(sets))
  numbers = ', '.join(f'{len(one.questions)} of {one.name}' for one in sets)
  say(f'{numbers}; corpus: {corpus or "none of ours"}')
  answer = functools.partial(answers.answer, agent, timed=True)
  if judge:
    answer = functools.partial(browsecomp_plus.judged, answer, judge)
  records, outcomes, made = _answer(answer, config, flags, sets, agent, policy=policy)
  places = ({'benchmark': one.name, 'sample': sample} for one in sets for _ in one.questions
            for sample in range(flags.samples))
  records = [record | place for record, place in zip(records, places)]
  scores = figures.scores(records, question_sets.golds_in(corpus, records), closed_book)
  shown = scores['benchmarks'] | scores['hops'] | {'macro': scores['macro']}
  printed = {name: {figure: of[figure] for figure in ('em', 'f1', 'n', 'ci95')} for name, of in shown.items()}
  result = scores | {'manifest': made, 'failures': outcomes, 'predictions': records}
  if browsed := [record for record in records if 'evidence' in record]:
    name = flags.model or flags.checkpoint or config.model
    result['browsecomp_plus'] = browsecomp_plus.summary(browsed, name)
    for record in browsed if flags.runs else ():
      file = f'run_{urllib.parse.quote(record["id"], safe="")}_{record["sample"]}.json'
      write_result(f'{flags.runs}/{file}', browsecomp_plus.run_of(record, name))
  _finish(flags, result, printed | {'out': flags.out})


@command(
  'quickstart',
  flag('--metric', 'figure of bench to show; em if not given', default='em'),
  flag('--format', 'text if not given', choices=('text', 'markdown', 'latex', 'csv'), default='text'),
  flag('--allow', 'settings that may differ within a column, such as k,corpus; or all; none if not given'),
  flag('--published', 'also rows of papers: all, or methods such as Search-R1,CARL; none if not given'),
  flag('--out', 'file to write; the terminal if not given', place()), takes_words=True,
  examples=('a.json b.json', 'a.json b.json --format markdown --allow k --published Search-R1'))
def table(_, flags) -> None:
  """Put results of bench side by side, with intervals and tests paired by question.

  Scores with other settings (corpus, index, k, turns, questions, split, metric, decoding) enter a column only
  if --allow says so.
  """
  from jaxsearch.evaluation import table
  if not flags.parts:
    raise UsageError('which results? usage: jaxsearch table a.json b.json')
  text = table.render(flags.parts, metric=flags.metric, form=flags.format, published=flags.published,
                      allow=flags.allow.split(',') if flags.allow else ())
  write_result(flags.out, text)
  if not flags.out:
    print(text, end='')


@command(
  'quickstart',
  flag('--out', 'HTML file to write; none if not given, with --serve', place()),
  flag('--with', 'another run or result, beside the first where both have a question; none if not given'),
  flag('--serve', 'serve the page to this machine instead, and follow a run that trains', bool),
  flag('--port', 'with --serve: 0 takes a free one; 8002 if not given', int, '>= 0 and <= 65535'),
  flag('--steps', 'only the rollouts of these steps, such as 10:20; all if not given', steps),
  flag('--most', 'only this many questions of each step; all if not given', int, '>= 1'),
  takes_words=True, examples=('runs/quickstart --out view.html', 'runs/mine --with runs/other --serve'))
def view(_, flags) -> None:
  """Show the rollouts of a run, or of a result, as one page: a table, trees, tokens by credit."""
  if len(flags.parts) != 1:
    raise UsageError('which run? usage: jaxsearch view RUN --out F.html')
  if flags.serve:
    refuse(flags, ('out', 'steps', 'most'), 'with --serve')
    try:
      from jaxsearch.tools import http_server
    except ImportError as error:
      raise UsageError(f"serving needs the package {error.name!r}: pip install 'jaxsearch[serve]'") from error
  else:
    refuse(flags, ('port',), 'without --serve')
    if not flags.out:
      raise UsageError('view needs --out F.html, or --serve')
  from jaxsearch.evaluation import view
  from jaxsearch.files import write_whole
  sources = [view.Source(path) for path in (*flags.parts, getattr(flags, 'with')) if path]
  if flags.serve:
    with http_server.bind('127.0.0.1', 8002 if flags.port is None else flags.port) as listener:
      http_server.run(view.app(sources), listener, 'rollouts')
  else:
    write_whole(flags.out, view.page(sources, flags.steps, flags.most))
    print(f'page: {flags.out}')


@command(
  'search_r2',
  flag('--a', 'result file of eval --out', required=True),
  flag('--b', 'result file to compare it with', required=True),
  flag('--out', 'JSON file to write; none if not given', place()),
  examples=('--a A.json --b B.json --out F.json --config.judge.kind=local --config.judge.model=HF_FOLDER',
            '--a A.json --b B.json --config.judge.kind=chat --config.judge.url=http://HOST/v1 '
            '--config.judge.model=NAME'))
def judge(config, flags) -> None:
  """Compare two results of eval question by question: a language model scores six rubrics."""
  if config.judge.kind == 'world':
    raise UsageError("config.judge.kind='world' knows gold chains, not style: take 'local' or 'chat'")
  check_files(config, ('judge',), services=('judge',))
  from jaxsearch.evaluation import judge_pairs, results
  from jaxsearch.evaluation.manifest import made_with
  from jaxsearch.setup import load_judge
  a, b = results.read_predictions(flags.a), results.read_predictions(flags.b)
  pairs = judge_pairs.pair_up(a, b)
  opened = load_judge(config.judge, config.dtype)
  with progress_of(len(pairs), 'pairs') as report:
    figures, records = judge_pairs.judge(opened.replies, pairs, report, opened.files['pair'])
  figures |= {'only_a': len(a) - len(pairs), 'only_b': len(b) - len(pairs)}
  made = made_with(config, a=flags.a, b=flags.b)
  write_result(flags.out, figures | {'manifest': made, 'comparisons': records})
  print_figures(figures)


@command('quickstart', CHECKPOINT, CORPUS, GREEDY, takes_words=True, examples=(
  '"What is the capital of the country in which Saratov is found?" --checkpoint runs/quickstart',
  '"Which element has the symbol Po?" --config carl --temperature 0.7'))
def ask(config, flags) -> None:
  """Answer one question and show every thought, query and document."""
  if not flags.words:
    raise UsageError('ask what? usage: jaxsearch ask "Which currency is used in the country of Oviedo?"')
  check_inputs(config, flags)
  from rich.console import Console

  from jaxsearch.data.questions import Question
  from jaxsearch.evaluation import terminal
  from jaxsearch.sampler.driver import rollout
  from jaxsearch.sampler.requests import Sampling
  console = Console(highlight=False)
  sampling, question = Sampling(flags.temperature), Question('ask', flags.words, ())
  agent, key, _ = open_agent(config, flags, [question])
  (tree,), _ = rollout(agent, [question], key, sampling=sampling,
                       observer=lambda tree, request, reply: request and terminal.show(console, reply))
  terminal.close(console, tree)
