"""The page and the picture at the end of a run: the learning curve, and the same questions answered before and after.

Both are made from the files of a run folder alone (`metrics.jsonl`, `evaluations.jsonl`), so they can be made again at
any time. The page is one HTML file that needs nothing else.
"""

from __future__ import annotations

import base64
import json
import pathlib

CURVES = (('em', 'exact match'), ('searches', 'searches per question'), ('reward', 'reward'), ('entropy', 'entropy'))
SAMPLES = 12  # questions whose rollouts are shown


def read_rows(path: pathlib.Path) -> list[dict]:
  """The rows of a JSONL file; none if it is not there."""
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines() if line]


def write_report(run: str | pathlib.Path) -> pathlib.Path:
  """Writes `learning_curve.png` and `report.html` into the run folder and returns the path of the page."""
  run = pathlib.Path(run)
  rows, evaluations = read_rows(run / 'metrics.jsonl'), read_rows(run / 'evaluations.jsonl')
  curve = run / 'learning_curve.png'
  plot_curves(rows, evaluations, curve)
  config = json.loads((run / 'config.json').read_text(encoding='utf-8')) if (run / 'config.json').exists() else {}
  page = run / 'report.html'
  page.write_text(render(rows, evaluations, config, curve.read_bytes()), encoding='utf-8')
  return page


def plot_curves(rows: list[dict], evaluations: list[dict], path: pathlib.Path) -> None:
  """Four small plots over the steps; evaluations on held-out questions are dots on the first two."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  figure = Figure(figsize=(10, 5.6), layout='constrained')
  for axes, (key, label) in zip(figure.subplots(2, 2).flat, CURVES):
    steps = [row['step'] for row in rows]
    values = [row[key] for row in rows]
    axes.plot(steps, values, color='#9db4c8', linewidth=1, label='training, each step')
    axes.plot(steps, smoothed(values), color='#1f5a8a', linewidth=2, label='training, smoothed')
    for greedy, colour, name in ((False, '#d1495b', 'held out, sampled'), (True, '#edae49', 'held out, greedy')):
      points = [(e['step'], e[key]) for e in evaluations if key in e and (e['temperature'] == 0) == greedy]
      if points:
        axes.plot(*zip(*points), 'o', color=colour, markersize=6, label=name)
    axes.set_title(label, fontsize=10)
    axes.set_xlabel('step', fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    if key == 'em':
      axes.set_ylim(0, 1)
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
  template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
  sampled = [e for e in evaluations if e.get('samples')]
  first, last = (sampled[0], sampled[-1]) if sampled else (None, None)
  pairs = list(zip(first['samples'], last['samples']))[:SAMPLES] if sampled else []
  return template.render(
    rows=rows, first_row=rows[0] if rows else {}, last_row=rows[-1] if rows else {}, evaluations=evaluations, pairs=pairs,
    first=first, last=last, config=config, curve=base64.b64encode(curve).decode(), shown=_SHOWN,
  )


_SHOWN = (
  'reward', 'em', 'searches', 'loss', 'kl', 'entropy', 'logprob_gap', 'tokens_generated', 'tokens_trained', 'seconds_generate',
  'seconds_tools', 'seconds_train',
)  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ config.get('method', 'run') }} · jaxsearch</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: .2rem .8rem; text-align: right;
border-bottom: 1px solid #e3e8ee } td:first-child, th:first-child { text-align: left }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin: .4rem 0 1.4rem } .rollout { border: 1px solid #e3e8ee;
border-radius: 6px; padding: .6rem .8rem; overflow-wrap: anywhere; white-space: pre-wrap; font-size: 13.5px }
.right { border-left: 4px solid #2a9d60 } .wrong { border-left: 4px solid #d1495b } .label { color: #66788a; font-size: 12px }
.think { color: #5b6b7b } .search { color: #1f5a8a; font-weight: 600 } .answer { color: #146c43; font-weight: 600 }
.observation { color: #85650f; background: #fdf8ea; display: block; padding: .2rem .4rem; border-radius: 4px }
.question { font-weight: 600 } .gold { color: #66788a; font-weight: 400 }
@media (max-width: 700px) { .pair { grid-template-columns: 1fr } }
</style></head><body>
<h1>{{ config.get('method', 'run') }}</h1>
<div class="label">model {{ config.get('model', '?') }} · {{ rows|length }} steps · seed {{ config.get('seed', '?') }}</div>
{% if evaluations %}
<h2>Held-out questions</h2>
<table><tr><th>step</th><th>decoding</th><th>EM</th><th>F1</th><th>searches</th><th>questions</th></tr>
{% for e in evaluations %}<tr><td>{{ e.step }}</td><td>{{ 'greedy' if e.temperature == 0 else 'temperature %s'|format(e.temperature) }}</td>
<td>{{ '%.1f'|format(100 * e.em) }}</td><td>{{ '%.1f'|format(100 * e.f1) }}</td><td>{{ '%.2f'|format(e.searches) }}</td>
<td>{{ e.n }}</td></tr>{% endfor %}</table>
{% endif %}
<h2>Learning curve</h2><img alt="exact match, searches, reward and entropy over the steps" src="data:image/png;base64,{{ curve }}">
{% if pairs %}
<h2>The same questions, before (step {{ first.step }}) and after (step {{ last.step }})</h2>
{% for pair in pairs %}
<div class="question">{{ pair[0].question }} <span class="gold">gold: {{ pair[0].golden_answers|join(' / ') }}</span></div>
<div class="pair">{% for sample in pair %}<div class="rollout {{ 'right' if sample.em else 'wrong' }}">{% for span in sample.spans
%}<span class="{{ span.kind }}">{{ span.text }}</span>{% endfor %}</div>{% endfor %}</div>
{% endfor %}{% endif %}
{% if rows %}<h2>Metrics</h2><table><tr><th></th><th>first step</th><th>last step</th></tr>
{% for key in shown if key in last_row %}<tr><td>{{ key }}</td><td>{{ '%.4g'|format(first_row[key]) }}</td>
<td>{{ '%.4g'|format(last_row[key]) }}</td></tr>{% endfor %}</table>{% endif %}
</body></html>
"""
