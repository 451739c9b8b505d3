"""The training step: hidden states of whole rows, log-probabilities where there is a loss, one update; and the state it changes.

`policy_loss` (reinforcement learning), `imitation_loss` (supervised) and the losses of critics are pure functions of
parameters and one micro-batch. `make_update` turns one of them, and the `optim` group of a config, into an optimizer and the
jitted, donated, sharded step: it accumulates gradients over micro-batches in float32 and updates, or skips and counts when
something is not finite. `make_score_step` and `make_value_step` compute log-probabilities and values over the same batch.
Parameters are held in float32 (the master weights) unless the config asks for the compute dtype; an update to bfloat16 is
rounded up or down at random, since to the nearest most would be lost.

Every loss is a plain sum of weight * per-token loss: the weights hold the denominators, decided once over the whole batch on
the host, so neither micro-batches nor packing can change a gradient.

Letters: R rows, T tokens of a row, M trained tokens of a row, D width of the hidden states.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from jaxsearch import losses
from jaxsearch.models import lora, value_head
from jaxsearch.models.decoder import DecoderConfig, hidden_states, target_logprobs
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training.batch import Batch

HEAD = 'value_head'  # key of a critic's head among the parameters of a policy that shares its backbone
# What a loss reports besides its value. 'sum': added up over micro-batches; 'mean': sums over trained tokens, divided by their
# number at the end, where a token counts once for each span that shares it; 'max': largest value.
Report = dict[str, dict[str, jax.Array]]
Loss = Callable[[dict, Batch], tuple[jax.Array, Report]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything on the device that changes from update to update."""
  params: dict                # nested, of arrays
  opt_state: optax.OptState   # its moments are float32 whatever the parameters are
  updates: jax.Array          # int32, updates applied (skipped ones do not count)
  skipped: jax.Array          # int32, updates skipped since the start because the loss or a gradient was not finite
  skipped_in_a_row: jax.Array  # int32, of these the ones since the last update that was applied
  critic: 'TrainState | None' = None  # of a critic, without parameters if it shares the policy's; in checkpoints alone


def predicting_states(config: DecoderConfig, params: dict, batch: Batch) -> jax.Array:
  """Hidden states [R, M, D] that predict the trained tokens of one micro-batch; anything on padding.

  A token is predicted by the one before it on its path, which in a row of trees is not always the one before it in the row.
  """
  hidden = hidden_states(config, params, batch.tokens, batch.positions, batch.visible_until)
  predicting = jnp.take_along_axis(batch.previous, jnp.maximum(batch.targets, 0), axis=1)
  return jnp.take_along_axis(hidden, predicting[..., None], axis=1)


def trained_logprobs(params: dict, states: jax.Array, batch: Batch, *, temperature: float, chunk: int,
                     with_entropy: bool = False):
  """Log-probabilities (and entropies) [R, M] of the trained tokens from their `predicting_states`; anything on padding."""
  ids = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.targets, 0), axis=1)
  return target_logprobs(params, states, ids, temperature=temperature, chunk=chunk, with_entropy=with_entropy)


def policy_loss(params: dict, batch: Batch, *, config: DecoderConfig, temperature: float, chunk: int, clip_low: float,
                clip_high: float, dual_clip: float | None, kl_coef: float, entropy_coef: float,
                importance_cap: float = 0.0) -> tuple[jax.Array, Report]:
  """sum of the clipped surrogates, of kl_weights * kl_coef * k3 KL to the reference, and of -weights * entropy_coef * entropy.

  The weights are of the average of the surrogate, or of that of `train.penalties`.

  `temperature` is that of the sampler: the ratio compares log-probabilities of the same distribution. Without a reference
  (`batch.ref_logprobs` is None) there is no KL term; it is reported as 0. With an `importance_cap` above 0 the surrogate of
  each token is multiplied by `losses.importance_weights`; `batch.old_logprobs` are then the trainer's own. All chains that
  share a token have one weight, since their token and context are the same.
  """
  mask = batch.targets >= 0
  states = predicting_states(config, params, batch)
  logprobs, entropies = trained_logprobs(params, states, batch, temperature=temperature, chunk=chunk, with_entropy=True)
  old = jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
  surrogate = losses.shared_surrogate(logprobs, old, batch.gains, batch.losses, mask,
                                      clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
  correction = {}
  if importance_cap:
    weights = losses.importance_weights(jnp.where(mask, old, 0), batch.sampler_logprobs, importance_cap)
    surrogate *= weights
    correction = {'importance_weight': weights, 'importance_capped': weights >= importance_cap}
  entropies = jnp.where(mask, entropies if entropy_coef else jax.lax.stop_gradient(entropies), 0)
  kl, kl_weights = jnp.zeros_like(entropies), 0.0
  if batch.ref_logprobs is not None:
    kl = jnp.where(mask, losses.kl(jnp.where(mask, logprobs, 0), batch.ref_logprobs, kind='k3'), 0)
    kl_weights = batch.kl_weights
  policy_loss = jnp.sum(surrogate)
  loss = policy_loss + jnp.sum(kl_coef * kl_weights * kl - entropy_coef * batch.weights * entropies)

  ratio = jnp.where(mask, jnp.exp(jnp.clip(logprobs - old, -20, 20)), 1)
  # The surrogate is clipped, and its gradient 0, where the ratio has left the interval on the side of the advantage.
  clipped = jnp.where(ratio > 1 + clip_high, batch.gains, 0) + jnp.where(ratio < 1 - clip_low, batch.losses, 0)
  clipped = clipped / jnp.where(clipped > 0, batch.gains + batch.losses, 1)
  gap = jnp.where(mask, jnp.abs((old if importance_cap else logprobs) - batch.sampler_logprobs), 0)
  report = {
    'sum': {'policy_loss': policy_loss},
    'mean': {name: jnp.sum(batch.spans * values) for name, values in {
      'kl': kl, 'entropy': entropies, 'clip_fraction': clipped, 'ratio': ratio, 'logprob_gap': gap, **correction}.items()},
    'max': {'ratio_max': jnp.max(ratio), 'logprob_gap_max': jnp.max(gap)},
  }  # fmt: skip
  return loss, jax.lax.stop_gradient(report)


def imitation_loss(params: dict, batch: Batch, *, config: DecoderConfig, chunk: int) -> tuple[jax.Array, Report]:
  """sum of weights * negative log-likelihood (temperature 1) of the trained tokens."""
  mask = batch.targets >= 0
  logprobs, _ = trained_logprobs(params, predicting_states(config, params, batch), batch, temperature=1.0, chunk=chunk)
  loss = -jnp.sum(jnp.where(mask, batch.weights * logprobs, 0))
  return loss, {'sum': {}, 'mean': {'logprob': jnp.sum(jnp.where(mask, batch.spans * logprobs, 0))}, 'max': {}}


def critic_loss(params: dict, batch: Batch, *, config: DecoderConfig, value_clip: float | None,
                frozen: bool) -> tuple[jax.Array, Report]:
  """Returns the weighted value loss of a critic with its own decoder; `params` is {'decoder', 'head'}.

  A `frozen` decoder gets no gradient, and no backward pass.
  """
  mask = batch.targets >= 0
  states = predicting_states(config, params['decoder'], batch)
  found = value_head.values(params['head'], jax.lax.stop_gradient(states) if frozen else states)
  loss = jnp.sum(batch.value_weights * losses.value_loss(found, batch.values, batch.returns, mask, clip=value_clip))
  return loss, {'sum': {}, 'mean': {'value': jnp.sum(jnp.where(mask, batch.spans * found, 0))}, 'max': {}}


def shared_critic_loss(params: dict, batch: Batch, *, config: DecoderConfig, coef: float = 1.0) -> tuple[jax.Array, Report]:
  """coef * sum of value weights * squared error of the critic `params['value_head']` on the policy's backbone (CARL, 3.4)."""
  mask = batch.targets >= 0
  found = value_head.probabilities(params[HEAD], predicting_states(config, params, batch))
  error = 2 * coef * jnp.sum(batch.value_weights * losses.value_loss(found, None, batch.returns, mask))
  return error, {'sum': {}, 'mean': {'value': jnp.sum(jnp.where(mask, batch.spans * found, 0))}, 'max': {}}


def make_update(loss_fn: Loss, params: dict, optim: ml_collections.ConfigDict, total_updates: int, *, mesh: Mesh, dtype: str,
                alpha: float | None = None, factor: Callable[[str], float] = lambda _: 1.0, seed: Sequence[int] = (0,)):
  """(optimizer, jitted `train_step(state, batch, base=None) -> (state, metrics)`); `state` is donated.

  With a `base`, frozen parameters in the compute dtype, the state holds an adapter and the gradient is that of the adapter.

  Args:
    loss_fn: (params in the compute dtype, micro-batch) -> (loss, report).
    params: what is trained: arrays on the mesh, or ShapeDtypeStructs with shardings.
    optim: the `optim` group of a config.
    dtype: the compute dtype.
    alpha: of the adapter, see models/lora.py.
    factor: of the learning rate, see `make_optimizer`.
    seed: of the rounding of parameters that are not float32; with the number of updates it decides every bit.
  """
  schedule = learning_rate_schedule(optim, total_updates)
  optimizer = make_optimizer(optim, schedule, factor)
  placed = state_shardings(params, optimizer, mesh)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(placed, meshes.replicated(mesh)))
  def train_step(state: TrainState, batch: Batch, base: dict | None = None):
    with meshes.ambient(mesh):
      # Cast once, before the micro-batches, so that gathers over `fsdp` move the smaller type. Tables of the vocabulary stay as
      # they are, which makes their gradients float32.
      params, loss_of = cast(state.params, dtype, but=('embedding', 'unembedding')), loss_fn
      if base is not None:
        merged = lora.merge(base, params, alpha)
        loss_of = lambda adapter, part: loss_fn(lora.adapted(merged, adapter, alpha), part)
      grads, loss, report = accumulate(loss_of, params, batch, placed.params)
    state, grad_norm = update(state, grads, loss, optimizer, seed)
    tokens = jnp.sum(batch.spans)
    per_token = {name: value / jnp.maximum(tokens, 1) for name, value in report['mean'].items()}
    return state, report['sum'] | per_token | report['max'] | {
      'loss': loss, 'grad_norm': grad_norm,
      'learning_rate': jnp.asarray(schedule(jnp.maximum(state.updates - 1, 0)), jnp.float32),
      'tokens_trained': tokens, 'skipped': state.skipped, 'skipped_in_a_row': state.skipped_in_a_row,
    }  # fmt: skip

  return optimizer, train_step


def accumulate(loss_fn: Loss, params: dict, batch: Batch, shardings: dict):
  """(gradients in float32, loss, report) summed over the micro-batches of `batch`.

  A loop whose length is data, not a scan, so that one program serves any number of micro-batches and those that are padding
  cost nothing; the gradient is taken inside, so nothing differentiates through the loop. The sums lie where the parameters
  lie (`shardings`).
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
  """Micro-batch number `i`."""
  return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)


def update(state: TrainState, grads: dict, loss, optimizer: optax.GradientTransformation, seed: Sequence[int] = (0,)):
  """(state, gradient norm) after one optimizer step in float32; if the loss or the norm is not finite, only counts change."""
  grad_norm = optax.tree.norm(grads)
  params = cast(state.params, jnp.float32)
  changes, opt_state = optimizer.update(grads, state.opt_state, params)
  key = functools.reduce(jax.random.fold_in, (*seed[1:], state.updates), jax.random.key(seed[0]))
  params = stored(jax.tree.map(jnp.add, params, changes), state.params, key)
  finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
  return TrainState(
    params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state),
    updates=state.updates + finite, skipped=state.skipped + ~finite,
    skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
  ), grad_norm  # fmt: skip


def stored(params: dict, like: dict, key) -> dict:
  """float32 parameters in the dtypes of `like`, to bfloat16 with bits from the random `key`, the same on any mesh."""
  leaves, nested = jax.tree.flatten(params)

  def store(number, x, dtype):
    if dtype != jnp.bfloat16:
      return x.astype(dtype)
    return round_to_bfloat16(x, jax.random.bits(jax.random.fold_in(key, number), x.shape, jnp.uint16))

  return nested.unflatten([store(number, x, old.dtype) for number, (x, old) in enumerate(zip(leaves, jax.tree.leaves(like)))])


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
  """Stochastic rounding: one of the two neighbours of each x, whose mean over uniform bits is x.

  A bfloat16 is the upper half of a float32. Random bits added to the lower half carry into the upper one with the probability
  that the lower half stands for. Learning rates far below the spacing of bfloat16 (1/128 to 1/256 of a weight) still count.

  Args:
    x: [...] float32; what is not finite is cast.
    bits: [...] uint16, uniform.
  Returns:
    [...] bfloat16.
  """
  carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits
  rounded = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def make_score_step(config: DecoderConfig, *, mesh: Mesh, temperature: float, chunk: int):
  """The jitted `score(params, batch) -> [n, R, M]` float32 log-probabilities of the trained tokens; 0 on padding."""
  def logprobs(params: dict, batch: Batch):
    return trained_logprobs(params, predicting_states(config, params, batch), batch, temperature=temperature, chunk=chunk)[0]
  return _over_micro_batches(logprobs, config.dtype, mesh)


def make_value_step(config: DecoderConfig, *, mesh: Mesh, shared: bool = False):
  """The jitted `values(params, batch) -> [n, R, M]` float32: a critic's values of the states before the trained tokens.

  `params` are {'decoder', 'head'}, or with `shared` the policy's with their 'value_head'.
  """
  def values(params: dict, batch: Batch):
    if shared:
      return value_head.probabilities(params[HEAD], predicting_states(config, params, batch))
    return value_head.values(params['head'], predicting_states(config, params['decoder'], batch))
  return _over_micro_batches(values, config.dtype, mesh)


def _over_micro_batches(per_token: Callable[[dict, Batch], jax.Array], dtype: str, mesh: Mesh):
  """The jitted `(params, batch) -> [n, R, M]` of a function of one micro-batch; 0 on padding.

  The result is split as the batch: every process packs that of its own rows into the training batch.
  """
  @functools.partial(jax.jit, out_shardings=meshes.split_over_batch(mesh, 1))
  def score(params: dict, batch: Batch):
    params = cast(params, dtype)

    def fill(i, found):
      part = micro_batch(batch, i)
      return found.at[i].set(jnp.where(part.targets >= 0, per_token(params, part), 0))

    with meshes.ambient(mesh):
      return jax.lax.fori_loop(0, batch.count, fill, jnp.zeros(batch.targets.shape, jnp.float32))

  return score


def learning_rate_schedule(optim: ml_collections.ConfigDict, total_updates: int) -> optax.Schedule:
  """Linear warm-up from 0 over `lr_warmup_updates`, then 'constant' or 'cosine' down to 0 at `total_updates`.

  The first update already has a rate above 0: update number i of the warm-up has (i + 1) / lr_warmup_updates of the peak.
  """
  peak, warmup = optim.learning_rate, optim.lr_warmup_updates
  if optim.schedule not in ('constant', 'cosine'):
    raise ValueError(f"optim.schedule={optim.schedule!r} is none of 'constant', 'cosine'")
  cosine = optim.schedule == 'cosine'
  after = optax.cosine_decay_schedule(peak, max(total_updates - warmup, 1)) if cosine else optax.constant_schedule(peak)
  warming = lambda count: jnp.where(count < warmup, peak * (count + 1) / warmup, after(jnp.maximum(count - warmup, 0)))
  return warming if warmup else after


def make_optimizer(optim: ml_collections.ConfigDict, schedule: optax.Schedule,
                   factor: Callable[[str], float] = lambda _: 1.0) -> optax.GradientTransformation:
  """AdamW behind a clip of the global gradient norm; norms, biases and the head of a critic do not decay.

  Args:
    factor: of the learning rate, from the name of a parameter at the top of the nesting; 0 freezes it: it has no moments.
  """
  def scaled(updates, _):
    return jax.tree.map_with_path(lambda path, update: factor(path[0].key) * update, updates)

  def thawed(grads, _):  # what is frozen does not count for the norm
    return jax.tree.map_with_path(lambda path, grad: grad if factor(path[0].key) else jnp.zeros_like(grad), grads)
  return optax.chain(
    optax.stateless(thawed), optax.clip_by_global_norm(optim.clip_norm),
    optax.masked(optax.adamw(schedule, b1=optim.b1, b2=optim.b2, eps=optim.eps, weight_decay=optim.weight_decay, mask=decays),
                 lambda params: jax.tree.map_with_path(lambda path, _: factor(path[0].key) != 0, params)),
    optax.stateless(scaled),
  )


def decays(params: dict) -> dict:
  """True for every parameter that weight decay applies to: all but norms, biases, and a critic's head.

  Decay would pull the head's probabilities to 0.5 (CARL, appendix C).
  """
  def decay(path, _):
    return path[0].key not in (HEAD, 'head') and not any(word in path[-1].key for word in ('norm', 'bias'))
  return jax.tree.map_with_path(decay, params)


def without_head(params: dict) -> dict:
  """The parameters of the policy, without the head of a critic."""
  return {name: value for name, value in params.items() if name != HEAD}


def cast(params: dict, dtype, but: Sequence[str] = ()) -> dict:
  """The same parameters in `dtype`: float32 to update them, the compute dtype to run them; those named in `but` as they are."""
  return jax.tree.map_with_path(lambda path, x: x if path[-1].key in but else x.astype(dtype), params)


def create_state(params: dict, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """The state before the first update, around a copy of `params`, which are on the mesh already: steps overwrite its buffers."""
  create = lambda params: initial_state(jax.tree.map(jnp.copy, params), optimizer)
  return jax.jit(create, out_shardings=state_shardings(params, optimizer, mesh))(params)


def initial_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
  """The pure function behind `create_state`."""
  counts = {name: jnp.zeros((), jnp.int32) for name in ('updates', 'skipped', 'skipped_in_a_row')}
  return TrainState(params, optimizer.init(cast(params, jnp.float32)), **counts)


def state_shardings(params: dict, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """Shardings nested as the state: the parameters' own, moments like their parameter, counters everywhere.

  Args:
    params: arrays or ShapeDtypeStructs with shardings.
  """
  state = jax.eval_shape(functools.partial(initial_state, optimizer=optimizer), params)
  own = jax.tree.map(lambda x: x.sharding, params)
  whole = meshes.replicated(mesh)
  frozen = lambda x: isinstance(x, optax.MaskedNode)
  opt_state = optax.tree.map_params(optimizer, lambda moment, sharding: moment if frozen(moment) else sharding, state.opt_state,
                                    own, transform_non_params=lambda _: whole, is_leaf=frozen)
  return TrainState(own, opt_state, whole, whole, whole)


def place_params(params: dict, shardings: dict, dtype=jnp.float32) -> dict:
  """Parameters that every process holds whole, in their layout and in `dtype`."""
  return jax.tree.map(lambda x, sharding: meshes.place(x, sharding).astype(dtype), params, shardings)
