"""Compiles the programs of a config for a target that is not here, and says what they need and whether it fits."""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence

import jax
import ml_collections

from jaxsearch.parallel import compiled, targets
from jaxsearch.parallel import mesh as meshes
from jaxsearch.planning import costs, programs, step

GIB = 2**30
FULL = 0.9  # of a device's memory: the rest is for programs, buffers of collectives and what fragments


@dataclasses.dataclass(frozen=True)
class Planned:
  """A compiled program, on one device."""
  temporary: float    # bytes beside its arguments: inf where it did not compile for want of memory
  padding: int        # bytes by which its arguments are larger in the layout of the device than by their shapes
  once: step.Cost
  each: step.Cost     # of a turn of the loop whose length is data
  collectives: list   # (kind, bytes, times, whether in a loop), largest first


def plan(config: ml_collections.ConfigDict, target: targets.Target, wanted: Sequence[str] = (), cache: str = '',
         say: Callable[[str], None] = print, **workload) -> dict:
  """The plan as a dict: what lies on a device, every program, the step, and what to change where it does not fit.

  Args:
    wanted: names of programs; all if empty, and else there is no time of a step.
    cache: a folder that keeps what was found of a program for the next time.
    workload: see `step.work`.
  """
  devices, rows = target.devices(), config.train.micro_rows
  parts = meshes.batch_size(meshes.make_mesh(**config.mesh, devices=devices))
  if rows % parts:
    config = _changed(config, 'train', 'micro_rows', -(-rows // parts) * parts)
    say(f'train.micro_rows={rows} does not split over {parts} devices, planned with {config.train.micro_rows}')
  run = programs.of_config(config, devices)
  if unknown := set(wanted) - set(run.programs):
    raise ValueError(f'--program={",".join(sorted(unknown))}: this config has {", ".join(run.programs)}')
  found = {}
  for name, program in run.programs.items():
    if not wanted or name in wanted:
      say(f'compiling {name} …')
      found[name] = examine(program, target, cache)
  work = step.work(config, **workload)
  if 'decode' in found:
    found['decode'] = dataclasses.replace(found['decode'], each=found['decode'].each.filled(work.mean_length / run.row_length))
  limit, network = FULL * target.device.memory, lambda sent: targets.network_seconds(target, run.hosts, sent)
  inside = lambda sent: targets.network_seconds(target, 1, sent)  # a host samples by itself
  result = {'model': config.model, 'devices': len(devices), 'hosts': run.hosts,
            'resident': {name: getattr(run, name) for name in ('parameters', 'moments', 'weights', 'cache')},
            'released': run.released, 'load': {'temporary': run.load, 'total': run.resident('load') + run.load}, 'programs': {}}
  seconds = {}
  for name, one in found.items():
    program, turns = run.programs[name], [cost.seconds(target.device, inside if name in programs.SAMPLING else network)
                                          for cost in (one.once, one.each)]
    seconds[name] = tuple(max(turn.values()) for turn in turns)
    kept = min(program.activations, max(0.0, one.temporary - program.gradients))
    result['programs'][name] = {
      'memory': {'resident': run.resident(name), 'gradients': program.gradients, 'activations': kept,
                 'temporary': one.temporary + one.padding - program.gradients - kept,
                 'total': run.resident(name) + one.temporary + one.padding},
      'once': dataclasses.asdict(one.once) | turns[0], 'each': dataclasses.asdict(one.each) | turns[1],
      'collectives': one.collectives}
  highest = max(result['load']['total'], *(one['memory']['total'] for one in result['programs'].values()))
  times = step.calls(work, config, hosts=run.hosts, slots=run.engine.slots, segment=run.engine.segment_steps,
                     prefill=math.prod(run.programs['prefill'].args[3].shape))
  phases = step.step_seconds(seconds, times)
  derived = ('decoded', 'prefilled', 'trained', 'mean_length')
  result |= {'work': dataclasses.asdict(work) | {name: getattr(work, name) for name in derived},
             'phases': phases, 'calls': {name: times[name] for name in found},
             'fits': highest <= limit, 'bytes_per_device': highest, 'share': highest / target.device.memory,
             'step_seconds': sum(phases.values()) if not wanted and all(one.once.bytes for one in found.values()) else None}
  if 'decode' in found:
    needed = run.weights + work.mean_length * run.engine.slots / run.engine.lanes * run.token
    result['decode_traffic'] = found['decode'].each.bytes / needed
  return result | {'advice': '' if result['fits'] else advice(config, run, found, limit)}


def examine(program: programs.Program, target: targets.Target, cache: str = '') -> Planned:
  """Compiles a program, or reads from the `cache` what an equal one was found to need."""
  devices = next(x.sharding.device_set for x in jax.tree.leaves(program.args) if hasattr(x, 'sharding'))
  # Kernels of a GPU are lowered for the devices of the mesh around; without one, for those of this machine.
  one = meshes.ambient(meshes.make_mesh(1, 1, 1, devices=[*devices])) if len(devices) == 1 else contextlib.nullcontext()
  with one:
    traced = program.function.trace(*program.args, **program.static)
    lowered = traced.lower()
  counting = [pathlib.Path(module.__file__).read_text() for module in (costs, compiled)]
  key = f'{jax.__version__} {target.kind} {program.devices} {program.dearest} {counting} {lowered.as_text()}'
  key = hashlib.sha256(key.encode()).hexdigest()
  file = pathlib.Path(cache) / f'{key[:24]}.json'
  if cache and file.exists():
    saved = json.loads(file.read_text())
    return Planned(**saved | {name: step.Cost(**saved[name]) for name in ('once', 'each')})
  arguments = programs.on_device(program.args)
  counted = [both / program.devices for both in costs.count(traced.jaxpr.jaxpr)]
  try:
    compiled_program = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    sizes = [float(size) * 1024.0**' KMGT'.index(unit) for size, unit in re.findall(r'([\d.]+)([KMGT])\b', str(error))]
    return Planned(max(sizes, default=math.inf) - arguments, 0, step.Cost(counted[0][0]), step.Cost(counted[1][0]), [])
  memory, text = compiled_program.memory_analysis(), compiled.with_lengths(compiled_program.as_text())
  parts = costs.cut(text) if counted[1][0] else (text, None)
  sent = [compiled.collectives(part) if part else [] for part in parts]
  once, each = (step.Cost(flops, costs.traffic(part, target.device.cache, program.dearest) + kernels, compiled.traffic(found),
                          cache) if part else step.Cost() for (flops, kernels, cache), part, found in zip(counted, parts, sent))
  listed = [(one.kind, one.bytes, one.times, found is sent[1] or one.in_loop) for found in sent for one in found]
  new = memory.output_size_in_bytes - memory.alias_size_in_bytes
  result = Planned(memory.temp_size_in_bytes + max(new, 0), max(memory.argument_size_in_bytes - arguments, 0),
                   once, each, sorted(listed, key=lambda one: -one[1] * one[2]))
  if cache:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(result)))
  return result


def advice(config: ml_collections.ConfigDict, run: programs.Run, found: dict[str, Planned], limit: float) -> str:
  """The field that would make it fit, if what a program needs beside its arguments shrinks as the field does."""
  said, lanes, parts = [], run.engine.lanes, meshes.batch_size(run.mesh)
  needs = {'load': run.load} | {name: one.temporary + one.padding for name, one in found.items()}
  room = {name: limit - run.resident(name) for name in needs}
  lacking = [name for name in needs if needs[name] > room[name]]
  more = 'more devices along mesh.fsdp, or optim.master_weights=False: parameters and moments leave no room'
  if run.hosts > 1 and run.weights + run.load > run.parameters + run.moments:
    more = (f"hosts of more devices: the sampler's weights take {run.weights / GIB:.1f} GiB of each device, and "
            f'{run.load / GIB:.1f} more while new ones come')
  full = [name for name in lacking if name in programs.SAMPLING or name == 'load' or room[name] <= 0]
  if full:  # fewer slots make room where the cache lies, if parameters and moments leave any
    shares = [(room[name] + run.cache) / (needs[name] + run.cache) if name in programs.SAMPLING else
              0 if run.released else (room[name] - needs[name] + run.cache) / run.cache for name in full]
    slots = int(config.sampler.slots * min(shares)) // lanes * lanes
    said.append(f'sampler.slots={slots}: the cache of {config.sampler.slots} takes {run.cache / GIB:.1f} GiB'
                if slots >= lanes else more)
  for name in (name for name in lacking if name not in full):
    if config.train.micro_rows > parts:
      gradients = run.programs[name].gradients
      rows = int(config.train.micro_rows * max(room[name] - gradients, 0) / (needs[name] - gradients)) // parts * parts
      said.append(f'train.micro_rows={max(rows, parts)} for {name}')
    elif config.remat != 'full':
      said.append(f"remat='full' for {name}")
    else:
      said.append(f'mesh.tensor={2 * run.mesh.shape["tensor"]}, or a smaller train.row_length or train.chunk, for {name}')
  return '; '.join(said)


def search(config: ml_collections.ConfigDict, target: targets.Target, cache: str = '',
           say: Callable[[str], None] = print) -> dict:
  """The largest `sampler.slots` and `train.micro_rows` that fit, each with the other as it is; compiles several of each."""
  devices, limit = target.devices(), FULL * target.device.memory

  def measure(group, field, names, value):
    run = programs.of_config(_changed(config, group, field, value), devices)
    say(f'{group}.{field}={value} …')
    found = [examine(run.programs[name], target, cache) for name in names]
    return max(run.resident(name) + one.temporary + one.padding for name, one in zip(names, found))

  run = programs.of_config(config, devices)
  training = [name for name in ('update', 'critic') if name in run.programs]
  return {
    'sampler.slots': step.largest(lambda value: measure('sampler', 'slots', ('decode',), value), config.sampler.slots,
                                  run.engine.lanes, limit, 4096),
    'train.micro_rows': step.largest(lambda value: measure('train', 'micro_rows', training, value), config.train.micro_rows,
                                     meshes.batch_size(run.mesh), limit, 1024),
  }


def _changed(config: ml_collections.ConfigDict, group: str, field: str, value: int) -> ml_collections.ConfigDict:
  changed = config.copy_and_resolve_references().unlock()
  changed[group][field] = value
  return changed.lock()
