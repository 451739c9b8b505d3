"""The run folder and its life: resume, rows of metrics, checkpoints, stop signals. What every training loop shares.

    DIR/config.json          the config, for people
    DIR/metrics.jsonl        a row a step
    DIR/tensorboard/         the same
    DIR/evaluations.jsonl    a row for each evaluation on held-out questions and each of its temperatures
    DIR/checkpoints/         see checkpoint.py

SIGTERM (and SIGINT once) finishes the step in hand, saves it and leaves with exit code 143 (130): the code says that the
run is not done, and the same command goes on with it. The process may as well be killed at any point; it then goes on
from the newest checkpoint.
"""

import contextlib
import json
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import checkpoint, metrics
from jaxsearch.training.state import TrainState


class RunStopped(RuntimeError):
  """The run cannot usefully go on; the message says why."""


class Run:
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
      self._log = metrics.MetricsLog(self.out, self.last_step)
      metrics.keep_steps(self.out / 'evaluations.jsonl', self.last_step)
      self._stack.callback(self._log.close)
    shown = self.config.progress and jax.process_index() == 0
    self._show = self._stack.enter_context(
      metrics.progress_bar(self.config.steps, self.last_step, shown, self._shown))
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
def open_run(config: ml_collections.ConfigDict, shown: tuple[str, ...]) -> Iterator[Run]:
  """The run in `config.out`, new or to be gone on with; `shown` are the metrics on the progress bar."""
  run = Run(config, shown)
  try:
    yield run
  finally:
    run.close()
