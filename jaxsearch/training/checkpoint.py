"""Checkpoints of everything that resumes a run to the bit, and the reading of their parameters alone.

A checkpoint `DIR/checkpoints/STEP` has three items. Orbax writes them into a temporary folder that is renamed at the end, so
that a killed save leaves nothing behind that looks like a checkpoint:

  params     the parameters that are trained, restored onto any mesh: the policy's, or those of its adapter (config.lora)
  rest       optimizer state and counters (`step.TrainState` without the parameters)
  host       JSON: step, random key, data position, method state, identity of the reference policy, config, decoder

Saving is synchronous on CPU, where a host array may share memory with a buffer that the next step is given to overwrite;
elsewhere the copy to the host is made first and files are written in the background.
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxsearch import setup
from jaxsearch.config_check import fields
from jaxsearch.models.decoder import DecoderConfig, RopeScaling
from jaxsearch.parallel.mesh import make_mesh
from jaxsearch.training import critic
from jaxsearch.training.step import TrainState, fingerprint, without_head

# What may differ between a run and its resumption: where things are, how often and how far, and how the same numbers are
# computed. Where monitor.action='rollback', another `monitor` or `checkpoint_every` may roll back at other steps, or to others.
FREE_FIELDS = ('steps', 'out', 'progress', 'checkpoint_every', 'keep_checkpoints', 'eval', 'mesh', 'distributed',
               'train.micro_rows', 'train.chunk', 'remat', 'search.url', 'search.timeout', 'optim.max_skipped',
               'python.workers', 'monitor', 'critic_warmup.gate', 'critic_warmup.min_updates', 'critic_warmup.max_updates')


@dataclasses.dataclass
class Chosen(policies.PreservationPolicy):
  """Keeps the checkpoints of the steps that are chosen at the time of a save."""
  steps: Callable[[], Collection[int]]

  def should_preserve(self, checkpoints, *, context):
    return [one.step in self.steps() for one in checkpoints]


def open_checkpoints(run: str | pathlib.Path, keep: int | None = None,
                     chosen: Callable[[], Collection[int]] = tuple) -> ocp.CheckpointManager:
  """The checkpoints of the run folder `run`; the `keep` newest survive a save, and the steps that `chosen` returns."""
  logging.getLogger('absl').setLevel(logging.WARNING)  # Orbax tells of every file at INFO
  return ocp.CheckpointManager((pathlib.Path(run) / 'checkpoints').absolute(), options=ocp.CheckpointManagerOptions(
    preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), Chosen(chosen)]),
    create=keep is not None, enable_async_checkpointing=jax.default_backend() != 'cpu'))


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, host: dict[str, Any]) -> None:
  """Writes a checkpoint; `host` is what JSON can hold."""
  params, rest = split(state)
  host = host | {'param_dtype': jax.tree.leaves(params)[0].dtype.name}
  manager.save(step, args=ocp.args.Composite(
    params=ocp.args.StandardSave(params), rest=ocp.args.StandardSave(rest), host=ocp.args.JsonSave(host)))


def restore(manager: ocp.CheckpointManager, step: int, like: TrainState) -> TrainState:
  """The state of a checkpoint; shapes, dtypes and shardings as in `like` (arrays or ShapeDtypeStructs)."""
  params, rest = split(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like))
  found = manager.restore(step, args=ocp.args.Composite(
    params=ocp.args.StandardRestore(params), rest=ocp.args.StandardRestore(rest)))
  return TrainState(params=found.params, **found.rest)


def restore_host(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  """What `save` was given as `host`."""
  return manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore())).host


def split(state: TrainState) -> tuple[dict, dict]:
  """(parameters, everything else) of a state."""
  rest = dict(vars(state))
  return rest.pop('params'), rest


def is_run(path: str | pathlib.Path) -> bool:
  """Whether `load_params` finds a checkpoint here, and not a Hugging Face folder or a file."""
  return (_run_folder(pathlib.Path(path))[0] / 'checkpoints').is_dir()


def _run_folder(path: pathlib.Path) -> tuple[pathlib.Path, int | None]:
  """(run folder, step or None for the newest) of a run folder, its `checkpoints`, or one checkpoint in that."""
  path = path.absolute()
  if path.name.isdecimal() and path.parent.name == 'checkpoints':
    return path.parent.parent, int(path.name)
  return (path.parent if path.name == 'checkpoints' else path), None


def load_params(path: str | pathlib.Path, mesh: jax.sharding.Mesh | None = None):
  """(model_config, parameters, host) of a checkpoint, for evaluation and export.

  An adapter is merged into its base, the model that the config of the run names; the head of a critic is left out.

  Args:
    path: a run folder or its `checkpoints` (the newest is taken), or one checkpoint in it.
    mesh: where the parameters go; the first device if not given.
  Raises:
    FileNotFoundError: there is no checkpoint, or not this one, or no base.
    ValueError: the base is not the one that the run began with, or the checkpoint is that of a critic.
  """
  mesh = mesh or make_mesh(1, 1, 1, devices=jax.devices()[:1])
  model_config, params, host = load_trained(path, mesh)
  if host.get('critic'):
    raise ValueError(f'{path}: this is a critic, not a policy')
  config = ml_collections.ConfigDict(host['config'])
  if config.lora.rank:
    _, base = setup.load_policy(config, mesh)
    check_base(host, fingerprint(base), config.model)
    params = setup.merger(config, model_config, mesh)(base, params)
  return model_config, without_head(params), host


def load_trained(path: str | pathlib.Path, mesh: jax.sharding.Mesh):
  """(model_config, parameters as they were trained, host) of a checkpoint.

  They are those of a policy, with the head of its critic if they share a backbone, of an adapter, or of a critic of its own.
  Raises FileNotFoundError if there is no checkpoint, or not this one.
  """
  run, step = _run_folder(pathlib.Path(path))
  if not (run / 'checkpoints').is_dir():
    raise FileNotFoundError(f'{path}: no checkpoints here')
  with contextlib.closing(open_checkpoints(run)) as manager:
    step = manager.latest_step() if step is None else step
    if step not in manager.all_steps():
      raise FileNotFoundError(f'{run}/checkpoints: no checkpoint {"at all" if step is None else step}')
    host = restore_host(manager, step)
    model_config = decoder_from_json(host['decoder'])
    shardings, shapes = (critic.layout(model_config, mesh) if host.get('critic')
                         else critic.trained_layout(ml_collections.ConfigDict(host['config']), model_config, mesh))
    like = jax.tree.map(
      lambda sharding, shape: jax.ShapeDtypeStruct(shape, host['param_dtype'], sharding=sharding), shardings, shapes)
    params = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(like))).params
  return model_config, params, host


def check_base(host: dict[str, Any], found: list[float], name: str) -> None:
  """Raises ValueError unless the run began with the parameters of model `name`, whose `step.fingerprint` is `found`."""
  then = host['reference']
  if len(then) != len(found) or not np.allclose(then, found, rtol=1e-5, atol=0):
    raise ValueError(f'model={name!r} has changed since this run began; its KL and its adapter refer to the old one')


def decoder_from_json(values: dict) -> DecoderConfig:
  """The inverse of `dataclasses.asdict`, by way of JSON."""
  scaling = values['rope_scaling']
  return DecoderConfig(**values | {'rope_scaling': scaling and RopeScaling(**scaling)})


def check_same_run(saved: dict, config: ml_collections.ConfigDict) -> None:
  """Raises ValueError, naming every field that differs and both values, if a config is not the saved one up to `FREE_FIELDS`."""
  then, now = ({name: list(value) if isinstance(value, tuple) else value for name, value in fields(values)
                if not isinstance(value, dict)} for values in (saved, config.to_dict()))  # JSON has lists for tuples
  free = FREE_FIELDS if config.optim.schedule == 'constant' else FREE_FIELDS[1:]  # a cosine ends at the last step
  differing = [name for name in sorted(then.keys() | now.keys())
               if then.get(name) != now.get(name) and not any(name == f or name.startswith(f + '.') for f in free)]
  if differing:
    shown = '; '.join(f'{name} was {then.get(name)!r}, now it is {now.get(name)!r}' for name in differing)
    raise ValueError(f'{config.out} holds a run with another config: {shown}. Use another out folder, or set it back.')
