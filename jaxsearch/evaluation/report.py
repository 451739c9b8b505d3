"""The report at the end of a run: the learning curve, and the same questions answered before and after.

One self-contained HTML file, made from `metrics.jsonl` and `evaluations.jsonl` alone, so it can be made again at any time.
"""

from __future__ import annotations

import base64
import json
import pathlib
import re

from jaxsearch.evaluation import heat_strip
from jaxsearch.training.runs import read as read_rows

CURVES = (('em', 'exact match'), ('searches', 'searches per question'), ('reward', 'reward'), ('entropy', 'entropy'))
METRICS = ('reward', 'em', 'searches', 'loss', 'kl', 'entropy', 'logprob_gap', 'tokens_generated', 'tokens_trained',
           'seconds_generate', 'seconds_tools', 'seconds_train')
SAMPLES = 12  # questions whose rollouts are shown


def write_report(run: str | pathlib.Path) -> pathlib.Path:
  """Writes `learning_curve.png` and `report.html` into the run folder and returns the path of the page."""
  run = pathlib.Path(run)
  page, curve, config = run / 'report.html', run / 'learning_curve.png', run / 'config.json'
  rows, evaluations = read_rows(run / 'metrics.jsonl'), read_rows(run / 'evaluations.jsonl')
  plot_curves(rows, evaluations, curve)
  settings = json.loads(config.read_text(encoding='utf-8')) if config.exists() else {}
  page.write_text(render(rows, evaluations, settings, curve.read_bytes()), encoding='utf-8')
  return page


def plot_curves(rows: list[dict], evaluations: list[dict], path: pathlib.Path) -> None:
  """Four small plots over the steps, with dots for the evaluations on held-out questions."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  from matplotlib.ticker import MaxNLocator
  figure = Figure(figsize=(10, 5.6), layout='constrained')
  for axes, (key, title) in zip(figure.subplots(2, 2).flat, CURVES):
    steps, values = [row['step'] for row in rows], [row[key] for row in rows]
    axes.plot(steps, values, color='#9db4c8', linewidth=1, label='training, each step')
    axes.plot(steps, smoothed(values), color='#1f5a8a', linewidth=2, label='training, smoothed')
    for greedy, colour, name in ((False, '#d1495b', 'held out, sampled'), (True, '#edae49', 'held out, greedy')):
      points = [(e['step'], e[key]) for e in evaluations if key in e and (e['temperature'] == 0) == greedy]
      if points:
        axes.plot(*zip(*points), 'o', color=colour, markersize=6, label=name)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel('step', fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    if key == 'em':
      axes.set_ylim(-0.02, 1.02)
      axes.legend(fontsize=7.5, loc='lower right')
  figure.savefig(path, dpi=110)


def smoothed(values: list[float], keep: float = 0.8) -> list[float]:
  """Exponential moving average, corrected for its start."""
  total, weight, result = 0.0, 0.0, []
  for value in values:
    total, weight = keep * total + value, keep * weight + 1
    result.append(total / weight)
  return result


def render(rows: list[dict], evaluations: list[dict], config: dict, curve: bytes) -> str:
  """The page as HTML; everything that a model or a tool wrote is escaped."""
  import jinja2
  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  environment.globals.update(pieces=pieces, colour=heat_strip.colour, signed=lambda value: f'{value:+.2f}'.replace('-', '−'))
  template = environment.from_string(pathlib.Path(__file__).with_name('report.html').read_text(encoding='utf-8'))
  sampled = [e for e in evaluations if e.get('samples')]
  first, last = (sampled[0], sampled[-1]) if sampled else ({'samples': []}, {'samples': []})
  pairs = [[sample | {'blocks': heat_strip.blocks(sample['spans'])} for sample in pair]
           for pair in zip(first['samples'][:SAMPLES], last['samples'])]
  blocks = [block for pair in pairs for sample in pair for block in sample['blocks']]
  return template.render(
    rows=rows, first_row=rows[0] if rows else {}, last_row=rows[-1] if rows else {}, evaluations=evaluations, pairs=pairs,
    first=first, last=last, config=config, curve=base64.b64encode(curve).decode(), shown=METRICS,
    credited=any('advantage' in block for block in blocks), branching=any(block['branch'] for block in blocks))


def pieces(text: str) -> list[tuple[str, str]]:
  """(kind, text) of the parts of a policy span: its elements, such as ('search', '<search>…</search>'), and 'other' text."""
  # re.split with one group gives text, element, text, element, …
  parts = re.split(r'(<\w+>.*?</\w+>)', text, flags=re.DOTALL)
  return [(part[1:part.index('>')] if i % 2 else 'other', part) for i, part in enumerate(parts) if part]
