"""The report of a sweep, from its run folders alone: table.md, table.json, curves.png and steps.png.

Figures are the scores after the last step at each temperature, means over the training where a method has
some, and the costs of the whole training. The tables show means over seeds and mean differences to the
baseline, paired by seed, with 95 % intervals (Student's t). Where evaluations say what each question got, a
table of verdicts follows: areas under EM against tokens spent, over seeds and questions together, see
verdicts.py. Unfinished runs are left out and listed.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import ml_collections
import numpy as np

from jaxsearch.evaluation import plots, verdicts
from jaxsearch.evaluation.figures import MAIN, OF_REFINEMENT, Figure, column, look_up, sources_in
from jaxsearch.evaluation.plots import STEP, TOKENS
from jaxsearch.evaluation.sweep import SweepRun, check_finished, finished
from jaxsearch.evaluation.tables import escaped, layout
from jaxsearch.files import write_whole
from jaxsearch.training.row_files import read as read_rows

COSTS = {'tokens_generated': Figure('tokens generated (k)', None, 1e-3, ',.0f'),
         'tokens_prefilled': Figure('prefilled (k)', None, 1e-3, ',.0f'),
         'tokens_trained': Figure('trained (k)', None, 1e-3, ',.0f'),
         'seconds': Figure('seconds', None, 1, ',.0f')}
MAX_COLUMNS = 15  # that fit on a page
MARGIN = 3.0      # points of EM, the smallest difference that matters
FOOTNOTE = (
  'After {steps} steps; EM and F1 in % on {questions} held-out questions. ± and [ ] are 95 % intervals over '
  "seeds (Student's t). Bold: significant, the interval excludes 0; elsewhere there is no significant "
  'difference. Nothing here is corrected for multiple comparisons. Seconds are those of the training steps, '
  'without evaluation, saving and compilation.')
SPENT = ('tokens_decoded', 'tokens_prefilled')
VERDICTS = (
  'Against {baseline}, {label}: EM at the end, and the area under EM against tokens decoded and prefilled, '
  'up to {budget:,.0f} k tokens. 95 % intervals over seeds and questions together, paired by both; '
  'p corrected over the variants with a verdict (Holm). Seeds needed: for {margin:g} points of area, with '
  '80 % power.')
# Axes of the plots.
MINUTES, REWARD = 'minutes of training steps', 'mean reward, smoothed'
SEARCHES = 'searches of a rollout, smoothed'
DEPTH = 'searches of a rollout, capped, smoothed'  # as CuSearch counts them
TRAINING_EM = 'EM in training, smoothed (%)'


def write(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> pathlib.Path:
  """Writes the four files and returns the path of the table. ValueError if no run is finished."""
  out, of_sweep = pathlib.Path(config.out), summary(config, runs)
  if not of_sweep['variants']:
    raise ValueError(f'{config.out}: no run of this sweep is finished')
  write_whole(out / 'table.json', json.dumps(of_sweep, indent=1, ensure_ascii=False) + '\n')
  write_whole(out / 'table.md', table(of_sweep))
  lines = {name: [curves(run) for run in runs if run.variant == name and finished(run)]
           for name in of_sweep['variants']}
  every = [of_run for of in lines.values() for of_run in of]
  held_out = [name for name in every[0] if name.startswith('held-out')]
  if min(np.isfinite(of_run[name]).sum() for of_run in every for name in held_out) < 3:
    held_out = [TRAINING_EM]
  capped = not any(np.isnan(of_run[DEPTH][1:]).any() for of_run in every)
  plot(lines, config, [(x, em) for em in held_out for x in (TOKENS, MINUTES)], 2, out / 'curves.png')
  over_steps = held_out[0], REWARD, DEPTH if capped else SEARCHES
  plot(lines, config, [(STEP, y) for y in over_steps], 3, out / 'steps.png')
  return out / 'table.md'


def summary(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> dict:
  """Returns the content of table.json. A figure's name is that of a cost, or SCORE@TEMPERATURE ('em@0.0')."""
  done = [run for run in runs if finished(run)]
  for run in done:
    check_finished(run)
  values = {name: {run.seed: figures(run) for run in done if run.variant == name} for name in config.variants}
  baseline, variants = values[config.baseline], {}
  for name, by_seed in values.items():
    if by_seed:
      variants[name] = {'overrides': config.variants[name], 'seeds': list(by_seed),
                        'figures': estimates(by_seed.values()), 'differences': {}}
    if by_seed and name != config.baseline:
      gaps = [{key: value - baseline[seed][key] for key, value in of.items() if key in baseline[seed]}
              for seed, of in by_seed.items() if seed in baseline]
      variants[name] |= {'differences': estimates(gaps),
                         'relative': relative(*(estimates(of[seed] for seed in by_seed if seed in baseline)
                                                for of in (by_seed, baseline)))}
  before = estimates([scores(run, 0) for run in done])
  return {
    'title': config.title, 'baseline': config.baseline, 'variants': variants,
    'steps': sorted({run.config.steps for run in done}),
    'questions': sorted({row['n'] for run in done for row in evaluations(run)}),
    'before': {key: of['mean'] for key, of in before.items()}, 'verdicts': decide(config, done),
    'not_finished': [str(run) for run in runs if run not in done],
  }


def figures(run: SweepRun) -> dict[str, float]:
  """Returns the scores of a finished run after its last step, means over its steps, and its costs.

  Search-R2's probes cost rollouts that the method does not need: such a run has no costs but the trained
  tokens.
  """
  rows = read_rows(run.out / 'metrics.jsonl')
  noted = {name: column(rows, name) for name in OF_REFINEMENT}
  means = {name: float(np.nanmean(values)) for name, values in noted.items() if not np.isnan(values).all()}
  probed = any(row.get('probed') for row in rows)
  costs = {name: float((seconds(rows) if name == 'seconds' else column(rows, name)).sum())
           for name in COSTS if not probed or name == 'tokens_trained'}
  return scores(run, run.config.steps) | means | {
    name: total for name, total in costs.items() if not np.isnan(total)}


def relative(figures: Mapping[str, Mapping], baseline: Mapping[str, Mapping]) -> dict[str, float]:
  """Returns changes of the mean EM and seconds as shares of the baseline's.

  And their ratio where the time grows: how much EM an added share of time buys (Search-R2, table 5).
  """
  changes = {name: figures[name]['mean'] / of['mean'] - 1 for name, of in baseline.items()
             if name in figures and of['mean'] and (name == 'seconds' or name.startswith('em@'))}
  time = changes.get('seconds', 0.0)
  return changes | {f'{name}/seconds': change / time for name, change in changes.items()
                    if name != 'seconds' and time > 0}


def decide(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> dict[str, dict]:
  """Returns, by temperature, `budget` (tokens) and of every variant the means and differences in points.

  `area` and `end` have the mean and, but for the baseline, a `difference` (mean, low, high, p) and
  `seeds_needed` to find one of MARGIN; the area also the `corrected` p and the `verdict` of each variant of
  `config.primary` (all if empty). {} for runs whose evaluations do not say what each question got, or asked
  different ones. Runs with probes are left out, as their tokens are not the method's.
  """
  runs = [run for run in runs if not any(row.get('probed') for row in read_rows(run.out / 'metrics.jsonl'))]
  decided = {}
  for temperature in dict.fromkeys(row['temperature'] for run in runs for row in evaluations(run)):
    each = {run: [row for row in evaluations(run) if row['temperature'] == temperature] for run in runs}
    asked = {(len(row.get('em_each', ())), *(sample['id'] for sample in row.get('samples', ())))
             for rows in each.values() for row in rows}
    if any(not number for number, *_ in asked) or len(asked) > 1:  # an older version's, or other questions
      continue
    spent = {run: tokens_spent(run, rows) for run, rows in each.items()}
    budget = min(of[-1] for of in spent.values())
    curves = {run: 100 * np.array([row['em_each'] for row in rows]) for run, rows in each.items()}
    measures = {'area': lambda run: verdicts.area(curves[run], spent[run], budget),
                'end': lambda run: curves[run][-1]}
    variants = {name: {} for name in config.variants if any(run.variant == name for run in runs)}
    for measure, of_run in measures.items():
      values = {name: {run.seed: of_run(run) for run in runs if run.variant == name} for name in variants}
      baseline = values.get(config.baseline, {})
      for name, by_seed in values.items():
        variants[name][measure] = compare(by_seed, {} if name == config.baseline else baseline)
    add_verdicts(variants, config)
    decided[f'{temperature}'] = {'budget': float(budget), 'variants': variants}
  return decided


def compare(by_seed: Mapping[int, np.ndarray], baseline: Mapping[int, np.ndarray]) -> dict:
  """Returns the mean of seed -> values [Q], and its difference to a baseline's."""
  of = {'mean': float(np.mean(list(by_seed.values())))}
  if both := by_seed.keys() & baseline.keys():
    gaps = np.stack([by_seed[seed] - baseline[seed] for seed in sorted(both)])
    of['difference'] = verdicts.estimate(gaps)._asdict()
    of['seeds_needed'] = verdicts.seeds_needed(gaps, MARGIN)
  return of


def add_verdicts(variants: Mapping[str, dict], config: ml_collections.ConfigDict) -> None:
  """Adds corrected p values and verdicts to the differences of areas that decide."""
  decisive = [variants[name]['area'] for name in config.get('primary') or variants
              if variants.get(name, {}).get('area', {}).get('difference', {}).get('p') is not None]
  for of, p in zip(decisive, verdicts.holm([of['difference']['p'] for of in decisive])):
    estimate = verdicts.Estimate(**of['difference'])
    of |= {'corrected': p, 'verdict': verdicts.verdict(estimate, MARGIN, p)}


def tokens_spent(run: SweepRun, rows: Iterable[Mapping]) -> np.ndarray:
  """Returns the tokens that a run had decoded and prefilled in training by each of its evaluations."""
  steps = read_rows(run.out / 'metrics.jsonl')
  totals = np.cumsum([0, *sum(column(steps, name) for name in SPENT)])
  return totals[[row['step'] for row in rows]]


def evaluations(run: SweepRun) -> list[dict]:
  return read_rows(run.out / 'evaluations.jsonl')


def scores(run: SweepRun, step: int) -> dict[str, float]:
  """Returns the main figures in the evaluations after `step`; {} if there are none."""
  return {f'{name}@{row["temperature"]}': row[name] for row in evaluations(run) if row['step'] == step
          for name in (*MAIN, *sources_in([row])) if row.get(name) is not None}


def seconds(rows: Sequence[Mapping]) -> np.ndarray:
  """Returns [rows] seconds of each step, without evaluations and saving.

  A step that compiled programs counts as the median of the others; NaN where a row does not tell, and where
  drafts were probed.
  """
  # Which run of a sweep compiles a program and which finds it in the cache says nothing about its variant.
  times, compiled = column(rows, 'seconds'), column(rows, 'compilations') > 0
  if not compiled.all():
    times[compiled] = np.median(times[~compiled])
  return np.where(column(rows, 'probed') > 0, np.nan, times)


def estimates(records: Iterable[Mapping[str, float]]) -> dict[str, dict]:
  """Returns the estimate of every figure that all records, one per seed, have, with its values."""
  records = list(records)
  values = {name: [record[name] for record in records]
            for name in (records[0] if records else ()) if all(name in record for record in records)}
  return {name: verdicts.estimate(of)._asdict() | {'values': of} for name, of in values.items()}


def table(of_sweep: Mapping) -> str:
  """Returns table.md of a summary."""
  variants, safe = of_sweep['variants'], lambda text: escaped(text, 'markdown')
  baseline, parts = safe(of_sweep['baseline']), [f'# {safe(of_sweep["title"])}']

  def add(said: str, corner: str, show: Callable, records: Mapping[str, Mapping]) -> None:
    """Adds a sentence and a table with a row for each record and a column for each of their figures."""
    names = dict.fromkeys(name for of in records.values() for name in of)
    names = sorted(names, key=lambda name: ('/' in name, name in COSTS))  # costs last
    rows = [[label, *(show(name, of[name]) if name in of else '' for name in names)]
            for label, of in records.items() if of]
    if rows:
      parts.extend([*filter(None, [said]), markdown([[corner, *map(heading, names)], *rows])])

  add('', 'variant (seeds)', interval, {'before training': of_sweep['before']} | {
    f'{name} ({len(of["seeds"])})': of['figures'] for name, of in variants.items()})
  add(f'Differences to {baseline}, paired by seed:', 'variant', difference,
      {name: of['differences'] for name, of in variants.items()})
  add(f'Changes against {baseline} in %, and that of EM over that of time where a variant takes more:',
      'variant', lambda name, value: f'{value:.2f}' if '/' in name else f'{100 * value:+.1f}',
      {name: of.get('relative', {}) for name, of in variants.items()})
  numbers = {key: ' or '.join(map(str, of_sweep[key])) for key in ('steps', 'questions')}
  parts.append(safe(FOOTNOTE.format(**numbers)))
  for temperature, of in of_sweep['verdicts'].items():
    said = VERDICTS.format(baseline=baseline, label=decoding(float(temperature)),
                           budget=of['budget'] / 1000, margin=MARGIN)
    parts += [said, markdown(verdict_rows(of['variants']))]
  if of_sweep['not_finished']:
    parts.append(safe(f'Not finished: {"; ".join(of_sweep["not_finished"])}.'))
  parts += ['![EM against trained tokens and against time](curves.png)',
            '![EM, reward and searches over the steps](steps.png)']
  return '\n\n'.join(parts) + '\n'


def verdict_rows(variants: Mapping[str, Mapping]) -> list[list[str]]:
  """Returns the table of verdicts: means, differences, corrected p and verdicts of variants."""
  rows = [['variant', 'area', 'Δ area', 'p', 'verdict', 'seeds needed', 'end', 'Δ end']]
  figure = Figure('', None, 1, '.1f')
  for name, of in variants.items():
    gaps = [of[measure].get('difference') for measure in ('area', 'end')]
    area, end = (figure.shown(gap['mean'], gap['low'], gap['high'], sign='+') if gap else '' for gap in gaps)
    corrected = of['area'].get('corrected')
    rows.append([name, figure.shown(of['area']['mean']), area,
                 '' if corrected is None else f'{corrected:.3f}', of['area'].get('verdict', ''),
                 str(of['area'].get('seeds_needed') or ''), figure.shown(of['end']['mean']), end])
  return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Returns a table; one too wide for a page is transposed, with a row for each figure."""
  return layout(list(zip(*rows)) if len(rows[0]) > MAX_COLUMNS else rows, 'markdown')


def figure_of(name: str) -> Figure:
  """Returns how a figure of a summary is shown."""
  score = name.partition('@')[0]
  return COSTS.get(score) or look_up(score)


def heading(name: str) -> str:
  """Returns the heading of a figure, or of one figure / another."""
  if '/' in name:
    return ' / '.join(map(heading, name.split('/')))
  _, _, temperature = name.partition('@')
  return figure_of(name).heading + (f', {decoding(float(temperature))}' if temperature else '')


def decoding(temperature: float) -> str:
  return f'T={temperature:g}' if temperature else 'greedy'


def interval(name: str, of: Mapping | float) -> str:
  """Returns '45.2 ± 3.1' of an estimate; a plain number and the mean of a single seed stand alone."""
  figure, of = figure_of(name), of if isinstance(of, Mapping) else {'mean': of, 'low': None}
  half = '' if of['low'] is None else f' ± {figure.shown(of["high"] - of["mean"])}'
  return figure.shown(of['mean']) + half


def difference(name: str, of: Mapping) -> str:
  """Returns '+1.2 [-0.4, +2.8]', bold if the interval excludes 0."""
  mark = '**' if of['low'] is not None and (of['low'] > 0 or of['high'] < 0) else ''
  return mark + figure_of(name).shown(of['mean'], of['low'], of['high'], sign='+') + mark


def curves(run: SweepRun) -> dict[str, np.ndarray]:
  """Returns what is plotted of a run: axis -> [steps + 1] values from step 0 on, NaN where none is known."""
  rows, tests = read_rows(run.out / 'metrics.jsonl'), evaluations(run)

  def line(rows: Sequence[Mapping], values: np.ndarray) -> np.ndarray:
    by_step = np.full(run.config.steps + 1, np.nan)
    by_step[[row['step'] for row in rows]] = values
    return by_step

  so_far = lambda values: line([{'step': 0}, *rows], np.cumsum([0, *values]))
  averaged = lambda name: line(rows, plots.smoothed(column(rows, name)))
  lines = {STEP: np.arange(run.config.steps + 1.0), TOKENS: so_far(column(rows, 'tokens_trained')),
           MINUTES: so_far(seconds(rows) / 60), REWARD: averaged('reward'), SEARCHES: averaged('searches'),
           DEPTH: averaged('depth_mean'), TRAINING_EM: 100 * averaged('em')}
  for temperature in run.config.eval.temperatures:
    chosen = [row for row in tests if row['temperature'] == temperature]
    lines[f'held-out EM, {decoding(temperature)} (%)'] = line(chosen, 100 * column(chosen, 'em'))
  return lines


def plot(lines: Mapping[str, Sequence[Mapping]], config: ml_collections.ConfigDict,
         labels: Sequence[tuple[str, str]], columns: int, path: pathlib.Path) -> None:
  """Draws panels (axis x, axis y) with a line for each variant, the mean over seeds in a band of all values.

  `lines` has the `curves` of the runs of each variant.
  """
  figure, panels = plots.panels(labels, columns)
  looks = dict(zip([name for name in lines if name != config.baseline], plots.looks()))
  looks[config.baseline] = {'color': '#222222', 'linestyle': '-', 'marker': 'o'}
  for axes, axis in zip(panels, labels):
    for name, of in lines.items():
      x, y = (np.array([of_run[label] for of_run in of]) for label in axis)  # [runs, steps + 1]
      known = ~np.isnan(x + y).any(axis=0)
      place, values, look = x[:, known].mean(axis=0), y[:, known], looks[name]
      axes.plot(place, values.mean(axis=0), linewidth=2, markersize=5, markevery=max(1, len(place) // 8),
                label=f'{name} ({len(of)})', **look)
      axes.fill_between(place, values.min(axis=0), values.max(axis=0), color=look['color'], alpha=0.13,
                        linewidth=0)
  figure.suptitle(config.title, fontsize=11)
  plots.save(figure, path, loc='outside lower center', ncols=5, handlelength=4, title_fontsize=8,
             title='mean over (seeds); band: lowest to highest')
