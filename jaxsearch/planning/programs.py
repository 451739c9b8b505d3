"""Builds the programs of a training run, with shapes in place of arrays: no device need be there."""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.models.architecture import parameter_shapes
from jaxsearch.parallel import mesh as meshes, targets, transfer
from jaxsearch.sampler.engine import Engine
from jaxsearch.training import batch as batches, learner, saved_policies, state as states, step as steps

# Any tokenizer will do: no size depends on it.
TOKENIZER = types.SimpleNamespace(
  pieces=lambda size: [b''] * size, check_fits=lambda size: None, eos_ids=(), pad_id=0)

SAMPLING = ('prefill', 'decode')
MICRO_BATCHES = 4  # of the batch of an update; no figure depends on it


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and its arguments as shapes."""
  function: Callable
  args: tuple
  static: dict = dataclasses.field(default_factory=dict)
  steps: int = 0  # decode steps in a call, where their number is fixed and not data
  gradients: int = 0  # bytes on a device, of the sums over micro-batches

  def trace(self) -> jax.stages.Traced:
    return self.function.trace(*self.args, **self.static)

  def lower(self) -> jax.stages.Lowered:
    """Lowers for the devices of the arguments; without a mesh around, kernels would be for this machine's."""
    devices = next(x.sharding.device_set for x in jax.tree.leaves(self.args) if hasattr(x, 'sharding'))
    alone = len(devices) == 1
    with meshes.ambient(meshes.make_mesh(devices=[*devices])) if alone else contextlib.nullcontext():
      return self.trace().lower()


@dataclasses.dataclass(frozen=True)
class Run:
  """Holds what lies on a device, by kind in bytes, the programs that run beside it, and the sampler."""
  mesh: jax.sharding.Mesh
  parameters: int  # of training: policy, reference, critic
  moments: int
  weights: int     # the sampler's
  cache: int
  load: int        # handing new weights to the sampler takes this much more for a moment
  released: bool   # weights and cache are there only while the sampler runs
  programs: dict[str, Program]
  hosts: int
  engine: Engine   # of the first host
  token: float     # bytes of one token in the cache of a device

  def resident(self, name: str) -> int:
    """Returns bytes on a device before a program starts, arguments included; for 'load' without copies."""
    there = self.parameters + self.moments
    if not self.released or name in SAMPLING:
      return there + self.weights + self.cache
    return there + (self.weights if name == 'load' else 0)


def of_config(config: ml_collections.ConfigDict, devices: Sequence[jax.Device]) -> Run:
  """Returns the run of a config on devices of one or several hosts.

  Every token of a batch is trained, which no real batch exceeds. Raises ValueError where the config does not
  fit the number of devices.
  """
  mesh = meshes.make_mesh(**config.mesh, devices=devices)
  batches.check_rows(config.train.micro_rows, mesh)
  model = setup.architecture(config)
  master = 'float32' if config.optim.master_weights else config.dtype
  policy = structs(setup.param_shardings(model, mesh), parameter_shapes(model), config.dtype)
  trained = structs(*saved_policies.trained_layout(config, model, mesh), master)
  optimizer, train_step = learner.make_update(config, model, mesh, trained)
  state, batch = state_structs(trained, optimizer, mesh), batch_structs(config, mesh)
  base = [policy] if config.lora.rank else []
  programs = {'update': Program(train_step, (state, batch, *base), gradients=on_device(trained, 4))}
  parameters = on_device(trained)
  if base or config.loss.kl_coef:
    parameters += on_device(policy)  # the base of an adapter is the reference too
  moments = on_device(state.opt_state)
  if learner.score_passes(config):
    score = steps.make_score_step(
      model, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk)
    programs['score'] = Program(score, (policy, batch))
  if config.critic.enabled:
    shared = learner.is_shared(config)
    assessed = trained if shared else structs(*saved_policies.critic_layout(model, mesh), master)
    optimizer, critic_step = learner.make_critic_update(config, model, assessed, mesh, 1)
    critic = state_structs(assessed, optimizer, mesh)
    programs['critic'] = Program(critic_step, (critic, batch), gradients=on_device(assessed, 4))
    programs['values'] = Program(steps.make_value_step(model, mesh=mesh, shared=shared), (assessed, batch))
    parameters += 0 if shared else on_device(assessed)
    moments += on_device(critic.opt_state)
  host = targets.one_host(devices)
  hosts = len(devices) // len(host)
  engine = setup.open_engine(config, model, TOKENIZER, meshes.make_mesh(devices=host))
  sampler, weights, cache = engine.largest_programs()
  pages, page = cache[0][0][0].shape[1:3]
  programs |= {name: Program(*program) for name, program in sampler.items()}
  if sampler['decode'][2]['kernel']:
    programs['decode'] = dataclasses.replace(programs['decode'], steps=engine.segment_steps)
  # Old weights are freed by then. A cast copy of all is laid out anew, through one copy per host if several.
  copies = on_device(policy) * (1 + hosts if hosts > 1 else 1)
  return Run(mesh, parameters, moments, on_device(weights), on_device(cache), copies,
             learner.releases(config, devices[0].platform), programs, hosts, engine,
             on_device(cache[0]) * engine.lanes / (pages * page))


def share(config: ml_collections.ConfigDict, run: Run) -> dict[str, tuple[Program, int]]:
  """Returns every program with the rows and slots of one device, and how many devices split its matrices."""
  engine, devices = run.engine, run.mesh.devices
  alone = changed(config, {
    'mesh': dict.fromkeys(meshes.MESH_AXES, 1), 'sampler': {'slots': engine.slots // engine.lanes},
    'train': {'micro_rows': config.train.micro_rows // meshes.batch_size(run.mesh)}})
  split = {name: devices.size // run.hosts // engine.lanes if name in SAMPLING else run.mesh.shape['tensor']
           for name in run.programs}
  alone = of_config(alone, list(devices.flat[:1])).programs
  return {name: (alone[name], split[name]) for name in alone}


def changed(config: ml_collections.ConfigDict, fields: dict[str, dict]) -> ml_collections.ConfigDict:
  """Returns a copy of a config with other values of some fields of its groups."""
  copy = config.copy_and_resolve_references().unlock()
  for group, values in fields.items():
    copy[group].update(values)
  return copy.lock()


def structs(shardings: dict, shapes: dict, dtype: str) -> dict:
  """Returns ShapeDtypeStructs of parameters whose shapes are tuples."""
  struct = lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
  return jax.tree.map(struct, shapes, shardings, is_leaf=lambda x: isinstance(x, tuple))


def state_structs(trained: dict, optimizer: Any, mesh: jax.sharding.Mesh) -> states.TrainState:
  """Returns the training state around parameters that are structs."""
  state = jax.eval_shape(lambda params: states.initial_state(params, optimizer), trained)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state,
                      states.state_shardings(trained, optimizer, mesh))


def batch_structs(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> batches.Batch:
  """Returns a batch on the mesh."""
  shape = MICRO_BATCHES, config.train.micro_rows, config.train.row_length
  absent = () if config.loss.kl_coef else ('ref_logprobs',)
  absent += () if config.critic.enabled else ('value_weights', 'values', 'returns')
  absent += () if steps.by_sequence(config.loss.kind, config.loss.importance) else ('sequences',)
  integers = ('tokens', 'positions', 'previous', 'visible_until', 'targets', 'sequences')
  kind = lambda name: np.int32 if name in integers else np.float32
  rows = transfer.split_over_batch(mesh, 1)
  fields = {field.name: jax.ShapeDtypeStruct(shape, kind(field.name), sharding=rows)
            for field in dataclasses.fields(batches.Batch)}
  count = jax.ShapeDtypeStruct((), np.int32, sharding=transfer.replicated(mesh))
  return batches.Batch(**fields | dict.fromkeys(absent) | {'count': count})


def on_device(tree: Any, itemsize: int | None = None) -> int:
  """Returns bytes of the structs in a tree on one device; or as if their elements had `itemsize` bytes."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * (itemsize or x.dtype.itemsize)
             for x in jax.tree.leaves(tree) if hasattr(x, 'sharding'))
