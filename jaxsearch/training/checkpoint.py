"""Checkpoints of everything that resumes a run to the bit, and the reading of their parameters alone.

A checkpoint `DIR/checkpoints/STEP` has three items. Orbax writes them into a temporary folder that is renamed
at the end, so that a killed save leaves nothing behind that looks like a checkpoint (in a bucket a mark is
written at the end):

  params     the parameters that are trained, restored onto any mesh: the policy's, or those of its adapter
  rest       optimizer state and counters (`state.TrainState` without the parameters)
  host       JSON: step, random key, data position, method state, identity of the reference, config, decoder

Saving is synchronous on CPU, where a host array may share memory with a buffer that the next step overwrites;
elsewhere the copy to the host is made first and files are written in the background.

A checkpoint that cannot be read (a disk was full, a copy was cut short) is passed over for the one before it,
see `newest`. What is not finite is neither saved nor read. `host` has checksums of all three, since Orbax's
own are of its indices alone: it would hand on an array with a flipped bit. They are taken of the arrays, not
of the files: on the devices, whatever the mesh.
"""

import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict
from orbax.checkpoint import checkpoint_managers as policies

from jaxsearch import __version__, registry, setup
from jaxsearch.config_check import fields, from_saved, to_saved, without_secrets
from jaxsearch.models import adapter_files, hub
from jaxsearch.models.decoder import DecoderConfig, config_from_json
from jaxsearch.models.hub import check_finite
from jaxsearch.parallel.mesh import broadcast, gather_objects, make_mesh
from jaxsearch.training import critic
from jaxsearch.training.remote import is_remote, place
from jaxsearch.training.state import TrainState, without_head

# What may differ between a run and its resumption: where things are, how often and how far, and how the same
# numbers are computed.
FREE_FIELDS = (
  'steps', 'out', 'progress', 'log', 'rollouts', 'checkpoint_every', 'keep_checkpoints', 'eval', 'mesh',
  'distributed', 'sampler.slots', 'train.micro_rows', 'train.chunk', 'remat', 'attention', 'search.url',
  'search.timeout', 'search.max_failed_steps', 'optim.max_skipped', 'python.workers', 'sampler.release',
  'monitor', 'critic_warmup.gate', 'critic_warmup.min_updates', 'critic_warmup.max_updates')

ITEMS = ('params', 'rest', 'host')
Loaded = TypeVar('Loaded')


class BrokenCheckpoint(ValueError):
  """A checkpoint that cannot be read; the message names it."""


class Corrupt(ValueError):
  """Restored data differs from saved data."""


def say(message: str) -> None:
  """Prints a line for the person who watches, above any progress bar; the first process alone."""
  if jax.process_index() == 0:
    print(f'jaxsearch: {message}', file=sys.stderr, flush=True)


def open_checkpoints(run: str | pathlib.Path, keep: int | None = None) -> ocp.CheckpointManager:
  """Opens the checkpoints of a run folder; a save keeps the `keep` newest, None means to read only."""
  for name in ('absl', 'asyncio'):  # Orbax logs every file, and every fault that it also raises
    logging.getLogger(name).setLevel(logging.CRITICAL)
  sys.unraisablehook = _without_echoes
  return ocp.CheckpointManager(place(run) / 'checkpoints', options=ocp.CheckpointManagerOptions(
    preservation_policy=policies.LatestN(keep), create=keep is not None,
    cleanup_tmp_directories=keep is not None, enable_async_checkpointing=jax.default_backend() != 'cpu'))


def _without_echoes(unraisable) -> None:
  """Leaves out what the threads of Orbax still print of a fault that it has raised."""
  said = str(unraisable.exc_value)
  if not re.search('tensorstore|os_error_code|Event loop is closed', said, re.IGNORECASE):
    sys.__unraisablehook__(unraisable)


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, host: dict[str, Any]) -> None:
  """Writes a checkpoint; `host` is what JSON can hold.

  Raises:
    NotFinite: a parameter or a moment of the optimizer has a value that is not finite; nothing was written.
    OSError: the disk is full, or the like, now or in the save before; the message names the folder.
  """
  arrays, path = dict(vars(state)), manager.directory / str(step)
  check_finite(arrays, path)
  dtype = jax.tree.leaves(state.params)[0].dtype.name
  host = host | {'param_dtype': dtype, 'checksums': checksums(arrays)}
  host |= {'checksum': _checksum_of_text(host)}
  params = arrays.pop('params')
  with writing(path):
    manager.save(step, args=ocp.args.Composite(
      params=ocp.args.StandardSave(params), rest=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host)))


@contextlib.contextmanager
def writing(path: epath.Path) -> Iterator[None]:
  """Turns what Orbax raises while it writes into an OSError that names `path`."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    raise OSError(f'{path} could not be saved: {_reason(error)}') from error


def restore(manager: ocp.CheckpointManager, step: int, like: TrainState) -> TrainState:
  """Reads the state of a checkpoint, with the shapes, dtypes and shardings of `like`; or BrokenCheckpoint."""
  rest = dict(vars(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)))
  params = rest.pop('params')
  host = restore_host(manager, step)
  with _reading(manager, step):
    items = manager.restore(step, args=ocp.args.Composite(
      params=ocp.args.StandardRestore(params), rest=ocp.args.StandardRestore(rest)))
    arrays = {'params': items.params} | items.rest
    _compare(arrays, host)
  return TrainState(**arrays)


def restore_host(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  """Reads what `save` was given as `host`; or BrokenCheckpoint."""
  with _reading(manager, step) as path:
    for item in ITEMS:
      if not (path / item).is_dir():
        raise FileNotFoundError(f'{item} is missing')
    host = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore())).host
    for key in ('step', 'config', 'decoder', 'param_dtype'):
      host[key]
    if host.pop('checksum', None) not in (None, _checksum_of_text(host)):
      raise Corrupt('host differs from its checksum')
  return host


def checksums(arrays: Any) -> dict[str, list]:
  """Returns {path: [dtype, sum of the bits of all elements modulo 2**32]} of nested arrays.

  One flipped bit changes it.
  """
  sums = jax.tree.leaves(jax.device_get(_sums(arrays)))
  return {jax.tree_util.keystr(path, simple=True, separator='/'): [array.dtype.name, int(total)]
          for (path, array), total in zip(jax.tree.leaves_with_path(arrays), sums, strict=True)}


@jax.jit
def _sums(arrays):
  def total(x):
    bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
    return jnp.sum(bits, dtype=jnp.uint32)
  return jax.tree.map(total, arrays)


def _checksum_of_text(host: Mapping[str, Any]) -> int:
  host = json.loads(json.dumps(host))  # as it will be read: tuples are lists, keys are texts
  return zlib.crc32(json.dumps(host, sort_keys=True).encode())


def _compare(arrays: Any, host: Mapping[str, Any]) -> None:
  """Raises Corrupt for an array that is not what was saved; one saved in another dtype passes."""
  saved = host.get('checksums', {})
  for name, (dtype, total) in checksums(arrays).items():
    if saved.get(name, [''])[0] == dtype and saved[name][1] != total:
      raise Corrupt(f'{name} differs from its checksum')


@contextlib.contextmanager
def _reading(manager: ocp.CheckpointManager, step: int) -> Iterator[epath.Path]:
  """Turns what Orbax raises for files that are cut short, empty or gone into BrokenCheckpoint."""
  path = manager.directory / str(step)
  try:
    yield path
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    raise BrokenCheckpoint(f'{path} cannot be read ({_reason(error)})') from error


def _reason(error: Exception) -> str:
  """Returns the operating system's message in an error of Orbax, else how the error begins."""
  if isinstance(error, Corrupt):
    return str(error)
  code = re.search(r"os_error_code='(\d+)'", str(error))
  said = os.strerror(int(code[1])) if code else getattr(error, 'strerror', None)
  return said or f'{type(error).__name__}: {re.split("[:(]", str(error))[0].strip()}'


def all_steps(manager: ocp.CheckpointManager) -> list[int]:
  """Returns the steps of all checkpoints, newest first, those that cannot be read included."""
  steps = [path for path in manager.directory.glob('*') if path.name.isdecimal()]
  if is_remote(manager.directory):  # elsewhere a folder gets its name when it is whole
    steps = filter(ocp.utils.is_checkpoint_finalized, steps)
  return sorted((int(path.name) for path in steps), reverse=True)


def newest(manager: ocp.CheckpointManager, read: Callable[[int], Loaded], warn: bool = True) -> Loaded | None:
  """Returns `read(step)` of the newest checkpoint that all processes can read, None if there is none at all.

  With `warn` it names those that cannot be read. Raises BrokenCheckpoint if that is all of them.
  """
  faults = []
  for step in all_steps(manager):
    try:
      loaded, fault = read(step), ''
    except BrokenCheckpoint as error:
      loaded, fault = None, str(error)
    if not any(everywhere := gather_objects(fault)):
      for fault in faults if warn else ():
        say(f'{fault}; using that of step {step}')
      return loaded
    faults.append(next(filter(None, everywhere)))
  if faults:
    raise BrokenCheckpoint(f'{"; ".join(faults)}; there is no other checkpoint')
  return None


def set_aside(manager: ocp.CheckpointManager, last_step: int) -> None:
  """Moves the checkpoints after `last_step`, which `newest` could not read, to DIR/broken.

  Their steps will be saved again.
  """
  broken, folder = broadcast([step for step in all_steps(manager) if step > last_step]), manager.directory
  for step in map(str, broken if jax.process_index() == 0 else ()):
    target = folder.parent / 'broken' / step
    target.parent.mkdir(exist_ok=True)
    # A bucket has no empty folders.
    (target.parent / 'README').write_text('Checkpoints that could not be read.\n')
    if target.is_dir():
      target.rmtree()
    target.unlink(missing_ok=True)
    (folder / step).rename(target)
    say(f'moved {folder / step} to {target}')
  if broken:
    broadcast(None)  # the others wait for it
    manager.reload()


def is_run(path: str | pathlib.Path) -> bool:
  """Tells whether `load_params` finds a checkpoint here, and not a Hugging Face folder or a file."""
  return (_run_folder(path)[0] / 'checkpoints').is_dir()


def _run_folder(path: str | os.PathLike) -> tuple[epath.Path, int | None]:
  """Returns (run folder, step or None for the newest) of a run folder, its `checkpoints`, or one of these."""
  path = place(path)
  if path.name.isdecimal() and path.parent.name == 'checkpoints':
    return path.parent.parent, int(path.name)
  return (path.parent if path.name == 'checkpoints' else path), None


def save_adapter(path: str | pathlib.Path, folder: str | pathlib.Path,
                 dtype: str | None = None) -> dict[str, Any]:
  """Writes adapter.safetensors and jaxsearch.json of a checkpoint, without its base; returns `host`.

  Args:
    path: as for `load_params`.
    dtype: 'float32' or 'bfloat16'; as it is if not given.
  Raises ValueError for a run without an adapter, and for the folder of its base.
  """
  _, params, host = load_trained(path, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
  if host.get('critic') or not host['config']['lora']['rank']:
    raise ValueError(f'{path}: this run has no adapter (lora.rank=0): leave out --adapter')
  if pathlib.Path(registry.policy_path(host['config']['model'])).resolve() == pathlib.Path(folder).resolve():
    raise ValueError(f'{folder} holds the base of this adapter: choose another folder')
  adapter = params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)
  kept = without_secrets({name: host[name] for name in ('step', 'config', 'decoder', 'reference')})
  adapter_files.save(adapter, folder, {'jaxsearch': __version__, 'jax': jax.__version__} | kept)
  return host


def load_params(path: str | pathlib.Path, mesh: Mesh | None = None,
                base: str | None = None) -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Returns (decoder, parameters, host) of a checkpoint, for evaluation and export.

  An adapter is merged into its base; the head of a critic is left out.

  Args:
    path: a run folder or its `checkpoints` (the newest is taken), one checkpoint in it, or a folder that
      `save_adapter` wrote.
    mesh: where the parameters go; the first device if not given.
    base: the model that it began with, where that is none of ours, see `setup.base_of`; None for a run of
      your own.
  Raises:
    FileNotFoundError: there is no checkpoint, or not this one, or no base.
    ValueError: the base is not the one that the run began with, or the checkpoint is that of a critic, or it
      has values that are not finite, or it cannot be read (nor can those before it, unless one was named).
  """
  mesh = mesh or make_mesh(1, 1, 1, devices=jax.devices()[:1])
  if adapter_files.is_adapter(path):
    return setup.load_adapted(path, mesh, base)
  decoder, params, host = load_trained(path, mesh)
  if host.get('critic'):
    raise ValueError(f'{path}: this is a critic, not a policy')
  if from_saved(host['config']).lora.rank:
    params = setup.merge_with_base(params, host, setup.base_of(host, base, path), mesh)
  return decoder, without_head(params), host


def load_trained(path: str | pathlib.Path, mesh: Mesh,
                 warn: bool = True) -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Returns (decoder, parameters as they were trained, host) of a checkpoint.

  They are those of a policy, with the head of its critic if they share a backbone, of an adapter, or of a
  critic of its own. `warn` names newer checkpoints that cannot be read. Raises FileNotFoundError and
  ValueError as `load_params` does.
  """
  def read(manager: ocp.CheckpointManager, step: int):
    host = restore_host(manager, step)
    decoder = config_from_json(host['decoder'])
    layout = (critic.layout(decoder, mesh) if host.get('critic')
              else critic.trained_layout(from_saved(host['config']), decoder, mesh))
    like = jax.tree.map(
      lambda sharding, shape: jax.ShapeDtypeStruct(shape, host['param_dtype'], sharding=sharding), *layout)
    with _reading(manager, step) as place:
      params = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(like))).params
      _compare({'params': params}, host)
    check_finite(params, place)
    return decoder, params, host

  return _read(path, read, warn)


def _read(path: str | os.PathLike, read: Callable[[ocp.CheckpointManager, int], Loaded],
          warn: bool) -> Loaded:
  """Returns `read(manager, step)` of the checkpoint that a path names, or of the newest in it.

  Raises FileNotFoundError if there is none.
  """
  run, step = _run_folder(path)
  if not (run / 'checkpoints').is_dir():
    raise FileNotFoundError(f'{path}: no checkpoints here')
  with contextlib.closing(open_checkpoints(run)) as manager:
    if step is None:
      loaded = newest(manager, functools.partial(read, manager), warn)
    else:
      loaded = read(manager, step) if step in all_steps(manager) else None
  if loaded is None:
    raise FileNotFoundError(f'{run}/checkpoints: no checkpoint {"at all" if step is None else step}')
  return loaded


def read_saved(path: str | pathlib.Path) -> dict[str, Any] | None:
  """Returns what a run knows of itself, at least `config` and `step`; None for any other folder or file.

  That is the `host` of a checkpoint, or the jaxsearch.json that `export` wrote. Raises FileNotFoundError for
  a run without this checkpoint.
  """
  if not is_run(path):
    return hub.read_run(path)
  return _read(path, restore_host, warn=False)  # `load_params` warns, which follows


def check_same_run(saved: Mapping[str, Any], config: ConfigDict) -> None:
  """Raises ValueError, naming each field that differs, if a config is not the saved one up to
  `FREE_FIELDS`."""
  def values(config):  # as JSON has them
    leaves = ((name, value) for name, value in fields(to_saved(config)) if not isinstance(value, dict))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in leaves}

  then, now = values(saved), values(config)
  # A cosine ends at the last step.
  free = FREE_FIELDS if config.optim.schedule == 'constant' else FREE_FIELDS[1:]
  is_free = lambda name: any(name == field or name.startswith(f'{field}.') for field in free)
  differing = [name for name in sorted(then.keys() | now.keys())
               if then.get(name) != now.get(name) and not is_free(name)]
  if differing:
    shown = '; '.join(f'{name} was {then.get(name)!r}, now it is {now.get(name)!r}' for name in differing)
    raise ValueError(
      f'{config.out} holds a run with another config: {shown}. Use another out folder, or set it back.')
