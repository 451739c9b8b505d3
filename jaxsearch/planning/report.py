"""A plan as text, and the line of JSON at its end."""

import collections
import json
from collections.abc import Iterator

from jaxsearch.parallel.targets import Target
from jaxsearch.planning.plan import FULL, GIB

COLUMNS = {'resident': 10, 'gradients': 10, 'activations': 12, 'temporary': 10}  # kinds of memory, and characters


def lines(plan: dict, target: Target) -> Iterator[str]:
  """What the command prints."""
  device, gib = target.device, lambda size: f'{size / GIB:8.2f}'
  yield (f'{plan["model"]} on {plan["devices"]} x {target.kind}, hosts: {plan["hosts"]}, {device.memory / GIB:.1f} GiB a device; '
         'compiled, not run')
  yield (f'GiB on a device: {", ".join(f"{name} {size / GIB:.2f}" for name, size in plan["resident"].items())}'
         f'{" (weights and cache of the sampler only while it samples)" if plan["released"] else ""}')
  yield f'{"program":10}{"".join(f"{kind:>{width}}" for kind, width in COLUMNS.items())}{"total":>8}{"share":>7}'
  for name, one in plan['programs'].items():
    memory = one['memory']
    sizes = ''.join(f'{gib(memory[kind]):>{width}}' for kind, width in COLUMNS.items())
    yield f'{name:10}{sizes}{gib(memory["total"])}{memory["total"] / device.memory:7.0%}'
  load = plan['load']
  yield (f'{"load":10}{gib(load["total"] - load["temporary"]):>10}{gib(load["temporary"]):>32}{gib(load["total"])}'
         f'{load["total"] / device.memory:7.0%}')
  yield f'{"program":22}{"TFLOP":>9}{"GB":>9}{"GB sent":>9}{"ms":>9}  bound by     (one device)'
  for name, one in plan['programs'].items():
    for part, label in (('once', 'a call'), ('each', {'decode': 'a token'}.get(name, 'a micro-batch'))):
      cost = one[part]
      by = max(('arithmetic', 'memory', 'network'), key=cost.get)
      if cost[by] > 1e-6:
        yield (f'{name + ", " + label:22}{cost["flops"] / 1e12:9.2f}{cost["bytes"] / 1e9:9.2f}{cost["received"] / 1e9:9.2f}'
               f'{1e3 * cost[by]:9.2f}  {by}')
  if 'decode_traffic' in plan:
    yield (f'decode, a token: {plan["decode_traffic"]:.2f} times the weights and what is live in the cache, '
           f'{plan["work"]["mean_length"]:.0f} tokens a slot')
  for name, one in plan['programs'].items():
    kinds = collections.Counter()
    for kind, size, times, in_loop in one['collectives']:
      kinds[f'{kind}{" in a loop" if in_loop else ""}'] += size * times
    if kinds:
      yield f'{name}: ' + ', '.join(f'{size / 1e9:.2f} GB {kind}' for kind, size in kinds.most_common())
  work = plan['work']
  yield (f'a step: {work["trees"]} trees, {work["decoded"] / 1e6:.2f} M tokens decoded, {work["prefilled"] / 1e6:.2f} M '
         f'prefilled, {work["trained"] / 1e6:.2f} M in training rows')
  if plan['step_seconds'] is not None:
    phases = ', '.join(f'{name} {seconds:.1f}' for name, seconds in plan['phases'].items())
    yield f'at least {plan["step_seconds"]:.1f} s ({phases}), without tools, judges and the host'
  yield (f'fits: {plan["share"]:.0%} of a device at most' if plan['fits'] else
         f'does not fit: {plan["share"]:.0%} of a device, {FULL:.0%} are allowed; set {plan["advice"]}')


def short(plan: dict) -> dict:
  """The line of JSON; what did not compile for want of memory has null bytes."""
  names = ('fits', 'bytes_per_device', 'share', 'step_seconds', 'phases', 'advice', 'resident', 'target', 'devices')
  found = {name: plan[name] for name in names} | {
    'programs': {name: one['memory']['total'] for name, one in plan['programs'].items()}} | (
      {'largest': plan['largest']} if 'largest' in plan else {})
  return json.loads(json.dumps(found), parse_constant=lambda _: None)
