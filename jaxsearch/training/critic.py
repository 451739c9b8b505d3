"""The critic of PPO: a decoder of its own with a value head, begun as a copy of the policy, as in verl and Search-R1."""

import dataclasses
from collections.abc import Callable

import jax
import ml_collections

from jaxsearch.models import value_head
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import state as states
from jaxsearch.training import step as steps
from jaxsearch.training.batch import Batch

SHOWN = ('loss', 'grad_norm', 'value')  # of the metrics of an update, as critic_…


@dataclasses.dataclass
class Critic:
  """The critic's parameters {'decoder', 'head'}, its optimizer, and its two compiled programs."""
  state: states.TrainState
  train_step: Callable
  value_step: Callable

  def values(self, batch: Batch) -> jax.Array:
    """Values [n, R, M] of the states before the trained tokens of a batch."""
    return self.value_step(self.state.params, batch)

  def learn(self, batch: Batch) -> dict[str, jax.Array]:
    """One update towards `batch.returns`; its metrics."""
    self.state, result = self.train_step(self.state, batch)
    return {f'critic_{name}': result[name] for name in SHOWN}


def open_critic(config: ml_collections.ConfigDict, numbers: DecoderConfig, params: dict, mesh: jax.sharding.Mesh,
                total_updates: int) -> Critic:
  """The critic before its first update.

  Args:
    params: of the policy (or of the base of its adapter), on `mesh`; they are copied.
  """
  if config.optim.master_weights:
    params = states.float32(params)  # what is frozen under an adapter is in the compute dtype
  optim = config.optim.copy_and_resolve_references()
  optim.update(learning_rate=config.critic.learning_rate, warmup_updates=config.critic.warmup_updates)
  schedule = states.learning_rate_schedule(optim, total_updates)
  optimizer = states.make_optimizer(optim, schedule)
  head = value_head.initial_head(numbers.hidden_size, params['embedding'].dtype)
  shapes = jax.tree.map(lambda x: x.shape, head)
  params = {'decoder': params, 'head': jax.device_put(head, meshes.shardings(value_head.AXES, shapes, mesh))}
  loss_fn = lambda params, batch: steps.critic_loss(params, batch, config=numbers, value_clip=config.critic.value_clip)
  return Critic(
    states.create(params, optimizer, mesh),
    steps.make_train_step(loss_fn, optimizer, schedule, mesh=mesh, dtype=numbers.dtype,
                          state_shardings=states.state_shardings(params, optimizer, mesh)),
    steps.make_value_step(numbers, mesh=mesh))
