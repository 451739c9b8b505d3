"""The verdicts of the training grids: contrasts of docs/claims/plan.md over the runs of configs/claims.

    jaxsearch sweep --config configs/claims/cusearch.py
    python -m studies.trained cusearch    # adds runs that are new to docs/claims/runs/cusearch_trained.jsonl
    python -m studies.trained systems --plot docs/plots/systems.png    # also draws EM against tokens

A row is a run: what each held-out question got at each evaluation, and the tokens that training had spent by
then. So a clone without run folders prints the same tables.
"""

import argparse
import functools
import importlib
import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs.claims import systems
from jaxsearch.evaluation import plots, sweep, sweep_report, verdicts
from jaxsearch.training import row_files
from studies import common

MARGIN = sweep_report.MARGIN
CEILING = 0.75  # EM at the end of what is compared, above which a bed decides nothing
MATCHED = 'tool rate at equal EM, tier 2'
EXPLAINED = 'value_explained'  # by a critic, of the variance of returns
TIERS = ('tool_rate_tier_2', 'em_tier_2', 'tool_rate_tier_1', 'em_tier_1', 'confident_wrong')


class Grid(NamedTuple):
  """What a paper's grid decides.

  Attributes:
    contrasts: label -> (a, b), for a - b, or (a, b, c, d), for (a - b) - (c - d); names of runs as in
      `name_of`. A label in bold is a primary contrast of the plan.
    control: a variant, and its copy trained on other questions' answers, or on random scores.
    tables: the arguments of its config's `get_config`.
    measures: what contrasts are taken of; the first decides. 'area' is that under EM against tokens, 'gain'
      that above EM at the start, 'end' EM after the last step, MATCHED see `at_matched_em`; others are
      figures of an evaluation, averaged over the steps.
    explains: the share of the variance of returns that a contrast's critic must explain.
  """
  contrasts: Mapping[str, Sequence[str]]
  control: tuple[str, str]
  tables: Sequence[str] = ('',)
  measures: Sequence[str] = ('area', 'end')
  explains: float = -np.inf


RANDOM, AUTO, PHASE, EXCHANGED = 'random-zero', 'auto-zero', 'phase-zero', 'answers-exchanged'
GRIDS = {
  'cusearch': Grid({
    '**Auto - Random**': (AUTO, RANDOM), '**Phase - Random**': (PHASE, RANDOM),
    '**Random - Anti**': (RANDOM, 'anti-zero'),
    '**Auto - Random, start that searches too little - enough**': (
      AUTO, RANDOM, f'enough/{AUTO}', f'enough/{RANDOM}'),
    '**Auto - Random, new noise - none**': (AUTO, RANDOM, f'quiet/{AUTO}', f'quiet/{RANDOM}'),
    'Auto - Random, new noise - the same again': (AUTO, RANDOM, f'again/{AUTO}', f'again/{RANDOM}'),
    '**Auto - Top-K reward**': (AUTO, 'top-k-reward'), '**Phase - DAPO**': (PHASE, 'dapo'),
    'deepest half of each question - Random': ('within-zero', RANDOM), 'AR3PO - Random': ('ar3po', RANDOM),
    'Auto - Full': (AUTO, 'full'), 'Auto - Full, two updates': (AUTO, 'full-two-updates'),
    'Phase - Full': (PHASE, 'full'),
    'Auto - Random, raw': ('auto-raw', 'random-raw'), 'Phase - Random, raw': ('phase-raw', 'random-raw'),
    'Random - Anti, raw': ('random-raw', 'anti-raw')},
    (RANDOM, EXCHANGED), ('', 'full', 'enough', 'quiet', 'again')),
  'search_r2': Grid({
    '**Search-R2 - Search-R1, n = 10**': ('search-r2', 'search-r1-n-10'),
    '**Search-R2 - random refiner**': ('search-r2', 'random-refiner'),
    'Search-R2 - frozen refiner': ('search-r2', 'frozen-refiner'),
    'Search-R2 - + process reward (not joint)': ('search-r2', 'process-reward'),
    '+ process reward - + refiner': ('process-reward', 'refiner'),
    '+ refiner - Search-R1, n = 5': ('refiner', 'search-r1-n-5'),
    'Search-R1, n = 10 - n = 5': ('search-r1-n-10', 'search-r1-n-5')}, ('search-r2', EXCHANGED)),
  'slate': Grid({
    '**SLATE - whole, EM**': ('slate', 'whole-em'), '**SLATE - whole, judge**': ('slate', 'whole-judge'),
    '**k = 5 - k = 1**': ('slate', 'k-1'), 'SLATE - truncated, EM': ('slate', 'truncated-em'),
    'k = 3 - k = 1': ('k-3', 'k-1'), 'k = 7 - k = 5': ('k-7', 'slate'),
    'no errors - 25 % errors': ('slate', 'slate-25-errors'),
    'SLATE - whole, judge, both 25 % errors': ('slate-25-errors', 'whole-judge-25-errors'),
    'bonus - no bonus': ('bonus', 'no-bonus')}, ('slate', 'scores-at-random'), ('', 'bonus')),
  'r_search': Grid({
    '**R-Search - no box**': ('r-search', 'no-box'), '**GRPO - PPO**': ('r-search', 'r-search-ppo'),
    'R-Search - box alone': ('r-search', 'box-alone'),
    'R-Search - box and its format': ('r-search', 'box-and-its-format'),
    'gated - not gated': ('r-search', 'r-search-not-gated'),
    'R-Search - Search-R1 (EM)': ('r-search', 'search-r1-em')}, ('r-search', EXCHANGED),
    measures=('gain', 'area', 'end'), explains=0.3),
  'carl': Grid({
    '**λ = 1 - λ = 0**': ('lambda-1-0', 'lambda-0-0'), 'λ = 0.5 - λ = 0': ('lambda-0-5', 'lambda-0-0'),
    'PPO - λ = 0': ('ppo', 'lambda-0-0'),
    'GRPO - λ = 0': ('grpo', 'lambda-0-0')}, ('lambda-1-0', EXCHANGED),
    measures=(MATCHED, 'tool_rate_tier_2', 'em_tier_2', 'em_tier_1', 'confident_wrong')),
  'systems': Grid({f'{name} - Search-R1': (sweep.slug(name), 'search-r1')
                   for name in (*systems.ROWS, 'rejection SFT') if name != 'Search-R1'}, ('', ''),
                  measures=('area', 'gain', 'end')),  # two start elsewhere
}  # fmt: skip


@functools.cache
def plans_of(grid: str) -> list[list[sweep.SweepRun]]:
  """Returns the runs of each table of a grid's config."""
  config = importlib.import_module(f'configs.claims.{grid}').get_config
  return [sweep.plan(config(table) if table else config()) for table in GRIDS[grid].tables]


def name_of(run: sweep.SweepRun, first: sweep.SweepRun) -> str:
  """Returns 'variant', or 'table/variant' where its table has another folder than the grid's first run."""
  (folder, variant), own = run.out.parts[-3:-1], first.out.parts[-3]
  return variant if folder == own else f'{folder.removeprefix(own + "_")}/{variant}'


def row_of(run: sweep.SweepRun) -> dict:
  """Returns the row of a finished run, which was evaluated at one temperature; ValueError if its config is
  another than the grid's."""
  sweep.check_finished(run)
  rows, steps = sweep_report.evaluations(run), row_files.read(run.out / 'metrics.jsonl')
  explained = [round(step[EXPLAINED], 4) for step in steps if EXPLAINED in step]
  return row_from(rows, sweep_report.tokens_spent(run, rows).tolist()) | (
    {EXPLAINED: explained} if explained else {})


def row_from(rows: Sequence[Mapping], tokens: Sequence[int]) -> dict:
  """Returns a row from evaluations, as evaluations.jsonl has them, and the tokens spent by each."""
  figures = {name: [round(row[name], 4) for row in rows]
             for name in ('em', 'f1', 'searches', *TIERS) if name in rows[0]}
  return {
    'temperature': rows[0]['temperature'], 'step': [row['step'] for row in rows], 'tokens': tokens, **figures,
    'each': [''.join(str(int(em)) for em in row['em_each']) for row in rows]}  # fmt: skip


def collect(grid: str, path: pathlib.Path) -> dict[str, dict[int, dict]]:
  """Returns variant -> seed -> row of the runs in a file, after adding those that are finished."""
  plans = plans_of(grid)
  runs = [run for plan in plans for run in plan if sweep.finished(run)]
  parts = {f'{name_of(run, plans[0][0])}/{run.seed}': functools.partial(row_of, run) for run in runs}
  found = {}
  for part, row in common.measured(path, parts, others=True).items():
    variant, seed = part.rsplit('/', 1)
    found.setdefault(variant, {})[int(seed)] = row
  if not found:
    sys.exit(f'{path}: no rows, and no run of configs/claims/{grid}.py is finished')
  return found


def curve(row: Mapping) -> np.ndarray:
  """Returns [T, Q] points of EM at each evaluation."""
  return 100.0 * np.array([list(map(int, of)) for of in row['each']])


def value(row: Mapping, measure: str, budget: float) -> np.ndarray:
  """Returns [Q] values of a run's questions, or [1] of the run, in points."""
  if measure in ('area', 'gain'):
    return verdicts.area(curve(row) - (measure == 'gain') * curve(row)[0], row['tokens'], budget)
  if measure == 'end':
    return curve(row)[-1]
  steps = row['step']
  return np.array([100 * np.trapezoid(row[measure], steps) / steps[-1]])


def at_matched_em(*rows: Mapping) -> list[float]:
  """Returns each run's tier-2 tool rate where it first reaches the tier-2 EM that both reach.

  That is the lower of their maxima; figures are interpolated linearly between evaluations.
  """
  level = min(max(row['em_tier_2']) for row in rows)
  rates = []
  for row in rows:
    em, rate = row['em_tier_2'], row['tool_rate_tier_2']
    place = next(place for place, value in enumerate(em) if value >= level)
    share = (level - em[place - 1]) / (em[place] - em[place - 1]) if place else 1.0
    rates.append(float(rate[max(place - 1, 0)] * (1 - share) + rate[place] * share))
  return rates


def contrast(runs: Mapping[str, Mapping[int, Mapping]], names: Sequence[str],
             measure: str) -> tuple[verdicts.Estimate, np.ndarray] | None:
  """Estimates a contrast over the seeds that all of its variants have; None if there are none.

  Areas go up to what the cheapest of these runs spends. Also returns the differences, [seeds, questions].
  """
  seeds = sorted(set.intersection(*(set(runs.get(name, ())) for name in names)))
  if not seeds:
    return None
  if measure == MATCHED:
    rates = np.array([at_matched_em(*(runs[name][seed] for name in names)) for seed in seeds])
    gaps = 100 * (rates[:, :1] - rates[:, 1:])
  else:
    budget = min(runs[name][seed]['tokens'][-1] for name in names for seed in seeds)
    gaps = sum(sign * np.stack([value(runs[name][seed], measure, budget) for seed in seeds])
               for name, sign in zip(names, (1, -1, -1, 1)))
  return verdicts.estimate(gaps), gaps


def control_of(grid: Grid, runs: Mapping[str, Mapping[int, Mapping]]) -> tuple[bool, str]:
  """Tells whether the control lets the bed decide, and what a policy learns in it."""
  own, other = (runs.get(name, {}).get(0) for name in grid.control)
  if not own or not other:
    return False, ''
  before, right, wrong = (100 * em for em in (own['em'][0], own['em'][-1], other['em'][-1]))
  passes = wrong - before < (right - before) / 2
  said = 'the control passes' if passes else '**the control fails, so nothing is decided**'
  return passes, (f'EM {before:.1f} before, {right:.1f} after, {wrong:.1f} in the control '
                  f'(seed 0): {said}.')


def explained(rows: Mapping[int, Mapping]) -> float | None:
  """Returns what the critic of a variant explains over the last quarter of the steps; None without one."""
  last = lambda row: np.mean(row[EXPLAINED][3 * len(row[EXPLAINED]) // 4:])
  found = [last(row) for row in rows.values() if EXPLAINED in row]
  return float(np.mean(found)) if found else None


def withheld(grid: Grid, runs: Mapping[str, Mapping[int, Mapping]], names: Sequence[str]) -> str:
  """Returns by which rule of the plan a contrast is undecided whatever its interval is; '' by none."""
  for name in names:
    end, explains = np.mean([row['em'][-1] for row in runs[name].values()]), explained(runs[name])
    if end > CEILING:
      return f'undecided, {name} ends at {100 * end:.1f} %'
    if explains is not None and explains < grid.explains:
      return f'undecided, the critic of {name} explains {explains:.2f}'
  return '' if control_of(grid, runs)[0] else 'undecided, no control passed'


def study(grid: str, path: pathlib.Path) -> str:
  """Returns the tables of a grid: its variants, its control, and its contrasts."""
  runs, of = collect(grid, path), GRIDS[grid]
  at = lambda rows, name, scale, place: float(np.mean([scale * row[name][place] for row in rows.values()]))
  every = [row for rows in runs.values() for row in rows.values()]
  figures = [name for name in ('em', *TIERS) if all(name in row for row in every)]
  parts = [common.table([
    {'variant': name, 'seeds': len(rows), 'tokens (k)': at(rows, 'tokens', 1e-3, -1)}
    | {f'{figure}, {when}': at(rows, figure, 100, place) for figure in figures
       for when, place in (('begin', 0), ('end', -1))} | {'searches': at(rows, 'searches', 1, -1)}
    for name, rows in runs.items()]), control_of(of, runs)[1], '\n'.join(
      f'The critic of {name} explains {share:.2f} of the variance of returns at the end.'
      for name, share in ((name, explained(rows)) for name, rows in runs.items()) if share is not None)]
  for measure in of.measures:
    found = {label: contrast(runs, names, measure) for label, names in of.contrasts.items()}
    found = {label: estimated for label, estimated in found.items() if estimated}
    decisive = lambda label: MARGIN if label.startswith('**') and measure == of.measures[0] else None
    if not found:
      continue
    decided = common.decide({label: (of_label, decisive(label)) for label, (of_label, _) in found.items()})
    parts.append(common.table([
      {'contrast': label, f'points of {measure}': common.interval(estimate), 'p (Holm)': row['corrected'],
       'verdict': row['verdict'] and (withheld(of, runs, of.contrasts[label]) or row['verdict']),
       'seeds': len(gaps), 'needed for 3 points': needed(gaps)}
      for row, (label, (estimate, gaps)) in zip(decided, found.items())]))
  return '\n\n'.join(filter(None, parts))


def needed(gaps: np.ndarray) -> int | str:
  """Returns how many seeds find a difference of MARGIN; '' where one cannot tell."""
  return (verdicts.seeds_needed(gaps, MARGIN) or '> 100') if min(gaps.shape) > 1 else ''


def draw(runs: Mapping[str, Mapping[int, Mapping]], file: str) -> None:
  """Draws EM against tokens, a line for each variant, the mean over its seeds."""
  figure, (axes,) = plots.panels([('thousand tokens decoded and prefilled', 'EM, held-out questions (%)')], 1)
  for (name, rows), look in zip(runs.items(), itertools.cycle(plots.looks())):
    tokens, em = (np.mean([row[key] for row in rows.values()], axis=0) for key in ('tokens', 'em'))
    axes.plot(tokens / 1000, 100 * em, label=f'{name} ({len(rows)})', markersize=4, **look)
  plots.save(figure, file, loc='outside right upper', title='mean over (seeds)')


if __name__ == '__main__':
  parser = argparse.ArgumentParser(prog='python -m studies.trained')
  parser.add_argument('grid', choices=GRIDS)
  parser.add_argument('--plot', help='PNG file of EM against tokens; none if not given')
  given = parser.parse_args()
  rows = common.RUNS / f'{given.grid}_trained.jsonl'
  print(study(given.grid, rows))
  if given.plot:
    draw(collect(given.grid, rows), given.plot)
