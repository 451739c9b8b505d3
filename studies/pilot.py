"""How much short runs of the training grids differ between seeds, and what the grids will cost.

    python -m studies.pilot [--beds SLATE,CuSearch]

Of each bed of docs/claims/plan.md the two variants of its primary contrast are trained with a few seeds, as
`jaxsearch sweep` trains them: finished runs are kept, and the others resume. A row has the difference of the
areas under EM against tokens, its spread between seeds beside that of questions, how many seeds would find 3
points with 80 % power (`evaluation/verdicts.py`), and the CPU time of the runs and so of the whole grid.
"""

import argparse
import functools
import importlib
import math
import pathlib
import resource
from typing import Any

from jaxsearch.evaluation import sweep, sweep_report
from studies import common

# Bed -> config of its grid, the variant and its baseline, what the pilot changes: it came before the policies
# and the learning rate of configs/claims/_bed.py. CARL's needs critics first.
BEDS = {
  'SLATE': ('slate', 'whole, judge', 'SLATE', {'model': 'world', 'data.hops': (1, 3)}),
  'CuSearch': ('cusearch', 'Auto, zero', 'Random, zero', {'model': 'world'}),
  'Search-R2': ('search_r2', 'Search-R2', 'Search-R1, n = 10', {'model': 'world-review'}),  # n = 7 then
  'R-Search': ('r_search', 'R-Search', 'no box', {'data.hops': (1, 3), 'search.topk': 2}),
}
SHORT = {'steps': 12, 'eval.every': 3, 'optim.learning_rate': 1e-4}
TINY = SHORT | {'steps': 1, 'eval.every': 1, 'eval.number': 4, 'questions_per_step': 2, 'train.micro_rows': 2}
SIZES = {'full': {'seeds': 3, 'changes': SHORT}, 'small': {'seeds': 2, 'changes': TINY}}


def grid(bed: str, seeds: int, changes: dict[str, Any], out: pathlib.Path) -> tuple[Any, int]:
  """Returns the sweep of a bed's pilot, and how many variants its grid has."""
  file, variant, baseline, of_bed = BEDS[bed]
  config = importlib.import_module(f'configs.claims.{file}').get_config().unlock()
  every, shared = config.variants, sweep.flat(config.common) | of_bed | changes
  config.common, config.baseline, config.primary = shared, baseline, (variant,)
  config.variants = {name: sweep.flat(every[name]) for name in (baseline, variant)}
  config.seeds, config.out = tuple(range(seeds)), str(out / sweep.slug(bed))
  return config.lock(), len(every)


def measure(bed: str, seeds: int, changes: dict[str, Any], out: pathlib.Path) -> dict[str, Any]:
  """Trains the runs of a pilot that are not there, and returns its row."""
  config, variants = grid(bed, seeds, changes, out)
  runs = sweep.plan(config)
  todo = [run for run in runs if not sweep.finished(run)]
  cpu = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
  before = cpu()
  if failed := sweep.train_all(runs, config.parallel):
    raise RuntimeError(f'{bed}: {len(failed)} runs failed, see {config.out}')
  seconds = (cpu() - before) / len(todo) if todo else math.nan
  (of,) = sweep_report.decide(config, runs).values()
  area = of['variants'][config.primary[0]]['area']
  needed = max(area['seeds_needed'] or 100, 5)
  return {
    'bed': bed, 'contrast': f'{config.primary[0]} - {config.baseline}', 'seeds': seeds,
    'steps': runs[0].config.steps, 'questions': runs[0].config.eval.number, 'budget': of['budget'],
    'area': [of['variants'][name]['area']['mean'] for name in (*config.primary, config.baseline)],
    'end': [of['variants'][name]['end']['mean'] for name in (*config.primary, config.baseline)],
    'difference': area['difference'], 'spread': area['spread'], 'seeds_needed': area['seeds_needed'],
    'cpu_seconds': seconds, 'variants': variants, 'hours': variants * needed * seconds / 3600,
  }  # fmt: skip


def study(settings: argparse.Namespace, path: pathlib.Path) -> str:
  """Returns the table of the pilot."""
  beds = settings.beds.split(',') if settings.beds else list(BEDS)
  out = pathlib.Path('runs/studies/pilot', settings.size)
  rows = common.measured(path, {bed: functools.partial(
    measure, bed, settings.seeds, settings.changes, out) for bed in beds})
  root = lambda variance: f'{math.sqrt(variance):.1f}'
  return common.table([{
    'bed': row['bed'], 'contrast': row['contrast'], 'seeds': row['seeds'],
    'area': ' / '.join(f'{x:.1f}' for x in row['area']), 'end': ' / '.join(f'{x:.1f}' for x in row['end']),
    'difference of areas': '{mean:+.1f} [{low:+.1f}, {high:+.1f}]'.format(**row['difference']),
    'SD seeds': root(row['spread']['seeds']), 'SD questions': root(row['spread']['questions']),
    'SD rest': root(row['spread']['cells']), 'seeds for 3 points': row['seeds_needed'] or '> 100',
    'CPU s a run': f'{row["cpu_seconds"]:.0f}', 'rows': row['variants'], 'CPU hours': f'{row["hours"]:.1f}',
  } for row in rows.values()])


if __name__ == '__main__':
  common.main('pilot', study, SIZES, beds='')
