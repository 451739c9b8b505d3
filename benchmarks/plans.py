"""Plans every pod config, and Search-R1 at three sizes on 8, 64 and 256 devices, and writes docs/plans.md and scaling.md.

    python benchmarks/plans.py --folder runs/plans           # hours on two cores; rerun the same command to resume
    python benchmarks/plans.py --write                       # only writes the pages

Each plan is one call of `jaxsearch plan`, one after the other; its output goes to the folder. What the pages need of it is a line
of benchmarks/plans.jsonl; a plan that has one is not made again, so take out the lines of what has changed. `--only TEXT` takes
the plans whose name contains TEXT.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLANS = ROOT / 'benchmarks' / 'plans.jsonl'
FIELDS = ('resident', 'load', 'share', 'fits', 'workloads', 'step_seconds', 'advice', 'decode_traffic')  # for the pages
CONFIGS = (
  'search_r1_grpo_qwen2_5_3b', 'cusearch_qwen2_5_3b', 'cusearch_llama3_2_3b', 'cusearch_qwen2_5_7b', 'r_search_qwen2_5_3b',
  'r_search_ppo_qwen2_5_3b', 'slate_qwen2_5_3b', 'slate_qwen2_5_7b', 'search_r2_qwen2_5_7b', 'carl_qwen2_5_3b', 'carl_qwen2_5_7b',
  *(f'carl_search_r1_qwen2_5:{name}' for name in ('grpo_3b', 'grpo_7b', 'ppo_3b', 'ppo_7b')),
  'igpo_qwen2_5_3b', 'gigpo_qwen2_5_3b', 'tree_grpo_qwen2_5_3b', 'trace_qwen3_8b')
TARGETS = ('cuda:h100:2x8', 'tpu:v5p:2x2x4')
SIZES = ('3b', '7b', '32b')
SLICES = {  # by devices
  8: ('cuda:h100:1x8', 'tpu:v5p:2x2x2', 'tpu:v6e:2x4'), 64: ('cuda:h100:8x8', 'tpu:v5p:4x4x4', 'tpu:v6e:8x8'),
  256: ('cuda:h100:32x8', 'tpu:v5p:4x8x8', 'tpu:v6e:16x16')}
SLOTS = {('3b', 'tpu:v6e'): 128, ('7b', 'tpu:v6e'): 64, ('32b', 'cuda:h100'): 128, ('32b', 'tpu:v5p'): 64, ('32b', 'tpu:v6e'): 8}
GIB = 2**30


def jobs():
  """Name -> arguments of `jaxsearch plan`."""
  found = {f'{config}@{target}': ['--config', add_py(config), '--target', target] for config in CONFIGS for target in TARGETS}
  for size in SIZES:
    for devices, slices in SLICES.items():
      for target in slices:
        found[f'scaling_{size}@{target}'] = [
          '--config', add_py(CONFIGS[0]), '--target', target, f'--config.model=random:qwen2.5-{size}',
          f'--config.train.micro_rows={devices}', f'--config.sampler.slots={slots(size, devices, target)}']
  return found


def slots(size, devices, target):
  """Slots of the sampler that fit, or would if something else did."""
  return min(SLOTS.get((size, target.rsplit(':', 1)[0]), 256), 16 if (size, devices) == ('32b', 8) else 256)


def add_py(config):
  name, _, argument = config.partition(':')
  return f'configs/{name}.py' + (f':{argument}' if argument else '')


def make(folder, name, arguments):
  """Makes a plan, and its line of PLANS."""
  print(name, flush=True)
  out = folder / f'{name.replace(":", "_")}.json'
  command = [sys.executable, '-m', 'jaxsearch.cli', 'plan', *arguments, '--out', str(out)]
  with open(out.with_suffix('.txt'), 'w') as log:
    if subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode:
      print(f'failed: {out.with_suffix(".txt").read_text().splitlines()[-1]}', flush=True)
      return
  line = {'name': name, 'date': f'{datetime.date.today()}', 'jax': importlib.metadata.version('jax')} | short(
    json.loads(out.read_text()))
  with open(PLANS, 'a') as file:
    file.write(json.dumps(line) + '\n')


def short(plan):
  """What the pages need of a plan."""
  programs = {name: {'memory': {size: program['memory'][size] for size in ('resident', 'total')}, 'each': program['each']}
              for name, program in plan['programs'].items()}
  return {name: plan.get(name) for name in FIELDS} | {'programs': programs}


def read():
  """{name: its line} of the plans that were made."""
  lines = PLANS.read_text().splitlines() if PLANS.exists() else []
  return {plan['name']: plan for plan in map(json.loads, lines)}


def table(head, rows):
  return '\n'.join([' | '.join(head), '---' + '|--:' * (len(head) - 1), *map(' | '.join, rows)]) + '\n'


def bound(plan):
  """What the longest phase waits for most."""
  least = plan['workloads']['limits']['roofline_seconds']
  phase = max(least, key=least.get)
  name = {'rollout': 'decode', 'score': 'score', 'update': 'update'}[phase]
  each = plan['programs'][name]['each']
  return f'{phase}: {max(("arithmetic", "memory", "network"), key=each.get)}'


def total(plan, workload):
  """Expected seconds of a step; '' for a plan without any."""
  phases = plan['workloads'][workload]['expected_seconds']
  return f'{sum(phases.values()):.0f}' if plan['step_seconds'] is not None else ''


def made(plans, scaling=False):
  """When the plans of a page were made, and with what."""
  plans = {name: plan for name, plan in plans.items() if name.startswith('scaling_') == scaling}
  days, versions = (sorted({plan[name] for plan in plans.values()}) for name in ('date', 'jax'))
  return f'Made {" to ".join(dict.fromkeys((days[0], days[-1])))} with JAX {", ".join(versions)}.\n\n' if plans else ''


def plans_page(plans):
  text = """# Plans of the pod configs

    python benchmarks/plans.py --folder runs/plans

Every program was compiled by the compiler of its target, at full size, from shapes alone. **Nothing was
run**. Memory is what the compiler planned, in GiB a device. One plan in full:
`jaxsearch plan --config configs/NAME.py --target TARGET`.

Seconds of phases are least times (the roofline): what arithmetic, memory or network must take at their
published rates (`DEVICES` in jaxsearch/parallel/targets.py, with sources), every chain as long as its config
allows. `expected` is a forecast of the same step: products at 0.6 of the peak, memory at 0.76 of its
bandwidth, a floor a token for short kernels and collectives, chains in whole rounds of slots, the host's time
a span (0.98 ms) and searches; `published` forecasts Search-R1's 2,560 chains of 250 generated tokens and 1.5
searches. Their constants (`CALIBRATION` in jaxsearch/planning/step.py) come from one H100
([figures](../benchmarks/RESULTS.md#on-an-h100), memory as planned), searches and collectives from assumptions;
judges take no time.

`jaxsearch plan --search` finds how many slots fit, at most a step's chains.

Pod configs leave `sampler.tensor` at 0: with 1 all fit 2 x 8 H100, but each device reads all weights.

`state` (parameters of policy, reference and critic, moments) always lies on a device, `sampler` (its weights and
cache) while it samples (`sampler.release`). `update` and `critic` are what updating the policy and the critic adds;
all other programs add less. `share` is the largest sum as a share of the device; other models there (`reader`,
`classifier`, `refiner`, `judge.kind='local'`, `search.writer='model'`) are not counted.

Decoding reads each slot's own length: slots are planned as long as they are on average. Samplers of
several TPU hosts are compiled for one host's slice.

""" + made(plans)
  missing = []
  for target in TARGETS:
    rows, moved = [], []
    for config in CONFIGS:
      plan = plans.get(f'{config}@{target}')
      if plan is None:
        missing.append((config, target))
        continue
      held = {name: size / GIB for name, size in plan['resident'].items()}
      memory = {name: program['memory'] for name, program in plan['programs'].items()}
      beside = lambda name: f'{(memory[name]["total"] - memory[name]["resident"]) / GIB:.1f}' if name in memory else ''
      rows.append([f'`{config}`', f'{held["parameters"] + held["moments"]:.1f}',
                   f'{held["weights"] + held["cache"]:.1f}', beside('update'), beside('critic'),
                   f'{plan["share"]:.0%}' + ('' if plan['fits'] else ' **too much**'),
                   *(f'{seconds:.0f}' for seconds in plan['workloads']['limits']['roofline_seconds'].values()), bound(plan),
                   total(plan, 'limits'), total(plan, 'published')])
      moved.append(plan['decode_traffic'])
    if rows:
      text += f'## {target}\n\n' + table(
        ['config', 'state', 'sampler', 'update', 'critic', 'share', 'rollout s', 'score s', 'update s', 'bound by',
         'expected s', 'published s'],
        rows)
      text += (f'\nDecoding a token moves {min(moved):.2f} to {max(moved):.2f} times the weights and what is live in '
               'the cache.\n\n')
  if missing:
    text += f'Not planned yet: {len(missing)} of {len(CONFIGS) * len(TARGETS)}. The command above goes on where it stopped.\n'
  return text


def scaling_page(plans):
  text = """# What a step costs at 3B, 7B and 32B

    python benchmarks/plans.py --folder runs/plans --only scaling

Plans of Search-R1's step (512 questions x 5 chains of 4,096 tokens, configs/search_r1_grpo_qwen2_5_3b.py)
with other models, one training row a device, and 256 slots a host or as many as fit. **Nothing was run**;
`step s` is the roofline, as in [plans.md](../docs/plans.md). `next limit`: the longest phase and what it is bound by,
or what does not fit; `too much` the compiler refused.

""" + made(plans, scaling=True)
  rows = []
  for size in SIZES:
    for devices, slices in SLICES.items():
      for target in slices:
        plan = plans.get(f'scaling_{size}@{target}')
        if plan is not None:
          figures = (['too much', ''] if plan['step_seconds'] is None else
                     [f'{plan["share"]:.0%}', f'{plan["step_seconds"]:.0f}'])
          rows.append([f'{size.upper()}, {devices} x {target.rsplit(":", 1)[0]}', f'{slots(size, devices, target)}', *figures,
                       bound(plan) if plan['fits'] else f'does not fit: {re.split("[:;]", plan["advice"])[0]}'])
  planned = len(SIZES) * sum(map(len, SLICES.values()))
  if len(rows) < planned:
    text += f'Not planned yet: {planned - len(rows)} of {planned}.\n\n'
  return text + table(['model, devices', 'slots', 'memory', 'step s', 'next limit'], rows)


PAGES = {'docs/plans.md': plans_page, 'benchmarks/scaling.md': scaling_page}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--folder', type=pathlib.Path, help='of the output; needed without --write')
  parser.add_argument('--only', default='', help='plans whose name contains this')
  parser.add_argument('--write', action='store_true', help='plan nothing')
  args = parser.parse_args()
  if not (args.folder or args.write):
    parser.error('--folder is missing')
  done = read()
  for name, arguments in jobs().items() if not args.write else ():
    if args.only in name and name not in done:
      args.folder.mkdir(parents=True, exist_ok=True)
      make(args.folder.resolve(), name, arguments)
  plans = read()
  for page, write in PAGES.items():
    (ROOT / page).write_text(write(plans))
    print(page, flush=True)


if __name__ == '__main__':
  main()
