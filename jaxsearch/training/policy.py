"""The policy that a config names: its configuration, its parameters on the mesh, and its tokenizer."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections

from jaxsearch.models import hub, lora
from jaxsearch.models.decoder import DecoderConfig, initial_params, parameter_axes, parameter_shapes
from jaxsearch.models.presets import preset
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.rewards import judge
from jaxsearch.sampler.assistant import Assistant
from jaxsearch.sampler.engine import Engine
from jaxsearch.training import critic
from jaxsearch.training.state import HEAD
from jaxsearch.world import files as world

WORLD_MODELS = {'world-tiny': '', 'world-review': 'review', 'world-carl': 'carl', 'world-reader': 'reader'}  # -> folder
RANDOM = 'random:'


def load_policy(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> tuple[DecoderConfig, dict]:
  """(model_config, parameters laid out on `mesh`) of `config.model`.

  Parameters are float32 master weights, or in the compute dtype if `config.optim.master_weights` is off or they are frozen
  under an adapter.
  """
  param_dtype = 'float32' if config.optim.master_weights and not config.lora.rank else config.dtype
  if config.model.startswith(RANDOM):
    model_config = dataclasses.replace(preset(config.model.removeprefix(RANDOM)), dtype=config.dtype, remat=config.remat)
    create = lambda key: initial_params(model_config, key, jnp.dtype(param_dtype))
    placed = param_shardings(model_config, mesh)
    return model_config, jax.jit(create, out_shardings=placed)(jax.random.key(config.seed))
  decoder = hub.load(model_path(config.model), config.dtype, param_dtype=param_dtype, mesh=mesh, remat=config.remat)
  return decoder.config, decoder.params


def new_adapter(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> dict:
  """The adapter that `config.lora` describes before its first update; float32 unless `config.optim.master_weights` is off."""
  dtype = jnp.dtype('float32' if config.optim.master_weights else config.dtype)
  create = lambda key: lora.initial_adapter(model_config, config.lora.rank, config.lora.targets, key, dtype)
  placed, _ = adapter_layout(config, model_config, mesh)
  return jax.jit(create, out_shardings=placed)(jax.random.fold_in(jax.random.key(config.seed), 0))


def adapter_layout(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
  """(shardings, shapes) of the adapter that `config.lora` describes."""
  shapes = lora.adapter_shapes(model_config, config.lora.rank, config.lora.targets)
  return meshes.shardings(lora.adapter_axes(model_config, config.lora.targets), shapes, mesh), shapes


def trained_layout(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
  """(shardings, shapes) of what a run of `config` trains: the policy, with the head of a critic on it, or an adapter."""
  if 'lora' in config and config.lora.rank > 0:
    return adapter_layout(config, model_config, mesh)
  shardings, shapes = param_shardings(model_config, mesh), parameter_shapes(model_config)
  if 'critic' in config and critic.is_shared(config):
    placed, sizes = critic.head_layout(model_config, mesh)
    shardings, shapes = shardings | {HEAD: placed}, shapes | {HEAD: sizes}
  return shardings, shapes


def merger(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> Callable[[dict, dict], dict]:
  """The compiled (base, adapter) -> parameters of the policy, in the layout of the base."""
  return jax.jit(functools.partial(lora.merge, alpha=config.lora.alpha), out_shardings=param_shardings(model_config, mesh))


def param_shardings(model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> dict:
  """The layout of a decoder's parameters on `mesh`."""
  return meshes.shardings(parameter_axes(model_config), parameter_shapes(model_config), mesh)


def model_path(name: str) -> str | pathlib.Path:
  """Where the weights of a model lie: those that are shipped have a name, all others are a path themselves."""
  return world.folder() / WORLD_MODELS[name] if name in WORLD_MODELS else name


def load_assistant(settings: ml_collections.ConfigDict, dtype: str, mesh: jax.sharding.Mesh | None = None) -> Assistant:
  """The frozen model of a config group such as `reader`, greedy, on its own sampler; `mesh` as for the policy's sampler."""
  decoder = hub.load(model_path(settings.model), dtype, param_dtype=dtype, mesh=mesh)
  tokenizer = Tokenizer.load(world.folder() if settings.model in WORLD_MODELS else settings.model)
  engine = Engine(decoder.config, tokenizer, slots=settings.slots, length=settings.length, temperature=0.0, mesh=mesh)
  engine.load(decoder.params)
  return Assistant(engine, settings.max_tokens, tuple(settings.stop), settings.chat)


def load_judge(settings: ml_collections.ConfigDict, dtype: str, mesh: jax.sharding.Mesh | None = None) -> Callable:
  """The judge of a config group `judge`, see rewards/judge.py."""
  if settings.kind == 'world':
    return judge.world_judge
  if settings.kind == 'local':
    return judge.LanguageJudge(load_assistant(settings, dtype, mesh), settings.templates)
  if settings.kind == 'chat':
    from jaxsearch.tools.chat import Chat
    return judge.LanguageJudge(Chat(settings.url, settings.model, max_tokens=settings.max_tokens, timeout=settings.timeout,
                                    cache=settings.cache or None).replies, settings.templates)
  raise ValueError(f"judge.kind={settings.kind!r} is none of 'world', 'local', 'chat'")


SERVICES = {'reader': load_assistant, 'judge': load_judge}  # what a method may name in its SERVICES, and how it is opened


def load_tokenizer(config: ml_collections.ConfigDict) -> Tokenizer:
  """The tokenizer that `config.tokenizer` names, else the model's own."""
  if config.tokenizer:
    return Tokenizer.load(config.tokenizer)
  own = config.model in WORLD_MODELS or config.model.startswith(RANDOM)
  return Tokenizer.load(world.folder() if own else config.model)
