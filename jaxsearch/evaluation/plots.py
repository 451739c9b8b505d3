"""Plots of evaluations as PNGs. Drawn without pyplot: nothing global, no display.

Lines differ by style and marker as well as colour, which is distinct for the colour-blind (Okabe and Ito).
"""

import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from jaxsearch.evaluation import calibration, metrics
from jaxsearch.rewards.match import f1

COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#7b3f00')
STYLES, MARKERS, HATCHES = ('--', '-.', ':', (0, (5, 1, 1, 1, 1, 1))), 'sv^Dx*P<>', ('', '//', '..', 'xx')
STEP, TOKENS, PREDICTED = 'step', 'tokens trained', 'predicted: V(s₀)'  # axes

File = str | os.PathLike | IO[bytes]


def looks() -> Iterator[dict[str, Any]]:
  """Yields colour, style and marker of one line after another."""
  for colour, style, marker in zip(*map(itertools.cycle, (COLOURS, STYLES, MARKERS))):
    yield {'color': colour, 'linestyle': style, 'marker': marker}


def new_figure(width: float, height: float):
  """Returns an empty figure of this size, in inches."""
  from matplotlib.figure import Figure  # slow to import
  return Figure(figsize=(width, height), layout='constrained')


def panels(labels: Sequence[tuple[str, str]], columns: int) -> tuple[Any, list]:
  """Returns a figure with an empty panel for each (x axis, y axis), and these panels."""
  from matplotlib.ticker import EngFormatter, MaxNLocator
  rows = -(-len(labels) // columns)
  figure = new_figure(5 * columns, 1 + 3 * rows)
  for axes in figure.subplots(rows, columns, squeeze=False).flat[len(labels):]:
    axes.remove()
  for axes, (x, y) in zip(figure.axes, labels):
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.25)
    if x == STEP:
      axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=7))
    elif x == TOKENS:
      axes.xaxis.set_major_formatter(EngFormatter(sep=' '))
  return figure, figure.axes


def save(figure, file: File, **legend) -> None:
  """Writes a figure with the labels of its first axes as legend, and one look for all axes."""
  legend = {'loc': 'outside upper left', 'fontsize': 8, 'frameon': False} | legend
  figure.legend(*figure.axes[0].get_legend_handles_labels(), **legend)
  for axes in figure.axes:
    axes.tick_params(labelsize=legend['fontsize'])
    axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(file, dpi=110)


def smoothed(values: Iterable[float], keep: float = 0.8) -> np.ndarray:
  """Returns the exponential moving average, corrected for its start; NaN leaves it as it was."""
  total, weight, averages = 0.0, 0.0, []
  for value in values:
    if not np.isnan(value):
      total, weight = keep * total + value, keep * weight + 1
    averages.append(total / weight if weight else np.nan)
  return np.array(averages)


def reliability(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], file: File) -> None:
  """Draws the reliability diagram of each name -> (probabilities [N], outcomes [N])."""
  figure, bins = new_figure(5.2, 6), calibration.BINS
  upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
  upper.plot([0, 1], [0, 1], color='#b0b8c1', linewidth=1, linestyle='--', zorder=1)
  width = 1 / bins / (len(curves) + 0.5)
  for number, (name, (probabilities, outcomes)) in enumerate(curves.items()):
    colour = COLOURS[number % len(COLOURS)]
    predicted, actual, counts = calibration.curve(probabilities, outcomes)
    label = f'{name}: ECE {calibration.ece(probabilities, outcomes):.3f}, n {len(probabilities)}'
    filled = counts > 0
    upper.plot(predicted[filled], actual[filled], color=colour, linewidth=1.2, alpha=0.6, label=label,
               zorder=2)
    # A dot is as large as its bin is full, since a bin of a few rollouts says little.
    sizes = 6 + 250 * counts / max(len(probabilities), 1)
    upper.scatter(predicted, actual, sizes, color=colour, zorder=3, clip_on=False)
    centres = (np.arange(bins) + 0.5) / bins + (number - (len(curves) - 1) / 2) * width
    lower.bar(centres, counts, width, color=colour, alpha=0.55, linewidth=0)
  upper.set(xlim=(0, 1), ylim=(0, 1), ylabel='share right')
  upper.grid(alpha=0.25)
  lower.set(xlabel=PREDICTED, ylabel='count', xticks=np.arange(0, 1.01, 0.2))
  save(figure, file)


def critic(starts: np.ndarray, folder: str) -> None:
  """Draws CARL's figures 2a (calibration.png) and 4 (values.png) of `competence.starts` into a folder."""
  values, outcomes, tiers = starts
  if not len(values):
    return
  pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  reliability({'held out': (values, outcomes)}, pathlib.Path(folder, 'calibration.png'))
  figure = new_figure(5.2, 3.4)
  axes = figure.subplots()
  for tier, colour, hatch in ((1, COLOURS[1], '//'), (2, COLOURS[0], '')):
    inside = values[tiers == tier]
    axes.hist(inside, bins=2 * calibration.BINS, range=(0, 1), density=len(inside) > 0, alpha=0.5,
              color=colour, hatch=hatch,
              label=f'tier {tier}: n {len(inside)}, mean {calibration.mean(inside):.2f}')
  axes.set(xlim=(0, 1), xlabel=PREDICTED, ylabel='density')
  save(figure, pathlib.Path(folder, 'values.png'))


def readers(reader: str, records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws F1 by data set (RSTool, figure 2): of the policy, and of a reader in three ways.

  Records are `rstool.predictions`; whiskers are 95 % intervals, bootstrapped over questions.
  """
  bars = {'the policy': 'policy', f'{reader}, with evidence': 'rstool', f'{reader}, with one search': 'rag',
          f'{reader}, alone': 'alone'}
  sources = list(dict.fromkeys(record['source'] for record in records))
  places, width = np.arange(len(sources)), 0.8 / len(bars)
  figure = new_figure(max(5.2, 0.5 * len(bars) * len(sources) + 1.5), 4)
  axes = figure.subplots()
  for number, (label, way) in enumerate(bars.items()):
    scores = [(record['source'], 100 * f1(record[way], record['golden_answers'])) for record in records]
    values = [np.array([score for of, score in scores if of == source]) for source in sources]
    means = np.array(list(map(metrics.mean, values)))
    ends = np.array([metrics.interval(metrics.resampled(of_source)) for of_source in values]).T
    axes.bar(places + (number - (len(bars) - 1) / 2) * width, means, width, label=label, edgecolor='white',
             color=COLOURS[number % len(COLOURS)], hatch=HATCHES[number % len(HATCHES)],
             yerr=np.abs(ends - means), error_kw={'linewidth': 0.8, 'ecolor': '#444444'})
  axes.set(ylabel='F1 (%)', ylim=(0, 100), xticks=places,
           xticklabels=[name or 'questions' for name in sources])
  path.parent.mkdir(parents=True, exist_ok=True)
  save(figure, path)
