"""A run: its folder, rows of metrics, checkpoints, stop signals, resume. What every training loop shares.

    DIR/config.json          the config, for people
    DIR/metrics.jsonl        a row a step
    DIR/tensorboard/         the same
    DIR/evaluations.jsonl    a row for each evaluation on held-out questions and each of its temperatures
    DIR/checkpoints/         see checkpoint.py

SIGTERM (and SIGINT once) finishes the step in hand, saves it and exits with status 143 (130): the same command resumes the
run. The process may also be killed at any point; the run then resumes from the newest checkpoint. Rows after that checkpoint
are dropped, so that no step is there twice.
"""

import collections
import contextlib
import json
import math
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
import psutil
from rich import progress

from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import checkpoint
from jaxsearch.training.step import TrainState


class RunStopped(RuntimeError):
  """The run cannot usefully go on; the message says why."""


class RunFolder(contextlib.ExitStack):
  """The run in `config.out`, new or to be resumed; a context that closes what it writes to; `shown` are metrics for its bar."""

  def __init__(self, config: ml_collections.ConfigDict, shown: tuple[str, ...]):
    super().__init__()
    self.config, self.out, self._shown = config, pathlib.Path(config.out), shown
    self.out.mkdir(parents=True, exist_ok=True)
    self._manager = self.enter_context(contextlib.closing(checkpoint.open_checkpoints(self.out, config.keep_checkpoints)))
    self.last_step, self._signal, self._seconds_save = self._manager.latest_step() or 0, 0, 0.0

  def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
    """(state, host) of the newest checkpoint, or (`state`, None) in a new run; ValueError if the run has another config."""
    if not self.last_step:
      return state, None
    host = checkpoint.restore_host(self._manager, self.last_step)
    checkpoint.check_same_run(host['config'], self.config)
    return checkpoint.restore(self._manager, self.last_step, state), host

  def start(self) -> None:
    """Starts to log; call it once the run is restored and nothing can be wrong with it any more."""
    first = jax.process_index() == 0
    if first:
      replace(self.out / 'config.json', json.dumps(self.config.to_dict(), indent=2) + '\n')
      self._log = self.enter_context(metrics_log(self.out, self.last_step))
      keep_steps(self.out / 'evaluations.jsonl', self.last_step)
    self._show = self.enter_context(progress_bar(self.config.steps, self.last_step, self.config.progress and first, self._shown))
    for number in (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ():
      self.callback(signal.signal, number, signal.signal(number, self._stop_soon))

  def say(self, message: str) -> None:
    """Prints a line for the person who watches, above the bar where there is one; the first process alone."""
    if jax.process_index() == 0:
      print(f'jaxsearch: {message}', file=sys.stderr, flush=True)

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
      append(self.out / 'evaluations.jsonl', rows)

  def finish_step(self, step: int, row: dict[str, float], state: TrainState, host: Callable[[], dict]) -> None:
    """Logs the step, saves if it is time to, and exits if a signal asked for it.

    The row is written before the checkpoint, so that none is ever missing; its `seconds_save` is that of the step before.

    Raises:
      RunStopped: too many updates in a row were not finite.
      SystemExit: after SIGTERM or SIGINT.
    """
    row = {'step': step} | row | {'seconds_save': self._seconds_save}
    if jax.process_index() == 0:
      self._log(row)
    self._show(row)
    limit = self.config.optim.max_skipped
    if row['skipped_in_a_row'] >= limit:
      raise RunStopped(f'step {step}: the loss or its gradient was not finite in {row["skipped_in_a_row"]} updates in a '
                       f'row (optim.max_skipped={limit}); nothing was saved since step {self._manager.latest_step()}')
    stop = max(meshes.gather_objects(self._signal))  # that of any process: all must exit after the same step
    start = time.perf_counter()
    if stop or step == self.config.steps or step % self.config.checkpoint_every == 0:
      checkpoint.save(self._manager, step, state, host() | {'step': step, 'config': self.config.to_dict()})
    self._seconds_save = time.perf_counter() - start
    if stop and step < self.config.steps:
      self._manager.wait_until_finished()
      raise SystemExit(128 + stop)


COMPILATION = '/jax/core/compile/backend_compile_duration'  # of a program, or its read from the compilation cache
_events = collections.Counter()  # of this process since this module was imported
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _events.update([event]))


class Clock:
  """Times one step: `with clock('generate'): …` adds to the seconds of that phase; counts programs compiled."""

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._started, self._compiled = time.perf_counter(), _events[COMPILATION]

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
      'resident_mib': round(psutil.Process().memory_info().rss / 2**20, 1)}


@contextlib.contextmanager
def metrics_log(out: str | pathlib.Path, last_step: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
  """Yields `write(row)`, which adds a step to DIR/metrics.jsonl and to the TensorBoard files in DIR/tensorboard.

  The line is on disk when `write` returns. Values that are not finite become null, as JSON has none; texts are in the line
  alone. Rows of steps after `last_step` (0: a new run) are dropped first, and so is a line that a killed run left unfinished.
  """
  from tensorboardX import SummaryWriter  # slow to import
  path = pathlib.Path(out) / 'metrics.jsonl'
  keep_steps(path, last_step)
  with SummaryWriter(str(path.with_name('tensorboard')), purge_step=last_step + 1) as board:
    def write(row: Mapping[str, float | str]) -> None:
      finite = {name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in row.items()}
      append(path, [finite])
      for name, value in finite.items():
        if value is not None and not isinstance(value, str) and name != 'step':
          board.add_scalar(name, value, row['step'])

    yield write


def keep_steps(path: str | pathlib.Path, last_step: int) -> None:
  """Drops the rows after `last_step` from a file of rows, or all of them if that is 0; atomic."""
  write(path, [row for row in read(path) if row['step'] <= last_step] if last_step else [])


def replace(path: pathlib.Path, text: str) -> None:
  """Writes a text; the file is replaced as a whole or not at all."""
  part = pathlib.Path(f'{path}.part')
  part.write_text(text, encoding='utf-8')
  part.replace(path)


def write(path: str | pathlib.Path, rows: Iterable[Mapping]) -> None:
  """Writes a JSON line for each row; the file is replaced as a whole or not at all."""
  part = pathlib.Path(f'{path}.part')
  append(part, rows, mode='w')
  part.replace(path)


def append(path: str | pathlib.Path, rows: Iterable[Mapping], mode: str = 'a') -> None:
  """Appends a JSON line for each row."""
  with open(path, mode, encoding='utf-8') as file:
    file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


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
def progress_bar(total: int, done: int, shown: bool, what: tuple[str, ...]):
  """Yields `show(row)`, which advances the bar by a step and shows the fields `what` of the row, and tokens a second."""
  columns = [progress.TextColumn('step'), progress.MofNCompleteColumn(), progress.BarColumn(bar_width=24),
             progress.TextColumn('{task.fields[figures]}'), progress.TimeElapsedColumn(),
             progress.TextColumn('left'), progress.TimeRemainingColumn()]
  with progress.Progress(*columns, disable=not shown) as bar:
    task = bar.add_task('', total=total, completed=done, figures='')

    def show(row: Mapping[str, float]) -> None:
      figures = [f'{name} {row[name]:.3g}' for name in what if row.get(name) is not None]
      figures.append(f'{row["tokens_per_second"]:,.0f} tokens/s')
      bar.update(task, advance=1, figures=' · '.join(figures))

    yield show
