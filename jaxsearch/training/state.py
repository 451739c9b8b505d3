"""What a training step changes: parameters, optimizer state and counters, and how they are created and laid out.

`make_optimizer` and `learning_rate_schedule` turn the `optim` group of a config into optax; `create` builds the sharded
state. Parameters are held in float32 (the master weights) unless the config asks for the compute dtype; `compute_copy`
is what the forward pass sees.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from jaxsearch.parallel import mesh as meshes

HEAD = 'value_head'  # key of a critic's head among the parameters of a policy that shares its backbone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything on the device that changes from update to update.

  Attributes:
    params: nested dict of arrays.
    opt_state: optax state; its moments are float32 whatever the parameters are.
    updates: int32, updates applied (skipped ones do not count); the schedule reads it.
    skipped: int32, updates skipped since the start because the loss or a gradient was not finite.
    skipped_in_a_row: int32, of these the ones since the last update that was applied.
    critic: the state of the critic, in checkpoints of runs that have one.
  """
  params: dict
  opt_state: optax.OptState
  updates: jax.Array
  skipped: jax.Array
  skipped_in_a_row: jax.Array
  critic: 'TrainState | None' = None


def learning_rate_schedule(optim: ml_collections.ConfigDict, total_updates: int) -> optax.Schedule:
  """Linear warm-up from 0 over `lr_warmup_updates`, then 'constant' or 'cosine' down to 0 at `total_updates`.

  The first update already has a rate above 0: update number i of the warm-up has (i + 1) / lr_warmup_updates of the peak.
  """
  peak, warmup = optim.learning_rate, optim.lr_warmup_updates
  if optim.schedule == 'constant':
    after = optax.constant_schedule(peak)
  elif optim.schedule == 'cosine':
    after = optax.cosine_decay_schedule(peak, max(total_updates - warmup, 1))
  else:
    raise ValueError(f"optim.schedule={optim.schedule!r} is none of 'constant', 'cosine'")
  if not warmup:
    return after
  return lambda count: jnp.where(count < warmup, peak * (count + 1) / warmup, after(jnp.maximum(count - warmup, 0)))


def make_optimizer(optim: ml_collections.ConfigDict, schedule: optax.Schedule,
                   factor: Callable[[str], float] = lambda _: 1.0) -> optax.GradientTransformation:
  """AdamW behind a clip of the global gradient norm; norms, biases and the head of a critic do not decay.

  Args:
    factor: of the learning rate, from the name of a parameter at the top of the nesting; 0 leaves it as it is.
  """
  def scaled(updates, _):
    return jax.tree.map_with_path(lambda path, update: factor(path[0].key) * update, updates)

  def thawed(grads, _):  # what is frozen does not count for the norm
    return jax.tree.map_with_path(lambda path, grad: grad if factor(path[0].key) else jnp.zeros_like(grad), grads)
  return optax.chain(
    optax.stateless(thawed), optax.clip_by_global_norm(optim.clip_norm),
    optax.adamw(schedule, b1=optim.b1, b2=optim.b2, eps=optim.eps, weight_decay=optim.weight_decay, mask=decays),
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
  """The parameters of the policy alone."""
  return {name: value for name, value in params.items() if name != HEAD}


def compute_copy(params: dict, dtype) -> dict:
  """The parameters as the forward pass wants them, all in `dtype`, as the sampler has them too.

  Made once per step, before the micro-batches, so that gathers over `fsdp` move the smaller type.
  """
  return jax.tree.map(lambda x: x.astype(dtype), params)


def float32(tree):
  """The same tree with every leaf in float32."""
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def create(params: dict, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """The state before the first update, around a copy of `params` (which are on the mesh already, see `place_params`).

  A copy, because the training step is given the state's buffers to overwrite.
  """
  def copied(params):
    return initial_state(jax.tree.map(jnp.copy, params), optimizer)
  return jax.jit(copied, out_shardings=state_shardings(params, optimizer, mesh))(params)


def initial_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
  """The pure function behind `create`; `jax.eval_shape` of it is what a checkpoint restores into."""
  counts = {name: jnp.zeros((), jnp.int32) for name in ('updates', 'skipped', 'skipped_in_a_row')}
  return TrainState(params, optimizer.init(float32(params)), **counts)


def state_shardings(params: dict, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """Shardings nested as the state: the parameters' own, moments like their parameter, counters everywhere.

  Args:
    params: arrays or ShapeDtypeStructs with shardings.
  """
  state = jax.eval_shape(functools.partial(initial_state, optimizer=optimizer), params)
  own = jax.tree.map(lambda x: x.sharding, params)
  whole = meshes.replicated(mesh)
  opt_state = optax.tree.map_params(
    optimizer, lambda _, sharding: sharding, state.opt_state, own, transform_non_params=lambda _: whole)
  return TrainState(own, opt_state, whole, whole, whole)


def place_params(params: dict, shardings: dict, dtype=jnp.float32) -> dict:
  """Parameters from the host, or from anywhere else, in their layout and in `dtype`."""
  def put(x, sharding):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return jax.device_put(x.astype(dtype), sharding)
    return meshes.place(x, sharding).astype(dtype)
  return jax.tree.map(put, params, shardings)


def fingerprint(params: dict) -> list[float]:
  """A mean absolute value per parameter: tells whether two sets of parameters are the same, on any mesh.

  Compare with a relative tolerance of 1e-5: the order of summation depends on the mesh.
  """
  means = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.mean(jnp.abs(x.astype(jnp.float32))), tree))(params)
  return [float(value) for value in jax.tree.leaves(means)]
