"""Holds what changes on the devices from update to update, and updates it.

`make_optimizer` is AdamW from the `optim` group of a config; no other file knows the optimizer. `update`
applies gradients, or skips and counts when something is not finite. Parameters are held in float32 (master
weights) unless the config asks for the compute dtype; an update to bfloat16 is rounded up or down at random,
since to the nearest most would be lost.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import GradientTransformation

from jaxsearch.parallel import transfer

HEAD = 'value_head'  # key of a critic's head among the parameters of a policy that shares its backbone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything on the device that changes from update to update."""
  params: dict                # nested, of arrays
  opt_state: optax.OptState   # its moments are float32 whatever the parameters are
  updates: jax.Array          # int32, updates applied (skipped ones do not count)
  skipped: jax.Array          # int32, updates skipped because the loss or a gradient was not finite
  skipped_in_a_row: jax.Array  # int32, those since the last update that was applied
  critic: 'TrainState | None' = None  # of a critic, without parameters if it shares the policy's


def learning_rate_schedule(optim: ConfigDict, total_updates: int) -> optax.Schedule:
  """Returns a linear warm-up over `lr_warmup_updates`, then a constant, or a cosine to 0 at `total_updates`.

  Update number i of the warm-up, from 0, has (i + 1) / lr_warmup_updates of the peak.
  """
  peak, warmup = optim.learning_rate, optim.lr_warmup_updates
  after = optax.constant_schedule(peak)
  if optim.schedule == 'cosine':
    after = optax.cosine_decay_schedule(peak, max(total_updates - warmup, 1))
  if not warmup:
    return after
  return lambda count: jnp.where(
    count < warmup, peak * (count + 1) / warmup, after(jnp.maximum(count - warmup, 0)))


def make_optimizer(optim: ConfigDict, schedule: optax.Schedule,
                   factor: Callable[[str], float] = lambda _: 1.0) -> GradientTransformation:
  """Returns AdamW behind a clip of the global gradient norm; it decays what `decays` says.

  Args:
    factor: of the learning rate, from the name of a parameter at the top of the nesting; 0 freezes it: it has
      no moments, and does not count for the norm.
  """
  def each(function):
    """Applies function(factor, array) to a tree of arrays."""
    return lambda tree, _=None: jax.tree.map_with_path(lambda path, x: function(factor(path[0].key), x), tree)

  thawed = each(lambda factor, grad: grad if factor else jnp.zeros_like(grad))
  adam = optax.adamw(
    schedule, b1=optim.b1, b2=optim.b2, eps=optim.eps, weight_decay=optim.weight_decay, mask=decays)
  return optax.chain(
    optax.stateless(thawed), optax.clip_by_global_norm(optim.clip_norm),
    optax.masked(adam, each(lambda factor, _: factor != 0)), optax.stateless(each(jnp.multiply)))


def decays(params: dict) -> dict:
  """Returns True for every parameter that decays: all but norms, biases, and the head of a critic.

  Decay would pull the head's probabilities to 0.5 (CARL, appendix C).
  """
  def decay(path, _):
    is_head = path[0].key in (HEAD, 'head')
    return not is_head and not any(word in path[-1].key for word in ('norm', 'bias'))
  return jax.tree.map_with_path(decay, params)


def update(state: TrainState, grads: dict, loss, optimizer: GradientTransformation,
           seed: Sequence[int] = (0,), tokens=1) -> tuple[TrainState, jax.Array]:
  """Returns the state after one optimizer step in float32, and the norm of the gradient.

  If the loss or the norm is not finite, only counts change; without trained `tokens` nothing does, or old
  momentum would move the parameters on. `seed` is that of the rounding to bfloat16.
  """
  grad_norm = optax.tree.norm(grads)
  params = cast(state.params, jnp.float32)
  changes, opt_state = optimizer.update(grads, state.opt_state, params)
  key = functools.reduce(jax.random.fold_in, (*seed[1:], state.updates), jax.random.key(seed[0]))
  params = stored(jax.tree.map(jnp.add, params, changes), state.params, key)
  finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  moved = finite & (tokens > 0)
  keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(moved, new, old))
  return TrainState(
    params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state),
    updates=state.updates + moved, skipped=state.skipped + ~finite,
    skipped_in_a_row=jnp.where(moved, 0, state.skipped_in_a_row + ~finite),
  ), grad_norm  # fmt: skip


def stored(params: dict, like: dict, key) -> dict:
  """Returns float32 parameters in the dtypes of `like`, bfloat16 rounded by `key`, alike on any mesh."""
  def store(number, x, dtype):
    if dtype != jnp.bfloat16:
      return x.astype(dtype)
    return round_to_bfloat16(x, jax.random.bits(jax.random.fold_in(key, number), x.shape, jnp.uint16))

  leaves, nested = jax.tree.flatten(params)
  dtypes = [x.dtype for x in jax.tree.leaves(like)]
  return nested.unflatten(map(store, range(len(leaves)), leaves, dtypes))


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
  """Rounds stochastically: to one of the two neighbours of each x, whose mean over uniform bits is x.

  A bfloat16 is the upper half of a float32. Random bits added to the lower half carry into the upper one with
  the probability that the lower half stands for.

  Args:
    x: [...] float32; what is not finite is cast.
    bits: [...] uint16, uniform.
  Returns:
    [...] bfloat16.
  """
  carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits
  rounded = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def create_state(params: dict, optimizer: GradientTransformation, mesh: Mesh) -> TrainState:
  """Returns the state before the first update, around a copy of `params`, which are on the mesh already."""
  create = lambda params: initial_state(jax.tree.map(jnp.copy, params), optimizer)
  return jax.jit(create, out_shardings=state_shardings(params, optimizer, mesh))(params)


def initial_state(params: dict, optimizer: GradientTransformation) -> TrainState:
  """Returns the state of `create_state`, as a pure function."""
  counts = {name: jnp.zeros((), jnp.int32) for name in ('updates', 'skipped', 'skipped_in_a_row')}
  return TrainState(params, optimizer.init(cast(params, jnp.float32)), **counts)


def state_shardings(params: dict, optimizer: GradientTransformation, mesh: Mesh) -> TrainState:
  """Returns shardings nested as the state: those of `params` (arrays or structs), also for their moments."""
  state = jax.eval_shape(functools.partial(initial_state, optimizer=optimizer), params)
  placed, whole = jax.tree.map(lambda x: x.sharding, params), transfer.replicated(mesh)
  is_frozen = lambda x: isinstance(x, optax.MaskedNode)
  opt_state = optax.tree.map_params(
    optimizer, lambda moment, sharding: moment if is_frozen(moment) else sharding, state.opt_state, placed,
    transform_non_params=lambda _: whole, is_leaf=is_frozen)
  return TrainState(placed, opt_state, whole, whole, whole)


def place_params(params: dict, shardings: dict, dtype=jnp.float32) -> dict:
  """Lays out parameters that every process holds whole, in `dtype`."""
  return jax.tree.map(lambda x, sharding: transfer.place(x, sharding).astype(dtype), params, shardings)


def without_head(params: dict) -> dict:
  """Returns the parameters of the policy, without the head of a critic."""
  return {name: value for name, value in params.items() if name != HEAD}


def cast(params: dict, dtype, but: Sequence[str] = ()) -> dict:
  """Returns the parameters in `dtype`, those named in `but` as they are."""
  return jax.tree.map_with_path(lambda path, x: x if path[-1].key in but else x.astype(dtype), params)
