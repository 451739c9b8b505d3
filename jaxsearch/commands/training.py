"""Training, and what prepares it."""

import contextlib
import json
import pathlib
import shlex
import sys
import time

from jaxsearch.commands.command import (
  CHECKPOINT,
  QUESTIONS,
  check_inputs,
  check_out,
  command,
  flag,
  load_questions,
  open_agent,
  print_figures,
  say,
  write_result,
)
from jaxsearch.config_check import check_files, without_secrets
from jaxsearch.flags import UsageError, check_place, place


@command('quickstart', examples=(
  '--config quickstart --config.out=runs/mine',
  '--config search_r1_grpo --config.data.questions=F.jsonl --config.data.corpus=F.jsonl --config.steps=100'))
def train(config, _) -> None:
  """Train a policy by reinforcement learning; rerun the same command to resume.

  With config.eval.every set it ends with one JSON line about held-out questions.
  """
  start = time.perf_counter()
  check_out(config)
  import jax

  check_files(config, ('data', 'model', 'tokenizer', 'search', 'reader', 'judge', 'critic', *['eval'] * bool(config.eval.every)))
  from jaxsearch.evaluation import answers, question_sets, report
  from jaxsearch.training import loop, remote, row_files, runs
  if config.eval.every:
    question_sets.read_held_out(config)  # a mistake in them is found now, not after the first step
  try:
    loop.train(config, answers.held_out)
  except runs.RunStopped:
    with contextlib.suppress(OSError):  # of a full disk
      if jax.process_index() == 0:
        report.write_report(remote.local(config.out))  # what went wrong stands at its top
        remote.publish(config.out)
    raise
  if jax.process_index() == 0:
    page = report.write_report(remote.local(config.out))
    remote.publish(config.out)
    given = without_secrets(shlex.join(sys.argv[2:]))  # where to search is not taken from a checkpoint
    print(f'jaxsearch: ask the policy: {sys.argv[0]} ask "QUESTION" {given} --checkpoint {config.out}', file=sys.stderr)
    evaluations = row_files.read(page.with_name('evaluations.jsonl'))
    if not evaluations:
      print(f'report: {page}')
      return
    own, greedy = ([row['em'] for row in evaluations if row['temperature'] == temperature]
                   for temperature in (config.eval.temperatures[0], 0.0))
    print_figures({'em_before': own[0], 'em_after': own[-1], 'steps': evaluations[-1]['step'],
            'seconds': round(time.perf_counter() - start, 1), 'report': str(page)}
           | ({'em_before_greedy': greedy[0], 'em_after_greedy': greedy[-1]} if greedy else {}))


@command('sft', examples=('--config.sft.demonstrations=F.jsonl --config.out=runs/sft', '--config sft_gold --config.steps=50'))
def sft(config, _) -> None:
  """Train a policy on demonstrations."""
  check_out(config)
  check_files(config, ('model', 'tokenizer'))
  if not config.sft.demonstrations:
    raise UsageError('sft.demonstrations is not set: a JSONL file, see configs/sft.py, or world:rl for gold chains')
  from jaxsearch.training import sft
  sft.train(config)
  print(f'run folder: {config.out}')


@command('carl', examples=(
  '--config.out=runs/critic', '--config search_r1_ppo --config.model=world-carl --config.out=runs/ppo_critic'))
def critic_warmup(config, _) -> None:
  """Warm up the critic of a config (CARL, PPO) until it passes its gate; exit status 1 if it does not.

  The critic learns from closed-book and tool-required rollouts. Pass its folder to train as config.critic.warm_start.
  """
  if 'critic_warmup' not in config:
    raise UsageError('this config has no group critic_warmup: its method has no critic, or see configs/carl.py')
  check_out(config)
  check_files(config, ('data', 'model', 'tokenizer', 'search', 'critic_warmup'))
  import jax

  from jaxsearch.evaluation import competence, plots
  from jaxsearch.training import critic_warmup
  figures = critic_warmup.warm_up(config, competence.gate_figures, plots.reliability)
  if jax.process_index() == 0:
    print_figures({'run': config.out} | figures)


@command('carl', CHECKPOINT, QUESTIONS, flag('--out', 'JSONL file to write', place(), required=True),
         flag('--limit', 'take only this many questions, the first; config.eval.number if not given', int, '>= 1'),
         flag('--mixed', 'question file to write too: half of each tier, all of the smaller one; none if not given', place()),
         examples=('--questions world:test --out tiers.jsonl', '--questions world:rl --out tiers.jsonl --mixed mixed.jsonl'))
def tiers(config, flags) -> None:
  """Sort questions into those that the policy answers closed-book (tier 2) and the others (tier 1)."""
  if 'critic_warmup' not in config:
    raise UsageError('this config does not say how to answer closed-book (config.critic_warmup.closed_book), see configs/carl.py')
  check_inputs(config, flags)
  from jaxsearch.data.questions import write_questions
  from jaxsearch.training import curation
  if flags.mixed and pathlib.Path(flags.mixed).absolute() == pathlib.Path(flags.out).absolute():
    raise UsageError(f'--mixed and --out are the same file, {flags.out}')
  limit = (config.eval.number or None) if flags.limit is None else flags.limit
  questions = load_questions(config, flags.questions or config.eval.questions, limit)
  agent, key = open_agent(config, flags, questions, **config.critic_warmup.closed_book)
  found = curation.tiers_of(agent, questions, config.critic_warmup.tier_rollouts, key)
  write_result(flags.out, ''.join(json.dumps({'id': name, 'tier': tier}) + '\n' for name, tier in found.items()))
  if flags.mixed:
    write_questions(curation.mixed(questions, found), flags.mixed)
  shares = {f'tier_1_{source}': sum(own) / len(own) for source in dict.fromkeys(
    question.metadata.get('source') for question in questions) if source and (
      own := [found[question.id] == 1 for question in questions if question.metadata.get('source') == source])}
  tier_2 = sum(tier == 2 for tier in found.values()) / len(found)
  print_figures({'questions': len(found), 'tier_2': tier_2} | shares | {'out': str(pathlib.Path(flags.out))})


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
  flag('--turns', 'observations of a chain; as many as the config allows if not given', int, '>= 0'),
  flag('--tokens', 'of a policy span; as many as the config allows if not given', int, '>= 1'),
  flag('--prompt', 'its tokens; 256, or a quarter of a short path, if not given', int, '>= 1'),
  flag('--observation', 'its tokens; 512, or what half of the path allows, if not given', int, '>= 1'),
  flag('--search', 'also find the largest sampler.slots and train.micro_rows that fit; compiles each several times', bool),
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
  from jaxsearch.planning import plan
  target, workload = targets.parse(flags.target), dict(
    turns=flags.turns, tokens=flags.tokens, prompt=flags.prompt, observation=flags.observation)
  made = plan.plan(config, target, say, **workload) | {'target': flags.target}
  for line in plan.lines(made, target):
    print(line)
  if flags.search:
    made['largest'] = plan.search(config, target, say)
  write_result(flags.out, made)
  print(json.dumps(plan.short(made)))
