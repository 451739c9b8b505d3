"""The programs of a training run, with shapes in place of arrays: nothing is allocated, so the devices need not be there."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.models.decoder import DecoderConfig, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.engine import Engine
from jaxsearch.training import batch as batches
from jaxsearch.training import critic as critics
from jaxsearch.training import learner as learners
from jaxsearch.training import step as steps

# Any tokenizer will do: no size depends on it.
TOKENIZER = types.SimpleNamespace(pieces=lambda size: [b''] * size, eos_ids=(), pad_id=0)

SAMPLING = ('prefill', 'decode')


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and its arguments as shapes."""
  function: Callable
  args: tuple
  static: dict = dataclasses.field(default_factory=dict)
  devices: int = 1
  gradients: int = 0    # bytes on a device, of the sums over micro-batches
  activations: int = 0  # bytes on a device, that the forward pass keeps for the backward pass
  dearest: bool = True  # of conditionals the dearest branch runs, else the cheapest


@dataclasses.dataclass(frozen=True)
class Run:
  """What lies on a device, by kind in bytes, the programs that run beside it, and the sampler."""
  mesh: jax.sharding.Mesh
  model: DecoderConfig
  parameters: int  # of training: policy, reference, critic
  moments: int
  weights: int     # the sampler's
  cache: int
  load: int        # handing new weights to the sampler takes this much more for a moment
  released: bool   # weights and cache are there only while the sampler runs
  programs: dict[str, Program]
  hosts: int
  engine: Engine   # of the first host
  row_length: int  # tokens for which a row of the cache has room
  token: float     # bytes of one token in the cache of a device

  def resident(self, name: str) -> int:
    """Bytes on a device before a program starts, with its arguments; for 'load', what lies there beside the copies in `load`."""
    there = self.parameters + self.moments
    if not self.released or name in SAMPLING:
      return there + self.weights + self.cache
    return there + (self.weights if name == 'load' else 0)


def of_config(config: ml_collections.ConfigDict, devices: Sequence[jax.Device], micro_batches: int = 4) -> Run:
  """The run of a config on devices of one or several hosts.

  The batch of an update has as many micro-batches as given, and every token in it is trained, which no real one exceeds.
  Raises ValueError where the config does not fit the number of devices.
  """
  mesh = meshes.make_mesh(**config.mesh, devices=devices)
  batches.check_rows(config.train.micro_rows, mesh)
  model = setup.architecture(config)
  master = 'float32' if config.optim.master_weights else config.dtype
  policy = structs(setup.param_shardings(model, mesh), parameter_shapes(model), config.dtype)
  trained = structs(*critics.trained_layout(config, model, mesh), master)
  optimizer, train_step = learners.make_update(config, model, mesh, trained)
  state = state_structs(trained, optimizer, mesh)
  base = [policy] if config.lora.rank else []
  batch = batch_structs(config, mesh, micro_batches)
  loss = functools.partial(steps.policy_loss, config=model, temperature=1.0, chunk=config.train.chunk, **config.loss)
  programs = {'update': Program(train_step, (state, batch, *base), gradients=on_device(trained, 4), activations=kept(
    loss, policy, batch, mesh))}
  parameters = on_device(trained) + (on_device(policy) if base or config.loss.kl_coef else 0)  # the base is the reference too
  moments = on_device(state.opt_state)
  if config.loss.kl_coef or config.train.old_logprobs == 'recompute':
    score = steps.make_score_step(model, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk)
    programs['score'] = Program(score, (policy, batch))
  if config.critic.enabled:
    shared = critics.is_shared(config)
    assessed = trained if shared else structs(*critics.layout(model, mesh), master)
    optimizer, critic_step = critics.make_update(config, model, assessed, mesh, 1, **critics.settings_of(config))
    critic = state_structs(assessed, optimizer, mesh)
    programs['critic'] = Program(critic_step, (critic, batch), gradients=on_device(assessed, 4),
                                 activations=programs['update'].activations)
    programs['values'] = Program(steps.make_value_step(model, mesh=mesh, shared=shared), (assessed, batch))
    parameters, moments = parameters + (0 if shared else on_device(assessed)), moments + on_device(critic.opt_state)
  own = np.array([device for device in mesh.devices.flat if device.process_index == mesh.devices.flat[0].process_index])
  hosts = len(devices) // len(own)
  engine = setup.open_engine(config, model, TOKENIZER, jax.sharding.Mesh(own.reshape(1, -1, 1), meshes.MESH_AXES))
  sampler, weights, cache = engine.largest_programs()
  rows, _, row_length, _ = cache[0][0][-1].shape
  programs = {name: dataclasses.replace(program, devices=len(devices)) for name, program in programs.items()}
  # Training samples without top_k and top_p, which are the one conditional of decoding.
  programs |= {name: Program(*program, devices=len(own), dearest=False) for name, program in sampler.items()}
  # The sampler's old weights are gone then (`learner.prepare`). A cast copy of all is laid out anew, by way of one copy a host.
  copies = on_device(policy) * (1 + hosts if hosts > 1 else 1)
  released = learners.releases(config, devices[0].platform)
  return Run(mesh, model, parameters, moments, on_device(weights), on_device(cache), copies, released, programs, hosts, engine,
             row_length, on_device(cache[0]) * engine.lanes / (rows * row_length))


def structs(shardings: dict, shapes: dict, dtype: str) -> dict:
  """ShapeDtypeStructs of parameters whose shapes are tuples."""
  return jax.tree.map(lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding), shapes, shardings,
                      is_leaf=lambda x: isinstance(x, tuple))


def state_structs(trained: dict, optimizer: Any, mesh: jax.sharding.Mesh) -> steps.TrainState:
  """The training state around parameters that are structs."""
  state = jax.eval_shape(lambda params: steps.initial_state(params, optimizer), trained)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state,
                      steps.state_shardings(trained, optimizer, mesh))


def batch_structs(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, n: int) -> batches.Batch:
  """A batch of `n` micro-batches on the mesh."""
  shape, rows = (n, config.train.micro_rows, config.train.row_length), meshes.split_over_batch(mesh, 1)
  absent = () if config.loss.kl_coef else ('ref_logprobs', 'kl_weights')
  absent += () if config.critic.enabled else ('value_weights', 'values', 'returns')
  integers = ('tokens', 'positions', 'previous', 'visible_until', 'targets')
  fields = {field.name: None if field.name in absent else jax.ShapeDtypeStruct(
    shape, np.int32 if field.name in integers else np.float32, sharding=rows) for field in dataclasses.fields(batches.Batch)}
  return batches.Batch(**fields | {'count': jax.ShapeDtypeStruct((), np.int32, sharding=meshes.replicated(mesh))})


def kept(loss: Callable, params: dict, batch: batches.Batch, mesh: jax.sharding.Mesh) -> int:
  """Bytes that a device keeps for the backward pass of one micro-batch, beside the parameters, before the compiler fuses."""
  rows = batch.tokens.shape[1] // meshes.batch_size(mesh)
  part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[2:]) if x.ndim else (), x.dtype), batch)
  plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  with meshes.ambient(meshes.make_mesh(1, 1, 1, devices=mesh.devices.flat[:1])):  # of the same kind
    residuals = jax.eval_shape(lambda params, part: jax.vjp(lambda p: loss(p, part)[0], params)[1], plain, part)
  left = [(x.shape, x.dtype) for x in jax.tree.leaves((plain, part))]
  total = 0
  for x in jax.tree.leaves(residuals):
    if (x.shape, x.dtype) in left:  # a parameter or a field of the batch, not a copy
      left.remove((x.shape, x.dtype))
    else:
      total += math.prod(x.shape) * x.dtype.itemsize
  return total


def on_device(tree: Any, itemsize: int | None = None) -> int:
  """Bytes of the structs in a tree on one device; or as if their elements had `itemsize` bytes."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * (itemsize or x.dtype.itemsize) for x in jax.tree.leaves(tree)
             if hasattr(x, 'sharding'))
