"""Policies: training, what prepares it, export."""

import contextlib
import functools
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from jaxsearch.commands.command import (
  CHECKPOINT,
  CORPUS,
  LIMIT,
  QUESTIONS,
  check_inputs,
  check_out,
  command,
  flag,
  open_agent,
  print_figures,
  progress_of,
  searched_corpus,
  write_result,
)
from jaxsearch.config_check import check_files, from_saved, to_saved, without_secrets
from jaxsearch.flags import TRAINED, UsageError, check_place, copy_fields, place, policy, say
from jaxsearch.parallel import memory

OUT = flag('--out', 'JSONL file to write', place(), required=True)


@command('quickstart', examples=(
  '--config quickstart --config.out=runs/mine',
  '--config search_r1_grpo --config.data.questions=F.jsonl --config.data.corpus=F.jsonl '
  '--config.eval.questions=F.jsonl'))
def train(config, _) -> None:
  """Train a policy by reinforcement learning; rerun the same command to resume.

  With config.eval.every set it ends with one JSON line about held-out questions.
  """
  start = time.perf_counter()
  check_out(config)
  import jax

  held_out = ['eval'] * bool(config.eval.every)
  used = ('data', 'model', 'tokenizer', 'search', 'reader', 'refiner', 'judge', 'second_judge', 'critic',
          'sampler', *held_out)
  check_files(config, used)
  from jaxsearch.evaluation import answers, question_sets, report
  from jaxsearch.training import RunStopped, bucket, loop, row_files
  if held_out:
    question_sets.read_held_out(config)  # a mistake in them is found now, not after the first step
  folder = bucket.local(config.out)
  try:
    loop.train(config, answers.held_out)
  except RunStopped:
    with contextlib.suppress(OSError):  # of a full disk
      if jax.process_index() == 0:
        report.write_report(folder)  # what went wrong stands at its top
        bucket.publish(config.out)
    raise
  if jax.process_index():
    return
  page = report.write_report(folder)
  bucket.publish(config.out)
  given = without_secrets(shlex.join(sys.argv[2:]))  # where to search is not taken from a checkpoint
  say(f'ask the policy: {sys.argv[0]} ask "QUESTION" {given} --checkpoint {config.out}')
  evaluations = row_files.read(folder / 'evaluations.jsonl')
  if not evaluations:
    print(f'report: {page}')
    return
  figures = {}
  for suffix, temperature in (('', config.eval.temperatures[0]), ('_greedy', 0.0)):
    if alike := report.alike_last([row for row in evaluations if row['temperature'] == temperature]):
      figures |= {f'em_before{suffix}': alike[0]['em'], f'em_after{suffix}': alike[-1]['em']}
  seconds = round(time.perf_counter() - start, 1)
  print_figures(figures | {'steps': evaluations[-1]['step'], 'seconds': seconds, 'report': str(page)})


@command('quickstart', examples=('--config.sft.demonstrations=F.jsonl --config.out=runs/sft',
                                 '--config sft_gold --config.steps=50'))
def sft(config, _) -> None:
  """Train a policy on demonstrations."""
  check_out(config)
  check_files(config, ('model', 'tokenizer'))
  if not config.sft.demonstrations:
    raise UsageError('sft.demonstrations is not set: a JSONL file, or world:rl for gold chains')
  from jaxsearch.training import sft
  sft.train(config)
  print(f'run folder: {config.out}')


@command('quickstart', CHECKPOINT, QUESTIONS, CORPUS, OUT,
         flag('--n', 'rollouts for each question; 5 if not given', int, '>= 1', default=5),
         flag('--keep', 'most demonstrations of a question; all right ones if not given', int, '>= 1'),
         flag('--temperature', 'of sampling; config.sampler.temperature if not given', float, '>= 0'), LIMIT,
         examples=('--checkpoint runs/quickstart --out demonstrations.jsonl',
                   '--config search_r1_grpo --n 10 --keep 2 --limit 500 --out demonstrations.jsonl'))
def sample(config, flags) -> None:
  """Sample rollouts and keep the right ones as demonstrations for sft.

  They are saved on the way; rerun the same command to resume.
  """
  if flags.keep is not None and flags.keep > flags.n:
    raise UsageError(f'--keep={flags.keep} means nothing with --n={flags.n}: a question has no more chains')
  check_inputs(config, flags)
  from jaxsearch.setup import load_questions
  from jaxsearch.training import rejection, row_files
  source = flags.questions or config.data.questions
  questions = load_questions(config, source)[:flags.limit]
  records = _sample(config, flags, source, questions, flags.n,
                    functools.partial(rejection.record, most=flags.keep))
  row_files.write(flags.out, (line for record in records for line in record['demonstrations']))
  _part(flags.out).unlink(missing_ok=True)
  print_figures(rejection.figures(records, flags.n) | {'out': flags.out})


def _part(out: str) -> pathlib.Path:
  from jaxsearch.evaluation.answers import PART
  return pathlib.Path(out + PART)


def _sample(config, flags, source: str, questions: Sequence, number: int, record: Callable,
            **changes) -> list[dict]:
  """Returns a `record` of each question's `number` rollouts; what --out has kept is not sampled again.

  `changes` are arguments of `grow`.
  """
  from jaxsearch.evaluation import answers
  from jaxsearch.evaluation.manifest import made_with
  from jaxsearch.sampler.requests import Sampling
  agent, key, weights = open_agent(config, flags, questions, **changes)
  given = getattr(flags, 'temperature', None)
  sampling = Sampling(config.sampler.temperature if given is None else given)
  about = made_with(config, questions=source, corpus=searched_corpus(config, flags)) | {
    'weights': weights, 'temperature': sampling.temperature, 'n': number,
    'keep': getattr(flags, 'keep', None), 'source': source, 'questions': len(questions)}
  kept = answers.Kept(flags.out, without_secrets(about), len(questions))
  try:
    with progress_of(len(questions) * number, 'chains') as report:
      answers.sample(agent, questions, number, key, kept, record, sampling=sampling, on_progress=report)
  except BaseException:
    say(f'{len(kept.records)} of {len(questions)} questions are saved; rerun the same command to resume')
    raise
  return kept.all()


@command('carl', examples=(
  '--config.out=runs/critic',
  '--config search_r1_ppo --config.model=world-carl --config.out=runs/ppo_critic'))
def critic_warmup(config, _) -> None:
  """Warm up the critic of a config (CARL, PPO) until it passes its gate; exit status 1 if it does not.

  It learns from closed-book and tool-required rollouts. Pass its folder to train as config.critic.warm_start.
  """
  if 'critic_warmup' not in config:
    raise UsageError('this config has no group critic_warmup, see configs/carl.py')
  check_out(config)
  check_files(config, ('data', 'model', 'tokenizer', 'search', 'critic_warmup', 'sampler'))
  import jax

  from jaxsearch.evaluation import competence, plots
  from jaxsearch.training import critic_warmup
  figures = critic_warmup.warm_up(config, competence.gate_figures, plots.reliability)
  if jax.process_index() == 0:
    print_figures({'run': config.out} | figures)


@command('carl', CHECKPOINT, QUESTIONS, OUT,
         flag('--limit', 'take only the first questions; the first config.eval.number of every source if not '
              'given', int, '>= 1'),
         flag('--mixed', 'question file with all of the smaller tier and as many others; none if not given',
              place()),
         examples=('--questions world:test --out tiers.jsonl',
                   '--questions world:rl --out tiers.jsonl --mixed mixed.jsonl'))
def tiers(config, flags) -> None:
  """Sort questions into those that the policy answers closed-book (tier 2) and the others (tier 1)."""
  if 'critic_warmup' not in config:
    raise UsageError('this config does not say how to answer closed-book (config.critic_warmup.closed_book), '
                     'see configs/carl.py')
  check_inputs(config, flags)
  if flags.mixed and pathlib.Path(flags.mixed).absolute() == pathlib.Path(flags.out).absolute():
    raise UsageError(f'--mixed and --out are the same file, {flags.out}')
  from jaxsearch.data.questions import write_questions
  from jaxsearch.evaluation.question_sets import first_of_each
  from jaxsearch.setup import load_questions
  from jaxsearch.training import curation, row_files
  source = flags.questions or config.eval.questions
  questions = load_questions(config, source)[:flags.limit]
  if not flags.limit:
    questions = first_of_each(questions, config.eval.number)
  of_question = lambda trees: max(map(curation.outcome, trees), key=lambda row: row['right'])
  records = _sample(config, flags, source, questions, config.critic_warmup.tier_rollouts, of_question,
                    **config.critic_warmup.closed_book)
  tiers = curation.tiers_by(records)
  row_files.write(flags.out, [{'id': name, 'tier': tier} for name, tier in tiers.items()])
  if flags.mixed:
    write_questions(curation.mixed(questions, tiers), flags.mixed)
  _part(flags.out).unlink(missing_ok=True)
  sources = {question.metadata.get('source') for question in questions} - {None}
  of = {source: [tiers[question.id] for question in questions if question.metadata.get('source') == source]
        for source in sorted(sources)}
  shares = {f'tier_1_of_{source}': found.count(1) / len(found) for source, found in of.items()}
  tier_2 = list(tiers.values()).count(2) / len(tiers)
  print_figures({'questions': len(tiers), 'tier_2': tier_2} | shares | {'out': flags.out})


@command('quickstart',
         flag('--checkpoint', 'run folder, a checkpoint in it, or an adapter', policy, required=True),
         flag('--out', 'folder to write', place(folder=True), required=True),
         flag('--dtype', 'of the weights: float32 or bfloat16; as they are if not given',
              choices=('float32', 'bfloat16')),
         flag('--adapter', 'write only the adapter of a run with config.lora, for --checkpoint', bool),
         examples=('--checkpoint runs/quickstart --out policy',
                   '--checkpoint runs/quickstart/checkpoints/20 --out policy --dtype bfloat16'))
def export(config, flags) -> None:
  """Write a checkpoint as a Hugging Face folder.

  Its jaxsearch.json holds the config, so that the folder serves as --checkpoint like the run itself. Needs no
  accelerator, and takes none from a training beside it.
  """
  import jax
  jax.config.update('jax_platforms', 'cpu')
  from jaxsearch.evaluation.agents import tokenizer_of
  from jaxsearch.models import hub
  from jaxsearch.models.decoder import Decoder
  from jaxsearch.training.saved_policies import VERSIONS, load_params, save_adapter
  if flags.adapter:
    host = save_adapter(flags.checkpoint, flags.out, flags.dtype or None)
  else:
    model_config, params, host = load_params(
      flags.checkpoint, base=config.model, dtype=flags.dtype or None)
    trained = from_saved(host['config'])
    copy_fields(TRAINED, config, trained)
    # The folder has a tokenizer of its own.
    run = VERSIONS | {'step': host['step'], 'config': to_saved(trained) | {'tokenizer': ''}}
    tokenizer = tokenizer_of(config, host, flags.checkpoint)
    with memory.named('writing the weights', 'set --dtype bfloat16'):
      hub.save(Decoder(model_config, params=params), flags.out, tokenizer, dtype=flags.dtype or None, run=run)
  print(f'step {host["step"]} written to {flags.out}')


@command('claims/cusearch', flag('--report-only', 'train nothing; report on finished runs', bool),
         examples=('--config claims/carl', '--config configs/claims/slate.py --report-only'))
def sweep(config, flags) -> None:
  """Train a grid of variants x seeds and compare them in a table and plots; exit status 1 if a run failed."""
  from jaxsearch.evaluation import sweep, sweep_report
  trials = sweep.plan(config)
  check_place('config.out', config.out, folder=True)
  failed = [] if flags.report_only else sweep.train_all(trials, config.parallel)
  if len(failed) < len(trials):
    print(f'table: {sweep_report.write(config, trials)}')
  if failed:
    raise SystemExit(1)


@command(
  'search_r1_grpo_qwen2_5_3b',
  flag('--target', 'devices: tpu:v5e:4x4, tpu:v5p:4x4x4, tpu:v6e:4x4 (shape of the slice) or cuda:h100:2x8 '
       '(hosts x devices), also a100, h200 and b200', required=True),
  flag('--turns', 'observations of a chain; as many as the config allows if not given', int, '>= 0'),
  flag('--tokens', 'of a policy span; as many as the config allows if not given', int, '>= 1'),
  flag('--prompt', 'its tokens; 256, or a quarter of a short path, if not given', int, '>= 1'),
  flag('--observation', 'its tokens; 512, or what half of the path allows, if not given', int, '>= 1'),
  flag('--search', 'also find the largest sampler.slots and train.micro_rows that fit', bool),
  flag('--out', 'JSON file to write, with every collective; none if not given', place()), examples=(
    '--config configs/carl_qwen2_5_7b.py --target tpu:v5p:4x4x4',
    '--config configs/search_r1_grpo_qwen2_5_3b.py --target cuda:h100:2x8 --turns 2 --tokens 200 --search'))
def plan(config, flags) -> None:
  """Plan a run on a TPU or GPU pod without one: memory of each device, traffic, time of a step.

  Compiles the real programs with the target's own compiler, from shapes alone; minutes each. Needs the extra
  `plan`.
  """
  import jax
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_enable_compilation_cache', False)  # of devices elsewhere: cannot be read back
  from jaxsearch.parallel import targets
  from jaxsearch.planning import plan
  target = targets.parse(flags.target)
  workload = {name: getattr(flags, name) for name in ('turns', 'tokens', 'prompt', 'observation')}
  made = plan.plan(config, target, say, **workload) | {'target': flags.target}
  for line in plan.lines(made, target):
    print(line)
  write_result(flags.out, made)
  if flags.search:
    made['largest'] = plan.search(config, target, say)
    write_result(flags.out, made)
  print(json.dumps(plan.short(made)))
