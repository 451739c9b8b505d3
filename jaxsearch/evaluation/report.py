"""The report at the end of a run: what went wrong, the learning curve, questions before and after, the costs.

One self-contained HTML file, made from `metrics.jsonl` and `evaluations.jsonl` alone, so it can be made again
at any time. Any value may be missing: null in the row of a skipped update, no such key in a row of another
version. rollout.js draws the rollouts, as in `jaxsearch view`. Colour never stands alone: words, signs, line
styles and markers say the same.
"""

import base64
import collections
import io
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxsearch.evaluation import plots
from jaxsearch.evaluation.figures import FIGURES, MAIN, OF_REFINEMENT, look_up, sources_in
from jaxsearch.files import write_whole
from jaxsearch.sampler.requests import add_failures, failing
from jaxsearch.training.row_files import read as read_rows

FOLDER = pathlib.Path(__file__).parent
OF_TRAINING = {'reward': 'reward (mean of rollouts)', 'entropy': 'entropy (nats per token)'}  # labels
METRICS = ('reward', 'em', 'searches', 'loss', 'kl', 'entropy', 'logprob_gap', 'tokens_generated',
           'tokens_trained', 'revised_per_tree', 'g_bar', *OF_REFINEMENT)
SECONDS = {'seconds': 'a step', 'seconds_generate': 'to generate', 'seconds_tools': 'in tools',
           'seconds_train': 'to train'}
# In the order of the page; with one evaluation there is no before.
CHANGES = {(False, True): 'wrong before, right after', (True, False): 'right before, wrong after',
           (True, True): 'right both times', (False, False): 'wrong both times', (True,): 'right',
           (False,): 'wrong'}
LOOKS = {  # of the lines of evaluations: greedy or not
  False: dict(label='held out, sampled', color='#d55e00', marker='o', linestyle='--', markersize=5),
  True: dict(label='held out, greedy', color='#222222', marker='s', linestyle=':', markerfacecolor='none',
             markersize=9)}


def write_report(run: str | pathlib.Path) -> pathlib.Path:
  """Writes `learning_curve.png` and `report.html` into the run folder and returns the path of the page."""
  run = pathlib.Path(run)
  page, config = run / 'report.html', run / 'config.json'
  rows, evaluations = read_rows(run / 'metrics.jsonl'), read_rows(run / 'evaluations.jsonl')
  settings = json.loads(config.read_text(encoding='utf-8')) if config.exists() else {}
  curves = plot_curves(rows, evaluations)
  write_whole(run / 'learning_curve.png', curves)
  write_whole(page, render(rows, evaluations, settings, curves))
  return page


def plot_curves(rows: Sequence[Mapping], evaluations: Sequence[Mapping]) -> bytes:
  """Returns a PNG of small plots over the steps, with markers for evaluations."""
  curves = curves_of(rows, evaluations)
  depths = [row for row in rows if row.get('chains_depth_0') is not None]
  lines = -(-(len(curves) + bool(depths)) // 2)
  figure = plots.new_figure(10, 2.8 * lines + 0.4)
  grid = figure.subplots(lines, 2, squeeze=False).flat
  for (key, label, scale), axes in zip(curves, grid):
    steps, values = [row['step'] for row in rows], scale * column(rows, key)
    axes.plot(steps, values, '.-', color='#8aa7c0', linewidth=1, markersize=3 if len(rows) > 20 else 6,
              label='training, each step')
    axes.plot(steps, plots.smoothed(values), color='#1f5a8a', linewidth=2.2, label='training, smoothed')
    for greedy, look in LOOKS.items():
      points = [(row['step'], scale * row[key]) for row in evaluations
                if row.get(key) is not None and (row['temperature'] == 0) == greedy]
      if points:
        axes.plot(*zip(*points), linewidth=1.2, **look)
    axes.set_ylabel(label, fontsize=10)
    axes.grid(alpha=0.25)
    if label.startswith('EM'):
      axes.set_ylim(-6, 106)
  if depths:
    plot_depths(depths, next(grid))
  for axes in figure.axes:
    plots.whole_steps(axes, 10)
  for axes in grid:  # those left over
    axes.set_visible(False)
  file = io.BytesIO()
  plots.save(figure, file, loc='outside lower center', ncols=4, fontsize=9)
  return file.getvalue()


def curves_of(rows: Sequence[Mapping], evaluations: Sequence[Mapping]) -> list[tuple[str, str, float]]:
  """Returns (key, label, scale) of what is plotted: those of which any row has a value, else the first."""
  sources = sources_in(evaluations)
  shown = lambda names: [(name, figure.heading + ' (%)' * (figure.scale == 100), figure.scale)
                         for name in names for figure in [look_up(name)]]
  curves = shown(name for name, figure in FIGURES.items() if figure.main)
  curves += [(key, label, 1) for key, label in OF_TRAINING.items()]
  curves += shown(['tool_rate_tier_2', *(sources if len(sources) > 1 else ())])
  known = {name for row in (*rows, *evaluations) for name, value in row.items() if value is not None}
  return [curve for curve in curves if curve[0] in known] or curves[:1]


def plot_depths(rows: Sequence[Mapping], axes) -> None:
  """Draws how deep the rollouts of each step searched, as shares: CuSearch's figure 1b."""
  depth = lambda name: int(name.removeprefix('chains_depth_'))
  names = sorted((name for name in rows[0] if name.startswith('chains_depth_')), key=depth)
  counts = np.array([column(rows, name) for name in names])
  greys = [str(0.92 - 0.8 * place / max(len(names) - 1, 1)) for place in range(len(names))]
  axes.stackplot([row['step'] for row in rows], 100 * counts / counts.sum(axis=0), colors=greys,
                 labels=[*map(str, range(len(names) - 1)), f'≥ {len(names) - 1}'])
  axes.set_ylabel('rollouts by searches (%)', fontsize=10)
  axes.margins(0)
  axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=len(names), fontsize=9, handlelength=0.9,
              columnspacing=0.9, handletextpad=0.4, frameon=False)


def column(rows: Sequence[Mapping], name: str) -> np.ndarray:
  """Returns [rows] floats, NaN where a row has no such value."""
  return np.array([row.get(name) for row in rows], float)


def render(rows: Sequence[Mapping], evaluations: Sequence[Mapping], config: Mapping, curves: bytes) -> str:
  """Returns the page as HTML; everything that a model or a tool wrote is escaped."""
  import jinja2
  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  text = lambda name: (FOLDER / name).read_text(encoding='utf-8')
  number = lambda value, scale, form: f'{scale * value:{form}}' if isinstance(value, (int, float)) else '–'
  sampled = [row for row in evaluations if row.get('samples')]
  alike = [row for row in sampled if row['temperature'] == sampled[-1]['temperature']]
  compared = [alike[0], *alike[1:][-1:]] if alike else []
  examples = collections.defaultdict(list)
  for pair in zip(*(row['samples'] for row in compared)):
    examples[CHANGES[tuple(bool(sample['em']) for sample in pair)]].append(pair)
  means = {key: np.nanmean(values) for key in METRICS if not np.isnan(values := column(rows, key)).all()}
  known = {name for row in evaluations for name, value in row.items() if value is not None}
  return environment.from_string(text('report.html')).render(
    rows=[*rows[:1], *rows[1:][-1:]], evaluations=evaluations, number=number, config=config,
    figures={name: figure for name, figure in MAIN.items() if name in known},
    examples=[(change, examples[change]) for change in CHANGES.values() if change in examples],
    curves=base64.b64encode(curves).decode(), metrics=means, warnings=warnings(rows, evaluations),
    costs=costs(rows), compared=compared, style=text('rollout.css'), script=text('rollout.js'))


def warnings(rows: Sequence[Mapping], evaluations: Sequence[Mapping]) -> list[str]:
  """Says what went wrong, a sentence each: skipped updates, alarms of the monitor, failed calls."""
  lines = []
  if skipped := _skipped(rows):
    lines.append(f'Updates were skipped at {named(skipped)}: the loss or its gradient was not finite.')
  alarms = collections.defaultdict(list)
  for row in rows:
    for name in row['alarms'].split(', ') if row.get('alarms') else ():
      alarms[name].append(row['step'])
  lines += [f'The monitor of collapse raised the alarm {name} at {named(steps)}.'
            for name, steps in alarms.items()]
  for where, several in (('At', rows), ('In the evaluations after', evaluations)):
    failed = [row['step'] for row in several if failing(add_failures([row]), most=False)]
    if failed:
      lines.append(f'{where} {named(failed)}: {failing(add_failures(several), most=False)}.')
  return lines


def costs(rows: Sequence[Mapping]) -> list[tuple[str, str]]:
  """Returns (name, figure) of what the run cost and of its updates, without what no row tells."""
  lines = [(f'Seconds {what}, median', f'{np.nanmedian(values):.3g}') for name, what in SECONDS.items()
           if not np.isnan(values := column(rows, name)).all()]
  if lines:
    lines.append(('Minutes of all steps', f'{np.nansum(column(rows, "seconds")) / 60:.3g}'))
  if any('skipped' in row for row in rows):
    lines.append(('Steps with skipped updates', f'{len(_skipped(rows))}'))
  return lines


def named(steps: Iterable[int], limit: int = 8) -> str:
  """Returns 'step 3' or 'steps 1, 4'; of many only the first."""
  numbers = [str(step) for step in sorted(set(steps))]
  more = f' and {len(numbers) - limit} more' if len(numbers) > limit else ''
  return f'step{"s" * (len(numbers) > 1)} {", ".join(numbers[:limit])}{more}'


def _skipped(rows: Sequence[Mapping]) -> list[int]:
  """Returns the steps with skipped updates; a row has the number of those since the start of the run."""
  counted = [row for row in rows if 'skipped' in row]
  before = [0, *(row['skipped'] for row in counted)]
  return [row['step'] for row, last in zip(counted, before) if row['skipped'] > last]
