"""The report at the end of a run: what went wrong, the learning curve, the same questions answered before and after, the costs.

One self-contained HTML file, made from `metrics.jsonl` and `evaluations.jsonl` alone, so it can be made again at any time. Any
value may be missing: null in the row of a skipped update, no such key in a row of another version.
Branches of a rollout stand below their parents; spans are coloured by their advantage. Colour never stands alone: words, signs,
line styles and markers say the same.
"""

import base64
import collections
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxsearch.files import write_whole
from jaxsearch.training.row_files import read as read_rows
from jaxsearch.trees.tree import Role

CURVES = (('em', 'exact match (%)', 100), ('searches', 'searches per question', 1), ('reward', 'reward (mean of rollouts)', 1),
          ('entropy', 'entropy (nats per token)', 1), ('tool_rate_tier_2', 'tool use on tier 2 (%)', 100))  # key, label, scale
OF_SOURCE = 'em_of_'  # begins the names of EM of single data sets
MEMORY = ('resident_mib', 'resident memory (MiB)', 1)
METRICS = ('reward', 'em', 'searches', 'loss', 'kl', 'entropy', 'logprob_gap', 'tokens_generated', 'tokens_trained',
           # and of Search-R2:
           'em_draft_per_tree', 'em_kept_per_tree', 'revised_per_tree', 'a_prec', 'v_inter', 's_trim', 'g_bar', 'gain_predicted',
           'gain_measured')
SECONDS = {'seconds': 'a step', 'seconds_generate': 'to generate', 'seconds_tools': 'in tools', 'seconds_train': 'to train'}
FAILURES = (('Searches', 'searches_failed', 'searches_asked', 'last_failure'),
            ('Tool calls', 'tool_calls_failed', 'tool_calls', 'last_failure'),
            ('Calls of the judge or reader', 'service_calls_failed', 'service_calls', 'last_service_failure'))
GOOD, BAD = (0x1F, 0x6F, 0xB2), (0xC8, 0x45, 0x2F)  # distinct for the colour-blind too
FULL = 0.5  # the advantage with the strongest colour; the same for all rollouts, so that they can be compared
GROWN = 1.1  # memory of the last quarter of the steps over that of the second; less is taken for caches that fill
CHANGES = {(False, True): 'wrong before, right after', (True, False): 'right before, wrong after',
           (True, True): 'right both times', (False, False): 'wrong both times',
           (True,): 'right', (False,): 'wrong'}  # in the order of the page; with one evaluation there is no before


def write_report(run: str | pathlib.Path) -> pathlib.Path:
  """Writes `learning_curve.png` and `report.html` into the run folder and returns the path of the page."""
  run = pathlib.Path(run)
  page, config = run / 'report.html', run / 'config.json'
  rows, evaluations = read_rows(run / 'metrics.jsonl'), read_rows(run / 'evaluations.jsonl')
  settings = json.loads(config.read_text(encoding='utf-8')) if config.exists() else {}
  wide, narrow = plot_curves(rows, evaluations, columns=2), plot_curves(rows, evaluations, columns=1)
  write_whole(run / 'learning_curve.png', wide)
  write_whole(page, render(rows, evaluations, settings, wide, narrow))
  return page


def plot_curves(rows: Sequence[Mapping], evaluations: Sequence[Mapping], columns: int) -> bytes:
  """A PNG of small plots over the steps, with markers for the evaluations on held-out questions; one column is for phones."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  from matplotlib.ticker import MaxNLocator
  curves = [curve for curve in CURVES if any(row.get(curve[0]) is not None for row in (*rows, *evaluations))]
  sources = sorted({name for row in evaluations for name in row if name.startswith(OF_SOURCE)})
  curves += [(name, f'exact match, {name.removeprefix(OF_SOURCE)} (%)', 100) for name in sources if len(sources) > 1]
  curves = (curves or [CURVES[0]]) + ([MEMORY] if grew(rows) else [])
  depths = [row for row in rows if row.get('chains_depth_0') is not None]
  lines = -(-(len(curves) + bool(depths)) // columns)
  figure = Figure(figsize=(5 * columns, 2.8 * lines + 0.4) if columns > 1 else (3.6, 2.4 * lines + 0.6), layout='constrained')
  grid = figure.subplots(lines, columns, squeeze=False).flat
  looks = ((False, 'held out, sampled', dict(color='#d55e00', marker='o', linestyle='--', markersize=5)),
           (True, 'held out, greedy', dict(color='#222222', marker='s', linestyle=':', markerfacecolor='none', markersize=9)))
  for (key, label, scale), axes in zip(curves, grid):
    steps, values = [row['step'] for row in rows], scale * column(rows, key)
    axes.plot(steps, values, '.-', color='#8aa7c0', linewidth=1, markersize=3 if len(rows) > 20 else 6,
              label='training, each step')
    axes.plot(steps, smoothed(values), color='#1f5a8a', linewidth=2.2, label='training, smoothed')
    for greedy, name, look in looks:
      points = [(e['step'], scale * e[key]) for e in evaluations if e.get(key) is not None and (e['temperature'] == 0) == greedy]
      if points:
        axes.plot(*zip(*points), label=name, linewidth=1.2, **look)
    axes.set_ylabel(label, fontsize=10)
    axes.grid(alpha=0.25)
    if key == 'em' or key.startswith(OF_SOURCE):
      axes.set_ylim(-6, 106)
  if depths:
    plot_depths(depths, next(grid))
  for axes in figure.axes:
    axes.set_xlabel('step', fontsize=10)
    axes.tick_params(labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=7))
    axes.spines[['top', 'right']].set_visible(False)
  for axes in grid:  # those left over
    axes.set_visible(False)
  figure.legend(*figure.axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=2 * columns, fontsize=9,
                frameon=False)
  file = io.BytesIO()
  figure.savefig(file, format='png', dpi=110 if columns > 1 else 200)
  return file.getvalue()


def plot_depths(rows: Sequence[Mapping], axes) -> None:
  """How deep the rollouts of each step searched, as shares of them (CuSearch's figure 1b): the deeper the darker."""
  depth = lambda name: int(name.removeprefix('chains_depth_'))
  names = sorted((name for name in rows[0] if name.startswith('chains_depth_')), key=depth)
  counts = np.array([column(rows, name) for name in names])
  greys = [str(0.92 - 0.8 * i / max(len(names) - 1, 1)) for i in range(len(names))]
  axes.stackplot([row['step'] for row in rows], 100 * counts / counts.sum(axis=0), colors=greys,
                 labels=[*map(str, range(len(names) - 1)), f'≥ {len(names) - 1}'])
  axes.set_ylabel('rollouts by searches (%)', fontsize=10)
  axes.margins(0)
  axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=len(names), fontsize=9, handlelength=0.9, columnspacing=0.9,
              handletextpad=0.4, frameon=False)


def column(rows: Sequence[Mapping], name: str) -> np.ndarray:
  """[rows] floats, NaN where a row has no such value."""
  return np.array([row.get(name) for row in rows], float)


def smoothed(values: Iterable[float], keep: float = 0.8) -> list[float]:
  """Exponential moving average, corrected for its start; a missing value (NaN) leaves it as it was."""
  total, weight, result = 0.0, 0.0, []
  for value in values:
    if not np.isnan(value):
      total, weight = keep * total + value, keep * weight + 1
    result.append(total / weight if weight else np.nan)
  return result


def render(rows: Sequence[Mapping], evaluations: Sequence[Mapping], config: Mapping, wide: bytes, narrow: bytes) -> str:
  """The page as HTML; everything that a model or a tool wrote is escaped."""
  import jinja2
  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  number = lambda value, scale, form: f'{scale * value:{form}}' if isinstance(value, (int, float)) else '–'  # missing or null
  environment.globals.update(pieces=pieces, colour=colour, number=number,
                             signed=lambda value: f'{value:+.2f}'.replace('-', '−'))
  template = environment.from_string(pathlib.Path(__file__).with_name('report.html').read_text(encoding='utf-8'))
  sampled = [e for e in evaluations if e.get('samples')]
  alike = [e for e in sampled if e['temperature'] == sampled[-1]['temperature']]  # greedy after, greedy before
  compared = [alike[0], *alike[1:][-1:]] if alike else []
  examples = collections.defaultdict(list)
  for samples in zip(*(e['samples'] for e in compared)):
    pair = [sample | {'blocks': blocks(sample['spans'])} for sample in samples]
    examples[CHANGES[tuple(bool(sample['em']) for sample in pair)]].append(pair)
  every = [block for pairs in examples.values() for pair in pairs for sample in pair for block in sample['blocks']]
  metrics = {key: float(np.nanmean(values)) for key in METRICS if not np.isnan(values := column(rows, key)).all()}
  return template.render(
    rows=[*rows[:1], *rows[1:][-1:]], evaluations=evaluations,
    examples=[(change, examples[change]) for change in CHANGES.values() if change in examples], compared=compared, config=config,
    wide=base64.b64encode(wide).decode(), narrow=base64.b64encode(narrow).decode(), metrics=metrics,
    warnings=warnings(rows, evaluations), costs=costs(rows),
    credited=any('advantage' in block for block in every), branching=any(block['branch'] for block in every))


def warnings(rows: Sequence[Mapping], evaluations: Sequence[Mapping]) -> list[str]:
  """What went wrong, a sentence each: skipped updates, alarms of the monitor, failed searches and other calls."""
  found = []
  if skipped := _skipped(rows):
    found.append(f'Updates were skipped at {ranges(skipped)}: the loss or its gradient was not finite.')
  alarms = collections.defaultdict(list)
  for row in rows:
    for name in row['alarms'].split(', ') if row.get('alarms') else ():
      alarms[name].append(row['step'])
  found += [f'The monitor of collapse raised the alarm {name} at {ranges(steps)}.' for name, steps in alarms.items()]
  for what, failed, asked, last in FAILURES:
    for where, of in (('at', rows), ('in the evaluations after', evaluations)):
      known = 'searches_failed' if failed == 'tool_calls_failed' else ''  # a search that fails is a tool call that fails too
      if failing := [row for row in of if row.get(failed, 0) > row.get(known, 0)]:
        reason = f' The last reason: {failing[-1][last]}' if last in failing[-1] else ''
        steps = ranges(row['step'] for row in failing)
        found.append(f'{what} failed {where} {steps}: {_share(of, failed, asked)}.{reason}')
  return found


def costs(rows: Sequence[Mapping]) -> list[tuple[str, str]]:
  """(name, figure) of what the run cost, and of the health of its tools, updates and memory; without what no row tells."""
  found = []
  for name, what in SECONDS.items():
    if not np.isnan(own := column(rows, name)).all():
      found.append((f'Seconds {what}, median', f'{np.nanmedian(own):.3g}'))
  if found:
    found.append(('Minutes of all steps', f'{np.nansum(column(rows, "seconds")) / 60:.3g}'))
  for what, failed, asked, _ in FAILURES:
    if any(row.get(asked) for row in rows) and any(failed in row for row in rows):
      found.append((f'{what} failed', _share(rows, failed, asked)))
  if any('skipped' in row for row in rows):
    found.append(('Steps with skipped updates', f'{len(_skipped(rows))}'))
  if len(sizes := resident(rows)):
    found.append(('Resident memory', f'{sizes[-1]:,.0f} MiB' + ('; it grew, see the last curve' if grew(rows) else '')))
  return found


def resident(rows: Sequence[Mapping]) -> np.ndarray:
  """Resident MiB at the steps that tell it."""
  sizes = column(rows, MEMORY[0])
  return sizes[~np.isnan(sizes)]


def grew(rows: Sequence[Mapping]) -> bool:
  """Whether resident memory grew from the second to the last quarter of the steps (medians)."""
  sizes = resident(rows)
  quarter = len(sizes) // 4
  return quarter > 1 and bool(np.median(sizes[-quarter:]) > GROWN * np.median(sizes[quarter:2 * quarter]))


def ranges(steps: Iterable[int], limit: int = 8) -> str:
  """'step 3' or 'steps 1, 4–7'; of many ranges only the first."""
  steps = sorted(set(steps))
  runs = [[step for _, step in run] for _, run in itertools.groupby(enumerate(steps), lambda place: place[1] - place[0])]
  texts = [f'{run[0]}–{run[-1]}' if len(run) > 1 else f'{run[0]}' for run in runs]
  more = f' and {sum(map(len, runs[limit:]))} more' if len(runs) > limit else ''
  return f'step{"s" if len(steps) > 1 else ""} {", ".join(texts[:limit])}{more}'


def _skipped(rows: Sequence[Mapping]) -> list[int]:
  """The steps with skipped updates; a row has the number of those since the start of the run."""
  counted = [row for row in rows if 'skipped' in row]
  return [row['step'] for before, row in zip([{'skipped': 0}, *counted], counted) if row['skipped'] > before['skipped']]


def _share(rows: Sequence[Mapping], part: str, whole: str) -> str:
  """'3 of 40 (8 %)' of two counts, summed over the rows."""
  some, every = (sum(row.get(name, 0) for row in rows) for name in (part, whole))
  return f'{some:,.0f} of {every:,.0f}' + (f' ({some / every:.0%})'.replace('%', ' %') if every else '')


def pieces(text: str) -> list[tuple[str, str]]:
  """(kind, text) of the parts of a policy span: its elements, such as ('search', '<search>…</search>'), and 'other' text."""
  # re.split with one group gives text, element, text, element, …
  parts = re.split(r'(<\w+>.*?</\w+>)', text, flags=re.DOTALL)
  return [(part[1:part.index('>')] if i % 2 else 'other', part) for i, part in enumerate(parts) if part]


def blocks(recorded: Sequence[dict]) -> list[dict]:
  """Recorded spans in the order of the page, without the first prompt: below a span its dropped branches, then the kept one.

  Each gets `depth`: in how many dropped branches it is nested; `branch`: '2 of 5' at the start of a branch, else '';
  `forgotten`: whether it is tool output that the policy saw only while it wrote the next segment.
  """
  children = collections.defaultdict(list)
  for i, span in enumerate(recorded):
    children[span.get('parent', i - 1)].append(i)
  found, stack = [], [(i, 0, '') for i in reversed(children[-1])]
  while stack:
    i, depth, branch = stack.pop()
    if i or recorded[i]['role'] != Role.PROMPT.value:
      forgotten = recorded[i + 1:i + 2] and recorded[i + 1].get('segment') == 'assimilate'
      found.append({'dropped': False} | recorded[i] | {'depth': depth, 'branch': branch, 'forgotten': forgotten})
    number = len(children[i])
    branches = [(recorded[child].get('dropped', False), -place, child) for place, child in enumerate(children[i], start=1)]
    for dropped, place, child in sorted(branches):  # the kept one first: it is popped last
      stack.append((child, depth + (dropped and number > 1), f'{-place} of {number}' if number > 1 else ''))
  return found


def colour(advantage: float) -> str:
  """White at 0, towards blue above and red below; never so dark that black text on it is hard to read."""
  share = 0.62 * min(abs(advantage) / FULL, 1.0)
  return '#' + ''.join(f'{round(255 + share * (hue - 255)):02x}' for hue in (GOOD if advantage > 0 else BAD))
