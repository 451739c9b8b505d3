"""The store of checkpoints, by Orbax: everything that resumes a run to the bit.

A checkpoint `DIR/checkpoints/STEP` has three items. Orbax writes them into a temporary folder that is renamed
at the end, so that a killed save leaves nothing behind that looks like a checkpoint (in a bucket a mark is
written at the end):

  params     the parameters that are trained, restored onto any mesh: the policy's, or those of its adapter
  rest       optimizer state and counters (`state.TrainState` without the parameters)
  host       JSON: step, random key, data position, method state, identity of the reference, config, decoder

Saving is synchronous on CPU, where a host array may share memory with a buffer that the next step overwrites;
elsewhere the copy to the host is made first and files are written in the background.

A checkpoint that cannot be read (a disk was full, a copy was cut short) is passed over for the one before it,
see `newest`. What is not finite is neither saved nor read.
"""

import contextlib
import json
import logging
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxsearch.files import DISK, NETWORK
from jaxsearch.parallel import transfer
from jaxsearch.training.bucket import place
from jaxsearch.training.state import TrainState

Loaded = TypeVar('Loaded')
Store = ocp.CheckpointManager  # opaque to others, but for `close`
BARRIER = 'jaxsearch'  # begins the names of Orbax's barriers
WAITS = 10, 60  # seconds, where a network fails while a checkpoint is read


class BrokenCheckpoint(ValueError):
  """A checkpoint that cannot be read; the message names it."""


def say(message: str) -> None:
  """Prints a line for the person who watches; the first process alone."""
  if jax.process_index() == 0:
    print(f'jaxsearch: {message}', file=sys.stderr, flush=True)


def open_checkpoints(run: str | pathlib.Path, keep: int | None = None) -> Store:
  """Opens the checkpoints of a run folder; a save keeps the `keep` newest, None means to read only."""
  for name in ('absl', 'asyncio'):  # Orbax logs every file, and every fault that it also raises
    logging.getLogger(name).setLevel(logging.CRITICAL)
  sys.unraisablehook = _without_echoes
  return ocp.CheckpointManager(place(run) / 'checkpoints', options=ocp.CheckpointManagerOptions(
    preservation_policy=policies.LatestN(keep), create=keep is not None,
    cleanup_tmp_directories=keep is not None, enable_async_checkpointing=jax.default_backend() != 'cpu',
    async_options=ocp.AsyncOptions(timeout_secs=3600),  # of slow disks, and for a host that failed
    multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=BARRIER)))


def _without_echoes(unraisable) -> None:
  """Leaves out what the threads of Orbax still print of a fault that it has raised."""
  said = str(unraisable.exc_value)
  if not re.search('tensorstore|os_error_code|Event loop is closed', said, re.IGNORECASE):
    sys.__unraisablehook__(unraisable)


def all_steps(manager: Store) -> list[int]:
  """Returns the steps of all checkpoints, newest first, those that cannot be read included."""
  return sorted(manager.all_steps(read=True), reverse=True)


def save(manager: Store, step: int, state: TrainState, host: dict[str, Any]) -> None:
  """Writes a checkpoint; `host` is what JSON can hold.

  Raises:
    NotFinite: a parameter or a moment of the optimizer has a value that is not finite; nothing was written.
    OSError: the disk is full, or the like, now or in the save before; the message names the folder.
  """
  arrays, path = dict(vars(state)), manager.directory / str(step)
  transfer.check_finite(arrays, path)
  dtype = jax.tree.leaves(state.params)[0].dtype.name
  params = arrays.pop('params')
  host = json.loads(json.dumps(host))  # it is written later, and the next step changes some of it
  with _writing(path):
    manager.save(step, args=ocp.args.Composite(
      params=ocp.args.StandardSave(params), rest=ocp.args.StandardSave(arrays),
      host=ocp.args.JsonSave(host | {'param_dtype': dtype})))


def wait(manager: Store) -> None:
  """Waits until what was saved is on disk; raises OSError as `save` does."""
  with _writing(manager.directory):
    manager.wait_until_finished()


def restore(manager: Store, step: int, like: TrainState) -> TrainState:
  """Reads the state of a checkpoint, with the shapes, dtypes and shardings of `like`; or BrokenCheckpoint."""
  rest = dict(vars(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)))
  params = rest.pop('params')
  items = _restore(
    manager, step, params=ocp.args.StandardRestore(params), rest=ocp.args.StandardRestore(rest))
  return TrainState(params=items.params, **items.rest)


def restore_params(manager: Store, step: int, like: dict) -> dict:
  """Reads the parameters alone, like these ShapeDtypeStructs; NotFinite if one has a value that is not."""
  params = _restore(manager, step, params=ocp.args.StandardRestore(like)).params
  transfer.check_finite(params, manager.directory / str(step))
  return params


def restore_host(manager: Store, step: int) -> dict[str, Any]:
  """Reads what `save` was given as `host`; or BrokenCheckpoint."""
  return _restore(manager, step, host=ocp.args.JsonRestore()).host


def _restore(manager: Store, step: int, **items) -> ocp.args.Composite:
  """Reads items; files that are cut short, empty or gone, for any process, are a BrokenCheckpoint of all.

  Where a network or a disk fails, it is tried again. Then that of a network is a ConnectionError: nothing is
  broken.
  """
  for wait in (*WAITS, None):
    restored = error = None
    try:
      restored = manager.restore(step, args=ocp.args.Composite(**items))
    except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
      raise
    except Exception as caught:
      error = caught
      ocp.multihost.sync_global_processes(f'{BARRIER}_Checkpointer:restore')  # the others wait there
    fault = f'{manager.directory / str(step)} cannot be read ({_reason(error)})' if error else ''
    # A disk is broken for good, or a network's that is slow.
    told = transfer.gather_objects((fault, _of_network(error), _number(error) in DISK))
    faults = [one for one in told if one[0]]
    if not faults:
      return restored
    for fault, network, disk in faults:
      if not (network or disk):
        raise BrokenCheckpoint(fault) from error
    if wait is None:
      raise (ConnectionError if network else BrokenCheckpoint)(fault) from error
    say(f'{fault}; trying again in {wait} seconds')
    time.sleep(wait)


@contextlib.contextmanager
def _writing(path: epath.Path) -> Iterator[None]:
  """Turns what Orbax raises while it writes into an OSError that names `path`."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    raise OSError(f'{path} could not be saved: {_reason(error)}') from error


def _reason(error: Exception) -> str:
  """Returns the operating system's message in an error of Orbax, else how the error begins."""
  number = _number(error)
  said = os.strerror(number) if number else getattr(error, 'strerror', None)
  return said or f'{type(error).__name__}: {re.split("[:(]", str(error))[0].strip()}'


def _number(error: Exception | None) -> int | None:
  """Returns the operating system's number of an error, which tensorstore has in its text."""
  code = re.search(r"os_error_code='(\d+)'", str(error))
  return int(code[1]) if code else getattr(error, 'errno', None)


def _of_network(error: Exception | None) -> bool:
  """Tells whether what failed is a network."""
  return (isinstance(error, (ConnectionError, TimeoutError)) or _number(error) in NETWORK
          or bool(re.search('UNAVAILABLE|DEADLINE_EXCEEDED', str(error))))


def newest(manager: Store, read: Callable[[int], Loaded], warn: bool = True) -> Loaded | None:
  """Returns `read(step)` of the newest checkpoint that all processes can read, None if there is none at all.

  With `warn` it names those that cannot be read. Raises BrokenCheckpoint if that is all of them.
  """
  faults = []
  for step in transfer.broadcast(all_steps(manager)):  # a network disk may show one host more than another
    try:
      loaded = read(step)
    except BrokenCheckpoint as error:
      faults.append(str(error))
      continue
    for fault in faults if warn else ():
      say(f'{fault}; using that of step {step}')
    return loaded
  if faults:
    raise BrokenCheckpoint(f'{"; ".join(faults)}; there is no other checkpoint')
  return None


def set_aside(manager: Store, last_step: int) -> None:
  """Moves the checkpoints after `last_step`, which `newest` could not read, to DIR/broken.

  Their steps will be saved again.
  """
  broken = transfer.broadcast([step for step in all_steps(manager) if step > last_step])
  for step in map(str, broken if jax.process_index() == 0 else ()):
    path, target = manager.directory / step, manager.directory.parent / 'broken' / step
    target.parent.mkdir(exist_ok=True)
    if target.exists():
      target.rmtree()
    path.rename(target)
    say(f'moved {path} to {target}')
  if broken:
    transfer.broadcast(None)  # the others wait for it
    manager.reload()
