"""Trains a grid of variants x seeds: `jaxsearch sweep`.

A sweep is a config (see configs/claims) with these fields:

  title      what is compared, in words: the heading of the table
  base       config file of the runs, such as 'configs/quickstart.py'
  common     overrides for every run: {'steps': 40, 'eval.every': 10} or, nested, {'eval': {'every': 10}}
  variants   {name: overrides}; a `config` among them is a file that replaces `base`
  baseline   the variant that the others are compared with
  seeds      tuple
  primary    if given: the variants whose difference to the baseline decides, for the correction of p
  out        folder; a run lives in OUT/VARIANT/SEED, its output in log.txt
  parallel   runs at a time; 0: one on each GPU, or one. On CPUs they share the cores: two small runs of one
             thread each took 80 s a run, one of two threads 130 s

Make it with `ConfigDict(convert_dict=False)`, which keeps the order of the variants and the dots in keys.
Each run is the ordinary `jaxsearch train` in a process of its own. Finished runs are kept, the others
resume. sweep_report.py writes the tables.
"""

import collections
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import ml_collections

from jaxsearch import flags
from jaxsearch.config_check import fields, from_saved, to_saved
from jaxsearch.evaluation.terminal import printable
from jaxsearch.files import no_link, read_json
from jaxsearch.training import run_folder
from jaxsearch.training.row_files import read as read_rows

FIELDS = dict(title=str, base=str, common=dict, variants=dict, baseline=str, seeds=tuple, out=str,
              parallel=int)
OPTIONAL = dict(primary=tuple)
POLL_SECONDS = 0.5  # between two looks at the running processes
LOG_LINES = 15      # shown of a failed run
DEVICES = pathlib.Path('/dev')


@dataclasses.dataclass(frozen=True, eq=False)
class SweepRun:
  """One training run of a sweep."""
  variant: str
  seed: int
  arguments: tuple[str, ...]         # of `jaxsearch train`
  config: ml_collections.ConfigDict  # parsed from them

  @property
  def out(self) -> pathlib.Path:
    return pathlib.Path(self.config.out)

  def __str__(self):
    return f'{self.variant}, seed {self.seed}'


def plan(config: ml_collections.ConfigDict) -> list[SweepRun]:
  """Returns the runs of a sweep: what decides first (baseline and primary variants), seed by seed.

  Raises ValueError, which names a wrong field or override.
  """
  check(config)
  runs = []
  decides = {config.baseline, *(config.get('primary') or config.variants)}
  cells = [(name, seed) for seed in config.seeds for name in config.variants]
  for name, seed in sorted(cells, key=lambda cell: cell[0] not in decides):
    overrides = flat(config.common) | flat(config.variants[name])
    file = overrides.pop('config', config.base)
    place = {'seed': seed, 'out': str(pathlib.Path(config.out, slug(name), str(seed))), 'progress': False}
    if taken := place.keys() & overrides.keys():
      raise ValueError(f'{name}: the sweep sets {min(taken)} itself')
    changed = [f'--config.{field}={value}' for field, value in (overrides | place).items()]
    arguments = (f'--config={file}', *changed)
    try:
      run_config, *_ = flags.parse('train', arguments, file)
    except ValueError as error:
      raise flags.UsageError(f'{name}: {error}') from error
    if not run_config.eval.every:
      raise ValueError(f'{name}: eval.every=0; a sweep compares scores on held-out questions')
    runs.append(SweepRun(name, seed, arguments, run_config))
    if set(run_config.eval.temperatures) != set(runs[0].config.eval.temperatures):
      raise ValueError(f'{name}: eval.temperatures is not that of {runs[0].variant}; a sweep compares scores '
                       'at the same temperatures')
  return runs


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a config that is no sweep or contradicts itself."""
  for name, kind in (FIELDS | {name: OPTIONAL[name] for name in set(config) & OPTIONAL.keys()}).items():
    if not isinstance(config.get(name), kind):
      raise ValueError(f'this config is no sweep: {name} should be a {kind.__name__} '
                       '(jaxsearch/evaluation/sweep.py lists the fields)')
  if unknown := set(config) - FIELDS.keys() - OPTIONAL.keys():
    raise ValueError(f'a sweep has no field {min(unknown)!r}')
  if config.baseline not in config.variants:
    raise ValueError(f'baseline={config.baseline!r} is none of the variants {", ".join(config.variants)}')
  if unknown := set(config.get('primary', ())) - set(config.variants):
    raise ValueError(f'primary={min(unknown)!r} is none of the variants {", ".join(config.variants)}')
  if not config.seeds or len({seed for seed in config.seeds if isinstance(seed, int)}) < len(config.seeds):
    raise ValueError(f'seeds={config.seeds} should be different whole numbers')
  if config.parallel < 0:
    raise ValueError(f'parallel={config.parallel} must be >= 0')
  slugs = collections.Counter(map(slug, config.variants))
  if clash := [name for name in config.variants if slugs[slug(name)] > 1 or not slug(name)]:
    raise ValueError(f'the variants {", ".join(map(repr, clash))} have no folder name of their own')


def flat(values: Mapping) -> dict:
  """Returns {'a.b': value} of nested dicts; keys may already contain dots."""
  return {name: value for name, value in fields(values) if not isinstance(value, Mapping)}


def slug(name: str) -> str:
  """Returns the folder name of a variant: 'SDGA-Auto (K=32)' -> 'sdga-auto-k-32'."""
  return re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')


def finished(run: SweepRun) -> bool:
  """Tells whether the run's last step is logged, evaluated at every temperature, and saved."""
  steps = run.config.steps
  evaluated = {row['temperature'] for row in read_rows(run.out / 'evaluations.jsonl') if row['step'] == steps}
  logged = any(row['step'] == steps for row in read_rows(run.out / 'metrics.jsonl')[-1:])
  saved = (run.out / 'checkpoints' / str(steps)).is_dir()
  return saved and logged and evaluated >= set(run.config.eval.temperatures)


def check_finished(run: SweepRun) -> None:
  """Raises ValueError if a finished run was trained or evaluated with another config than the sweep's."""
  saved = read_json(run.out / 'config.json')
  run_folder.check_same_run(saved, run.config)
  if (then := from_saved(saved).eval.to_dict()) != from_saved(to_saved(run.config)).eval.to_dict():
    raise ValueError(f'{run.out} was evaluated with other settings: {then}. '
                     'Use another out folder, or set them back.')


def train_all(runs: Sequence[SweepRun], parallel: int) -> list[SweepRun]:
  """Trains the unfinished runs, `parallel` at a time; says how each ends, and returns those that failed.

  On SIGTERM and Ctrl-C every run finishes its step and saves; a second signal kills them. ValueError, before
  anything is started, if a finished run has another config.
  """
  waiting = [run for run in runs if not finished(run)]
  for run in set(runs).difference(waiting):
    check_finished(run)
  free, running, failed, again = environments(parallel), {}, [], collections.Counter()
  report = lambda text: print(printable(text), file=sys.stderr, flush=True)
  handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
  try:
    while running or waiting:
      while waiting and free:
        run, environment = waiting.pop(0), free.pop()
        running[start(run, environment)] = run, environment
      for process in [process for process in running if process.poll() is not None]:
        run, environment = running.pop(process)
        free.append(environment)
        if process.returncode in (3, 75) and again[run] < 2:  # a server or a network
          again[run] += 1
          waiting.append(run)
          report(f'{run}: exit status {process.returncode}; it is tried again')
        elif process.returncode or not finished(run):
          failed.append(run)
          report(_end_of(run, process.returncode))
        else:
          report(f'{run}: finished; {len(waiting) + len(running)} runs left')
      time.sleep(POLL_SECONDS if running else 0)
  except BaseException:
    for process in running:
      process.terminate()
    for process in running:
      process.wait()
    done = sum(map(finished, runs))
    report(f'stopped with {done} of {len(runs)} runs finished; rerun the same command to resume')
    raise
  finally:
    signal.signal(signal.SIGTERM, handler)
    for process in running:
      process.kill()
  return failed


def start(run: SweepRun, environment: Mapping[str, str]) -> subprocess.Popen:
  """Starts the training of a run; its output is appended to log.txt."""
  run.out.mkdir(parents=True, exist_ok=True)
  programs = run.out.parents[1].absolute() / 'programs'  # compiled, shared by the runs
  with open(run.out / 'log.txt', 'a', opener=no_link) as log:
    print('$ jaxsearch train', *run.arguments, file=log, flush=True)
    command = [sys.executable, '-m', 'jaxsearch.cli', 'train', *run.arguments]
    variables = {'JAX_COMPILATION_CACHE_DIR': str(programs)} | os.environ | environment
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def environments(parallel: int) -> list[dict[str, str]]:
  """Returns the environment variables of each parallel run: a GPU of its own, or its share of the cores."""
  if (visible := os.environ.get('CUDA_VISIBLE_DEVICES')) is None:
    gpus = [str(number) for number in range(len(list(DEVICES.glob('nvidia[0-9]*'))))]
  else:
    gpus = [name for name in visible.split(',') if name]  # '' hides all
  if not gpus or os.environ.get('JAX_PLATFORMS') == 'cpu':
    threads = {'NPROC': str(max(1, os.cpu_count() // parallel))} if parallel > 1 else {}  # XLA reads it
    return [threads] * (parallel or 1)
  return [{'CUDA_VISIBLE_DEVICES': name} for name in gpus[:parallel or None]]


def _end_of(run: SweepRun, status: int) -> str:
  unfinished = f'it ended, but step {run.config.steps} is not logged, evaluated and saved'
  log = run.out / 'log.txt'
  lines = log.read_text(encoding='utf-8', errors='replace').splitlines()[-LOG_LINES:]
  how = f'exit status {status}' if status else unfinished
  return '\n  '.join([f'{run}: {how}; the end of {log}:', *lines])
