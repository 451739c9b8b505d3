"""Adapters in and out of folders: adapter.safetensors, and jaxsearch.json with its run and its base."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from jaxsearch.files import write_whole
from jaxsearch.models import hub, lora
from jaxsearch.models.decoder import DecoderConfig, config_from_json
from jaxsearch.models.tensor_files import write_json

ADAPTER = 'adapter.safetensors'


def is_adapter(path: str | pathlib.Path) -> bool:
  """Tells whether `save` wrote this folder."""
  return (pathlib.Path(path) / ADAPTER).is_file()


def save(adapter: dict, folder: str | pathlib.Path, run: Mapping[str, Any]) -> None:
  """Writes an adapter in its dtype, and what `load` needs to know of its run.

  Args:
    run: at least `config`, `step`, `decoder` (by `dataclasses.asdict`) and `reference` (the base's
      `fingerprint`).
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  named = traverse_util.flatten_dict(jax.tree.map(np.asarray, adapter), sep='/')
  write_whole(folder / ADAPTER, safetensors.numpy.save(named))
  write_json(folder / hub.RUN, run)


def load(folder: str | pathlib.Path) -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Reads (the decoder, the adapter as host arrays, `run`) from a folder that `save` wrote.

  Raises FileNotFoundError without jaxsearch.json, ValueError if a file cannot be read or they do not belong
  together, NotFinite if the adapter has values that are not finite.
  """
  folder = pathlib.Path(folder)
  run = read_run(folder)
  try:
    config = config_from_json(run['decoder'])
    rank, targets = (run['config']['lora'][name] for name in ('rank', 'targets'))
    shapes = lora.adapter_shapes(config, rank, targets)
  except (KeyError, TypeError) as error:
    raise ValueError(f'{folder / hub.RUN} does not say what {ADAPTER} is an adapter of') from error
  try:
    adapter = traverse_util.unflatten_dict(safetensors.numpy.load_file(folder / ADAPTER), sep='/')
  except safetensors.SafetensorError as error:
    raise ValueError(f'{folder / ADAPTER} cannot be read ({error})') from error
  if jax.tree.map(np.shape, adapter) != shapes:
    raise ValueError(f'{folder / ADAPTER}: its shapes are not those of lora.rank={rank}')
  hub.check_finite(adapter, folder)
  return config, adapter, run


def read_run(folder: str | pathlib.Path) -> dict[str, Any]:
  """Reads the `run` of a folder that `save` wrote; raises FileNotFoundError if it is not there."""
  run = hub.read_run(folder)
  if run is None:
    raise FileNotFoundError(f'{folder}: {ADAPTER} without {hub.RUN}, which says what it is an adapter of')
  return run
