"""The training step: hidden states of whole rows, log-probabilities where there is a loss, one update.

`policy_loss` (reinforcement learning) and `imitation_loss` (supervised) are pure functions of parameters and one
micro-batch; `make_train_step` turns either into the jitted, donated, sharded step that accumulates gradients over
micro-batches in float32 and updates, or skips and counts when something is not finite. `make_score_step` computes the
log-probabilities of a frozen policy over the same batch.

Every loss is a plain sum of weight * per-token loss: the weights hold the denominators, decided once over the whole
batch on the host, so neither micro-batches nor packing can change a gradient.

Letters: R rows, T tokens of a row, M trained tokens of a row, D width of the hidden states.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxsearch import losses
from jaxsearch.models import lora, value_head
from jaxsearch.models.decoder import DecoderConfig, hidden_states, target_logprobs
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training.batch import Batch
from jaxsearch.training.state import TrainState, compute_copy

# What a loss reports besides its value. 'sum': added up over micro-batches; 'mean': sums over trained tokens, divided
# by their number at the end; 'max': largest value.
Report = dict[str, dict[str, jax.Array]]
Loss = Callable[[dict, Batch], tuple[jax.Array, Report]]


def predicting_states(config: DecoderConfig, params: dict, batch: Batch) -> jax.Array:
  """Hidden states [R, M, D] in which the trained tokens of one micro-batch were chosen; anything on padding.

  That is the state of the token before it on its path, which in a row of trees is not always the token before it in the
  row.
  """
  hidden = hidden_states(config, params, batch.tokens, batch.positions, batch.visible_until)
  predicting = jnp.take_along_axis(batch.previous, jnp.maximum(batch.targets, 0), axis=1)
  return jnp.take_along_axis(hidden, predicting[..., None], axis=1)


def trained_logprobs(params: dict, states: jax.Array, batch: Batch, *, temperature: float, chunk: int,
                     with_entropy: bool = False):
  """Log-probabilities (and entropies) [R, M] of the trained tokens from their `predicting_states`; anything on padding."""
  ids = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.targets, 0), axis=1)
  return target_logprobs(params, states, ids, temperature=temperature, chunk=chunk, with_entropy=with_entropy)


def policy_loss(params: dict, batch: Batch, *, config: DecoderConfig, temperature: float, chunk: int,
                clip_low: float, clip_high: float, dual_clip: float | None, kl_coef: float,
                entropy_coef: float, value_coef: float = 0.0, backbone_share: float = 1.0) -> tuple[jax.Array, Report]:
  """sum of weights * (clipped surrogate + kl_coef * k3 KL to the reference - entropy_coef * entropy).

  With a `value_coef` that times the squared error of a critic on the same backbone, `params['value_head']`, is added;
  `backbone_share` scales its gradient into the backbone.

  `temperature` is that of the sampler: the ratio compares log-probabilities of the same distribution. Without a
  reference (`batch.ref_logprobs` is None) the KL term is absent and reported as 0.
  """
  mask = batch.targets >= 0
  states = predicting_states(config, params, batch)
  logprobs, entropies = trained_logprobs(params, states, batch, temperature=temperature, chunk=chunk, with_entropy=True)
  surrogate = losses.clipped_surrogate(logprobs, batch.old_logprobs, batch.advantages, mask,
                                       clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
  entropies = jnp.where(mask, entropies, 0)
  kl = jnp.zeros_like(entropies)
  if batch.ref_logprobs is not None:
    kl = jnp.where(mask, losses.kl(jnp.where(mask, logprobs, 0), batch.ref_logprobs, kind='k3'), 0)
  per_token = surrogate + kl_coef * kl - entropy_coef * entropies
  loss, value_report = jnp.sum(batch.weights * per_token), {}
  if value_coef:
    error, found = shared_value_error(params, states, batch, backbone_share)
    loss, value_report = loss + value_coef * error, {'value_loss': error}

  ratio = jnp.where(mask, jnp.exp(jnp.clip(logprobs - batch.old_logprobs, -20, 20)), 1)
  # The surrogate is clipped, and its gradient 0, where the ratio has left the interval on the side of the advantage.
  clipped = jnp.where(batch.advantages > 0, ratio > 1 + clip_high, (ratio < 1 - clip_low) & (batch.advantages < 0))
  gap = jnp.where(mask, jnp.abs(logprobs - batch.sampler_logprobs), 0)
  report = {
    'sum': {'policy_loss': jnp.sum(batch.weights * surrogate)} | value_report,
    'mean': {
      'kl': jnp.sum(kl), 'entropy': jnp.sum(entropies), 'clip_fraction': jnp.sum(clipped & mask, dtype=jnp.float32),
      'ratio': jnp.sum(jnp.where(mask, ratio, 0)), 'logprob_gap': jnp.sum(gap),
    },
    'max': {'ratio_max': jnp.max(ratio), 'logprob_gap_max': jnp.max(gap)},
  }  # fmt: skip
  return loss, jax.lax.stop_gradient(report)


def imitation_loss(params: dict, batch: Batch, *, config: DecoderConfig, chunk: int) -> tuple[jax.Array, Report]:
  """sum of weights * negative log-likelihood (temperature 1) of the trained tokens."""
  mask = batch.targets >= 0
  logprobs, _ = trained_logprobs(params, predicting_states(config, params, batch), batch, temperature=1.0, chunk=chunk)
  loss = -jnp.sum(jnp.where(mask, batch.weights * logprobs, 0))
  return loss, {'sum': {}, 'mean': {'logprob': jnp.sum(jnp.where(mask, logprobs, 0))}, 'max': {}}


def critic_loss(params: dict, batch: Batch, *, config: DecoderConfig, value_clip: float | None) -> tuple[jax.Array, Report]:
  """sum of weights * value loss; `params` is {'decoder', 'head'}, see training/critic.py."""
  mask = batch.targets >= 0
  found = value_head.values(params['head'], predicting_states(config, params['decoder'], batch))
  loss = jnp.sum(batch.value_weights * losses.value_loss(found, batch.values, batch.returns, mask, clip=value_clip))
  return loss, {'sum': {}, 'mean': {'value': jnp.sum(jnp.where(mask, found, 0))}, 'max': {}}


def shared_value_error(params: dict, states: jax.Array, batch: Batch, backbone_share: float) -> tuple[jax.Array, jax.Array]:
  """(sum of value weights * squared error, values [R, M]) of the critic on the policy's own hidden states (CARL, section 3.4)."""
  mask = batch.targets >= 0
  shared = backbone_share * states + (1 - backbone_share) * jax.lax.stop_gradient(states)
  found = value_head.probabilities(params['value_head'], shared)
  halves = losses.value_loss(found, found, batch.returns, mask)
  return 2 * jnp.sum(batch.value_weights * halves), found


def shared_critic_loss(params: dict, batch: Batch, *, config: DecoderConfig) -> tuple[jax.Array, Report]:
  """The error of that critic alone, for its warm-up."""
  error, found = shared_value_error(params, predicting_states(config, params, batch), batch, 1.0)
  return error, {'sum': {}, 'mean': {'value': jnp.sum(jnp.where(batch.targets >= 0, found, 0))}, 'max': {}}


def make_train_step(loss_fn: Loss, optimizer: optax.GradientTransformation, schedule: optax.Schedule, *,
                    mesh: Mesh, state_shardings: TrainState, dtype: str, alpha: float | None = None):
  """The jitted `train_step(state, batch, base=None) -> (state, metrics)`; `state` is donated.

  With a `base`, frozen parameters in the compute dtype, the state holds an adapter and the gradient is that of the adapter.

  Args:
    loss_fn: (params in the compute dtype, micro-batch) -> (loss, report).
    dtype: the compute dtype.
    alpha: of the adapter, see models/lora.py.
  """
  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(state_shardings, meshes.replicated(mesh)))
  def train_step(state: TrainState, batch: Batch, base: dict | None = None):
    loss_of = loss_fn if base is None else lambda adapter, part: loss_fn(lora.merge(base, adapter, alpha), part)
    with meshes.ambient(mesh):
      grads, loss, report = accumulate(loss_of, compute_copy(state.params, dtype), batch, state_shardings.params)
    state, grad_norm = update(state, grads, loss, optimizer)
    tokens = jnp.sum(batch.targets >= 0)
    per_token = {name: value / jnp.maximum(tokens, 1) for name, value in report['mean'].items()}
    return state, report['sum'] | per_token | report['max'] | {
      'loss': loss, 'grad_norm': grad_norm,
      'learning_rate': jnp.asarray(schedule(jnp.maximum(state.updates - 1, 0)), jnp.float32),
      'tokens_trained': tokens, 'skipped': state.skipped, 'skipped_in_a_row': state.skipped_in_a_row,
    }  # fmt: skip

  return train_step


def accumulate(loss_fn: Loss, params: dict, batch: Batch, shardings: dict):
  """(gradients in float32, loss, report) summed over the micro-batches of `batch`.

  A loop whose length is data, not a scan, so that one program serves any number of micro-batches and those that are
  padding cost nothing; the gradient is taken inside, so nothing differentiates through the loop. The sums lie where the
  parameters lie (`shardings`).
  """
  value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
  combine = {'sum': jnp.add, 'mean': jnp.add, 'max': jnp.maximum}

  def micro_batch(i):
    return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)

  def add(i, carry):
    grads, loss, report = carry
    (value, new), grad = value_and_grad(params, micro_batch(i))
    grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, grad)
    grads = jax.lax.with_sharding_constraint(grads, shardings)
    return grads, loss + value, {how: jax.tree.map(combine[how], report[how], new[how]) for how in report}

  zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
  _, report = jax.eval_shape(loss_fn, params, micro_batch(0))
  start = zeros(params), jnp.zeros((), jnp.float32), {how: zeros(values) for how, values in report.items()}
  return jax.lax.fori_loop(0, batch.count, add, start)


def update(state: TrainState, grads: dict, loss, optimizer: optax.GradientTransformation):
  """One optimizer step in float32, or, where the loss or the gradient norm is not finite, none but a higher count."""
  grad_norm = optax.tree.norm(grads)
  params = jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
  changes, opt_state = optimizer.update(grads, state.opt_state, params)
  params = jax.tree.map(lambda old, p, c: (p + c).astype(old.dtype), state.params, params, changes)
  finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

  def keep(new, old):
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

  return TrainState(
    params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state),
    updates=state.updates + finite, skipped=state.skipped + ~finite,
    skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
  ), grad_norm  # fmt: skip


def make_score_step(config: DecoderConfig, *, mesh: Mesh, temperature: float, chunk: int):
  """The jitted `score(params, batch) -> [n, R, M]` float32 log-probabilities of the trained tokens; 0 on padding."""
  def logprobs(params: dict, batch: Batch):
    return trained_logprobs(params, predicting_states(config, params, batch), batch, temperature=temperature, chunk=chunk)[0]
  return _over_micro_batches(logprobs, config.dtype, mesh)


def make_value_step(config: DecoderConfig, *, mesh: Mesh, shared: bool = False):
  """The jitted `values(params, batch) -> [n, R, M]` float32: a critic's values of the states before the trained tokens.

  `params` are {'decoder', 'head'}, or with `shared` the policy's with their 'value_head'.
  """
  def own(params: dict, batch: Batch):
    return value_head.values(params['head'], predicting_states(config, params['decoder'], batch))

  def on_the_policy(params: dict, batch: Batch):
    return value_head.probabilities(params['value_head'], predicting_states(config, params, batch))

  return _over_micro_batches(on_the_policy if shared else own, config.dtype, mesh)


def _over_micro_batches(per_token: Callable[[dict, Batch], jax.Array], dtype: str, mesh: Mesh):
  """The jitted `(params, batch) -> [n, R, M]` of a function of one micro-batch; 0 on padding.

  The result is whole on every device, since the host packs it into the training batch.
  """
  @functools.partial(jax.jit, out_shardings=meshes.replicated(mesh))
  def score(params: dict, batch: Batch):
    params = compute_copy(params, dtype)

    def fill(i, found):
      part = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
      return found.at[i].set(jnp.where(part.targets >= 0, per_token(params, part), 0))

    with meshes.ambient(mesh):
      return jax.lax.fori_loop(0, batch.count, fill, jnp.zeros(batch.targets.shape, jnp.float32))

  return score
