"""A run: its folder, rows of metrics, checkpoints, stop signals, resume. What every training loop shares.

    DIR/config.json          the config, for people
    DIR/metrics.jsonl        a row a step
    DIR/tensorboard/         the same
    DIR/evaluations.jsonl    a row for each evaluation on held-out questions and each of its temperatures
    DIR/checkpoints/         see checkpoint.py

SIGTERM (and SIGINT once) finishes the step in hand, saves it and exits with status 143 (130): the run is not done, and the
same command resumes it. The process may also be killed at any point; the run then resumes from the newest checkpoint. Rows
after that checkpoint are dropped, so that no step stands there twice.
"""

import collections
import contextlib
import json
import math
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np
from rich import progress

from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import checkpoint
from jaxsearch.training.step import TrainState


class RunStopped(RuntimeError):
  """The run cannot usefully go on; the message says why."""


class RunFolder:
  """A run folder that is being written; made by `open_run`."""

  def __init__(self, config: ml_collections.ConfigDict, shown: tuple[str, ...]):
    self.config = config
    self.out = pathlib.Path(config.out)
    self.out.mkdir(parents=True, exist_ok=True)
    self._shown = shown
    self._manager = checkpoint.open_checkpoints(self.out, config.keep_checkpoints)
    self.last_step = self._manager.latest_step() or 0
    self._signal = 0
    self._seconds_save = 0.0
    self._stack = contextlib.ExitStack()

  def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
    """(state, host) of the newest checkpoint, or (`state`, None) in a new run.

    Raises:
      ValueError: the run in this folder has another config.
    """
    if not self.last_step:
      return state, None
    host = checkpoint.restore_host(self._manager, self.last_step)
    checkpoint.check_same_run(host['config'], self.config)
    return checkpoint.restore(self._manager, self.last_step, state), host

  def start(self) -> None:
    """Begins to log; call it once the run is restored and nothing can be wrong with it any more."""
    if jax.process_index() == 0:
      (self.out / 'config.json').write_text(json.dumps(self.config.to_dict(), indent=2) + '\n')
      self._log = MetricsLog(self.out, self.last_step)
      keep_steps(self.out / 'evaluations.jsonl', self.last_step)
      self._stack.callback(self._log.close)
    shown = self.config.progress and jax.process_index() == 0
    self._show = self._stack.enter_context(
      progress_bar(self.config.steps, self.last_step, shown, self._shown))
    for number in (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ():
      self._stack.callback(signal.signal, number, signal.signal(number, self._stop_soon))

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
    """Appends to evaluations.jsonl; call it before `finish_step`, so that a run that goes on evaluates no step twice."""
    rows = list(rows)
    if jax.process_index() == 0:
      with (self.out / 'evaluations.jsonl').open('a', encoding='utf-8') as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)

  def finish_step(self, step: int, row: dict[str, float], state: TrainState, host: Callable[[], dict]) -> None:
    """Logs the step, saves if it is time to, and leaves if a signal asked for it.

    The row is written before the checkpoint, so that none is ever missing; `seconds_save` is therefore that of the last
    save, if it came after the row before.

    Raises:
      RunStopped: too many updates in a row were not finite.
      SystemExit: after SIGTERM or SIGINT.
    """
    row = {'step': step} | row | {'seconds_save': self._seconds_save}
    if jax.process_index() == 0:
      self._log.write(row)
    self._show(row)
    limit = self.config.optim.max_skipped
    if row['skipped_in_a_row'] >= limit:
      raise RunStopped(f'step {step}: the loss or its gradient was not finite in {row["skipped_in_a_row"]} updates in a '
                       f'row (optim.max_skipped={limit}); nothing was saved since step {self._manager.latest_step()}')
    stop = self._agreed_signal()
    start = time.perf_counter()
    if stop or step == self.config.steps or step % self.config.checkpoint_every == 0:
      checkpoint.save(self._manager, step, state, host() | {
        'step': step, 'config': self.config.to_dict()})
    self._seconds_save = time.perf_counter() - start
    if stop and step < self.config.steps:
      self._manager.wait_until_finished()
      raise SystemExit(128 + stop)

  def _agreed_signal(self) -> int:
    """The signal that any process has received: all must leave after the same step."""
    return max(int(np.frombuffer(own, np.int32)[0]) for own in meshes.gather_bytes(np.int32(self._signal).tobytes()))

  def close(self) -> None:
    self._stack.close()
    self._manager.close()


@contextlib.contextmanager
def open_run(config: ml_collections.ConfigDict, shown: tuple[str, ...]) -> Iterator[RunFolder]:
  """The run in `config.out`, new or to be gone on with; `shown` are the metrics on the progress bar."""
  run = RunFolder(config, shown)
  try:
    yield run
  finally:
    run.close()


# Rows of metrics.

_compilations = 0


def _on_event(event: str, seconds: float, **_) -> None:
  global _compilations
  if event == '/jax/core/compile/backend_compile_duration':
    _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def compilations() -> int:
  """Programs compiled (or fetched from the compilation cache) by this process since this module was imported."""
  return _compilations


class Clock:
  """Times one step: `with clock('generate'): …` adds to the seconds of that phase; counts programs compiled."""

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._started, self._compiled = time.perf_counter(), compilations()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self.seconds[phase] += time.perf_counter() - start

  def row(self, tokens: int) -> dict[str, float]:
    """`seconds_…` of each phase, and of the step so far: its seconds, programs compiled, and `tokens` a second."""
    seconds = time.perf_counter() - self._started
    return {f'seconds_{phase}': value for phase, value in self.seconds.items()} | {
      'seconds': seconds, 'tokens_per_second': tokens / seconds, 'compilations': compilations() - self._compiled}


class MetricsLog:
  """Appends rows to DIR/metrics.jsonl and to the TensorBoard files in DIR/tensorboard."""

  def __init__(self, out: str | pathlib.Path, last_step: int):
    """Rows of steps after `last_step` (0: a new run) are dropped, and so is a line that a killed run left unfinished."""
    from tensorboardX import SummaryWriter  # slow to import
    path = pathlib.Path(out) / 'metrics.jsonl'
    keep_steps(path, last_step)
    self._file = path.open('a')
    self._board = SummaryWriter(str(pathlib.Path(out) / 'tensorboard'), purge_step=last_step + 1)

  def write(self, row: Mapping[str, float]) -> None:
    """Adds a step; the line is on disk when this returns. Values that are not finite become null, as JSON has none."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    self._file.write(json.dumps(finite) + '\n')
    self._file.flush()
    for name, value in finite.items():
      if value is not None and name != 'step':
        self._board.add_scalar(name, value, row['step'])

  def close(self) -> None:
    self._file.close()
    self._board.close()


def keep_steps(path: str | pathlib.Path, last_step: int) -> None:
  """Drops the rows after `last_step` from a file of rows, or all of them if that is 0; atomic."""
  path = pathlib.Path(path)
  kept = [row for row in read(path) if row['step'] <= last_step] if last_step else []
  replacement = path.with_suffix('.tmp')
  replacement.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in kept), encoding='utf-8')
  replacement.replace(path)


def read(path: str | pathlib.Path) -> list[dict]:
  """The rows of a metrics.jsonl, [] if there is none; an unfinished last line is left out.

  Raises:
    ValueError: another line is no JSON; names file and line.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = path.read_text(encoding='utf-8').split('\n')
  rows = []
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
  result = {}
  for name in metrics[0]:
    values = [row[name] for row in metrics]
    if name.startswith('logprob_gap'):
      result[name] = values[0]
    elif name.endswith('_max'):
      result[name] = max(values)
    elif name in ('skipped', 'skipped_in_a_row', 'learning_rate'):
      result[name] = values[-1]
    elif name == 'tokens_trained':
      result[name] = sum(values)
    else:
      result[name] = sum(values) / len(values)
  return result


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
