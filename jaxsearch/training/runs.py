"""A run: its folder, rows of metrics, checkpoints, stop signals, resume. What every training loop shares.

    DIR/config.json          the config, for people
    DIR/metrics.jsonl        a row a step
    DIR/evaluations.jsonl    a row for each evaluation on held-out questions and each of its temperatures
    DIR/rollouts.jsonl.gz    rollouts with tokens and credit, see rollouts.py
    DIR/tensorboard/         the numbers of both
    DIR/checkpoints/         see checkpoint.py
    DIR/broken/              checkpoints that could not be read, where the run was resumed from the one before
    DIR/lock, DIR/locked_by  held while a process trains here, and which one it is

DIR may be in a bucket, see remote.py.

SIGTERM (and SIGINT once) finishes the step in hand, saves it and exits with status 143 (130): the same command resumes the
run. With several processes it is enough that one gets SIGTERM: JAX finds the step after which all of them stop. The process may
also be killed at any point; the run then resumes from the newest checkpoint. Rows after that checkpoint are dropped, so that no
step is there twice.
"""

import collections
import contextlib
import gc
import json
import math
import os
import pathlib
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import filelock
import jax
import ml_collections
import psutil
from jax.experimental import multihost_utils
from rich import progress
from rich.console import Console

from jaxsearch.files import naming, no_link, write_whole
from jaxsearch.models.hub import NotFinite
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import requests
from jaxsearch.training import RunStopped, checkpoint, remote, rollouts, trackers
from jaxsearch.training.step import TrainState
from jaxsearch.trees.tree import Tree

GROUPS = {  # of tags in TensorBoard: a metric is in the first whose pattern its name has
  'time': 'second|compilations|resident',
  'gate': '^gate_',
  'reward': '^reward|^em$|^f1$|groups_alike',
  'loss': 'loss|^kl|entropy|ratio|clip|logprob|grad_norm|learning_rate|skipped|critic|value',
  'sampler': 'token|stop_|tool|search|service|failure|malformed|tree|rows|padded|segments|steps|episodes|idle',
  'method': '',
}


def check_searches(metrics: Mapping[str, Any], what: str, *, stop: bool = True) -> None:
  """Says what mostly failed in a rollout, which `what` names; if that is its searches and `stop` is set, raises RunStopped."""
  message = requests.failing(metrics)
  if message and stop and requests.mostly_failed(metrics):
    raise RunStopped(f'{what}: {message}')
  if message:
    checkpoint.say(f'{what}: {message}')


def failures_of_all(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """What failed in the rollouts of all processes: counts added up, shares computed anew, texts from the first that has one."""
  found = {}
  for name, value in (item for own in meshes.gather_objects(requests.failure_figures(metrics)) for item in own.items()):
    found[name] = found.get(name, 0) + value if isinstance(value, (int, float)) else found.get(name) or value
  return found | {'searches_failed_share': found['searches_failed'] / max(found['searches_asked'], 1)}


class RunFolder(contextlib.ExitStack):
  """The run in `config.out`, new or to be resumed; a context that locks the folder and closes what it writes to.

  `shown` are the metrics of a step for the person who watches. Raises ValueError if another process trains in this folder.
  """

  def __init__(self, config: ml_collections.ConfigDict, shown: tuple[str, ...]):
    super().__init__()
    self.config, self.out, self._shown = config, remote.local(config.out), shown
    self.out.mkdir(parents=True, exist_ok=True)
    self.enter_context(locked(self.out))
    self._published = 0.0
    if jax.process_index() == 0:
      remote.fetch(config.out)
    self.callback(self.publish)
    self._manager = self.enter_context(contextlib.closing(
      checkpoint.open_checkpoints(config.out, config.keep_checkpoints)))
    self.last_step, self._signal, self._seconds_save = 0, 0, 0.0
    self.push(self._stop_out_of_memory)

  def restore(self, state: TrainState, check: Callable[[dict], None] = lambda host: None) -> tuple[TrainState, dict | None]:
    """(state, host) of the newest checkpoint that can be read, or (`state`, None) in a new run.

    Raises ValueError if the run has another config, if `check(host)` does, or if no checkpoint can be read.
    """
    def read(step: int) -> tuple[int, TrainState, dict]:
      host = checkpoint.restore_host(self._manager, step)
      checkpoint.check_same_run(host['config'], self.config)
      check(host)
      return step, checkpoint.restore(self._manager, step, state), host

    self.last_step, state, host = checkpoint.newest(self._manager, read) or (0, state, None)
    return state, host

  def publish(self) -> None:
    """Copies what has changed in the run folder to its bucket, if it is in one."""
    since, self._published = self._published, time.time()
    if jax.process_index() == 0:
      remote.publish(self.config.out, since)

  def rows(self) -> list[dict]:
    """The rows of metrics so far, the same in every process; call it after `start`."""
    return meshes.of_first(read(self.out / 'metrics.jsonl') if jax.process_index() == 0 else None)

  def start(self) -> None:
    """Starts to log; call it once the run is restored and nothing can be wrong with it any more."""
    checkpoint.set_aside(self._manager, self.last_step)
    total, last, self._show = self.config.steps, self.last_step, lambda row: None
    if jax.process_index() == 0:
      write_whole(self.out / 'config.json', json.dumps(self.config.to_dict(), indent=2) + '\n')
      loggers = [self.enter_context(trackers.open_tracker(name, self.out, self.config)) for name in self.config.log]
      self._log = self.enter_context(metrics_log(self.out, last, loggers))
      if last:
        self.say(f'resuming at step {last + 1}' if last < total else f'step {last} of {total} is done')
      if self.config.progress:
        console = Console(stderr=True)
        self._show = self.enter_context(progress_bar(total, last, self._shown, console)) if console.is_interactive else (
          plain_lines(total, self._shown, self.say))
    own = (signal.SIGTERM, signal.SIGINT)
    if meshes.notices_preemption():
      own = (signal.SIGINT,)
      if multihost_utils.reached_preemption_sync_point(1):  # where JAX would stop for a notice that came before this line
        self._signal = signal.SIGTERM
      multihost_utils.reached_preemption_sync_point(last)  # from here on it counts from the step that this run resumes after
    for number in own if threading.current_thread() is threading.main_thread() else ():
      self.callback(signal.signal, number, signal.signal(number, self._stop_soon))

  def say(self, message: str) -> None:
    """Prints a line for the person who watches, above the bar where there is one; the first process alone."""
    checkpoint.say(message)

  def steps(self) -> range:
    """The steps that are left, counted from 1."""
    return range(self.last_step + 1, self.config.steps + 1)

  def _stop_soon(self, number, _):
    if self._signal and number == signal.SIGINT:
      raise KeyboardInterrupt  # asked twice: does not wait for the step
    self._signal = number

  def wants_evaluation(self, step: int) -> bool:
    """Whether held-out questions are to be answered after `step` (0: before the first)."""
    every = self.config.eval.every
    return bool(every) and (step % every == 0 or step == self.config.steps)

  def write_evaluation(self, rows: Iterable[dict]) -> None:
    """Appends to evaluations.jsonl; call it before `finish_step`, so that a run that is resumed evaluates no step twice."""
    rows = list(rows)
    if jax.process_index() == 0:
      with self._resumable():
        self._log('evaluations.jsonl', rows)

  def write_rollouts(self, step: int, groups: Sequence[Sequence[Tree]]) -> None:
    """Keeps the trees of `config.rollouts` questions of a step; call it before `finish_step`."""
    if jax.process_index() == 0 and self.config.rollouts:
      with self._resumable():
        rollouts.append(self.out, step, rollouts.sample(groups, self.config.rollouts))

  def finish_step(self, step: int, row: dict[str, float], state: TrainState, host: Callable[[], dict]) -> None:
    """Logs the step, saves if it is time to, and exits if a signal asked for it.

    The row is written before the checkpoint, so that none is ever missing; its `seconds_save` is that of the step before.

    Raises:
      RunStopped: too many updates in a row were not finite, too many steps in a row had most of their searches fail, the state is
        not finite, or the disk is full.
      SystemExit: after SIGTERM or SIGINT.
    """
    row = {'step': step} | row | {'seconds_save': self._seconds_save}
    with self._resumable():
      if jax.process_index() == 0:
        self._log('metrics.jsonl', [row])
      self._show(row)
      limit = self.config.optim.max_skipped
      if row['skipped_in_a_row'] >= limit:
        raise RunStopped(f'step {step}: the loss or its gradient was not finite in {row["skipped_in_a_row"]} updates in a '
                         f'row (optim.max_skipped={limit}); {self._saved()}')
      failed, most = row.get('failed_steps_in_a_row', 0), self.config.search.max_failed_steps
      if 0 < most <= failed:
        raise RunStopped(f'step {step}: most searches failed in {failed} steps in a row (search.max_failed_steps={most}). '
                         f'{requests.failing(row)}; {self._saved()}; once searches work, '
                         'rerun the same command to resume')
      stop = max(meshes.gather_objects(self._signal))  # that of any process: all must exit after the same step
      if meshes.notices_preemption() and multihost_utils.reached_preemption_sync_point(step):
        stop = signal.SIGTERM
      start, last = time.perf_counter(), bool(stop) or step == self.config.steps
      if last or step % self.config.checkpoint_every == 0:
        self.publish()
        gc.collect()  # what steps leave behind in cycles; Python itself looks for it once in a hundred steps
        psutil.heap_trim()  # to the system what malloc holds and does not use, or holes add up over hours
        checkpoint.save(self._manager, step, state, host() | {'step': step, 'config': self.config.to_dict()})
      if last:
        with checkpoint.writing(self._manager.directory):
          self._manager.wait_until_finished()
      self._seconds_save = time.perf_counter() - start
    if stop and step < self.config.steps:
      self.say(f'stopped after step {step}; rerun the same command to resume')
      raise SystemExit(128 + stop)

  def _stop_out_of_memory(self, _, error: BaseException | None, __) -> None:
    """Turns an allocation that failed into RunStopped; of what a context of memory.py named, it says what for."""
    if error is not None and memory.ran_out(error):
      named = error if isinstance(error, memory.OutOfMemory) else memory.explained(error)
      raise RunStopped(f'{named}; {self._saved()}; rerun the same command with less to resume') from error

  def _saved(self) -> str:
    steps = checkpoint.all_steps(self._manager)
    return f'the last checkpoint is that of step {steps[0]}' if steps else 'there is no checkpoint yet'

  @contextlib.contextmanager
  def _resumable(self) -> Iterator[None]:
    """Turns what ends a run while it writes into RunStopped, which says from where it resumes."""
    try:
      yield
    except NotFinite as error:
      raise RunStopped(f'{error}, so it was not saved; {self._saved()}') from error
    except OSError as error:
      what = f'{error.filename}: {error.strerror}' if error.filename else error
      raise RunStopped(f'{what}; {self._saved()}; once that is mended, rerun the same command to resume') from error


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
  """Keeps a run folder for this run; ValueError, with the name of the process that holds it, if that is another.

  The lock ends with its process, however that ends. The first process of a multi-host run holds it for all.
  """
  lock, holder, refusal = filelock.FileLock(out / 'lock'), out / 'locked_by', ''
  if jax.process_index() == 0:
    try:
      lock.acquire(timeout=0)
      write_whole(holder, f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %H:%M:%S")}\n')
    except filelock.Timeout:
      name = holder.read_text(encoding='utf-8').strip() if holder.exists() else 'another process'
      refusal = f'{out}: {name} trains here; wait for it, stop it, or use another out folder'
  if refusal := meshes.of_first(refusal):
    raise ValueError(refusal)
  try:
    yield
  finally:
    lock.release()


COMPILATION = '/jax/core/compile/backend_compile_duration'  # of a program, or its read from the compilation cache
_events = collections.Counter()  # of this process since this module was imported
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _events.update([event]))


class Clock:
  """Times one step: `with clock('generate'): …` adds to the seconds of that phase; counts programs compiled."""

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._started, self._compiled = time.perf_counter(), _events[COMPILATION]
    self._exchanged = meshes.exchanged['bytes']

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self.seconds[phase] += time.perf_counter() - start

  def row(self, tokens: int) -> dict[str, float]:
    """`seconds_…` of each phase, and of the step so far: its seconds, programs compiled, and `tokens` a second; and the
    resident size of this process, in MiB."""
    seconds = time.perf_counter() - self._started
    return {f'seconds_{phase}': value for phase, value in self.seconds.items()} | {
      'seconds': seconds, 'tokens_per_second': tokens / seconds, 'compilations': _events[COMPILATION] - self._compiled,
      'bytes_exchanged': meshes.exchanged['bytes'] - self._exchanged,
      'resident_mib': round(psutil.Process().memory_info().rss / 2**20, 1)}


@contextlib.contextmanager
def metrics_log(out: str | pathlib.Path, last_step: int, loggers: Sequence[Callable[[dict[str, float], int], None]] = (),
                ) -> Iterator[Callable[[str, Iterable[Mapping]], None]]:
  """Yields `write(name, rows)`, which appends rows to the file DIR/name, and their numbers to those of TensorBoard.

  Each of `loggers` is called with the same numbers by tag, and the step.

  The lines are on disk when `write` returns. Numbers that are not finite become null, as JSON has none. Rows of steps after
  `last_step` (0: a new run) are dropped first, and so is a line that was left unfinished.
  """
  from tensorboardX.event_file_writer import EventsWriter  # slow to import
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.proto.summary_pb2 import Summary
  out = pathlib.Path(out)
  for name in ('metrics.jsonl', 'evaluations.jsonl'):
    keep_steps(out / name, last_step)
  rollouts.keep_steps(out, last_step)
  (out / 'tensorboard').mkdir(exist_ok=True)
  board = EventsWriter(str(out / 'tensorboard' / 'events'))  # not SummaryWriter, whose thread dies of a full disk unseen

  def write(name: str, rows: Iterable[Mapping]) -> None:
    rows = [{key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
            for row in rows]
    append(out / name, rows)
    for row in rows:
      values = {tag(key, row): value for key, value in row.items()
                if isinstance(value, (int, float)) and key not in ('step', 'temperature')}
      board.write_event(Event(step=row['step'], wall_time=time.time(), summary=Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])))
      for log in loggers:
        log(values, row['step'])
    board.flush()

  try:
    board.write_event(Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START)))  # hides what is done again
    yield write
  finally:
    with contextlib.suppress(OSError):  # what could not be written has raised in `write`
      board.close()


def tag(name: str, row: Mapping) -> str:
  """The tag of a number in TensorBoard: held_out/em_greedy or held_out/em_at_0.5 of an evaluation, else GROUP/NAME."""
  if 'temperature' in row:
    return f'held_out/{name}_' + (f'at_{row["temperature"]:g}' if row['temperature'] else 'greedy')
  return next(group for group, pattern in GROUPS.items() if re.search(pattern, name)) + f'/{name}'


def keep_steps(path: str | pathlib.Path, last_step: int) -> None:
  """Drops the rows after `last_step` from a file of rows, or all of them if that is 0; atomic."""
  write(path, [row for row in read(path) if row['step'] <= last_step] if last_step else [])


def write(path: str | pathlib.Path, rows: Iterable[Mapping]) -> None:
  """Writes a JSON line for each row; the file is replaced as a whole or not at all."""
  write_whole(path, ''.join(map(line, rows)))


def append(path: str | pathlib.Path, rows: Iterable[Mapping]) -> None:
  """Appends a JSON line for each row; an OSError names the file."""
  with naming(path), open(path, 'a', encoding='utf-8', opener=no_link) as file:
    file.write(''.join(map(line, rows)))


def line(row: Mapping) -> str:
  """A row as a line of JSON."""
  return json.dumps(row, ensure_ascii=False) + '\n'


def read(path: str | pathlib.Path) -> list[dict]:
  """The rows of such a file, [] if there is none; an unfinished last line is left out; ValueError if another is no JSON."""
  path, rows = pathlib.Path(path), []
  lines = path.read_text(encoding='utf-8').split('\n') if path.exists() else ['']
  for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end was never finished
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as error:
      raise ValueError(f'{path}:{number}: not JSON: {error}') from error
  return rows


def to_row(metrics: Mapping) -> dict[str, float]:
  """Numbers of any kind (device scalars included) as int or float."""
  return {name: value if isinstance(value, (int, float)) else value.item() for name, value in metrics.items()}


def mean_of(metrics: list[Mapping[str, float]]) -> dict[str, float]:
  """The metrics of a step from those of its updates: sums of counts, largest maxima, last states, means of the rest.

  The gap to the sampler's log-probabilities is that of the first update: later ones are of a policy that has moved on.
  """
  def merged(name: str, values: list[float]) -> float:
    if name.startswith('logprob_gap'):
      return values[0]
    if name.endswith('_max'):
      return max(values)
    if name in ('skipped', 'skipped_in_a_row', 'learning_rate'):
      return values[-1]
    return sum(values) if name == 'tokens_trained' else sum(values) / len(values)

  return {name: merged(name, [row[name] for row in metrics]) for name in metrics[0]}


@contextlib.contextmanager
def progress_bar(total: int, done: int, shown: tuple[str, ...], console: Console) -> Iterator[Callable[[Mapping], None]]:
  """Yields `show(row)`, which advances the bar by a step and shows the fields `shown` of the row, and tokens a second."""
  columns = [progress.TextColumn('step'), progress.MofNCompleteColumn(), progress.BarColumn(bar_width=24),
             progress.TextColumn('{task.fields[figures]}'), progress.TimeElapsedColumn(),
             progress.TextColumn('left'), progress.TimeRemainingColumn()]
  with progress.Progress(*columns, console=console) as bar:
    task = bar.add_task('', total=total, completed=done, figures='')
    yield lambda row: bar.update(task, advance=1, figures=' · '.join(
      [*figures(row, shown), f'{row["tokens_per_second"]:,.0f} tokens/s']))


def plain_lines(total: int, shown: tuple[str, ...], say: Callable[[str], None]) -> Callable[[Mapping], None]:
  """`show(row)` where there is no terminal: a line a step, with the time that is left at the pace of the last ten."""
  left = time_left(total, window=10)

  def show(row: Mapping) -> None:
    seconds = left(row['step'])
    pace = [] if seconds is None else [f'{seconds:.0f} s left']
    failed = [f'{row["searches_failed"]} searches failed'] if row.get('searches_failed') else []
    say(', '.join([f'step {row["step"]}/{total}', *pace, *figures(row, shown), *failed]))

  return show


def time_left(total: int, window: int | None = None) -> Callable[[int], float | None]:
  """`left(done)`: seconds until all are done at the pace of the last `window` of them; None before there is a pace.

  What is done by the first call is left out: until then programs are compiled, and slots are filled. So is, unless there is
  nothing else, what was done while programs were compiled.
  """
  before, paces = None, {False: collections.deque(maxlen=window), True: collections.deque(maxlen=window)}

  def left(done: int) -> float | None:
    nonlocal before
    now = done, time.monotonic(), _events[COMPILATION]
    if before:
      more, seconds, compiled = (new - old for new, old in zip(now, before))
      paces[compiled > 0].append((more, seconds))
    before = now
    more, seconds = map(sum, zip(*(paces[False] or paces[True] or [(0, 0.0)])))
    return seconds / more * (total - done) if more else None

  return left


def figures(row: Mapping, shown: tuple[str, ...]) -> list[str]:
  """The fields `shown` of a row in words, as far as it has them."""
  return [f'{name} {row[name]:.3g}' for name in shown if row.get(name) is not None]
