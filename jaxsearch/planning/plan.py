"""Compiles the programs of a config for a target that is not here: what they need, and whether that fits."""

import bisect
import collections
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_collections

from jaxsearch import setup
from jaxsearch.models.architecture import parameter_shapes
from jaxsearch.parallel import mesh as meshes, targets
from jaxsearch.parallel.compiled import collectives
from jaxsearch.parallel.memory import POOL
from jaxsearch.planning import costs, programs, step
from jaxsearch.training.learner import score_passes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled program, on one device."""
  needs: float              # bytes beside its arguments: temporaries, results, what the device's layouts pad
  collectives: list | None  # None where it did not compile for want of memory: `needs` is what it asked for


def plan(config: ml_collections.ConfigDict, target: targets.Target, say: Callable[[str], None] = print,
         **workload) -> dict:
  """Returns what lies on a device, every program, the step, and what to change where it does not fit.

  `workload`: see `step.work`.
  """
  engine, rows, devices = config.sampler.engine, config.train.micro_rows, target.devices()
  config = adjusted(config, devices)
  run = programs.of_config(config, devices)
  if config.train.micro_rows != rows:
    say(f'train.micro_rows={rows} does not split over {meshes.batch_size(run.mesh)} devices, '
        f'planned with {config.train.micro_rows}')
  shares, work = programs.share(config, run), step.work(config, **workload)
  compiled, moved, figures = {}, {}, {}
  for name, program in run.programs.items():
    say(f'compiling {name} …')
    compiled[name] = made = compile_program(program, target)
    moved[name] = costs.of_program(program, *shares[name], made.collectives or ())
    resident = run.resident(name)
    figures[name] = {
      'memory': {'resident': resident, 'gradients': program.gradients,
                 'temporary': made.needs - program.gradients, 'total': resident + made.needs},
      'collectives': list(map(dataclasses.astuple, made.collectives or ()))}
  load = {'temporary': run.load, 'total': run.resident('load') + run.load}
  highest = max(load['total'], *(program['memory']['total'] for program in figures.values()))
  limit = POOL * target.device.memory
  needs = {'load': run.load} | {name: made.needs for name, made in compiled.items()}
  spent, limits = forecast(config, target, run, compiled, moved, work)
  for name, (once, each) in spent.items():
    figures[name] |= {'once': once, 'each': each}
  workloads = {'limits': limits,
               'published': forecast(config, target, run, compiled, moved, step.published(work))[1]}
  complete = all(made.collectives is not None for made in compiled.values())
  seconds = [sum(phases.values()) if complete else None for phases in limits.values()]
  live = run.weights + work.mean_length * run.engine.slots / run.engine.lanes * run.token
  derived = ('decoded', 'prefilled', 'trained', 'mean_length')
  serving = 0 if engine == 'jax' else servers(limits['expected_seconds'], len(devices))
  shapes = parameter_shapes(setup.architecture(config))
  numbers = sum(map(math.prod, jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))))
  size = jnp.dtype(config.dtype).itemsize * numbers
  return {
    'model': config.model, 'devices': len(devices), 'hosts': run.hosts,
    'resident': {name: getattr(run, name) for name in ('parameters', 'moments', 'weights', 'cache')},
    'released': run.released, 'load': load, 'programs': figures,
    'work': dataclasses.asdict(work) | {name: getattr(work, name) for name in derived},
    'workloads': workloads, 'step_seconds': seconds[0], 'expected_step_seconds': seconds[1],
    'servers': serving, 'reload_bytes': size,
    'reload_seconds': serving and step.reload_seconds(size, math.ceil(serving * run.hosts / len(devices))),
    'decode_traffic': figures['decode']['each']['bytes'] / live,
    'fits': highest <= limit, 'bytes_per_device': highest, 'share': highest / target.device.memory,
    'advice': '' if highest <= limit else advice(config, run, needs, limit)}


def adjusted(config: ml_collections.ConfigDict, devices: list[jax.Device]) -> ml_collections.ConfigDict:
  """Returns the config with our own sampler, and with micro-batches that split over the devices."""
  parts = meshes.batch_size(meshes.make_mesh(**config.mesh, devices=devices))
  rows = -(-config.train.micro_rows // parts) * parts
  return programs.changed(config, {'sampler': {'engine': 'jax'}, 'train': {'micro_rows': rows}})


def servers(phases: dict[str, float], devices: int) -> int:
  """Returns how many of the devices should serve rollouts, so that these take as long as the updates beside
  them."""
  share = phases['rollout'] / sum(phases.values())
  return min(max(round(share * devices), 1), devices - 1)


def forecast(config: ml_collections.ConfigDict, target: targets.Target, run: programs.Run,
             compiled: dict[str, Compiled], moved: dict[str, list[costs.Cost]], work: step.Work) -> tuple:
  """Returns (cost and least seconds of a program's call and turn, seconds of phases) in a workload."""
  device, on_gpus = target.device, target.kind.startswith('cuda')
  spent, least, expected = {}, {}, {}
  for name, parts in moved.items():
    decodes = name == 'decode'
    if decodes:
      parts = [cost.filled(work.mean_length / run.engine.row_length) for cost in parts]
    hosts = 1 if name in programs.SAMPLING else run.hosts  # a host samples by itself
    times = [{'arithmetic': cost.flops / device.flops, 'memory': cost.bytes / device.bandwidth,
              'network': targets.network_seconds(target, hosts, cost.received)} for cost in parts]
    waited = [sum(each.times for each in compiled[name].collectives or () if each.in_turn == in_turn)
              for in_turn in (False, True)]
    if steps := run.programs[name].steps:
      waited = 0, waited[0] / steps
    launched = 0, setup.architecture(config).num_layers if decodes and on_gpus else 0
    spent[name] = [dataclasses.asdict(cost) | time for cost, time in zip(parts, times)]
    least[name] = [max(time.values()) for time in times]
    expected[name] = [step.expected(**time, collectives=count, layers=layers)
                      for time, count, layers in zip(times, waited, launched)]
  sizes = dict(scored=score_passes(config), hosts=run.hosts, slots=run.engine.slots,
               segment=run.engine.segment_steps, prefill=math.prod(run.programs['prefill'].args[3].shape))
  calls, whole = (step.calls(work, config, **sizes, whole=whole) for whole in (False, True))
  seconds = {'roofline_seconds': step.step_seconds(least, calls),
             'expected_seconds': step.step_seconds(expected, whole)}
  workers = config.sampler.tool_workers
  phases = seconds['expected_seconds']
  phases['rollout'] += step.waits(work, hosts=run.hosts, workers=workers)
  return spent, seconds


def compile_program(program: programs.Program, target: targets.Target) -> Compiled:
  """Compiles a program and asks the compiler what it needs."""
  arguments = programs.on_device(program.args)
  try:
    executable = program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    sizes = re.findall(r'([\d.]+)([KMGT])\b', str(error))
    asked = max((float(size) * 1024.0**' KMGT'.index(unit) for size, unit in sizes), default=math.inf)
    return Compiled(asked - arguments, None)
  return Compiled(needs(executable, arguments), collectives(executable.as_text()))


def needs(executable: jax.stages.Compiled, arguments: int) -> int:
  """Returns bytes that a program needs on a device beside `arguments`, the bytes of its arguments."""
  memory = executable.memory_analysis()
  results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
  padding = max(memory.argument_size_in_bytes - arguments, 0)
  return memory.temp_size_in_bytes + results + padding


def advice(config: ml_collections.ConfigDict, run: programs.Run, needs: dict[str, float],
           limit: float) -> str:
  """Names a field to change for each of the programs that do not fit; `search` finds its value."""
  said = {}
  for name, need in needs.items():
    resident, sampling = run.resident(name), name in programs.SAMPLING
    cached = run.cache if sampling or not run.released else 0
    if resident + need <= limit:
      continue
    if sampling or resident > limit or name == 'load':
      if resident + (0 if sampling else need) - cached < limit and cached:
        change = (f'a smaller sampler.slots: the cache of {config.sampler.slots} takes '
                  f'{run.cache / GIB:.1f} GiB')
      elif run.hosts > 1 and run.weights + run.load > run.parameters + run.moments:
        change = (f"hosts of more devices: the sampler's weights take {run.weights / GIB:.1f} GiB of each "
                  f'device, and {run.load / GIB:.1f} more while new ones come')
      else:
        change = 'more devices along mesh.fsdp, or optim.master_weights=False: parameters leave no room'
    elif config.train.micro_rows > meshes.batch_size(run.mesh):
      change = 'a smaller train.micro_rows'
    elif config.remat != 'full':
      change = "remat='full'"
    else:
      change = f'mesh.tensor={2 * run.mesh.shape["tensor"]}, or a smaller train.row_length or train.chunk'
    said.setdefault(change, []).append(name)
  return '; '.join(f'{change} (for {", ".join(names)})' for change, names in said.items())


def search(config: ml_collections.ConfigDict, target: targets.Target,
           say: Callable[[str], None] = print) -> dict:
  """Finds the largest `sampler.slots` and `train.micro_rows` that fit, each with the other as it is.

  Bisects: slots up to the chains of a host, at most 4096; rows up to 1024. Compiles programs up to ten times,
  and once the others that run beside the cache.
  """
  devices, limit = target.devices(), POOL * target.device.memory
  config = adjusted(config, devices)
  run = programs.of_config(config, devices)

  def largest(group, field, names, multiple, most, needs):
    def measure(value):
      tried = programs.of_config(programs.changed(config, {group: {field: value}}), devices)
      held = max(tried.resident(name) + needs.get(name, 0) for name in (*needs, *names))
      if held > limit:
        return held
      say(f'{group}.{field}={value} …')
      return max(tried.resident(name) + compile_program(tried.programs[name], target).needs for name in names)

    return multiple * bisect.bisect(range(multiple, most + 1, multiple), limit, key=measure)

  training = [name for name in ('update', 'critic') if name in run.programs]
  work, lanes = step.work(config), run.engine.lanes
  chains = -(-work.trees * work.branches // (run.hosts * lanes)) * lanes
  # Whatever the slots: what runs while the cache is there needs as much.
  needs = {} if run.released else {'load': run.load}
  for name, program in run.programs.items():
    if name != 'decode' and (name == 'prefill' or not run.released):
      say(f'compiling {name} …')
      needs[name] = compile_program(program, target).needs
  return {'sampler.slots': largest('sampler', 'slots', ['decode'], lanes, min(chains, 4096), needs),
          'train.micro_rows': largest('train', 'micro_rows', training, meshes.batch_size(run.mesh), 1024, {})}


def lines(plan: dict, target: targets.Target) -> Iterator[str]:
  """Yields what the command prints."""
  memory, work, load = target.device.memory, plan['work'], plan['load']
  yield (f'{plan["model"]} on {plan["devices"]} x {target.kind}, hosts: {plan["hosts"]}, '
         f'{memory / GIB:.1f} GiB a device; compiled, not run')
  resident = ', '.join(f'{name} {size / GIB:.2f}' for name, size in plan['resident'].items())
  yield (f'GiB on a device: {resident}'
         f'{" (weights and cache of the sampler only while it samples)" if plan["released"] else ""}')
  yield f'{"program":10}{"resident":>10}{"gradients":>10}{"temporary":>10}{"total":>8}{"share":>7}'
  held = {name: program['memory'] for name, program in plan['programs'].items()}
  held['load'] = {'resident': load['total'] - load['temporary'], 'gradients': 0} | load
  for name, sizes in held.items():
    columns = ''.join(f'{sizes[kind] / GIB:10.2f}' for kind in ('resident', 'gradients', 'temporary'))
    yield f'{name:10}{columns}{sizes["total"] / GIB:8.2f}{sizes["total"] / memory:7.0%}'
  yield f'{"program":22}{"TFLOP":>9}{"GB":>9}{"GB sent":>9}{"ms":>9}  bound by     (one device)'
  for name, program in plan['programs'].items():
    for part, label in (('once', 'a call'), ('each', 'a token' if name == 'decode' else 'a micro-batch')):
      cost = program[part]
      by = max(('arithmetic', 'memory', 'network'), key=cost.get)
      if cost[by] > 1e-6:
        yield (f'{name + ", " + label:22}{cost["flops"] / 1e12:9.2f}{cost["bytes"] / 1e9:9.2f}'
               f'{cost["received"] / 1e9:9.2f}{1e3 * cost[by]:9.2f}  {by}')
  yield (f'decode, a token: {plan["decode_traffic"]:.2f} times the weights and what is live in the cache, '
         f'{work["mean_length"]:.0f} tokens a slot')
  for name, program in plan['programs'].items():
    kinds = collections.Counter()
    for kind, size, times, *_ in program['collectives']:
      kinds[kind] += size * times
    if kinds:
      yield f'{name}: ' + ', '.join(f'{size / 1e9:.2f} GB {kind}' for kind, size in kinds.most_common())
  yield (f'a step: {work["trees"]} trees, {work["decoded"] / 1e6:.2f} M tokens decoded, '
         f'{work["prefilled"] / 1e6:.2f} M prefilled, {work["trained"] / 1e6:.2f} M in training rows')
  if plan['step_seconds'] is not None:
    names = {'limits': 'chains at their limits, or as given', 'published': "Search-R1's published workload"}
    for name, kinds in plan['workloads'].items():
      least, expected = (f'{sum(phases.values()):.1f} s ('
                         + ', '.join(f'{phase} {seconds:.1f}' for phase, seconds in phases.items()) + ')'
                         for phases in kinds.values())
      yield f'{names[name]}: at least {least}, expected {expected}'
  if plan['servers']:
    left = plan['devices'] - plan['servers']
    yield (f'with servers for rollouts: {plan["servers"]} devices for them, {left} to train, if they sample '
           'as fast as ours and train.async_steps=1; memory is as without them')
    rates = (step.CALIBRATION[name] / 1e9 for name in ('disk_write', 'disk_read'))
    yield (f'new weights, {plan["reload_bytes"] / 1e9:.2f} GB, reach them in {plan["reload_seconds"]:.1f} s, '
           'before each rollout, by a shared disk: {:.2f} GB/s in, {:.2f} out'.format(*rates))
  yield (f'fits: {plan["share"]:.0%} of a device at most' if plan['fits'] else
         f'does not fit: {plan["share"]:.0%} of a device, {POOL:.0%} are allowed; set {plan["advice"]}')


def short(plan: dict) -> dict:
  """Returns the line of JSON; what did not compile for want of memory has null bytes."""
  programs = {name: program['memory']['total'] for name, program in plan['programs'].items()}
  kept = ('fits', 'bytes_per_device', 'share', 'step_seconds', 'expected_step_seconds', 'workloads', 'advice',
          'resident', 'target', 'devices', 'servers', 'reload_seconds', 'largest')
  result = {name: plan[name] for name in kept if name in plan} | {'programs': programs}
  return json.loads(json.dumps(result), parse_constant=lambda _: None)
