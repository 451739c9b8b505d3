"""The policy that a config names: its numbers, its parameters on the mesh, and its tokenizer."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections

from jaxsearch.data import world
from jaxsearch.models import hub
from jaxsearch.models.decoder import DecoderConfig, initial_params, parameter_axes, parameter_shapes
from jaxsearch.models.presets import preset
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes

WORLD_MODEL = 'world-tiny'
RANDOM = 'random:'


def load_policy(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> tuple[DecoderConfig, dict]:
  """(numbers, parameters laid out on `mesh`) of `config.model`.

  Parameters are float32 master weights, or in the compute dtype if `config.optim.master_weights` is off.
  """
  param_dtype = 'float32' if config.optim.master_weights else config.dtype
  if config.model.startswith(RANDOM):
    numbers = dataclasses.replace(preset(config.model.removeprefix(RANDOM)), dtype=config.dtype, remat=config.remat)
    create = lambda key: initial_params(numbers, key, jnp.dtype(param_dtype))
    placed = param_shardings(numbers, mesh)
    return numbers, jax.jit(create, out_shardings=placed)(jax.random.key(config.seed))
  path = world.folder() if config.model == WORLD_MODEL else config.model
  decoder = hub.load(path, config.dtype, param_dtype=param_dtype, mesh=mesh, remat=config.remat)
  return decoder.config, decoder.params


def param_shardings(numbers: DecoderConfig, mesh: jax.sharding.Mesh) -> dict:
  """The layout of a decoder's parameters on `mesh`."""
  return meshes.shardings(parameter_axes(numbers), parameter_shapes(numbers), mesh)


def load_tokenizer(config: ml_collections.ConfigDict) -> Tokenizer:
  """The tokenizer that `config.tokenizer` names, else the model's own."""
  if config.tokenizer:
    return Tokenizer.load(config.tokenizer)
  own = config.model == WORLD_MODEL or config.model.startswith(RANDOM)
  return Tokenizer.load(world.folder() if own else config.model)
