"""The report at the end of a run: what went wrong, the learning curve, questions before and after, the costs.

One self-contained HTML file, made from `metrics.jsonl` and `evaluations.jsonl` alone, of which any value may
be missing. rollout.js draws the rollouts, as in `jaxsearch view`. Colour never stands alone: words, signs,
line styles and markers say the same.
"""

import base64
import collections
import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxsearch.evaluation import plots
from jaxsearch.evaluation.figures import FIGURES, MAIN, OF_REFINEMENT, Figure, column, look_up, sources_in
from jaxsearch.files import read_json, write_whole
from jaxsearch.sampler.requests import add_failures, failing
from jaxsearch.training.row_files import read as read_rows

FOLDER = pathlib.Path(__file__).parent
PLOTTED = {name: figure for name, figure in FIGURES.items() if figure.main} | {
  'reward': Figure('reward (mean of rollouts)', scale=1),
  'entropy': Figure('entropy (nats per token)', scale=1), 'tool_rate_tier_2': MAIN['tool_rate_tier_2']}
METRICS = ('reward', 'em', 'searches', 'loss', 'kl', 'entropy', 'logprob_gap', 'tokens_generated',
           'tokens_trained', 'revised_per_tree', *OF_REFINEMENT)
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

Rows = Sequence[Mapping]


def write_report(run: str | pathlib.Path) -> pathlib.Path:
  """Writes `learning_curve.png` and `report.html` into the run folder and returns the path of the page."""
  run = pathlib.Path(run)
  page, config = run / 'report.html', run / 'config.json'
  rows, evaluations = read_rows(run / 'metrics.jsonl'), read_rows(run / 'evaluations.jsonl')
  settings = read_json(config) if config.exists() else {}
  curves = plot_curves(rows, evaluations)
  write_whole(run / 'learning_curve.png', curves)
  write_whole(page, render(rows, evaluations, settings, curves))
  return page


def plot_curves(rows: Rows, evaluations: Rows) -> bytes:
  """Returns a PNG of small plots over the steps, with markers for evaluations.

  Plots each figure that any row has a value of; only EM if there is none.
  """
  known, sources = _known([*rows, *evaluations]), sources_in(evaluations)
  curves = PLOTTED | {name: look_up(name) for name in (sources if len(sources) > 1 else ())}
  curves = {name: figure for name, figure in curves.items() if name in known} or {'em': PLOTTED['em']}
  labels = [figure.heading + ' (%)' * (figure.scale == 100) for figure in curves.values()]
  depths = [row for row in rows if row.get('chains_depth_0') is not None]
  labels += ['rollouts by searches (%)'] * bool(depths)
  figure, panels = plots.panels([(plots.STEP, label) for label in labels], 2)
  for (name, of), axes in zip(curves.items(), panels):
    steps, values = [row['step'] for row in rows], of.scale * column(rows, name)
    axes.plot(steps, values, '.-', color='#8aa7c0', linewidth=1, markersize=3 if len(rows) > 20 else 6,
              label='training, each step')
    axes.plot(steps, plots.smoothed(values), color='#1f5a8a', linewidth=2.2, label='training, smoothed')
    for number, at in enumerate(dict.fromkeys(row['temperature'] for row in evaluations)):
      points = [(row['step'], of.scale * row[name]) for row in evaluations
                if row.get(name) is not None and row['temperature'] == at]
      own = {} if at in (0, 1) else {'label': f'held out, T = {at:g}', 'color': f'C{number + 2}'}
      if points:
        axes.plot(*zip(*points), linewidth=1.2, **LOOKS[at == 0] | own)
    if of.heading.startswith('EM'):
      axes.set_ylim(-6, 106)
  if depths:
    plot_depths(depths, panels[-1])
  file = io.BytesIO()
  plots.save(figure, file, loc='outside lower center', ncols=4, fontsize=9)
  return file.getvalue()


def plot_depths(rows: Rows, axes) -> None:
  """Draws how deep the rollouts of each step searched, as shares: CuSearch's figure 1b."""
  depth = lambda name: int(name.removeprefix('chains_depth_'))
  names = sorted((name for name in rows[0] if name.startswith('chains_depth_')), key=depth)
  counts = np.array([column(rows, name) for name in names])
  greys = [str(0.92 - 0.8 * place / max(len(names) - 1, 1)) for place in range(len(names))]
  axes.stackplot([row['step'] for row in rows], 100 * counts / counts.sum(axis=0), colors=greys,
                 labels=[*map(str, range(len(names) - 1)), f'≥ {len(names) - 1}'])
  axes.margins(0)
  axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=len(names), fontsize=9, handlelength=0.9,
              columnspacing=0.9, handletextpad=0.4, frameon=False)


def alike_last(evaluations: Rows) -> Rows:
  """Returns the evaluations with the last one's temperature and questions: a resumed run may ask others."""
  asked = lambda row: (row['temperature'], len(row.get('em_each', ())),
                       [sample['question'] for sample in row.get('samples', ())])
  return [row for row in evaluations if asked(row) == asked(evaluations[-1])]


def render(rows: Rows, evaluations: Rows, config: Mapping, curves: bytes) -> str:
  """Returns the page as HTML; everything that a model or a tool wrote is escaped."""
  import jinja2
  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  text = lambda name: (FOLDER / name).read_text(encoding='utf-8')
  number = Figure('', scale=1, digits='.4g').shown
  alike = alike_last([row for row in evaluations if row.get('samples')])
  compared = [*alike[:1], *alike[1:][-1:]]
  examples = {change: [] for change in CHANGES.values()}
  for pair in zip(*(row['samples'] for row in compared)):
    examples[CHANGES[tuple(bool(sample['em']) for sample in pair)]].append(pair)
  figures = {name: figure for name, figure in MAIN.items() if name in _known(evaluations)}
  means = {name: np.nanmean(column(rows, name)) for name in METRICS if name in _known(rows)}
  return environment.from_string(text('report.html')).render(
    rows=[*rows[:1], *rows[1:][-1:]], evaluations=evaluations, number=number, config=config, figures=figures,
    examples=[(change, pairs) for change, pairs in examples.items() if pairs], compared=compared,
    curves=base64.b64encode(curves).decode(), metrics=means, warnings=warnings(rows, evaluations),
    costs=costs(rows), style=text('rollout.css'), script=text('rollout.js'))


def _known(rows: Rows) -> set[str]:
  return {name for row in rows for name, value in row.items() if value is not None}


def costs(rows: Rows) -> list[tuple[str, str]]:
  """Returns (name, figure) of what the run cost and of its updates, without what no row tells."""
  known = _known(rows)
  lines = [(f'Seconds {what}, median', f'{np.nanmedian(column(rows, name)):.3g}')
           for name, what in SECONDS.items() if name in known]
  if lines:
    lines.append(('Minutes of all steps', f'{np.nansum(column(rows, "seconds")) / 60:.3g}'))
  if 'skipped' in known:
    lines.append(('Steps with skipped updates', str(len(_skipped(rows)))))
  return lines


def warnings(rows: Rows, evaluations: Rows) -> list[str]:
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


def named(steps: Iterable[int], limit: int = 8) -> str:
  """Returns 'step 3' or 'steps 1, 4'; of many only the first."""
  numbers = [str(step) for step in sorted(set(steps))]
  more = f' and {len(numbers) - limit} more' if len(numbers) > limit else ''
  return f'step{"s" * (len(numbers) > 1)} {", ".join(numbers[:limit])}{more}'


def _skipped(rows: Rows) -> list[int]:
  """Returns the steps with skipped updates; a row has the number of those since the start of the run."""
  counted = [row for row in rows if 'skipped' in row]
  before = [0, *(row['skipped'] for row in counted)]
  return [row['step'] for row, last in zip(counted, before) if row['skipped'] > last]
