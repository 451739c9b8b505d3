"""A plan as text, and the line of JSON at its end."""

import collections
import json
from collections.abc import Iterator

from jaxsearch.parallel.targets import Target
from jaxsearch.planning.plan import FULL, GIB


def lines(plan: dict, target: Target) -> Iterator[str]:
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
  if 'decode_traffic' in plan:
    yield (f'decode, a token: {plan["decode_traffic"]:.2f} times the weights and what is live in the cache, '
           f'{work["mean_length"]:.0f} tokens a slot')
  for name, program in plan['programs'].items():
    kinds = collections.Counter()
    for kind, size, times, in_loop in program['collectives']:
      kinds[f'{kind}{" in a loop" if in_loop else ""}'] += size * times
    if kinds:
      yield f'{name}: ' + ', '.join(f'{size / 1e9:.2f} GB {kind}' for kind, size in kinds.most_common())
  yield (f'a step: {work["trees"]} trees, {work["decoded"] / 1e6:.2f} M tokens decoded, '
         f'{work["prefilled"] / 1e6:.2f} M prefilled, {work["trained"] / 1e6:.2f} M in training rows')
  if plan['step_seconds'] is not None:
    phases = ', '.join(f'{name} {seconds:.1f}' for name, seconds in plan['phases'].items())
    yield f'at least {plan["step_seconds"]:.1f} s ({phases}), without tools, judges and the host'
  yield (f'fits: {plan["share"]:.0%} of a device at most' if plan['fits'] else
         f'does not fit: {plan["share"]:.0%} of a device, {FULL:.0%} are allowed; set {plan["advice"]}')


def short(plan: dict) -> dict:
  """Returns the line of JSON; what did not compile for want of memory has null bytes."""
  result = {name: plan[name] for name in (
    'fits', 'bytes_per_device', 'share', 'step_seconds', 'phases', 'advice', 'resident', 'target', 'devices')}
  result['programs'] = {name: program['memory']['total'] for name, program in plan['programs'].items()}
  if 'largest' in plan:
    result['largest'] = plan['largest']
  return json.loads(json.dumps(result), parse_constant=lambda _: None)
