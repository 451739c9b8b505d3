"""Policies and critics out of the checkpoints of runs, for evaluation, export and warm starts."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxsearch import __version__, registry, setup
from jaxsearch.config_check import from_saved, without_secrets
from jaxsearch.models import hub, value_head
from jaxsearch.models.architecture import DecoderConfig, config_from_json, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import checkpoint
from jaxsearch.training.bucket import place
from jaxsearch.training.state import HEAD, without_head

VERSIONS = {'jaxsearch': __version__, 'jax': jax.__version__}  # what wrote a policy


def is_run(path: str | pathlib.Path) -> bool:
  """Tells whether `load_params` finds a checkpoint here, and not a Hugging Face folder or a file."""
  return (_run_folder(path)[0] / 'checkpoints').is_dir()


def _run_folder(path: str | os.PathLike) -> tuple[epath.Path, int | None]:
  """Returns (run folder, step or None for the newest) of a run folder, its `checkpoints`, or one of these."""
  path = place(path)
  if path.name.isdecimal() and path.parent.name == 'checkpoints':
    return path.parent.parent, int(path.name)
  return (path.parent if path.name == 'checkpoints' else path), None


def load_params(path: str | pathlib.Path, mesh: Mesh | None = None, base: str | None = None,
                dtype: str | None = None) -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Returns (decoder, parameters, host) of a checkpoint, for evaluation and export.

  An adapter is merged into its base; the head of a critic is left out.

  Args:
    path: a run folder or its `checkpoints` (the newest is taken), one checkpoint in it, or a folder that
      `save_adapter` wrote.
    mesh: where the parameters go; the devices of this host if not given.
    base: the model that it began with, where that is none of ours, see `setup.base_of`.
    dtype: of the parameters, unless there is an adapter; as they were saved if not given.
  Raises:
    FileNotFoundError: there is no checkpoint, or not this one, or no base.
    ValueError: the base is another now, or it is the checkpoint of a critic, or cannot be read, or has values
      that are not finite.
  """
  mesh = mesh or meshes.of_host()
  if hub.is_adapter(path):
    return setup.load_adapted(path, mesh, base)
  decoder, params, host = load_trained(path, mesh, dtype=dtype)
  if host.get('critic'):
    raise ValueError(f'{path}: this is a critic, not a policy')
  if from_saved(host['config']).lora.rank:
    params = setup.merge_with_base(params, host, setup.base_of(host, base, path), mesh)
  return decoder, without_head(params), host


def load_trained(path: str | pathlib.Path, mesh: Mesh, warn: bool = True,
                 dtype: str | None = None) -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Returns (decoder, parameters as they were trained, host) of a checkpoint.

  They are those of a policy, with the head of its critic if they share a backbone, of an adapter, or of a
  critic of its own. `warn` names newer checkpoints that cannot be read. For `dtype` and what it raises see
  `load_params`; a device never holds them in another.
  """
  def read(manager: checkpoint.Store, step: int):
    host = checkpoint.restore_host(manager, step)
    decoder = config_from_json(host['decoder'])
    config = from_saved(host['config'])
    layout = critic_layout(decoder, mesh) if host.get('critic') else trained_layout(config, decoder, mesh)
    wanted = dtype if dtype and not config.lora.rank else host['param_dtype']
    struct = lambda sharding, shape: jax.ShapeDtypeStruct(shape, wanted, sharding=sharding)
    return decoder, checkpoint.restore_params(manager, step, jax.tree.map(struct, *layout)), host

  return _read(path, read, warn)


def _read(path: str | os.PathLike, read: Callable, warn: bool) -> Any:
  """Returns `read(manager, step)` of the checkpoint of a path, or the newest; FileNotFoundError for none."""
  run, step = _run_folder(path)
  if not (run / 'checkpoints').is_dir():
    raise FileNotFoundError(f'{path}: no checkpoints here')
  with contextlib.closing(checkpoint.open_checkpoints(run)) as manager:
    if step is None:
      loaded = checkpoint.newest(manager, functools.partial(read, manager), warn)
    else:
      loaded = read(manager, step) if step in checkpoint.all_steps(manager) else None
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
  return _read(path, checkpoint.restore_host, warn=False)  # `load_params` warns, which follows


def save_adapter(path: str | pathlib.Path, folder: str | pathlib.Path,
                 dtype: str | None = None) -> dict[str, Any]:
  """Writes adapter.safetensors and jaxsearch.json of a checkpoint, without its base; returns `host`.

  Args:
    path: as for `load_params`.
    dtype: 'float32' or 'bfloat16'; as it is if not given.
  Raises ValueError for a run without an adapter, and for the folder of its base.
  """
  _, params, host = load_trained(path, meshes.of_host())
  if host.get('critic') or not host['config']['lora']['rank']:
    raise ValueError(f'{path}: this run has no adapter (lora.rank=0): leave out --adapter')
  if pathlib.Path(registry.policy_path(host['config']['model'])).resolve() == pathlib.Path(folder).resolve():
    raise ValueError(f'{folder} holds the base of this adapter: choose another folder')
  adapter = params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)
  kept = without_secrets({name: host[name] for name in ('step', 'config', 'decoder', 'reference')})
  hub.save_adapter(adapter, folder, VERSIONS | kept)
  return host


def critic_layout(model_config: DecoderConfig, mesh: Mesh) -> tuple[dict, dict]:
  """Returns (shardings, shapes) of the parameters of a critic of its own."""
  axes = {'decoder': parameter_axes(model_config), 'head': value_head.AXES}
  shapes = {'decoder': parameter_shapes(model_config),
            'head': {'kernel': (model_config.hidden_size,), 'bias': ()}}
  return meshes.shardings(axes, shapes, mesh), shapes


def trained_layout(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh) -> tuple[dict, dict]:
  """Returns (shardings, shapes) of what a run trains: the policy, with its critic's head, or an adapter."""
  if config.lora.rank:
    return setup.adapter_layout(config, model_config, mesh)
  axes, shapes = parameter_axes(model_config), parameter_shapes(model_config)
  if config.critic.enabled and config.critic.shared:
    axes = axes | {HEAD: value_head.MLP_AXES}
    shapes = shapes | {HEAD: value_head.mlp_shapes(model_config.hidden_size)}
  return meshes.shardings(axes, shapes, mesh), shapes
