"""What a comparison found, from its run folders alone: OUT/table.md, OUT/table.json and OUT/curves.png.

Figures are those of the policy after its last step (held-out questions, at each temperature of the evaluation) and of
its whole training. Of each a variant has a value for every seed; shown are the mean with its 95 % interval over seeds
(Student's t), and the mean of the differences to the baseline with the same seed, with theirs. Runs that are not
finished are left out and named.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import ml_collections
import numpy as np

from jaxsearch.evaluation.metrics import student_interval
from jaxsearch.evaluation.report import smoothed
from jaxsearch.evaluation.sweep import Trial, finished
from jaxsearch.training import runs

SCORES = ('em', 'f1', 'searches')  # of each evaluation
OPTIONAL = {  # of those that know tiers or have a critic, see competence.py; shares in %
  'em_tier_1': 'EM tier 1', 'em_tier_2': 'EM tier 2', 'tool_rate_tier_1': 'tool use tier 1',
  'tool_rate_tier_2': 'tool use tier 2', 'confident_wrong': 'confident and wrong', 'tokens_per_answer': 'tokens an answer',
  'auc': 'AUC', 'ece': 'ECE', 'explained_variance': 'explained variance',
}  # fmt: skip
TRAINING = {'tokens_generated': 'tokens generated (k)', 'tokens_trained': 'tokens trained (k)', 'seconds': 'seconds'}
WIDE = 14  # columns of a table that a page has room for
COLOURS = ('#1f5a8a', '#d1495b', '#2a9d60', '#edae49', '#7b4fa3', '#00a5b5', '#a05a2c', '#e377c2', '#7f9b24', '#4059d6')


def write(config: ml_collections.ConfigDict, trials: Sequence[Trial]) -> pathlib.Path:
  """Writes the three files and returns the path of the table.

  Raises:
    ValueError: no run is finished.
  """
  done = [trial for trial in trials if finished(trial)]
  if not done:
    raise ValueError(f'{config.out}: no run of this comparison is finished')
  out = pathlib.Path(config.out)
  found = summary(config, trials)
  (out / 'table.json').write_text(json.dumps(found, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
  plot({name: [trial for trial in done if trial.variant == name] for name in found['variants']}, config, out / 'curves.png')
  page = out / 'table.md'
  page.write_text(table(found), encoding='utf-8')
  return page


def summary(config: ml_collections.ConfigDict, trials: Sequence[Trial]) -> dict:
  """The content of table.json. A figure's name is that of the training, or SCORE@TEMPERATURE: 'em@0.0' is greedy EM."""
  done = [trial for trial in trials if finished(trial)]
  values: dict[str, dict[int, dict[str, float]]] = {name: {} for name in config.variants}
  for trial in done:
    values[trial.variant][trial.seed] = figures(trial)
  baseline, variants = values[config.baseline], {}
  for name, by_seed in values.items():
    if not by_seed:
      continue
    shared = [seed for seed in by_seed if seed in baseline] if name != config.baseline else []
    names = common(by_seed.values())
    both = common([of[seed] for of in (by_seed, baseline) for seed in shared])
    variants[name] = {
      'overrides': config.variants[name], 'seeds': list(by_seed),
      'figures': {key: estimate([of[key] for of in by_seed.values()]) for key in names},
      'differences': {key: estimate([by_seed[seed][key] - baseline[seed][key] for seed in shared])
                      for key in both},
    }  # fmt: skip
  befores = [scores(trial, 0) for trial in done]
  return {
    'title': config.title, 'baseline': config.baseline, 'variants': variants,
    'steps': sorted({trial.config.steps for trial in done}),
    'questions': sorted({row['n'] for trial in done for row in evaluations(trial)}),
    'before': {key: float(np.mean([before[key] for before in befores])) for key in (common(befores) if all(befores) else ())},
    'not_finished': [str(trial) for trial in trials if trial not in done],
  }  # fmt: skip


def common(records: Iterable[Mapping[str, float]]) -> list[str]:
  """Names that all records have, in the order of the first."""
  records = list(records)
  return [name for name in (records[0] if records else ()) if all(name in record for record in records)]


def figures(trial: Trial) -> dict[str, float]:
  """The figures of a finished run: scores after the last step; tokens and seconds of all steps."""
  rows = runs.read(trial.out / 'metrics.jsonl')
  return scores(trial, trial.config.steps) | {
    'tokens_generated': sum(row['tokens_generated'] for row in rows),
    'tokens_trained': sum(row['tokens_trained'] for row in rows),
    'seconds': float(sum(seconds(rows))),
  }


def evaluations(trial: Trial) -> list[dict]:
  return runs.read(trial.out / 'evaluations.jsonl')


def scores(trial: Trial, step: int) -> dict[str, float]:
  """SCORES of the evaluations after `step`, and of OPTIONAL what they have; empty if there are none."""
  return {f'{name}@{row["temperature"]}': row[name] for row in evaluations(trial) if row['step'] == step
          for name in (*SCORES, *OPTIONAL) if name in SCORES or name in row}


def seconds(rows: Sequence[Mapping]) -> list[float]:
  """Seconds of each step, without evaluations and saving.

  A step in which programs were compiled counts as the median one in which none were: which run of a comparison has to
  compile a program, and which finds it in the cache, says nothing about its variant.
  """
  steady = [row['seconds'] for row in rows if not row['compilations']]
  return [float(np.median(steady)) if row['compilations'] and steady else row['seconds'] for row in rows]


def estimate(values: Sequence[float]) -> dict:
  """Mean of one value per seed and its 95 % interval, None where there is but one seed."""
  low, high = student_interval(values) if len(values) > 1 else (None, None)
  return {'mean': float(np.mean(values)), 'low': low, 'high': high, 'values': list(values)}


def table(found: Mapping) -> str:
  """table.md of a summary."""
  names = list(dict.fromkeys(name for of in found['variants'].values() for name in of['figures']))
  names.sort(key=lambda name: name in TRAINING)  # those of training last
  cells = lambda show, of: [show(name, of[name]) if name in of else '' for name in names]
  labels = [label(name) for name in names]
  means = [['before training', *cells(number, found['before'])]] if found['before'] else []
  means += [[f'{variant} ({len(of["seeds"])})', *cells(interval, of['figures'])] for variant, of in found['variants'].items()]
  lines = [f'# {found["title"]}', '', *markdown([['variant (seeds)', *labels], *means])]
  compared = [[variant, *cells(difference, of['differences'])] for variant, of in found['variants'].items() if of['differences']]
  if compared:
    lines += ['', f'Differences to {found["baseline"]}, paired by seed:', '', *markdown([['variant', *labels], *compared])]
  steps, questions = (' or '.join(map(str, found[key])) for key in ('steps', 'questions'))
  lines += ['', f'After {steps} steps; EM and F1 in % on {questions} held-out questions. ± and [ ] are 95 % intervals over '
            'seeds (Student\'s t); differences whose interval leaves out 0 are bold, without a correction for how many '
            'there are. Seconds are those of the training steps, without evaluation, saving and compilation.']
  if found['not_finished']:
    lines += ['', f'Not finished: {"; ".join(found["not_finished"])}.']
  return '\n'.join([*lines, '', '![EM against trained tokens and against time](curves.png)', ''])


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
  """The lines of a table, the first row its head; one that is too wide for a page is turned, with a row for each figure."""
  if len(rows[0]) > WIDE:
    rows = list(zip(*rows))
  line = lambda cells: f'| {" | ".join(cells)} |'
  return [line(rows[0]), f'|:--|{"--:|" * (len(rows[0]) - 1)}', *map(line, rows[1:])]


def label(name: str) -> str:
  """The column heading of a figure."""
  score, _, temperature = name.partition('@')
  if not temperature:
    return TRAINING[name]
  score = OPTIONAL.get(score, score.upper() if score in ('em', 'f1') else score)
  return f'{score}, {decoding(float(temperature))}'


def decoding(temperature: float) -> str:
  return f'T={temperature:g}' if temperature else 'greedy'


def number(name: str, value: float, sign: str = '') -> str:
  """A figure as it is printed: shares in percent, tokens in thousands."""
  score = name.partition('@')[0]
  if score in ('em', 'f1', 'confident_wrong') or score.startswith(('em_tier', 'tool_rate')):
    return f'{100 * value:{sign}.1f}'
  if score in ('searches', 'auc', 'ece', 'explained_variance'):
    return f'{value:{sign}.2f}'
  if score == 'tokens_per_answer':
    return f'{value:{sign}.0f}'
  return f'{value / (1000 if name.startswith("tokens") else 1):{sign},.0f}'


def interval(name: str, of: Mapping) -> str:
  """'45.2 ± 3.1', or the mean alone where there is but one seed."""
  half = '' if of['low'] is None else f' ± {number(name, of["high"] - of["mean"])}'
  return number(name, of['mean']) + half


def difference(name: str, of: Mapping) -> str:
  """'+1.2 [-0.4, +2.8]', bold if 0 is not in the interval."""
  if of['low'] is None:
    return number(name, of['mean'], '+')
  text = f'{number(name, of["mean"], "+")} [{number(name, of["low"], "+")}, {number(name, of["high"], "+")}]'
  return f'**{text}**' if of['low'] > 0 or of['high'] < 0 else text


def curve(trial: Trial, temperature: float | None) -> dict[int, tuple[float, float, float]]:
  """{step: (tokens trained until then, minutes, EM)} of a finished run.

  Args:
    temperature: of the evaluations whose EM it is; None takes the smoothed EM of the training rollouts.
  """
  rows = runs.read(trial.out / 'metrics.jsonl')
  tokens = dict(enumerate(np.cumsum([0] + [row['tokens_trained'] for row in rows])))
  minutes = dict(enumerate(np.cumsum([0] + seconds(rows)) / 60))
  if temperature is None:
    em = dict(zip((row['step'] for row in rows), smoothed([row['em'] for row in rows])))
  else:
    em = {row['step']: row['em'] for row in evaluations(trial) if row['temperature'] == temperature}
  return {step: (tokens[step], minutes[step], value) for step, value in em.items()}


def plot(runs: Mapping[str, Sequence[Trial]], config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
  """EM against trained tokens and against minutes, a line for each variant: the mean over seeds, a band from the lowest
  to the highest. A row for each temperature of the evaluation; with fewer than three evaluations, EM in training."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  from matplotlib.ticker import EngFormatter
  trials = [trial for of in runs.values() for trial in of]
  often = min(len({row['step'] for row in evaluations(trial)}) for trial in trials) >= 3
  kinds = trials[0].config.eval.temperatures if often else (None,)
  figure = Figure(figsize=(10, 1 + 3.4 * len(kinds)), layout='constrained')
  grid = figure.subplots(len(kinds), 2, squeeze=False, sharey='row')
  for kind, row in zip(kinds, grid):
    others = iter([(colour, style) for style in ('-', '--', ':') for colour in COLOURS] * len(runs))
    for name, of in runs.items():
      colour, style = ('#333333', '-') if name == config.baseline else next(others)
      curves = [curve(trial, kind) for trial in of]
      steps = sorted(set.intersection(*(set(curve) for curve in curves)))
      points = np.array([[curve[step] for step in steps] for curve in curves])  # [seeds, steps, 3]
      em = 100 * points[..., 2]
      for i, axes in enumerate(row):
        x = points[..., i].mean(axis=0)
        axes.plot(x, em.mean(axis=0), style, color=colour, linewidth=2, marker='o' if often else None, markersize=3.5,
                  label=f'{name} ({len(of)})')
        axes.fill_between(x, em.min(axis=0), em.max(axis=0), color=colour, alpha=0.13, linewidth=0)
    what = 'EM in training, smoothed (%)' if kind is None else f'held-out EM, {decoding(kind)} (%)'
    row[0].set_ylabel(what, fontsize=9)
    for axes in row:
      axes.tick_params(labelsize=8)
      axes.grid(alpha=0.25)
      axes.spines[['top', 'right']].set_visible(False)
  for axes, text in zip(grid[-1], ('tokens trained', 'minutes of training steps')):
    axes.set_xlabel(text, fontsize=9)
  for axes in grid[:, 0]:
    axes.xaxis.set_major_formatter(EngFormatter(sep=' '))
  figure.suptitle(config.title, fontsize=11)
  figure.legend(*grid[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=8, frameon=False,
                title='mean over (seeds); band: from the lowest to the highest', title_fontsize=8)
  figure.savefig(path, dpi=110)
