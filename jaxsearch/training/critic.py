"""Critics: on the backbone of the policy (CARL), or a decoder of its own that starts as a copy of the policy.

Both have an optimizer and a step of their own. The head of the former is among the parameters of the policy.
Its gradient into the backbone is not added to the policy's: AdamW divides a gradient by its size, so that no
factor in front of it would be a rate. It costs a second pair of moments (8 bytes a parameter) and a second
forward and backward pass, not a second decoder.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import GradientTransformation

from jaxsearch import setup
from jaxsearch.models import value_head
from jaxsearch.models.decoder import DecoderConfig, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import step as steps
from jaxsearch.training.state import HEAD, TrainState, cast, create_state

FROZEN = ('embedding', 'unembedding')  # of the policy, for the critic on its backbone


def open_critic(config: ConfigDict, model_config: DecoderConfig, params: dict, mesh: Mesh, total_updates: int,
                warm: dict | None = None) -> tuple[TrainState, Callable]:
  """Returns (state, compiled step) of a critic: {'decoder', 'head'}, or the policy with its head.

  Args:
    params: of the policy (or of the base of its adapter), on `mesh`; they are copied.
    warm: the parameters of a critic that was warmed up, to start from in place of `params`.
  """
  if warm:
    params = warm
  elif is_shared(config):
    params = params | {HEAD: _new_head(config, model_config, mesh)}
  else:
    if config.optim.master_weights:
      params = cast(params, jnp.float32)  # what is frozen under an adapter is in the compute dtype
    head = value_head.initial_head(model_config.hidden_size, params['embedding'].dtype)
    params = {'decoder': params, 'head': jax.device_put(head, layout(model_config, mesh)[0]['head'])}
  optimizer, train_step = make_update(config, model_config, params, mesh, total_updates)
  return create_state(params, optimizer, mesh), train_step


def make_update(config: ConfigDict, model_config: DecoderConfig, params: dict, mesh: Mesh,
                total_updates: int) -> tuple[GradientTransformation, Callable]:
  """Returns (optimizer, compiled step) of a critic with these parameters, arrays or ShapeDtypeStructs."""
  settings = config.critic
  rates = {name: settings[name] for name in ('learning_rate', 'lr_warmup_updates', 'weight_decay')}
  backbone = 1.0 if settings.backbone_rate is None else settings.backbone_rate / settings.learning_rate
  kind = dict(coef=2 * settings.coef) if settings.shared else dict(value_clip=settings.value_clip)
  loss_fn = functools.partial(
    steps.critic_loss, config=model_config, frozen=not backbone, shared=settings.shared, **kind)
  factors = {HEAD: 1.0, 'head': 1.0} | dict.fromkeys(FROZEN, 0.0)
  return steps.make_update(
    loss_fn, params, ConfigDict(dict(config.optim) | rates), total_updates, mesh=mesh,
    dtype=model_config.dtype, factor=lambda name: factors.get(name, backbone), seed=(config.seed, 3))


def is_shared(config: ConfigDict) -> bool:
  """Tells whether the critic is on the backbone of the policy."""
  return config.critic.enabled and config.critic.shared


def _new_head(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh) -> dict:
  dtype = jnp.dtype('float32' if config.optim.master_weights else config.dtype)
  create = lambda key: value_head.initial_mlp(model_config.hidden_size, key, dtype)
  placed, _ = _head_layout(model_config, mesh)
  return jax.jit(create, out_shardings=placed)(jax.random.fold_in(jax.random.key(config.seed), 1))


def _head_layout(model_config: DecoderConfig, mesh: Mesh) -> tuple[dict, dict]:
  shapes = value_head.mlp_shapes(model_config.hidden_size)
  return meshes.shardings(value_head.MLP_AXES, shapes, mesh), shapes


def layout(model_config: DecoderConfig, mesh: Mesh) -> tuple[dict, dict]:
  """Returns (shardings, shapes) of the parameters of a critic of its own."""
  axes = {'decoder': parameter_axes(model_config), 'head': value_head.AXES}
  shapes = {'decoder': parameter_shapes(model_config),
            'head': {'kernel': (model_config.hidden_size,), 'bias': ()}}
  return meshes.shardings(axes, shapes, mesh), shapes


def trained_layout(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh) -> tuple[dict, dict]:
  """Returns (shardings, shapes) of what a run trains: the policy, with the head of a critic on it, or an
  adapter."""
  if config.lora.rank:
    return setup.adapter_layout(config, model_config, mesh)
  shardings, shapes = setup.param_shardings(model_config, mesh), parameter_shapes(model_config)
  if is_shared(config):
    placed, sizes = _head_layout(model_config, mesh)
    shardings, shapes = shardings | {HEAD: placed}, shapes | {HEAD: sizes}
  return shardings, shapes
