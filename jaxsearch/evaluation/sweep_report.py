"""The report of a sweep, from its run folders alone: OUT/table.md, OUT/table.json, OUT/curves.png, OUT/steps.png.

Figures are the scores after the last step (held-out questions, at each temperature of the evaluation), means over
the training where a method has some, and the costs of the whole training. The tables show means over seeds, and
mean differences to the baseline, paired by seed, with their 95 % intervals (Student's t); a last one relates gains
in EM to time. Unfinished runs are left out and listed.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import ml_collections
import numpy as np
from scipy.special import stdtrit

from jaxsearch.evaluation import plots
from jaxsearch.evaluation.figures import MAIN, OF_SOURCE, Figure, look_up
from jaxsearch.evaluation.plots import smoothed
from jaxsearch.evaluation.report import column
from jaxsearch.evaluation.sweep import SweepRun, finished
from jaxsearch.evaluation.text_tables import escaped, layout
from jaxsearch.files import write_whole
from jaxsearch.training.row_files import read as read_rows

COSTS = {'tokens_generated': Figure('tokens generated (k)', None, 1e-3, ',.0f'),
         'tokens_prefilled': Figure('prefilled (k)', None, 1e-3, ',.0f'),
         'tokens_trained': Figure('trained (k)', None, 1e-3, ',.0f'), 'seconds': Figure('seconds', None, 1, ',.0f')}
# Means over all steps, where a method has them: Search-R2's drafts, and the terms of what revising them gains.
TRAINING = {'em_draft_per_tree': Figure('EM of drafts'), 'em_kept_per_tree': Figure('EM of kept traces')} | {
  name: Figure(heading, None, 1, '.3f') for name, heading in {
    'a_prec': 'A_prec', 'v_inter': 'V_inter', 's_trim': 'S_trim', 'gain_predicted': 'gain, predicted',
    'gain_measured': 'gain, measured'}.items()}
MAX_COLUMNS = 15  # that fit on a page
FOOTNOTE = (
  "After {steps} steps; EM and F1 in % on {questions} held-out questions. ± and [ ] are 95 % intervals over seeds "
  "(Student's t). Bold: significant, the interval excludes 0; elsewhere there is no significant difference. Nothing "
  'is corrected for multiple comparisons. Seconds are those of the training steps, without evaluation, saving and '
  'compilation.')


def write(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> pathlib.Path:
  """Writes the four files and returns the path of the table. ValueError if no run is finished."""
  out, found = pathlib.Path(config.out), summary(config, runs)
  if not found['variants']:
    raise ValueError(f'{config.out}: no run of this sweep is finished')
  write_whole(out / 'table.json', json.dumps(found, indent=1, ensure_ascii=False) + '\n')
  done = {name: [run for run in runs if run.variant == name and finished(run)] for name in found['variants']}
  plot(done, config, out / 'curves.png')
  plot_steps(done, config, out / 'steps.png')
  write_whole(out / 'table.md', table(found))
  return out / 'table.md'


def summary(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> dict:
  """Returns the content of table.json. A figure's name is that of a cost, or SCORE@TEMPERATURE ('em@0.0')."""
  done = [run for run in runs if finished(run)]
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
                         'relative': relative(variants[name]['figures'], estimates(baseline.values()))}
  before = estimates([scores(run, 0) for run in done])
  return {
    'title': config.title, 'baseline': config.baseline, 'variants': variants,
    'steps': sorted({run.config.steps for run in done}),
    'questions': sorted({row['n'] for run in done for row in evaluations(run)}),
    'before': {key: of['mean'] for key, of in before.items()},
    'not_finished': [str(run) for run in runs if run not in done],
  }  # fmt: skip


def figures(run: SweepRun) -> dict[str, float]:
  """Returns the scores of a finished run after its last step, means over all steps, and costs that every step tells.

  Search-R2's probes cost rollouts that the method does not need: a run with any has no costs but the trained tokens.
  """
  rows = read_rows(run.out / 'metrics.jsonl')
  costs = ['tokens_trained'] if any(row.get('probed') for row in rows) else COSTS
  totals = {name: float((seconds(rows) if name == 'seconds' else column(rows, name)).sum()) for name in costs}
  means = {name: float(np.nanmean(values)) for name in TRAINING
           if not np.isnan(values := column(rows, name)).all()}
  known = {name: total for name, total in totals.items() if not np.isnan(total)}
  return scores(run, run.config.steps) | means | known


def relative(figures: Mapping[str, Mapping], baseline: Mapping[str, Mapping]) -> dict[str, float]:
  """Returns changes of the mean EM and seconds as shares of the baseline's, and their ratio where the time grows.

  How much EM an added share of time buys: Search-R2, table 5.
  """
  changes = {name: figures[name]['mean'] / of['mean'] - 1 for name, of in baseline.items()
             if name in figures and of['mean'] and (name == 'seconds' or name.startswith('em@'))}
  time = changes.get('seconds', 0.0)
  bought = {f'{name}/seconds': change / time for name, change in changes.items() if name != 'seconds' and time > 0}
  return changes | bought


def evaluations(run: SweepRun) -> list[dict]:
  return read_rows(run.out / 'evaluations.jsonl')


def scores(run: SweepRun, step: int) -> dict[str, float]:
  """Returns the main figures in the evaluations after `step`; {} if there are none."""
  return {f'{name}@{row["temperature"]}': row[name] for row in evaluations(run) if row['step'] == step
          for name in (*MAIN, *(name for name in row if name.startswith(OF_SOURCE))) if row.get(name) is not None}


def seconds(rows: Sequence[Mapping]) -> np.ndarray:
  """Returns [rows] seconds of each step, without evaluations and saving.

  A step that compiled programs counts as the median of the others; NaN where a row does not tell, and where drafts
  were probed.
  """
  # Which run of a sweep compiles a program and which finds it in the cache says nothing about its variant.
  times, compiled = column(rows, 'seconds'), column(rows, 'compilations') > 0
  if not compiled.all():
    times[compiled] = np.median(times[~compiled])
  return np.where(column(rows, 'probed') > 0, np.nan, times)


def estimates(records: Iterable[Mapping[str, float]]) -> dict[str, dict]:
  """Returns the `estimate` of every figure that all records, one per seed, have."""
  records = list(records)
  return {name: estimate([record[name] for record in records])
          for name in (records[0] if records else ()) if all(name in record for record in records)}


def estimate(values: Sequence[float]) -> dict:
  """Returns the mean of one value per seed and its 95 % interval (Student's t), None for a single seed."""
  mean, number, low, high = np.mean(values), len(values), None, None
  if number > 1:
    half = stdtrit(number - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(number)
    low, high = float(mean - half), float(mean + half)
  return {'mean': float(mean), 'low': low, 'high': high, 'values': list(values)}


def table(found: Mapping) -> str:
  """Returns table.md of a summary."""
  variants, shown = found['variants'], lambda text: escaped(text, 'markdown')
  names = list(dict.fromkeys(name for of in variants.values() for name in of['figures']))
  names.sort(key=lambda name: name in COSTS)  # costs last
  cells = lambda show, of: [show(name, of[name]) if name in of else '' for name in names]
  rows = [['variant (seeds)', *map(heading, names)]]
  rows += [['before training', *cells(number, found['before'])]] if found['before'] else []
  rows += [[f'{variant} ({len(of["seeds"])})', *cells(interval, of['figures'])] for variant, of in variants.items()]
  parts = [f'# {shown(found["title"])}', markdown(rows)]
  rows = [[variant, *cells(difference, of['differences'])] for variant, of in variants.items() if of['differences']]
  if rows:
    parts.append(f'Differences to {shown(found["baseline"])}, paired by seed:')
    parts.append(markdown([['variant', *map(heading, names)], *rows]))
  parts += relative_table(found)
  parts.append(shown(FOOTNOTE.format(**{key: ' or '.join(map(str, found[key])) for key in ('steps', 'questions')})))
  if found['not_finished']:
    parts.append(shown(f'Not finished: {"; ".join(found["not_finished"])}.'))
  parts += ['![EM against trained tokens and against time](curves.png)',
            '![EM, reward and searches over the steps](steps.png)']
  return '\n\n'.join(parts) + '\n'


def relative_table(found: Mapping) -> list[str]:
  """Returns the table of `relative` changes, in %, and what stands above; none before the baseline is finished."""
  changes = {variant: of['relative'] for variant, of in found['variants'].items() if of.get('relative')}
  columns = sorted(dict.fromkeys(name for of in changes.values() for name in of), key=lambda name: '/' in name)
  if not columns:
    return []
  heads = [name.replace('em@', 'EM, T=').replace('/seconds', ' / seconds') for name in columns]
  cell = lambda name, of: '' if name not in of else f'{of[name]:.2f}' if '/' in name else f'{100 * of[name]:+.1f}'
  rows = [[variant, *(cell(name, of) for name in columns)] for variant, of in changes.items()]
  above = f'Changes against {found["baseline"]} in %, and that of EM over that of time where a variant takes more:'
  return [escaped(above, 'markdown'), markdown([['variant', *heads], *rows])]


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Returns a table; one too wide for a page is transposed, with a row for each figure."""
  return layout(list(zip(*rows)) if len(rows[0]) > MAX_COLUMNS else rows, 'markdown')


def figure_of(name: str) -> Figure:
  """Returns how a figure of a summary is shown."""
  score = name.partition('@')[0]
  return (TRAINING | COSTS).get(score) or look_up(score)


def heading(name: str) -> str:
  _, _, temperature = name.partition('@')
  return figure_of(name).heading + (f', {decoding(float(temperature))}' if temperature else '')


def decoding(temperature: float) -> str:
  return f'T={temperature:g}' if temperature else 'greedy'


def number(name: str, value: float, sign: str = '') -> str:
  """Returns a figure as printed: shares in percent, tokens in thousands."""
  figure = figure_of(name)
  return f'{figure.scale * value:{sign}{figure.digits}}'


def interval(name: str, of: Mapping) -> str:
  """Returns '45.2 ± 3.1', or the mean alone for a single seed."""
  return number(name, of['mean']) + ('' if of['low'] is None else f' ± {number(name, of["high"] - of["mean"])}')


def difference(name: str, of: Mapping) -> str:
  """Returns '+1.2 [-0.4, +2.8]', bold if the interval excludes 0."""
  if of['low'] is None:
    return number(name, of['mean'], '+')
  mean, low, high = (number(name, of[key], '+') for key in ('mean', 'low', 'high'))
  mark = '**' if of['low'] > 0 or of['high'] < 0 else ''
  return f'{mark}{mean} [{low}, {high}]{mark}'


def curve(run: SweepRun, temperature: float | None) -> dict[int, tuple[float, float, float]]:
  """Returns {step: (tokens trained until then, minutes, EM)}; without a temperature, the smoothed EM in training."""
  rows = read_rows(run.out / 'metrics.jsonl')
  steps = [row['step'] for row in rows]
  so_far = lambda values: dict(zip([0, *steps], np.cumsum([0, *values])))
  tokens, minutes = so_far(column(rows, 'tokens_trained')), so_far(seconds(rows) / 60)
  if temperature is None:
    em = dict(zip(steps, smoothed(column(rows, 'em'))))
  else:
    em = {row['step']: row['em'] for row in evaluations(run) if row['temperature'] == temperature}
  return {step: (tokens[step], minutes[step], value) for step, value in em.items() if step in tokens}


def plot(runs: Mapping[str, Sequence[SweepRun]], config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
  """Draws EM against trained tokens and against minutes, a row of plots for each temperature."""
  from matplotlib.ticker import EngFormatter
  temperatures = temperatures_of(runs)
  figure = plots.new_figure(10, 1 + 3.4 * len(temperatures))
  grid = figure.subplots(len(temperatures), 2, squeeze=False, sharey='row')
  draw = drawer(runs, config.baseline)
  for temperature, row in zip(temperatures, grid):
    for name, of in runs.items():
      steps, points = common([curve(run, temperature) for run in of])
      for axes, x in zip(row, np.moveaxis(points[..., :2].mean(axis=0), 1, 0)):
        draw(axes, name, x, 100 * points[..., 2])
    row[0].set_ylabel(em_label(temperature), fontsize=9)
    row[0].xaxis.set_major_formatter(EngFormatter(sep=' '))
  for axes, text in zip(grid[-1], ('tokens trained', 'minutes of training steps')):
    axes.set_xlabel(text, fontsize=9)
  save(figure, config.title, path)


def plot_steps(runs: Mapping[str, Sequence[SweepRun]], config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
  """Draws EM, mean reward and searches of a rollout over the steps (CuSearch's figure 3; its depth is capped)."""
  temperature, draw = temperatures_of(runs)[0], drawer(runs, config.baseline)
  rows = {name: [read_rows(run.out / 'metrics.jsonl') for run in of] for name, of in runs.items()}
  capped = all(row.get('depth_mean') is not None for of in rows.values() for of_run in of for row in of_run)
  figure = plots.new_figure(12, 4.2)
  panels = figure.subplots(1, 3)
  for name, of in runs.items():
    steps, points = common([curve(run, temperature) for run in of])
    draw(panels[0], name, steps, 100 * points[..., 2])
    last = min(map(len, rows[name]))
    for axes, key in zip(panels[1:], ('reward', 'depth_mean' if capped else 'searches')):
      values = np.array([smoothed(column(of_run, key))[:last] for of_run in rows[name]])
      if not np.isnan(values).all():
        draw(axes, name, [row['step'] for row in rows[name][0][:last]], values)
  labels = em_label(temperature), 'mean reward, smoothed', 'searches of a rollout, smoothed'
  for axes, label in zip(panels, labels):
    axes.set_ylabel(label, fontsize=9)
    plots.whole_steps(axes)
  save(figure, config.title, path)


def common(curves: Sequence[Mapping[int, tuple]]) -> tuple[list[int], np.ndarray]:
  """Returns the steps that all curves have, and their points [seeds, steps, 3]."""
  steps = sorted(set.intersection(*map(set, curves)))
  return steps, np.array([[points[step] for step in steps] for points in curves])


def temperatures_of(runs: Mapping[str, Sequence[SweepRun]]) -> tuple[float | None, ...]:
  """Returns the temperatures of the held-out evaluations.

  (None,), for EM in training, where there are fewer than three of them.
  """
  every = [run for of in runs.values() for run in of]
  often = min(len({row['step'] for row in evaluations(run)}) for run in every) >= 3
  return every[0].config.eval.temperatures if often else (None,)


def em_label(temperature: float | None) -> str:
  return 'EM in training, smoothed (%)' if temperature is None else f'held-out EM, {decoding(temperature)} (%)'


def drawer(runs: Mapping[str, Sequence[SweepRun]], baseline: str) -> Callable:
  """Returns draw(axes, variant, x [n], values [seeds, n]): a line, the mean over seeds, in a band of all values."""
  others = [name for name in runs if name != baseline]

  def draw(axes, name: str, x: Sequence[float], values: np.ndarray) -> None:
    colour, style, marker = '#222222', '-', 'o'
    if name != baseline:
      looks = plots.COLOURS, plots.STYLES, plots.MARKERS
      colour, style, marker = (kinds[others.index(name) % len(kinds)] for kinds in looks)
    axes.plot(x, values.mean(axis=0), linestyle=style, color=colour, linewidth=2, marker=marker, markersize=5,
              markevery=max(1, len(x) // 8), label=f'{name} ({len(runs[name])})')
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.13, linewidth=0)

  return draw


def save(figure, title: str, path: pathlib.Path) -> None:
  """Writes a figure of such lines, with its legend."""
  for axes in figure.axes:
    axes.grid(alpha=0.25)
  plots.finish(figure)
  figure.suptitle(title, fontsize=11)
  figure.legend(*figure.axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=8,
                frameon=False, handlelength=4, title='mean over (seeds); band: lowest to highest', title_fontsize=8)
  figure.savefig(path, dpi=110)
