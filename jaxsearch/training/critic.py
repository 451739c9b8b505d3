"""Critics: on the backbone of the policy (CARL), or a decoder of its own, begun as a copy of the policy (verl, Search-R1).

The former is a head among the parameters of the policy, which `steps.policy_loss` trains with them; the latter has an
optimizer and a step of its own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections

from jaxsearch import setup
from jaxsearch.models import value_head
from jaxsearch.models.decoder import DecoderConfig, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import step as steps
from jaxsearch.training.batch import Batch

SHOWN = ('loss', 'grad_norm', 'value')  # of the metrics of an update, as critic_…


@dataclasses.dataclass
class Critic:
  """The parameters {'decoder', 'head'} of a critic of its own, its optimizer, and its compiled step."""
  state: steps.TrainState
  train_step: Callable

  def learn(self, batch: Batch) -> dict[str, jax.Array]:
    """One update towards `batch.returns`; its metrics."""
    self.state, result = self.train_step(self.state, batch)
    return {f'critic_{name}': result[name] for name in SHOWN}


def open_critic(config: ml_collections.ConfigDict, model_config: DecoderConfig, params: dict, mesh: jax.sharding.Mesh,
                total_updates: int, warm: dict | None = None, decoder_factor: float = 1.0) -> Critic:
  """The critic before its first update.

  Args:
    params: of the policy (or of the base of its adapter), on `mesh`; they are copied.
    warm: the parameters of a critic that was warmed up, to begin with in their place.
    decoder_factor: of the learning rate, for all but the head.
  """
  optim = config.optim.copy_and_resolve_references()
  optim.update(learning_rate=config.critic.learning_rate, lr_warmup_updates=config.critic.lr_warmup_updates)
  schedule = steps.learning_rate_schedule(optim, total_updates)
  optimizer = steps.make_optimizer(optim, schedule, lambda name: 1.0 if name == 'head' else decoder_factor)
  if warm is not None:
    params = warm
  else:
    if config.optim.master_weights:
      params = steps.float32(params)  # what is frozen under an adapter is in the compute dtype
    head = value_head.initial_head(model_config.hidden_size, params['embedding'].dtype)
    placed, _ = layout(model_config, mesh)
    params = {'decoder': params, 'head': jax.device_put(head, placed['head'])}
  loss_fn = lambda params, batch: steps.critic_loss(params, batch, config=model_config, value_clip=config.critic.value_clip)
  return Critic(
    steps.create_state(params, optimizer, mesh),
    steps.make_train_step(loss_fn, optimizer, schedule, mesh=mesh, dtype=model_config.dtype,
                          state_shardings=steps.state_shardings(params, optimizer, mesh)))


def layout(model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
  """(shardings, shapes) of the parameters of a critic of its own."""
  shapes = {'decoder': parameter_shapes(model_config), 'head': {'kernel': (model_config.hidden_size,), 'bias': ()}}
  return meshes.shardings({'decoder': parameter_axes(model_config), 'head': value_head.AXES}, shapes, mesh), shapes


def is_shared(config: ml_collections.ConfigDict) -> bool:
  """Whether the critic is on the backbone of the policy."""
  return config.critic.enabled and config.critic.get('shared', False)


def new_head(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> dict:
  """The head of a critic on the backbone of the policy, before its first update."""
  create = lambda key: value_head.initial_mlp(model_config.hidden_size, key, jnp.dtype(
    'float32' if config.optim.master_weights else config.dtype))
  placed, _ = head_layout(model_config, mesh)
  return jax.jit(create, out_shardings=placed)(jax.random.fold_in(jax.random.key(config.seed), 1))


def head_layout(model_config: DecoderConfig, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
  """(shardings, shapes) of that head."""
  shapes = value_head.mlp_shapes(model_config.hidden_size)
  return meshes.shardings(value_head.MLP_AXES, shapes, mesh), shapes


def trained_layout(config: ml_collections.ConfigDict, model_config: DecoderConfig,
                   mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
  """(shardings, shapes) of what a run of `config` trains: the policy, with the head of a critic on it, or an adapter."""
  if 'lora' in config and config.lora.rank > 0:
    return setup.adapter_layout(config, model_config, mesh)
  shardings, shapes = setup.param_shardings(model_config, mesh), parameter_shapes(model_config)
  if 'critic' in config and is_shared(config):
    placed, sizes = head_layout(model_config, mesh)
    shardings, shapes = shardings | {steps.HEAD: placed}, shapes | {steps.HEAD: sizes}
  return shardings, shapes
