"""Compiles the programs of a config for a target that is not here: what they need, and whether that fits."""

import dataclasses
import functools
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
class Compiled:
  """A compiled program, on one device."""
  needs: float              # bytes beside its arguments: temporaries, results, what the device's layouts pad
  collectives: list | None  # None where it did not compile for want of memory: `needs` is what it asked for

  def received(self, in_turn: bool) -> int:
    """Returns bytes outside of the loop whose length is data, or in one turn of it."""
    return compiled.traffic(each for each in self.collectives or () if each.in_turn == in_turn)


def plan(config: ml_collections.ConfigDict, target: targets.Target, wanted: Sequence[str] = (),
         cache: str = '', say: Callable[[str], None] = print, **workload) -> dict:
  """Returns what lies on a device, every program, the step, and what to change where it does not fit.

  Args:
    wanted: names of programs; all if empty, and else there is no time of a step.
    cache: a folder that keeps what the compiler said of a program for the next time.
    workload: see `step.work`.
  """
  devices, rows = target.devices(), config.train.micro_rows
  parts = meshes.batch_size(meshes.make_mesh(**config.mesh, devices=devices))
  if rows % parts:
    config = programs.changed(config, {'train': {'micro_rows': -(-rows // parts) * parts}})
    say(f'train.micro_rows={rows} does not split over {parts} devices, '
        f'planned with {config.train.micro_rows}')
  run = programs.of_config(config, devices)
  if unknown := set(wanted) - set(run.programs):
    raise ValueError(f'--program={",".join(sorted(unknown))}: this config has {", ".join(run.programs)}')
  shares, work = programs.share(config, run), step.work(config, **workload)
  compiled_programs, figures, seconds = {}, {}, {}
  for name in wanted or run.programs:
    say(f'compiling {name} …')
    program = run.programs[name]
    compiled_programs[name] = found = compile_program(program, target, cache)
    figures[name] = figures_of(program, found, run.resident(name))
    seconds[name] = []
    hosts = 1 if name in programs.SAMPLING else run.hosts  # a host samples by itself
    network = functools.partial(targets.network_seconds, target, hosts)
    for part, cost in cost_of(program, *shares[name], found).items():
      if name == 'decode':
        cost = cost.filled(work.mean_length / run.row_length)
      times = cost.seconds(target.device, network)
      figures[name][part] = dataclasses.asdict(cost) | times
      seconds[name].append(max(times.values()))
  load = {'temporary': run.load, 'total': run.resident('load') + run.load}
  highest = max(load['total'], *(program['memory']['total'] for program in figures.values()))
  limit = FULL * target.device.memory
  prefill = math.prod(run.programs['prefill'].args[3].shape)
  times = step.calls(work, config, scored=programs.score_passes(config), hosts=run.hosts,
                     slots=run.engine.slots, segment=run.engine.segment_steps, prefill=prefill)
  phases = step.step_seconds(seconds, times)
  complete = not wanted and all(found.collectives is not None for found in compiled_programs.values())
  derived = ('decoded', 'prefilled', 'trained', 'mean_length')
  result = {
    'model': config.model, 'devices': len(devices), 'hosts': run.hosts,
    'resident': {name: getattr(run, name) for name in ('parameters', 'moments', 'weights', 'cache')},
    'released': run.released, 'load': load, 'programs': figures,
    'work': dataclasses.asdict(work) | {name: getattr(work, name) for name in derived},
    'phases': phases, 'calls': {name: times[name] for name in figures},
    'fits': highest <= limit, 'bytes_per_device': highest, 'share': highest / target.device.memory,
    'step_seconds': sum(phases.values()) if complete else None}
  if 'decode' in figures:
    needed = run.weights + work.mean_length * run.engine.slots / run.engine.lanes * run.token
    result['decode_traffic'] = figures['decode']['each']['bytes'] / needed
  return result | {'advice': '' if result['fits'] else advice(config, run, compiled_programs, limit)}


def figures_of(program: programs.Program, found: Compiled, resident: int) -> dict:
  """Returns what a plan says of the memory and the collectives of a program."""
  memory = {'resident': resident, 'gradients': program.gradients,
            'temporary': found.needs - program.gradients, 'total': resident + found.needs}
  largest_first = sorted(found.collectives or (), key=lambda each: -each.bytes * each.times)
  return {'memory': memory, 'collectives': [
    (each.kind, each.bytes, each.times, each.in_loop or each.in_turn) for each in largest_first]}


def cost_of(program: programs.Program, alone: programs.Program, split: int,
            found: Compiled) -> dict[str, costs.Cost]:
  """Returns {'once', 'each'}: what a device does in a call, and in a turn of the loop whose length is data.

  Args:
    alone: the program with the rows and slots of one device; `split` devices share its matrices.
  """
  once, each = (counted / split for counted in costs.count(alone.trace().jaxpr.jaxpr))
  if program.gradients:  # a device's part, read and written in every turn, and again with its training state
    each[1] += 2 * program.gradients
    once[1] = 2 * (program.gradients + programs.on_device(program.args[0]))
  return {part: costs.Cost(flops, size, found.received(part == 'each'), cache)
          for part, (flops, size, cache) in {'once': once, 'each': each}.items()}


def compile_program(program: programs.Program, target: targets.Target, cache: str = '') -> Compiled:
  """Compiles a program, or reads from the `cache` what the compiler said of an equal one."""
  lowered = program.lower()
  counting = pathlib.Path(compiled.__file__).read_text()
  key = hashlib.sha256(f'{jax.__version__} {target.kind} {counting} {lowered.as_text()}'.encode()).hexdigest()
  file = pathlib.Path(cache) / f'{key[:24]}.json'
  if cache and file.exists():
    saved = json.loads(file.read_text())
    return Compiled(saved['needs'], [compiled.Collective(**each) for each in saved['collectives']])
  arguments = programs.on_device(program.args)
  try:
    executable = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    sizes = re.findall(r'([\d.]+)([KMGT])\b', str(error))
    asked = max((float(size) * 1024.0**' KMGT'.index(unit) for size, unit in sizes), default=math.inf)
    return Compiled(asked - arguments, None)
  memory = executable.memory_analysis()
  results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
  padding = max(memory.argument_size_in_bytes - arguments, 0)
  result = Compiled(memory.temp_size_in_bytes + results + padding, compiled.collectives(executable.as_text()))
  if cache:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(result)))
  return result


def advice(config: ml_collections.ConfigDict, run: programs.Run, found: dict[str, Compiled],
           limit: float) -> str:
  """Names the field that would make it fit, if what programs need beside arguments shrinks as it does."""
  said, lanes, parts = [], run.engine.lanes, meshes.batch_size(run.mesh)
  needs = {'load': run.load} | {name: one.needs for name, one in found.items()}
  room = {name: limit - run.resident(name) for name in needs}
  lacking = [name for name in needs if needs[name] > room[name]]
  more = 'more devices along mesh.fsdp, or optim.master_weights=False: parameters and moments leave no room'
  if run.hosts > 1 and run.weights + run.load > run.parameters + run.moments:
    more = (f"hosts of more devices: the sampler's weights take {run.weights / GIB:.1f} GiB of each device, "
            f'and {run.load / GIB:.1f} more while new ones come')
  full = [name for name in lacking if name in programs.SAMPLING or name == 'load' or room[name] <= 0]
  if full:  # fewer slots make room where the cache lies, if parameters and moments leave any
    def share_of_slots(name):
      if name in programs.SAMPLING:
        return (room[name] + run.cache) / (needs[name] + run.cache)
      return 0 if run.released else (room[name] - needs[name] + run.cache) / run.cache

    slots = int(config.sampler.slots * min(map(share_of_slots, full))) // lanes * lanes
    said.append(f'sampler.slots={slots}: the cache of {config.sampler.slots} takes {run.cache / GIB:.1f} GiB'
                if slots >= lanes else more)
  for name in (name for name in lacking if name not in full):
    if config.train.micro_rows > parts:
      gradients = run.programs[name].gradients
      share = max(room[name] - gradients, 0) / (needs[name] - gradients)
      rows = int(config.train.micro_rows * share) // parts * parts
      said.append(f'train.micro_rows={max(rows, parts)} for {name}')
    elif config.remat != 'full':
      said.append(f"remat='full' for {name}")
    else:
      tensor = 2 * run.mesh.shape['tensor']
      said.append(f'mesh.tensor={tensor}, or a smaller train.row_length or train.chunk, for {name}')
  return '; '.join(said)


def search(config: ml_collections.ConfigDict, target: targets.Target, cache: str = '',
           say: Callable[[str], None] = print) -> dict:
  """Finds the largest `sampler.slots` and `train.micro_rows` that fit, each with the other as it is.

  Compiles programs several times.
  """
  devices, limit = target.devices(), FULL * target.device.memory
  run = programs.of_config(config, devices)

  def largest(group, field, names, multiple, most):
    def measure(value):
      say(f'{group}.{field}={value} …')
      tried = programs.of_config(programs.changed(config, {group: {field: value}}), devices)
      needs = {name: compile_program(tried.programs[name], target, cache).needs for name in names}
      return max(tried.resident(name) + needs[name] for name in names)

    return step.largest(measure, config[group][field], multiple, limit, most)

  training = [name for name in ('update', 'critic') if name in run.programs]
  return {'sampler.slots': largest('sampler', 'slots', ['decode'], run.engine.lanes, 4096),
          'train.micro_rows': largest('train', 'micro_rows', training, meshes.batch_size(run.mesh), 1024)}
