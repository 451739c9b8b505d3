"""A grid of variants x seeds: which trainings it takes, and getting them all done.

A comparison is a config (see configs/claims) with these fields:

  title      what is compared, in words: the heading of the table
  base       config file of the runs, such as 'configs/quickstart.py'
  common     overrides for every run: {'steps': 40, 'eval.every': 10} or, nested, {'eval': {'every': 10}}
  variants   {name: overrides}; a `config` among them is a file that takes the place of `base`
  baseline   the variant that differences refer to
  seeds      tuple
  out        folder; a run lives in OUT/VARIANT/SEED, with what it printed in log.txt
  parallel   runs at a time; 0 is one on each accelerator, or two on CPU

It is made with `ConfigDict(convert_dict=False)`, which keeps the order of the variants and the dots in keys. Each run is
the ordinary `jaxsearch train` in a process of its own; finished ones are left as they are, others are gone on with. The
tables are made in sweep_report.py.
"""

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import ml_collections
from rich import progress
from rich.console import Console

from jaxsearch import flags
from jaxsearch.training import checkpoint, runs

FIELDS = {'title': str, 'base': str, 'common': dict, 'variants': dict, 'baseline': str, 'seeds': tuple, 'out': str,
          'parallel': int}
OWN = ('seed', 'out', 'progress')  # fields of a run that the comparison sets
POLL = 0.5       # seconds between two looks at the running processes
LOG_LINES = 15   # shown of a run that failed


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
  """One run of the grid."""
  variant: str
  seed: int
  arguments: tuple[str, ...]         # of `jaxsearch train`
  config: ml_collections.ConfigDict  # what they come to

  @property
  def out(self) -> pathlib.Path:
    return pathlib.Path(self.config.out)

  def __str__(self):
    return f'{self.variant}, seed {self.seed}'


@dataclasses.dataclass(frozen=True)
class Place:
  """Where one run at a time computes: its environment variables, and the cores it is kept to (None: all)."""
  environment: Mapping[str, str]
  cores: frozenset[int] | None = None


def plan(config: ml_collections.ConfigDict) -> list[Trial]:
  """The runs of a comparison, all variants of the first seed first.

  Raises:
    ValueError, flags.UsageError: a field, a variant or one of its overrides is not as it should be; names it.
  """
  check(config)
  common, trials = flat(config.common), []
  for seed in config.seeds:
    for name, changes in config.variants.items():
      overrides = common | flat(changes)
      file = overrides.pop('config', config.base)
      if own := [field for field in OWN if field in overrides]:
        raise ValueError(f'{name}: {own[0]} is set by the comparison')
      overrides |= {'seed': seed, 'out': str(pathlib.Path(config.out) / slug(name) / str(seed)), 'progress': False}
      arguments = (f'--config={file}', *(f'--config.{field}={value}' for field, value in overrides.items()))
      try:
        run, *_ = flags.parse('train', arguments, file)
      except flags.UsageError as error:
        raise flags.UsageError(f'{name}: {error}') from error
      if not run.eval.every:
        raise ValueError(f'{name}: eval.every=0; without answers to held-out questions there is nothing to compare')
      trials.append(Trial(name, seed, arguments, run))
  return trials


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError where the fields are not those of a comparison, or do not fit together."""
  if wrong := [name for name, kind in FIELDS.items() if not isinstance(config.get(name), kind)]:
    raise ValueError(f'this config is no comparison: {wrong[0]} should be a {FIELDS[wrong[0]].__name__} '
                     '(the fields are told in jaxsearch/evaluation/sweep.py)')
  if unknown := [name for name in config if name not in FIELDS]:
    raise ValueError(f'a comparison has no field {unknown[0]!r}')
  if config.baseline not in config.variants:
    raise ValueError(f'baseline={config.baseline!r} is none of the variants {", ".join(config.variants)}')
  if not config.seeds or len(set(config.seeds)) < len(config.seeds) or not all(isinstance(s, int) for s in config.seeds):
    raise ValueError(f'seeds={config.seeds} should be different whole numbers')
  slugs = collections.Counter(map(slug, config.variants))
  if clash := [name for name in config.variants if slugs[slug(name)] > 1 or not slug(name)]:
    raise ValueError(f'the variants {", ".join(map(repr, clash))} have no folder name of their own')


def flat(values: Mapping, prefix: str = '') -> dict:
  """{'a.b': value} of nested dicts; keys may have their dots already."""
  result = {}
  for name, value in values.items():
    result |= flat(value, f'{prefix}{name}.') if isinstance(value, Mapping) else {prefix + name: value}
  return result


def slug(name: str) -> str:
  """The folder name of a variant: 'SDGA-Auto (K=32)' -> 'sdga-auto-k-32'."""
  return re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')


def finished(trial: Trial) -> bool:
  """Whether the run's last step is logged, evaluated at every temperature, and saved."""
  steps = trial.config.steps
  evaluated = {row['temperature'] for row in runs.read(trial.out / 'evaluations.jsonl') if row['step'] == steps}
  return (step_of(trial) == steps and evaluated >= set(trial.config.eval.temperatures)
          and (trial.out / 'checkpoints' / str(steps)).is_dir())


def step_of(trial: Trial) -> int:
  """The last step in the run's metrics, 0 before the first."""
  rows = runs.read(trial.out / 'metrics.jsonl')
  return rows[-1]['step'] if rows else 0


def check_finished(trial: Trial) -> None:
  """Raises ValueError if a finished run was made with another config than the comparison asks for."""
  saved = json.loads((trial.out / 'config.json').read_text(encoding='utf-8'))
  checkpoint.check_same_run(saved, trial.config)
  if saved['eval'] != json.loads(json.dumps(trial.config.eval.to_dict())):
    raise ValueError(f'{trial.out} was evaluated with other settings: {saved["eval"]}. Use another out folder, or set '
                     'them back.')


def train_all(trials: Sequence[Trial], parallel: int) -> list[Trial]:
  """Trains what is not finished, `parallel` runs at a time; returns the runs that failed, told of on stderr.

  Raises:
    ValueError: a finished run has another config; nothing is started.
    SystemExit: after SIGTERM or SIGINT, once every run has saved what it has; status 128 + signal.
  """
  waiting = [trial for trial in trials if not finished(trial)]
  for trial in trials:
    if trial not in waiting:
      check_finished(trial)
  free, running, failed = places(parallel) if waiting else [], {}, []
  console = Console(stderr=True, highlight=False)
  tell = lambda text: console.print(text, markup=False, soft_wrap=True)
  with _stop_signals() as signals, _progress_bar(trials, console) as show, contextlib.ExitStack() as stack:
    stack.callback(lambda: [process.kill() for process in running])  # none is left, unless something went wrong here
    told = 0
    while running or (waiting and not signals):
      while waiting and free and not signals:
        trial, place = waiting.pop(0), free.pop()
        try:
          running[start(trial, place)] = trial, place
        except BlockingIOError:
          free.append(place)
          failed.append(trial)
          tell(f'{trial}: another process is at this run')
      for process in [process for process in running if process.poll() is not None]:
        trial, place = running.pop(process)
        free.append(place)
        if not signals and not (process.returncode == 0 and finished(trial)):
          failed.append(trial)
          tell(failure(trial, process.returncode))
      if len(signals) > told:
        for process in running:
          process.kill() if told else process.terminate()  # asked twice: does not wait for the step
        told = len(signals)
      show([trial for trial, _ in running.values()], failed)
      time.sleep(POLL if running else 0)
  if signals:
    tell(f'stopped; {sum(map(finished, trials))} of {len(trials)} runs are finished, and the same command goes on')
    raise SystemExit(128 + signals[0])
  return failed


def start(trial: Trial, place: Place) -> subprocess.Popen:
  """Starts the training of a run; what it prints is appended to log.txt.

  Raises:
    BlockingIOError: another process is at it. The log is locked as long as any process holds it open, so this holds for
      runs that outlived their comparison too.
  """
  trial.out.mkdir(parents=True, exist_ok=True)
  cache = {'JAX_COMPILATION_CACHE_DIR': str(trial.out.parents[1].absolute() / 'programs')}  # runs share their programs
  command = [sys.executable, '-m', 'jaxsearch.cli', 'train', *trial.arguments]
  with (trial.out / 'log.txt').open('a') as log, _kept_to(place.cores):
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.write(f'$ jaxsearch train {" ".join(trial.arguments)}\n')
    log.flush()
    return subprocess.Popen(command, env=cache | os.environ | place.environment, stdin=subprocess.DEVNULL, stdout=log,
                            stderr=log)


def failure(trial: Trial, status: int) -> str:
  """What is told of a run that failed: how it ended and the end of its log."""
  lines = (trial.out / 'log.txt').read_text(encoding='utf-8', errors='replace').splitlines()
  how = f'exit status {status}' if status else f'it ended, but step {trial.config.steps} is not logged, evaluated and saved'
  return '\n  '.join([f'{trial}: {how}; the end of {trial.out / "log.txt"}:', *lines[-LOG_LINES:]])


def places(parallel: int) -> list[Place]:
  """Where runs compute: `parallel` shares of this machine, at most one for each accelerator or core (0: see above).

  A run that has the machine for itself is left alone. On CPU the cores are dealt out: two trainings whose thread pools
  both take all cores are slower than one after the other.
  """
  platform, names = devices()
  number = min(parallel or (2 if platform == 'cpu' else len(names)), len(names))
  if number == 1:
    return [Place({})]
  if platform == 'cpu':
    size = len(names) // number
    single = {'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} --xla_cpu_multi_thread_eigen=false'} if size == 1 else {}
    return [Place({'OMP_NUM_THREADS': str(size)} | single, frozenset(map(int, names[i * size:(i + 1) * size])))
            for i in range(number)]
  if platform == 'gpu':
    return [Place({'CUDA_VISIBLE_DEVICES': name}) for name in names[:number]]
  # https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3: processes on one host that know nothing of each other
  return [Place({'TPU_VISIBLE_CHIPS': name, 'TPU_CHIPS_PER_PROCESS_BOUNDS': '1,1,1', 'TPU_PROCESS_BOUNDS': '1,1,1',
                 'TPU_MESH_CONTROLLER_ADDRESS': f'localhost:{8476 + i}', 'TPU_MESH_CONTROLLER_PORT': str(8476 + i)})
          for i, name in enumerate(names[:number])]


def devices() -> tuple[str, list[str]]:
  """('cpu', cores), ('gpu', names as in CUDA_VISIBLE_DEVICES) or ('tpu', chips) of this machine.

  Another process asks JAX: one that has opened a device keeps it from the runs.
  """
  platform, count = 'cpu', 0
  if os.environ.get('JAX_PLATFORMS') != 'cpu':
    # A TPU chip may be two devices: chips are told apart by where they are.
    code = ('import jax; found = jax.local_devices(); '
            'print(found[0].platform, len({str(getattr(device, "coords", device.id)) for device in found}))')
    asked = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    if asked.returncode:
      raise ValueError(f'JAX finds no device: {asked.stderr.strip().splitlines()[-1]}')
    platform, count = asked.stdout.split()[-2:]
  if platform == 'cpu':
    cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count())
    return platform, [str(core) for core in sorted(cores)]
  shown = os.environ.get('CUDA_VISIBLE_DEVICES' if platform == 'gpu' else 'TPU_VISIBLE_CHIPS', '')
  return platform, shown.split(',') if shown else [str(i) for i in range(int(count))]


@contextlib.contextmanager
def _kept_to(cores: frozenset[int] | None) -> Iterator[None]:
  """This thread, and so a process started by it, stays on `cores` meanwhile, where the system can do that."""
  if cores is None or not hasattr(os, 'sched_setaffinity'):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
  """A list to which every SIGTERM and SIGINT is added, in place of what they do otherwise."""
  received, before = [], {}
  if threading.current_thread() is threading.main_thread():
    before = {number: signal.signal(number, lambda number, _: received.append(number))
              for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield received
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def _progress_bar(trials: Sequence[Trial], console: Console):
  """Yields `show(running, failed)`: a bar for all runs together and one for each that is running, counted in steps."""
  columns = [progress.TextColumn('{task.description}', markup=False), progress.BarColumn(bar_width=24),
             progress.MofNCompleteColumn(), progress.TextColumn('{task.fields[note]}', markup=False),
             progress.TimeElapsedColumn(), progress.TextColumn('left'), progress.TimeRemainingColumn()]
  with progress.Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=1,
                         speed_estimate_period=1800) as bar:
    steps = {trial: min(step_of(trial), trial.config.steps) for trial in trials}
    done = sum(finished(trial) for trial in trials)
    overall, tasks = bar.add_task('all runs', total=None, completed=sum(steps.values()), note=''), {}

    def show(running: Sequence[Trial], failed: Sequence[Trial]) -> None:
      """Brings the bars up to date."""
      nonlocal done
      if not console.is_terminal:
        return
      for trial in tasks.keys() - set(running):
        bar.remove_task(tasks.pop(trial))
        steps[trial] = step_of(trial)
        done += finished(trial)
      for trial in running:
        if trial not in tasks:
          tasks[trial] = bar.add_task(str(trial), total=trial.config.steps, note='steps')
        steps[trial] = step_of(trial)
        bar.update(tasks[trial], completed=steps[trial])
      note = f'steps · {done} of {len(trials)} runs' + (f', {len(failed)} failed' if failed else '')
      total = sum(steps[trial] if trial in failed else trial.config.steps for trial in trials)
      bar.update(overall, total=total, completed=sum(steps.values()), note=note)

    yield show
