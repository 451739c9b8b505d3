"""Trains a grid of variants x seeds: `jaxsearch sweep`.

A sweep is a config (see configs/claims) with these fields:

  title      what is compared, in words: the heading of the table
  base       config file of the runs, such as 'configs/quickstart.py'
  common     overrides for every run: {'steps': 40, 'eval.every': 10} or, nested, {'eval': {'every': 10}}
  variants   {name: overrides}; a `config` among them is a file that replaces `base`
  baseline   the variant that the others are compared with
  seeds      tuple
  out        folder; a run lives in OUT/VARIANT/SEED, its output in log.txt
  parallel   runs at a time; 0: one on each accelerator, or two on CPU

Make it with `ConfigDict(convert_dict=False)`, which keeps the order of the variants and the dots in keys. Each run is the
ordinary `jaxsearch train` in a process of its own. Finished runs are kept, the others resume. sweep_report.py writes the tables.
"""

import collections
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_collections
from rich import progress
from rich.console import Console

from jaxsearch import flags
from jaxsearch.config_check import fields, from_saved
from jaxsearch.evaluation.terminal import printable
from jaxsearch.files import no_link
from jaxsearch.training import checkpoint
from jaxsearch.training.runs import read as read_rows

FIELDS = dict(title=str, base=str, common=dict, variants=dict, baseline=str, seeds=tuple, out=str, parallel=int)
POLL_SECONDS = 0.5  # between two looks at the running processes
LOG_LINES = 15      # shown of a failed run


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


class DeviceShare(NamedTuple):
  """The devices of one run at a time: environment variables that select them, and its CPU cores (None: all)."""
  environment: Mapping[str, str]
  cores: frozenset[int] | None = None


def plan(config: ml_collections.ConfigDict) -> list[SweepRun]:
  """The runs of a sweep, all variants of the first seed first. ValueError or UsageError names a wrong field or override."""
  check(config)
  runs = []
  for seed, (name, changes) in itertools.product(config.seeds, config.variants.items()):
    overrides = flat(config.common) | flat(changes)
    file = overrides.pop('config', config.base)
    own = {'seed': seed, 'out': str(pathlib.Path(config.out) / slug(name) / str(seed)), 'progress': False}
    if taken := [field for field in own if field in overrides]:
      raise ValueError(f'{name}: the sweep sets {taken[0]} itself')
    arguments = (f'--config={file}', *(f'--config.{field}={value}' for field, value in (overrides | own).items()))
    try:
      run_config, *_ = flags.parse('train', arguments, file)
    except flags.UsageError as error:
      raise flags.UsageError(f'{name}: {error}') from error
    if not run_config.eval.every:
      raise ValueError(f'{name}: eval.every=0; a sweep compares scores on held-out questions')
    runs.append(SweepRun(name, seed, arguments, run_config))
  return runs


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a config that is no sweep or contradicts itself."""
  if wrong := [name for name, kind in FIELDS.items() if not isinstance(config.get(name), kind)]:
    raise ValueError(f'this config is no sweep: {wrong[0]} should be a {FIELDS[wrong[0]].__name__} '
                     '(jaxsearch/evaluation/sweep.py lists the fields)')
  if unknown := [name for name in config if name not in FIELDS]:
    raise ValueError(f'a sweep has no field {unknown[0]!r}')
  if config.baseline not in config.variants:
    raise ValueError(f'baseline={config.baseline!r} is none of the variants {", ".join(config.variants)}')
  if not config.seeds or len(set(config.seeds)) < len(config.seeds) or not all(isinstance(s, int) for s in config.seeds):
    raise ValueError(f'seeds={config.seeds} should be different whole numbers')
  if config.parallel < 0:
    raise ValueError(f'parallel={config.parallel} must be >= 0')
  slugs = collections.Counter(map(slug, config.variants))
  if clash := [name for name in config.variants if slugs[slug(name)] > 1 or not slug(name)]:
    raise ValueError(f'the variants {", ".join(map(repr, clash))} have no folder name of their own')


def flat(values: Mapping) -> dict:
  """{'a.b': value} of nested dicts; keys may already contain dots."""
  return {name: value for name, value in fields(values) if not isinstance(value, Mapping)}


def slug(name: str) -> str:
  """The folder name of a variant: 'SDGA-Auto (K=32)' -> 'sdga-auto-k-32'."""
  return re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')


def finished(run: SweepRun) -> bool:
  """Whether the run's last step is logged, evaluated at every temperature, and saved."""
  steps = run.config.steps
  missing = set(run.config.eval.temperatures).difference(
    row['temperature'] for row in read_rows(run.out / 'evaluations.jsonl') if row['step'] == steps)
  return (run.out / 'checkpoints' / str(steps)).is_dir() and last_step(run) == steps and not missing


def last_step(run: SweepRun) -> int:
  """The last step in the run's metrics, 0 before the first."""
  rows = read_rows(run.out / 'metrics.jsonl')
  return rows[-1]['step'] if rows else 0


def check_finished(run: SweepRun) -> None:
  """Raises ValueError if a finished run was trained or evaluated with another config than the sweep's."""
  saved = json.loads((run.out / 'config.json').read_text(encoding='utf-8'))
  checkpoint.check_same_run(saved, run.config)
  if (then := from_saved(saved).eval.to_dict()) != run.config.eval.to_dict():
    raise ValueError(f'{run.out} was evaluated with other settings: {then}. Use another out folder, or set them back.')


def train_all(runs: Sequence[SweepRun], parallel: int) -> list[SweepRun]:
  """Trains the unfinished runs, `parallel` at a time; reports failures on stderr and returns the runs that failed.

  Raises:
    ValueError: a finished run has another config; nothing is started.
    SystemExit: after SIGTERM or SIGINT, once every run has saved; status 128 + signal.
  """
  waiting = [run for run in runs if not finished(run)]
  for run in set(runs).difference(waiting):
    check_finished(run)
  free, running, failed = device_shares(parallel) if waiting else [], {}, []
  signals, forwarded = [], 0  # received, and passed on to the processes
  console = Console(stderr=True, highlight=False)
  report = lambda text: console.print(text, markup=False, soft_wrap=True)
  with _progress_bar(runs, console) as show, contextlib.ExitStack() as stack:
    for number in (signal.SIGTERM, signal.SIGINT):
      stack.callback(signal.signal, number, signal.signal(number, lambda number, _: signals.append(number)))
    stack.callback(lambda: [process.kill() for process in running])  # empty, unless this function itself failed
    while running or (waiting and not signals):
      while waiting and free and not signals:
        run, share = waiting.pop(0), free.pop()
        try:
          running[start(run, share)] = run, share
        except BlockingIOError:
          free.append(share)
          failed.append(run)
          report(f'{run}: another process is training this run')
      for process in [process for process in running if process.poll() is not None]:
        run, share = running.pop(process)
        free.append(share)
        if not signals and not (process.returncode == 0 and finished(run)):
          failed.append(run)
          lines = (run.out / 'log.txt').read_text(encoding='utf-8', errors='replace').splitlines()[-LOG_LINES:]
          how = (f'exit status {process.returncode}' if process.returncode else
                 f'it ended, but step {run.config.steps} is not logged, evaluated and saved')
          report(printable('\n  '.join([f'{run}: {how}; the end of {run.out / "log.txt"}:', *lines])))
      if len(signals) > forwarded:
        for process in running:
          process.kill() if forwarded else process.terminate()  # the second signal does not wait for the step
        forwarded = len(signals)
      show([run for run, _ in running.values()], failed)
      time.sleep(POLL_SECONDS if running else 0)
  if signals:
    report(f'stopped with {sum(map(finished, runs))} of {len(runs)} runs finished; rerun the same command to resume')
    raise SystemExit(128 + signals[0])
  return failed


def start(run: SweepRun, share: DeviceShare) -> subprocess.Popen:
  """Starts the training of a run and appends its output to log.txt; BlockingIOError if another process is training it."""
  run.out.mkdir(parents=True, exist_ok=True)
  cache = {'JAX_COMPILATION_CACHE_DIR': str(run.out.parents[1].absolute() / 'programs')}  # runs share compiled programs
  command = [sys.executable, '-m', 'jaxsearch.cli', 'train', *run.arguments]
  with open(run.out / 'log.txt', 'a', opener=no_link) as log, contextlib.ExitStack() as stack:
    # Any process that holds the log open keeps it locked, so this also finds runs that outlived their sweep.
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.write(f'$ jaxsearch train {" ".join(run.arguments)}\n')
    log.flush()
    if share.cores and hasattr(os, 'sched_setaffinity'):
      stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
      os.sched_setaffinity(0, share.cores)  # of this thread: the process that it starts inherits them
    return subprocess.Popen(command, env=cache | os.environ | share.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def device_shares(parallel: int) -> list[DeviceShare]:
  """Splits this machine into `parallel` shares, at most one for each accelerator or core (0: see above)."""
  platform, names = devices()
  number = min(parallel or (2 if platform == 'cpu' else len(names)), len(names))
  if number == 1:
    return [DeviceShare({})]
  if platform == 'cpu':  # two runs whose thread pools both take all cores are slower than one after the other
    size = len(names) // number
    environment = {'OMP_NUM_THREADS': str(size)}
    if size == 1:
      environment['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_cpu_multi_thread_eigen=false'
    return [DeviceShare(environment, frozenset(map(int, names[i * size:(i + 1) * size]))) for i in range(number)]
  if platform == 'gpu':
    return [DeviceShare({'CUDA_VISIBLE_DEVICES': name}) for name in names[:number]]
  # Independent processes on one TPU host: https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3
  return [DeviceShare({'TPU_VISIBLE_CHIPS': name, 'TPU_CHIPS_PER_PROCESS_BOUNDS': '1,1,1', 'TPU_PROCESS_BOUNDS': '1,1,1',
                       'TPU_MESH_CONTROLLER_ADDRESS': f'localhost:{8476 + i}', 'TPU_MESH_CONTROLLER_PORT': str(8476 + i)})
          for i, name in enumerate(names[:number])]


def devices() -> tuple[str, list[str]]:
  """('cpu', cores), ('gpu', names as in CUDA_VISIBLE_DEVICES) or ('tpu', chips) of this machine."""
  platform, count = 'cpu', 0
  if os.environ.get('JAX_PLATFORMS') != 'cpu':
    # Another process asks JAX: one that has opened a device keeps it from the runs. The devices of a TPU chip share coordinates.
    code = ('import jax; found = jax.local_devices(); '
            'print(found[0].platform, len({str(getattr(device, "coords", device.id)) for device in found}))')
    query = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    if query.returncode:
      raise ValueError(f'JAX finds no device: {query.stderr.strip().splitlines()[-1]}')
    platform, count = query.stdout.split()[-2:]
  if platform == 'cpu':
    cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count())
    return platform, [str(core) for core in sorted(cores)]
  visible = os.environ.get('CUDA_VISIBLE_DEVICES' if platform == 'gpu' else 'TPU_VISIBLE_CHIPS', '')
  return platform, visible.split(',') if visible else [str(i) for i in range(int(count))]


@contextlib.contextmanager
def _progress_bar(runs: Sequence[SweepRun], console: Console) -> Iterator[Callable]:
  """Yields `show(running, failed)`, which updates a bar for the sweep and one for each running run, all in steps."""
  columns = [progress.TextColumn('{task.description}', markup=False), progress.BarColumn(bar_width=24),
             progress.MofNCompleteColumn(), '{task.fields[note]}', progress.TimeElapsedColumn(), 'left',
             progress.TimeRemainingColumn()]
  with progress.Progress(*columns, console=console, disable=not console.is_interactive, refresh_per_second=1,
                         speed_estimate_period=1800) as bar:
    steps, shown, done = {run: last_step(run) for run in runs}, set(), set(filter(finished, runs))
    overall = bar.add_task('all runs', total=None, completed=sum(steps.values()), note='')
    tasks = {run: bar.add_task(str(run), start=False, visible=False, total=run.config.steps, note='steps') for run in runs}

    def show(running: Sequence[SweepRun], failed: Sequence[SweepRun]) -> None:
      shown.update(running if console.is_interactive else ())
      for run in shown:
        steps[run] = last_step(run)
        bar.start_task(tasks[run])
        bar.update(tasks[run], completed=steps[run], visible=run in running)
      done.update(run for run in shown.difference(running) if finished(run))
      shown.intersection_update(running)
      note = f'steps · {len(done)} of {len(runs)} runs' + (f', {len(failed)} failed' if failed else '')
      total = sum(steps[run] if run in failed else run.config.steps for run in runs)
      bar.update(overall, total=total, completed=sum(steps.values()), note=note)

    yield show
