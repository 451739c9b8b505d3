"""The report of a sweep, from its run folders alone: OUT/table.md, OUT/table.json, OUT/curves.png and OUT/steps.png.

Figures are the scores after the last step (held-out questions, at each temperature of the evaluation), means over the training
where a method has some, and the costs of the whole training. The tables show means over seeds, and mean differences to the
baseline, paired by seed, with their 95 % intervals (Student's t); a last one relates gains in EM to time. Unfinished runs are
left out and listed.
"""

import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import ml_collections
import numpy as np
from scipy.special import stdtrit

from jaxsearch.evaluation.report import OF_SOURCE, column, smoothed
from jaxsearch.evaluation.sweep import SweepRun, finished
from jaxsearch.evaluation.table import escaped
from jaxsearch.files import write_whole
from jaxsearch.training.row_files import read as read_rows

# name -> (column heading, scale, number format). Scores of an evaluation; those after the first three only where
# config.eval.tiers or a critic gives them, see competence.py.
SCORES = {
  'em': ('EM', 100, '.1f'), 'f1': ('F1', 100, '.1f'), 'searches': ('searches', 1, '.2f'),
  'em_tier_1': ('EM tier 1', 100, '.1f'), 'em_tier_2': ('EM tier 2', 100, '.1f'),
  'tool_rate_tier_1': ('tool use tier 1', 100, '.1f'), 'tool_rate_tier_2': ('tool use tier 2', 100, '.1f'),
  'confident_wrong': ('confident and wrong', 100, '.1f'), 'tokens_per_answer': ('tokens an answer', 1, '.0f'),
  'auc': ('AUC', 1, '.2f'), 'ece': ('ECE', 1, '.2f'), 'explained_variance': ('explained variance', 1, '.2f'),
}  # fmt: skip
COSTS = {'tokens_generated': ('tokens generated (k)', 1e-3, ',.0f'), 'tokens_prefilled': ('prefilled (k)', 1e-3, ',.0f'),
         'tokens_trained': ('trained (k)', 1e-3, ',.0f'), 'seconds': ('seconds', 1, ',.0f')}
TRAINING = {  # means over all steps, where a method has them: Search-R2's drafts, and the terms of what revising them gains
  'em_draft_per_tree': ('EM of drafts', 100, '.1f'), 'em_kept_per_tree': ('EM of kept traces', 100, '.1f'),
  'a_prec': ('A_prec', 1, '.3f'),
  'v_inter': ('V_inter', 1, '.3f'), 's_trim': ('S_trim', 1, '.3f'), 'gain_predicted': ('gain, predicted', 1, '.3f'),
  'gain_measured': ('gain, measured', 1, '.3f')}
MAX_COLUMNS = 15  # that fit on a page
_shown = functools.partial(escaped, form='markdown')
# Of the variants beside the baseline: distinct for the colour-blind (Okabe and Ito), and without any colour by line and marker.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#7b3f00')
STYLES, MARKERS = ('--', '-.', ':', (0, (5, 1, 1, 1, 1, 1))), 'sv^Dx*P<>'
FOOTNOTE = (
  "After {steps} steps; EM and F1 in % on {questions} held-out questions. ± and [ ] are 95 % intervals over seeds (Student's t). "
  'Bold: significant, the interval excludes 0; elsewhere there is no significant difference. Nothing is corrected for multiple '
  'comparisons. Seconds are those of the training steps, without evaluation, saving and compilation.')


def write(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> pathlib.Path:
  """Writes the four files and returns the path of the table. ValueError if no run is finished."""
  out, found = pathlib.Path(config.out), summary(config, runs)
  if not found['variants']:
    raise ValueError(f'{config.out}: no run of this sweep is finished')
  write_whole(out / 'table.json', json.dumps(found, indent=1, ensure_ascii=False) + '\n')
  done = {name: [run for run in runs if run.variant == name and finished(run)] for name in found['variants']}
  plot(done, config, out / 'curves.png')
  plot_steps(done, config, out / 'steps.png')
  page = out / 'table.md'
  write_whole(page, table(found))
  return page


def summary(config: ml_collections.ConfigDict, runs: Sequence[SweepRun]) -> dict:
  """The content of table.json. A figure's name is that of a cost, or SCORE@TEMPERATURE: 'em@0.0' is greedy EM."""
  done = [run for run in runs if finished(run)]
  values = {name: {run.seed: figures(run) for run in done if run.variant == name} for name in config.variants}
  baseline, variants = values[config.baseline], {}
  for name, by_seed in values.items():
    if not by_seed:
      continue
    differences = [{key: value - baseline[seed][key] for key, value in of.items() if key in baseline[seed]}
                   for seed, of in by_seed.items() if seed in baseline and name != config.baseline]
    variants[name] = {'overrides': config.variants[name], 'seeds': list(by_seed), 'figures': estimates(by_seed.values()),
                      'differences': estimates(differences)}
    if name != config.baseline:
      variants[name]['relative'] = relative(variants[name]['figures'], estimates(baseline.values()))
  before = estimates([scores(run, 0) for run in done])
  return {
    'title': config.title, 'baseline': config.baseline, 'variants': variants,
    'steps': sorted({run.config.steps for run in done}),
    'questions': sorted({row['n'] for run in done for row in evaluations(run)}),
    'before': {key: of['mean'] for key, of in before.items()},
    'not_finished': [str(run) for run in runs if run not in done],
  }  # fmt: skip


def figures(run: SweepRun) -> dict[str, float]:
  """The figures of a finished run: scores after the last step, means over all steps; tokens and seconds of all steps, where every
  step tells them. Search-R2's probes cost rollouts that the method does not need: a run with any has no costs but the trained
  tokens."""
  rows = read_rows(run.out / 'metrics.jsonl')
  costs = ['tokens_trained'] if any(row.get('probed') for row in rows) else COSTS
  totals = {name: float((seconds(rows) if name == 'seconds' else column(rows, name)).sum()) for name in costs}
  means = {name: float(np.nanmean(values)) for name in TRAINING if not np.isnan(values := column(rows, name)).all()}
  return scores(run, run.config.steps) | means | {name: total for name, total in totals.items() if not np.isnan(total)}


def relative(figures: Mapping[str, Mapping], baseline: Mapping[str, Mapping]) -> dict[str, float]:
  """Changes of the mean EM and seconds as shares of the baseline's, and their ratio where the time grows: how much EM an added
  share of time buys (Search-R2, table 5)."""
  changes = {name: figures[name]['mean'] / of['mean'] - 1 for name, of in baseline.items()
             if name in figures and of['mean'] and (name == 'seconds' or name.startswith('em@'))}
  time = changes.get('seconds', 0.0)
  return changes | {f'{name}/seconds': change / time for name, change in changes.items() if name != 'seconds' and time > 0}


def evaluations(run: SweepRun) -> list[dict]:
  return read_rows(run.out / 'evaluations.jsonl')


def scores(run: SweepRun, step: int) -> dict[str, float]:
  """The `SCORES` in the evaluations after `step`; empty if there are none."""
  return {f'{name}@{row["temperature"]}': row[name] for row in evaluations(run) if row['step'] == step
          for name in (*SCORES, *(name for name in row if name.startswith(OF_SOURCE))) if row.get(name) is not None}


def seconds(rows: Sequence[Mapping]) -> np.ndarray:
  """[rows] seconds of each step, without evaluations and saving; a step that compiled programs counts as the median of the
  others; NaN where a row does not tell, and where drafts were probed."""
  # Which run of a sweep compiles a program and which finds it in the cache says nothing about its variant.
  own, compiled = column(rows, 'seconds'), column(rows, 'compilations') > 0
  if not compiled.all():
    own[compiled] = np.median(own[~compiled])
  return np.where(column(rows, 'probed') > 0, np.nan, own)


def estimates(records: Iterable[Mapping[str, float]]) -> dict[str, dict]:
  """The `estimate` of every figure that all records, one per seed, have."""
  records = list(records)
  return {name: estimate([record[name] for record in records])
          for name in (records[0] if records else ()) if all(name in record for record in records)}


def estimate(values: Sequence[float]) -> dict:
  """Mean of one value per seed and its 95 % interval (Student's t), None for a single seed."""
  mean, number, low, high = np.mean(values), len(values), None, None
  if number > 1:
    half = stdtrit(number - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(number)
    low, high = float(mean - half), float(mean + half)
  return {'mean': float(mean), 'low': low, 'high': high, 'values': list(values)}


def table(found: Mapping) -> str:
  """table.md of a summary."""
  variants = found['variants']
  names = list(dict.fromkeys(name for of in variants.values() for name in of['figures']))
  names.sort(key=lambda name: name in COSTS)  # costs last
  cells = lambda show, of: [show(name, of[name]) if name in of else '' for name in names]
  heads = []
  for score, _, temperature in (name.partition('@') for name in names):
    heads.append(look_up(score)[0] + (f', {decoding(float(temperature))}' if temperature else ''))
  rows = [['before training', *cells(number, found['before'])]] if found['before'] else []
  rows += [[f'{variant} ({len(of["seeds"])})', *cells(interval, of['figures'])] for variant, of in variants.items()]
  lines = [f'# {_shown(found["title"])}', '', *markdown([['variant (seeds)', *heads], *rows])]
  rows = [[variant, *cells(difference, of['differences'])] for variant, of in variants.items() if of['differences']]
  if rows:
    lines += ['', f'Differences to {_shown(found["baseline"])}, paired by seed:', '', *markdown([['variant', *heads], *rows])]
  lines += relative_table(found)
  note = FOOTNOTE.format(**{key: ' or '.join(map(str, found[key])) for key in ('steps', 'questions')})
  lines += ['', _shown(note)]
  if found['not_finished']:
    lines += ['', _shown(f'Not finished: {"; ".join(found["not_finished"])}.')]
  return '\n'.join([*lines, '', '![EM against trained tokens and against time](curves.png)', '',
                    '![EM, reward and searches over the steps](steps.png)', ''])


def relative_table(found: Mapping) -> list[str]:
  """The lines of the table of `relative` changes, in %; none before the baseline is finished."""
  changes = {variant: of['relative'] for variant, of in found['variants'].items() if of.get('relative')}
  columns = sorted(dict.fromkeys(name for of in changes.values() for name in of), key=lambda name: '/' in name)
  if not columns:
    return []
  heads = [name.replace('em@', 'EM, T=').replace('/seconds', ' / seconds') for name in columns]
  cell = lambda name, of: '' if name not in of else f'{of[name]:.2f}' if '/' in name else f'{100 * of[name]:+.1f}'
  rows = ([variant, *(cell(name, of) for name in columns)] for variant, of in changes.items())
  head = f'Changes against {found["baseline"]} in %, and that of EM over that of time where a variant takes more:'
  return ['', _shown(head), '', *markdown([['variant', *heads], *rows])]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
  """The lines of a table, its heading row first; a table too wide for a page is transposed, with a row for each figure."""
  if len(rows[0]) > MAX_COLUMNS:
    rows = list(zip(*rows))
  line = lambda cells: f'| {" | ".join(_shown(cell) for cell in cells)} |'
  return [line(rows[0]), f'|:--|{"--:|" * (len(rows[0]) - 1)}', *map(line, rows[1:])]


def decoding(temperature: float) -> str:
  return f'T={temperature:g}' if temperature else 'greedy'


def look_up(name: str) -> tuple[str, float, str]:
  """(column heading, scale, number format) of a figure; EM of a data set is shown as EM."""
  if name.startswith(OF_SOURCE):
    return f'EM {name.removeprefix(OF_SOURCE)}', *SCORES['em'][1:]
  return (SCORES | TRAINING | COSTS)[name]


def number(name: str, value: float, sign: str = '') -> str:
  """A figure as printed: shares in percent, tokens in thousands."""
  _, scale, digits = look_up(name.partition('@')[0])
  return f'{scale * value:{sign}{digits}}'


def interval(name: str, of: Mapping) -> str:
  """'45.2 ± 3.1', or the mean alone for a single seed."""
  return number(name, of['mean']) + ('' if of['low'] is None else f' ± {number(name, of["high"] - of["mean"])}')


def difference(name: str, of: Mapping) -> str:
  """'+1.2 [-0.4, +2.8]', bold if the interval excludes 0."""
  if of['low'] is None:
    return number(name, of['mean'], '+')
  mean, low, high = (number(name, of[key], '+') for key in ('mean', 'low', 'high'))
  mark = '**' if of['low'] > 0 or of['high'] < 0 else ''
  return f'{mark}{mean} [{low}, {high}]{mark}'


def curve(run: SweepRun, temperature: float | None) -> dict[int, tuple[float, float, float]]:
  """{step: (tokens trained until then, minutes, EM)}; without a temperature, the smoothed EM of the training rollouts."""
  rows = read_rows(run.out / 'metrics.jsonl')
  so_far = lambda values: dict(zip((0, *(row['step'] for row in rows)), np.cumsum([0, *values])))
  tokens, minutes = so_far(column(rows, 'tokens_trained')), so_far(seconds(rows) / 60)
  if temperature is None:
    em = dict(zip((row['step'] for row in rows), smoothed(column(rows, 'em'))))
  else:
    em = {row['step']: row['em'] for row in evaluations(run) if row['temperature'] == temperature}
  return {step: (tokens[step], minutes[step], value) for step, value in em.items() if step in tokens}


def plot(runs: Mapping[str, Sequence[SweepRun]], config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
  """EM against trained tokens and against minutes: a line for each variant (mean over seeds) in a band from lowest to highest."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  from matplotlib.ticker import EngFormatter
  temperatures = temperatures_of(runs)  # one row of plots for each
  figure = Figure(figsize=(10, 1 + 3.4 * len(temperatures)), layout='constrained')
  grid = figure.subplots(len(temperatures), 2, squeeze=False, sharey='row')
  for temperature, row in zip(temperatures, grid):
    for name, of in runs.items():
      curves = [curve(run, temperature) for run in of]
      steps = sorted(set.intersection(*map(set, curves)))
      points = np.array([[curve[step] for step in steps] for curve in curves])  # [seeds, steps, 3]
      for axes, x in zip(row, np.moveaxis(points[..., :2].mean(axis=0), 1, 0)):
        draw(axes, x, 100 * points[..., 2], f'{name} ({len(of)})', look(name, runs, config.baseline))
    row[0].set_ylabel(em_label(temperature), fontsize=9)
    row[0].xaxis.set_major_formatter(EngFormatter(sep=' '))
  for axes, text in zip(grid[-1], ('tokens trained', 'minutes of training steps')):
    axes.set_xlabel(text, fontsize=9)
  save(figure, config.title, path)


def plot_steps(runs: Mapping[str, Sequence[SweepRun]], config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
  """EM, mean reward and searches of a rollout over the steps, by variant, as `plot` draws them (CuSearch's figure 3; its depth
  is capped, where rows have it)."""
  from matplotlib.figure import Figure
  from matplotlib.ticker import MaxNLocator
  temperature = temperatures_of(runs)[0]
  rows = {name: [read_rows(run.out / 'metrics.jsonl') for run in of] for name, of in runs.items()}
  capped = all(row.get('depth_mean') is not None for of in rows.values() for own in of for row in own)
  figure = Figure(figsize=(12, 4.2), layout='constrained')
  panels = figure.subplots(1, 3)
  for name, of in runs.items():
    own, shown = look(name, runs, config.baseline), f'{name} ({len(of)})'
    curves = [{step: em for step, (*_, em) in curve(run, temperature).items()} for run in of]
    steps = sorted(set.intersection(*map(set, curves)))
    draw(panels[0], steps, np.array([[100 * one[step] for step in steps] for one in curves]), shown, own)
    for axes, key in zip(panels[1:], ('reward', 'depth_mean' if capped else 'searches')):
      last = min(map(len, rows[name]))
      values = np.array([smoothed(column(one, key))[:last] for one in rows[name]])
      if not np.isnan(values).all():
        draw(axes, [row['step'] for row in rows[name][0][:last]], values, shown, own)
  for axes, label in zip(panels, (em_label(temperature), 'mean reward, smoothed', 'searches of a rollout, smoothed')):
    axes.set_ylabel(label, fontsize=9)
    axes.set_xlabel('step', fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
  save(figure, config.title, path)


def temperatures_of(runs: Mapping[str, Sequence[SweepRun]]) -> tuple[float | None, ...]:
  """The temperatures of the held-out evaluations; (None,), for EM in training, where there are fewer than three of them."""
  every = [run for of in runs.values() for run in of]
  often = min(len({row['step'] for row in evaluations(run)}) for run in every) >= 3
  return every[0].config.eval.temperatures if often else (None,)


def em_label(temperature: float | None) -> str:
  return 'EM in training, smoothed (%)' if temperature is None else f'held-out EM, {decoding(temperature)} (%)'


def look(name: str, names: Iterable[str], baseline: str) -> tuple:
  """Colour, line style and marker of a variant."""
  if name == baseline:
    return '#222222', '-', 'o'
  number = [one for one in names if one != baseline].index(name)
  return tuple(kinds[number % len(kinds)] for kinds in (COLOURS, STYLES, MARKERS))


def draw(axes, x: Sequence[float], values: np.ndarray, label: str, look: tuple) -> None:
  """The line of a variant, the mean of `values` [seeds, n] over x [n], in its band."""
  colour, style, marker = look
  axes.plot(x, values.mean(axis=0), linestyle=style, color=colour, linewidth=2, marker=marker, markersize=5,
            markevery=max(1, len(x) // 8), label=label)
  axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.13, linewidth=0)


def save(figure, title: str, path: pathlib.Path) -> None:
  """Writes a figure of such lines, with its legend."""
  for axes in figure.axes:
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
  figure.suptitle(title, fontsize=11)
  figure.legend(*figure.axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=8, frameon=False,
                handlelength=4, title='mean over (seeds); band: lowest to highest', title_fontsize=8)
  figure.savefig(path, dpi=110)
