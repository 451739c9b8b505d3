"""A run: its folder, rows of metrics, checkpoints, stop signals, resume. What every training loop shares.

    DIR/config.json          the config, for people
    DIR/metrics.jsonl        a row a step
    DIR/evaluations.jsonl    a row for each evaluation on held-out questions and each of its temperatures
    DIR/rollouts.jsonl.gz    rollouts with tokens and credit, see rollout_file.py
    DIR/tensorboard/         the numbers of both
    DIR/checkpoints/         see checkpoint.py
    DIR/broken/              checkpoints that could not be read, where the run was resumed from the one before
    DIR/lock, DIR/locked_by  held while a process trains here, and which one it is

DIR may be in a bucket, see bucket.py.

SIGTERM (and SIGINT once) finishes the step in hand, saves it and exits with status 143 (130): the same
command resumes the run. With several processes it is enough that one gets it. The process may also be killed
at any point; the run then resumes from the newest checkpoint, and rows after it are dropped.
"""

import contextlib
import errno
import gc
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import filelock
import jax
import psutil
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from jaxsearch import registry, setup
from jaxsearch.config_check import fields, to_saved
from jaxsearch.files import write_json, write_whole
from jaxsearch.parallel import memory, mesh as meshes, transfer
from jaxsearch.sampler import requests
from jaxsearch.training import RunStopped, bucket, checkpoint, metrics, rollout_file, row_files
from jaxsearch.training.state import TrainState
from jaxsearch.trees.tree import Tree

BOOT = pathlib.Path('/proc/sys/kernel/random/boot_id')  # of this machine
# What may differ between a run and its resumption: where things are, how often and how far, and how the same
# numbers are computed.
FREE_FIELDS = (
  'steps', 'out', 'progress', 'log', 'rollouts', 'profile', 'checkpoint_every', 'keep_checkpoints', 'eval',
  'mesh', 'distributed', 'sampler.slots', 'sampler.pages', 'sampler.tool_workers', 'sampler.tensor',
  'train.micro_rows', 'train.chunk', 'remat', 'attention', 'search.url', 'search.timeout',
  'search.max_failed_steps', 'optim.max_skipped', 'sampler.urls', 'sampler.timeout', 'sampler.folder',
  'sampler.release', 'judge.url', 'judge.timeout', 'judge.concurrency', 'second_judge.url',
  'second_judge.timeout', 'second_judge.concurrency', 'judge.slots', 'second_judge.slots', 'reader.slots',
  'refiner.slots', 'python.workers', 'xla_deterministic', 'monitor',
  'critic_warmup.gate', 'critic_warmup.min_updates', 'critic_warmup.max_updates')

# A restarted job would fail on these again; other faults of disks and networks may have passed.
LASTING = tuple(map(os.strerror, (
  errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)))


def check_searches(metrics: Mapping[str, Any], what: str, *, stop: bool = True) -> None:
  """Says what mostly failed in the rollout `what`; RunStopped if that is its searches and `stop` is set."""
  message = requests.failing(metrics)
  if message and stop and requests.mostly_failed(metrics):
    raise RunStopped(f'{what}: {message}')
  if message:
    checkpoint.say(f'{what}: {message}')


def failures_of_all(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Adds up what failed in the rollouts of all processes."""
  return requests.add_failures(transfer.gather_objects(requests.add_failures([metrics])))


class RunFolder(contextlib.ExitStack):
  """The run in `config.out`, new or to be resumed: a context that locks the folder and closes its files.

  `shown` are the metrics of a step for the person who watches. What ends a run that can be resumed (an
  allocation or a write that failed, values that are not finite) is a RunStopped, which says from where.
  Raises ValueError if another process trains here.
  """

  def __init__(self, config: ConfigDict, shown: tuple[str, ...]):
    super().__init__()
    self.config, self.out, self._shown, self._published = config, bucket.local(config.out), shown, 0.0
    self.last_step, self._signal, self._seconds_save, self._started = 0, 0, 0.0, False
    self._show, self._log = (lambda row: None), (lambda name, rows: None)  # of the first process alone
    self.out.mkdir(parents=True, exist_ok=True)
    self.enter_context(locked(self.out, shared=not bucket.is_remote(config.out)))
    if jax.process_index() == 0:
      bucket.fetch(config.out)
    self.push(self._explain)
    self.callback(self.publish)
    self._manager = self.enter_context(contextlib.closing(
      checkpoint.open_checkpoints(config.out, config.keep_checkpoints)))

  say = staticmethod(checkpoint.say)

  def restore(self, state: TrainState,
              check: Callable[[dict], None] = lambda host: None) -> tuple[TrainState, dict | None]:
    """Reads (state, host) of the newest checkpoint that can be read; (`state`, None) in a new run.

    The memory of `state` is freed before a checkpoint is read. Raises ValueError if the run has another
    config, if `check(host)` does, or if no checkpoint can be read.
    """
    def read(step: int) -> tuple[int, TrainState, dict]:
      host = checkpoint.restore_host(self._manager, step)
      check_same_run(host['config'], self.config)
      check(host)
      jax.tree.map(lambda x: x.delete(), state)  # or both would lie on the devices
      return step, checkpoint.restore(self._manager, step, state), host

    self.last_step, state, host = checkpoint.newest(self._manager, read) or (0, state, None)
    return state, host

  def start(self) -> None:
    """Starts to log; call it once the run is restored and nothing can be wrong with it any more."""
    checkpoint.set_aside(self._manager, self.last_step)
    total, last, self._started = self.config.steps, self.last_step, True
    self._about = {'config': to_saved(self.config)}
    if self.config.tokenizer or not registry.is_shipped(self.config.model):
      # The checkpoint carries its tokenizer: loading one opens no path that its config names.
      self._about['tokenizer'] = setup.load_tokenizer(self.config).to_json()
    self._check_record()
    if jax.process_index() == 0:
      write_json(self.out / 'config.json', self._about['config'])
      self._log = self.enter_context(metrics.open_log(self.out, last, self.config))
      if last:
        self.say(f'resuming at step {last + 1}' if last < total else f'step {last} of {total} is done')
      if self.config.progress:
        self._show = metrics.step_lines(total, self._shown, self.say)
    signals = [signal.SIGTERM, signal.SIGINT]
    self._noticed = meshes.notices_preemption()
    if self._noticed:
      signals.remove(signal.SIGTERM)  # JAX takes it
      # Where JAX would stop for a notice that came before this line.
      if multihost_utils.reached_preemption_sync_point(1):
        self._signal = signal.SIGTERM
      multihost_utils.reached_preemption_sync_point(last)  # from here on it counts from the last step
    for number in signals if threading.current_thread() is threading.main_thread() else ():
      self.callback(signal.signal, number, signal.signal(number, self._stop_soon))

  def _check_record(self) -> None:
    """Raises ValueError where a new run would empty the record of one whose checkpoints are gone."""
    steps = [row['step'] for row in self.read('metrics.jsonl')] if not self.last_step else []
    if len(steps) > 2 * self.config.checkpoint_every:  # one that was killed during its first save goes on
      raise ValueError(f'{self.out} has the record of {max(steps)} steps, but no checkpoint: use another out '
                       'folder, or delete metrics.jsonl and tracked_as')

  def _stop_soon(self, number, _):
    if self._signal and number == signal.SIGINT:
      raise KeyboardInterrupt  # asked twice: does not wait for the step
    self._signal = number

  def read(self, name: str) -> list[dict]:
    """Reads the rows of a file in the folder, the same in every process; [] if there is none."""
    return transfer.broadcast(row_files.read(self.out / name) if jax.process_index() == 0 else None)

  def write(self, name: str, rows: Iterable[Mapping]) -> None:
    """Writes a file of rows as a whole; the first process alone."""
    if jax.process_index() == 0:
      row_files.write(self.out / name, rows)

  def steps(self) -> Iterator[int]:
    """Yields the steps that are left, counted from 1, and traces those of `config.profile`."""
    for step in range(self.last_step + 1, self.config.steps + 1):
      traced = step in self.config.profile
      with jax.profiler.trace(self.out / 'profile') if traced else contextlib.nullcontext():
        yield step
      if traced:
        bucket.publish(self.config.out, files=('profile/**/*',))

  def wants_evaluation(self, step: int) -> bool:
    """Tells whether held-out questions are to be answered after `step` (0: before the first)."""
    every = self.config.eval.every
    return bool(every) and (step % every == 0 or step == self.config.steps)

  def write_evaluation(self, rows: Iterable[dict]) -> None:
    """Appends to evaluations.jsonl."""
    self._log('evaluations.jsonl', rows)

  def is_evaluated(self, step: int) -> bool:
    """Tells, the same in every process, whether evaluations.jsonl has a step: a kill may come before it."""
    return any(row['step'] == step for row in self.read('evaluations.jsonl'))

  def write_rollouts(self, step: int, groups: Sequence[Sequence[Tree]]) -> None:
    """Keeps the trees of `config.rollouts` questions of a step; call it before `finish_step`."""
    if jax.process_index() == 0 and self.config.rollouts:
      rollout_file.append(self.out, step, rollout_file.sample(groups, self.config.rollouts))

  def finish_step(self, step: int, row: dict[str, float], state: TrainState,
                  host: Callable[[], dict]) -> None:
    """Logs the step, saves if it is time to, and exits if a signal asked for it (SystemExit).

    The row is written before the checkpoint, so that none is ever missing; its `seconds_save` is that of the
    step before. Raises RunStopped after too many updates in a row that were not finite, or steps whose
    searches or judgements mostly failed.
    """
    row = {'step': step} | row | {'seconds_save': self._seconds_save}
    self._log('metrics.jsonl', [row])
    self._show(row)
    self._check_limits(step, row)
    stop = max(transfer.gather_objects(self._signal))  # of any process: all must exit after the same step
    if self._noticed and multihost_utils.reached_preemption_sync_point(step):
      stop = signal.SIGTERM
    start, last = time.perf_counter(), bool(stop) or step == self.config.steps
    if last or step % self.config.checkpoint_every == 0:
      self.publish()
      gc.collect()  # what steps leave behind in cycles; Python itself looks for it once in a hundred steps
      psutil.heap_trim()  # to the system what malloc holds and does not use, or holes add up over hours
      checkpoint.save(self._manager, step, state, host() | self._about | {'step': step})
    if last:
      checkpoint.wait(self._manager)
    self._seconds_save = time.perf_counter() - start
    if stop and step < self.config.steps:
      self.say(f'stopped after step {step}; rerun the same command to resume')
      raise SystemExit(128 + stop)

  def _check_limits(self, step: int, row: dict[str, float]) -> None:
    """Raises RunStopped after too many bad steps in a row, see `finish_step`."""
    skipped = max(row['skipped_in_a_row'], row.get('critic_skipped_in_a_row', 0))
    limit = self.config.optim.max_skipped
    if skipped >= limit:
      raise RunStopped(f'step {step}: the loss or its gradient was not finite in {skipped} updates in a row '
                       f'(optim.max_skipped={limit}); {self._saved()}')
    failed, most = row.get('failed_steps_in_a_row', 0), self.config.search.max_failed_steps
    if 0 < most <= failed:
      raise RunStopped(
        f'step {step}: most searches, judgements or calls of a service or tool failed in {failed} steps in a '
        f'row (search.max_failed_steps={most}). '
        f'{requests.failing(row)}; {self._saved()}; once they work, rerun the same command to resume')

  def publish(self) -> None:
    """Copies what has changed in the run folder to its bucket, if it is in one."""
    since, self._published = self._published, time.time()
    if jax.process_index() == 0:
      bucket.publish(self.config.out, since)

  def _explain(self, _, error: BaseException | None, __) -> None:
    """Turns what ends a run that can be resumed into RunStopped."""
    if error is not None and memory.ran_out(error):
      named = error if isinstance(error, memory.OutOfMemory) else memory.explained(error)
      raise RunStopped(f'{named}; {self._saved()}; rerun the same command with less to resume '
                       '(length, row_length, dtype, optim, loss and lora: in another out)') from error
    if self._started and isinstance(error, transfer.NotFinite):
      raise RunStopped(f'{error}, so it was not saved; {self._saved()}') from error
    if self._started and isinstance(error, OSError):
      what = f'{error.filename}: {error.strerror}' if error.filename else error
      advice = 'once that is mended, rerun the same command to resume'
      stopped = RunStopped(f'{what}; {self._saved()}; {advice}')
      stopped.status = 1 if any(reason in str(what) for reason in LASTING) else 75
      raise stopped from error

  def _saved(self) -> str:
    """Says from where the run resumes."""
    try:
      steps = checkpoint.all_steps(self._manager)
    except OSError:
      return 'the checkpoints cannot be read now'
    return f'the last checkpoint is that of step {steps[0]}' if steps else 'there is no checkpoint yet'


def check_same_run(saved: Mapping[str, Any], config: ConfigDict) -> None:
  """Raises ValueError that names each field which differs from the saved config, but for `FREE_FIELDS`."""
  def values(config):  # as JSON has them
    leaves = ((name, value) for name, value in fields(to_saved(config)) if not isinstance(value, dict))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in leaves}

  then, now = values(saved), values(config)
  # A cosine ends at the last step, and so does the curriculum of a simulated search.
  curriculum = config.search.backend == 'simulated' and config.search.noise_start != config.search.noise_end
  free = FREE_FIELDS[1:] if curriculum or config.optim.schedule != 'constant' else FREE_FIELDS
  is_free = lambda name: any(name == field or name.startswith(f'{field}.') for field in free)
  differing = [name for name in sorted(then.keys() | now.keys())
               if then.get(name) != now.get(name) and not is_free(name)]
  if differing:
    shown = '; '.join(f'{name} was {then.get(name)!r}, now it is {now.get(name)!r}' for name in differing)
    raise ValueError(
      f'{config.out} holds a run with another config: {shown}. Use another out folder, or set it back.')


def _processes_without(path: pathlib.Path, seconds: float = 90) -> list[int]:
  """Returns the processes that do not find what process 0 has at a path; network disks show it late."""
  text = transfer.broadcast(path.read_text(encoding='utf-8') if jax.process_index() == 0 else None)
  end = time.monotonic() + seconds
  while not (found := path.exists() and path.read_text(encoding='utf-8') == text) and time.monotonic() < end:
    time.sleep(0.5)
  return [index for index, found in enumerate(transfer.gather_objects(found)) if not found]


@contextlib.contextmanager
def locked(out: pathlib.Path, shared: bool = True) -> Iterator[None]:
  """Keeps a run folder for this run; ValueError if another process holds it, with its name.

  ConnectionError, which is retried, if that process is of another host: one that is gone may hold a lock on a
  network disk for some time.

  The lock ends with its process, however that ends. The first process of a multi-host run holds it for all;
  the others must find it there, if the folder is `shared`.
  """
  lock, holder, refusal, here = filelock.FileLock(out / 'lock'), out / 'locked_by', '', True
  boot = BOOT.read_text() if BOOT.exists() else ''  # a pod that takes the place of a lost one has its name
  if jax.process_index() == 0:
    try:
      lock.acquire(timeout=0)
      since = time.strftime('%Y-%m-%d %H:%M:%S')
      write_whole(holder, f'process {os.getpid()} on {socket.gethostname()} since {since}\n{boot}')
    except filelock.Timeout:
      named = holder.read_text(encoding='utf-8') if holder.exists() else f'another process\n{boot}'
      name, _, other = named.partition('\n')
      refusal = f'{out}: {name} trains here; wait for it, stop it, or use another out folder'
      here = other == boot
      refusal += '' if here else f'. If that host is gone for good, delete {out / "lock"}'
  refusal, here = transfer.broadcast([refusal, here])
  if refusal:
    raise (ValueError if here else ConnectionError)(refusal)
  try:
    missing = _processes_without(holder) if shared else []
    if missing:  # else the first save would wait for them, in vain
      others = ', '.join(map(str, missing))
      raise ValueError(f'{out} is not the same folder in process 0 and in {others}: name one on a disk '
                       'that all hosts share, or in a bucket')
    yield
  finally:
    lock.release()
