"""The training step: hidden states of whole rows, log-probabilities where there is a loss, one update.

`policy_loss` (reinforcement learning), `imitation_loss` (supervised) and `critic_loss` are pure functions of
parameters and one micro-batch. `make_update` turns one of them into an optimizer and the jitted step, which
accumulates gradients over micro-batches in float32. `make_score_step` and `make_value_step` compute
log-probabilities and values over the same batch.

Every loss is a plain sum of weight * per-token loss: the weights hold the denominators, decided once over the
whole batch on the host, so neither micro-batches nor packing can change a gradient.

Letters: n micro-batches, R rows of each, T tokens of a row, M trained tokens of a row, D width of the hidden
states.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import GradientTransformation

from jaxsearch import losses
from jaxsearch.models import lora, value_head
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.models.decoder import hidden_states
from jaxsearch.models.vocabulary import target_logprobs
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.training import state as states
from jaxsearch.training.batch import Batch
from jaxsearch.training.state import HEAD, TrainState, cast

# What a loss reports besides its value. 'sum': added up over micro-batches; 'mean': sums over trained tokens,
# divided by their number at the end (a token counts once for each span that shares it); 'max': the largest.
Report = dict[str, dict[str, jax.Array]]
Loss = Callable[[dict, Batch], tuple[jax.Array, Report]]


def predicting_states(config: DecoderConfig, params: dict, batch: Batch) -> jax.Array:
  """Returns the hidden states [R, M, D] that predict the trained tokens; anything on padding.

  Each is that of the token before it on its path, which may stand elsewhere in a row of trees.
  """
  hidden = hidden_states(config, params, batch.tokens, batch.positions, batch.visible_until)
  predicting = jnp.take_along_axis(batch.previous, jnp.maximum(batch.targets, 0), axis=1)
  return jnp.take_along_axis(hidden, predicting[..., None], axis=1)


def trained_logprobs(params: dict, states: jax.Array, batch: Batch, *, temperature: float, chunk: int,
                     with_entropy: bool = False) -> tuple[jax.Array, jax.Array | None]:
  """Returns log-probabilities (and entropies) [R, M] of the trained tokens from their `predicting_states`."""
  ids = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.targets, 0), axis=1)
  return target_logprobs(params, states, ids, temperature=temperature, chunk=chunk, with_entropy=with_entropy)


def policy_loss(params: dict, batch: Batch, *, config: DecoderConfig, temperature: float, chunk: int,
                clip_low: float, clip_high: float, dual_clip: float | None, kl_coef: float,
                entropy_coef: float, kind: str = 'clip', importance: str = 'token',
                importance_floor: float = 0.5, importance_cap: float = 0.0) -> tuple[jax.Array, Report]:
  """Adds up surrogate + weights * kl_coef * k3 KL to the reference - weights * entropy_coef * entropy.

  The surrogates are weighted already (`batch.gains`, `batch.losses`). `temperature` is that of the sampler:
  the ratio compares log-probabilities of the same distribution. Without a reference the KL is 0. With an
  `importance_cap` above 0 the surrogate of each token is multiplied by `losses.importance_weights`;
  `batch.old_logprobs` are then the trainer's own. `batch.sequences` are for what `by_sequence` says.
  """
  mask = batch.targets >= 0
  states = predicting_states(config, params, batch)
  logprobs, entropies = trained_logprobs(
    params, states, batch, temperature=temperature, chunk=chunk, with_entropy=True)
  old = jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
  now, before, bounds = logprobs, old, dict(clip_low=clip_low, clip_high=clip_high)
  if kind == 'gspo':
    now = losses.sequence_log_ratio(logprobs, old, batch.sequences, mask, batch.tokens.shape[1])
    before = jnp.zeros_like(now)
  if kind == 'cispo':
    surrogate = losses.cispo(now, before, batch.gains - batch.losses, mask, **bounds)
  else:
    surrogate = losses.shared_surrogate(now, before, batch.gains, batch.losses, mask, **bounds,
                                        dual_clip=dual_clip)
  correction = {}
  if importance_cap:
    own, sampler = jnp.where(mask, old, 0), batch.sampler_logprobs
    if importance.startswith('sequence'):
      own = losses.over_sequences(own - sampler, batch.sequences, mask, batch.tokens.shape[1])
      own, sampler = jnp.where(mask, own, 0), 0.0
    floor = importance_floor if importance.endswith('mask') else None
    weights = losses.importance_weights(own, sampler, importance_cap, floor)
    surrogate *= weights
    capped = weights >= importance_cap if floor is None else weights == 0
    correction = {'importance_weight': weights, 'importance_capped': capped}
  entropies = jnp.where(mask, entropies if entropy_coef else jax.lax.stop_gradient(entropies), 0)
  kl = jnp.zeros_like(entropies)
  if batch.ref_logprobs is not None:
    kl = jnp.where(mask, losses.kl(jnp.where(mask, logprobs, 0), batch.ref_logprobs, kind='k3'), 0)
  policy_loss = jnp.sum(surrogate)
  loss = policy_loss + jnp.sum(batch.weights * (kl_coef * kl - entropy_coef * entropies))

  ratio = jnp.where(mask, jnp.exp(jnp.clip(now - before, -20, 20)), 1)
  # The surrogate is clipped, and its gradient 0, where the ratio left the interval on the advantage's side.
  above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
  clipped = jnp.where(above, batch.gains, 0) + jnp.where(below, batch.losses, 0)
  clipped = clipped / jnp.where(clipped > 0, batch.gains + batch.losses, 1)
  gap = jnp.where(mask, jnp.abs((old if importance_cap else logprobs) - batch.sampler_logprobs), 0)
  means = {'kl': kl, 'entropy': entropies, 'clip_fraction': clipped, 'ratio': ratio, 'logprob_gap': gap}
  report = {'sum': {'policy_loss': policy_loss},
            'mean': {name: jnp.sum(batch.spans * values) for name, values in (means | correction).items()},
            'max': {'ratio_max': jnp.max(ratio), 'logprob_gap_max': jnp.max(gap)}}
  return loss, jax.lax.stop_gradient(report)


def by_sequence(kind: str, importance: str) -> bool:
  """Tells whether a loss is about whole sequences, so that spans cannot share their trained tokens."""
  return kind == 'gspo' or importance.startswith('sequence')


def imitation_loss(params: dict, batch: Batch, *, config: DecoderConfig,
                   chunk: int) -> tuple[jax.Array, Report]:
  """Adds up weights * negative log-likelihood (temperature 1) of the trained tokens."""
  states = predicting_states(config, params, batch)
  logprobs, _ = trained_logprobs(params, states, batch, temperature=1.0, chunk=chunk)
  return -_sum(batch, batch.weights * logprobs), _report(batch, logprob=logprobs)


def critic_loss(params: dict, batch: Batch, *, config: DecoderConfig, shared: bool,
                value_clip: float | None = None, coef: float = 1.0,
                frozen: bool = False) -> tuple[jax.Array, Report]:
  """Adds up coef * value weights * `losses.value_loss` of a critic; `params` as of `critic_values`.

  A `frozen` decoder gets no gradient, and no backward pass.
  """
  values = critic_values(params, batch, config=config, shared=shared, frozen=frozen)
  error = losses.value_loss(values, batch.values, batch.returns, batch.targets >= 0, clip=value_clip)
  return coef * jnp.sum(batch.value_weights * error), _report(batch, value=values)


def critic_values(params: dict, batch: Batch, *, config: DecoderConfig, shared: bool,
                  frozen: bool = False) -> jax.Array:
  """Returns a critic's values [R, M] of the states before the trained tokens; anything on padding.

  `params` are {'decoder', 'head'}, or with `shared` the policy's with their 'value_head'; the embeddings get
  no gradient here: only the policy trains them.
  """
  if shared:
    params = params | {'embedding': jax.lax.stop_gradient(params['embedding'])}
  states = predicting_states(config, params if shared else params['decoder'], batch)
  if frozen:
    states = jax.lax.stop_gradient(states)
  if shared:
    return value_head.probabilities(params[HEAD], states)
  return value_head.values(params['head'], states)


def _sum(batch: Batch, values: jax.Array) -> jax.Array:
  return jnp.sum(jnp.where(batch.targets >= 0, values, 0))


def _report(batch: Batch, **values: jax.Array) -> Report:
  """Reports the means of values [R, M], and nothing else."""
  return {'sum': {}, 'mean': {name: _sum(batch, batch.spans * x) for name, x in values.items()}, 'max': {}}


def make_update(loss_fn: Loss, params: dict, optim: ConfigDict, total_updates: int, *,
                mesh: Mesh, dtype: str, alpha: float | None = None,
                factor: Callable[[str], float] = lambda _: 1.0,
                seed: Sequence[int] = (0,)) -> tuple[GradientTransformation, Callable]:
  """Returns (optimizer, jitted `train_step(state, batch, base=None) -> (state, metrics)`); donates the state.

  Args:
    loss_fn: (params in the compute dtype, micro-batch) -> (loss, report).
    params: what is trained, arrays on the mesh or ShapeDtypeStructs with shardings: the policy, or an
      adapter, scaled by `alpha`, of the `base`, frozen parameters in the compute dtype.
    dtype: the compute dtype.
    factor: of the learning rate, see `make_optimizer`.
    seed: of the rounding of parameters that are not float32.
  """
  schedule = states.learning_rate_schedule(optim, total_updates)
  optimizer = states.make_optimizer(optim, schedule, factor)
  placed = states.state_shardings(params, optimizer, mesh)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(placed, transfer.replicated(mesh)))
  def train_step(state: TrainState, batch: Batch, base: dict | None = None):
    with meshes.ambient(mesh):
      # Cast once, before the micro-batches, so that gathers over `fsdp` move the smaller type. Tables of the
      # vocabulary stay as they are, which makes their gradients float32.
      params, loss_of = cast(state.params, dtype, but=('embedding', 'unembedding')), loss_fn
      if base is not None:
        merged = lora.merge(base, params, alpha)
        loss_of = lambda adapter, part: loss_fn(lora.adapted(merged, adapter, alpha), part)
      grads, loss, report = accumulate(loss_of, params, batch, placed.params)
    tokens = jnp.sum(batch.spans)
    state, grad_norm = states.update(state, grads, loss, optimizer, seed, tokens)
    per_token = {name: value / tokens for name, value in report['mean'].items()}  # NaN where none is trained
    return state, report['sum'] | per_token | report['max'] | {
      'loss': loss, 'grad_norm': grad_norm,
      'learning_rate': jnp.asarray(schedule(jnp.maximum(state.updates - 1, 0)), jnp.float32),
      'tokens_trained': tokens, 'skipped': state.skipped, 'skipped_in_a_row': state.skipped_in_a_row,
    }  # fmt: skip

  return optimizer, train_step


def accumulate(loss_fn: Loss, params: dict, batch: Batch, shardings: dict) -> tuple[dict, jax.Array, Report]:
  """Returns (gradients in float32, loss, report), each summed over the micro-batches of `batch`.

  A loop whose length is data, not a scan: one program serves any number of micro-batches, and those that are
  padding cost nothing. The sums lie where the parameters lie (`shardings`).
  """
  combine = {'sum': jnp.add, 'mean': jnp.add, 'max': jnp.maximum}

  def add(i, carry):
    grads, loss, report = carry
    (value, new), grad = jax.value_and_grad(loss_fn, has_aux=True)(params, micro_batch(batch, i))
    grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, grad)
    grads = jax.lax.with_sharding_constraint(grads, shardings)
    return grads, loss + value, {how: jax.tree.map(combine[how], report[how], new[how]) for how in report}

  zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
  _, report = jax.eval_shape(loss_fn, params, micro_batch(batch, 0))
  start = zeros(params), jnp.zeros((), jnp.float32), {how: zeros(values) for how, values in report.items()}
  return jax.lax.fori_loop(0, batch.count, add, start)


def micro_batch(batch: Batch, i) -> Batch:
  """Returns micro-batch number `i`."""
  return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)


def make_score_step(config: DecoderConfig, *, mesh: Mesh, temperature: float, chunk: int) -> Callable:
  """Returns the jitted `score(params, batch)`: float32 log-probabilities [n, R, M] of the trained tokens."""
  def logprobs(params: dict, batch: Batch):
    states = predicting_states(config, params, batch)
    return trained_logprobs(params, states, batch, temperature=temperature, chunk=chunk)[0]
  return _over_micro_batches(logprobs, config.dtype, mesh)


def make_value_step(config: DecoderConfig, *, mesh: Mesh, shared: bool = False) -> Callable:
  """Returns the jitted `values(params, batch)`: the float32 [n, R, M] of `critic_values`."""
  values = functools.partial(critic_values, config=config, shared=shared)
  return _over_micro_batches(values, config.dtype, mesh)


def _over_micro_batches(per_token: Callable[[dict, Batch], jax.Array], dtype: str, mesh: Mesh) -> Callable:
  """Returns the jitted `(params, batch) -> [n, R, M]` of a function of one micro-batch; 0 on padding."""
  @functools.partial(jax.jit, out_shardings=transfer.split_over_batch(mesh, 1))
  def score(params: dict, batch: Batch):
    params = cast(params, dtype)

    def fill(i, scores):
      part = micro_batch(batch, i)
      return scores.at[i].set(jnp.where(part.targets >= 0, per_token(params, part), 0))

    with meshes.ambient(mesh):
      return jax.lax.fori_loop(0, batch.count, fill, jnp.zeros(batch.targets.shape, jnp.float32))

  return score
