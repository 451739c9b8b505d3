"""Plots of what a critic knows: is it calibrated (CARL, figure 2a), does it tell the tiers apart (figure 4)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from jaxsearch.evaluation import calibration
from jaxsearch.evaluation.competence import calibration_curve

COLOURS = ('#1f5a8a', '#d1495b', '#2a9d60', '#edae49', '#7b4fa3', '#00a5b5')
TIERS = {1: ('tier 1, needs tools', '#d1495b'), 2: ('tier 2, knows it', '#1f5a8a')}
BINS = 10


def plot_calibration(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike) -> None:
  """The reliability diagram: the share that came out right against what was predicted, a line for each name.

  Dots are as large as their bins are full, since a bin of a few says little; the counts stand below.

  Args:
    curves: name -> (probabilities [N], outcomes [N]).
    path: of the PNG.
  """
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  figure = Figure(figsize=(5.2, 6), layout='constrained')
  upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
  upper.plot([0, 1], [0, 1], color='#b0b8c1', linewidth=1, linestyle='--', zorder=1)
  width = 1 / BINS / (len(curves) + 0.5)
  for i, (name, (probabilities, outcomes)) in enumerate(curves.items()):
    colour = COLOURS[i % len(COLOURS)]
    predicted, right, counts = calibration_curve(probabilities, outcomes, BINS)
    filled = counts > 0
    error = float(calibration.ece(np.asarray(probabilities), np.asarray(outcomes), bins=BINS)) if len(probabilities) else np.nan
    label = f'{name}: ECE {error:.3f}, n {len(probabilities)}'
    upper.plot(predicted[filled], right[filled], color=colour, linewidth=1.2, alpha=0.6, label=label, zorder=2)
    sizes = 6 + 250 * counts[filled] / max(len(probabilities), 1)
    upper.scatter(predicted[filled], right[filled], sizes, color=colour, zorder=3, clip_on=False)
    lefts = (np.arange(BINS) + 0.5) / BINS + (i - (len(curves) - 1) / 2) * width
    lower.bar(lefts, counts, width, color=colour, alpha=0.55, linewidth=0)
  upper.set(xlim=(0, 1), ylim=(0, 1), ylabel='share right')
  figure.legend(fontsize=8, frameon=False, loc='outside upper left')
  upper.grid(alpha=0.25)
  lower.set(xlabel='predicted: V(s₀)', ylabel='count', xticks=np.arange(0, 1.01, 0.2))
  for axes in (upper, lower):
    _tidy(axes)
  figure.savefig(path, dpi=110)


def plot_values_by_tier(panels: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike) -> None:
  """How V(s_0) is distributed among questions of each tier, a panel for each name.

  Args:
    panels: name -> (V(s_0) [N], tier [N]); tiers other than 1 and 2 are left out.
    path: of the PNG.
  """
  from matplotlib.figure import Figure
  figure = Figure(figsize=(0.6 + 3.6 * len(panels), 3.2), layout='constrained')
  row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
  for axes, (name, (values, tiers)) in zip(row, panels.items()):
    values, tiers = np.asarray(values, np.float64), np.asarray(tiers)
    for tier, (label, colour) in TIERS.items():
      of = values[tiers == tier]
      share = np.full(len(of), 100 / max(len(of), 1))  # per tier, as they may be of very different sizes
      axes.hist(of, np.linspace(0, 1, 21), weights=share, color=colour, alpha=0.5, label=f'{label} ({len(of)})')
      if len(of):
        axes.axvline(of.mean(), color=colour, linewidth=1.2, linestyle='--', ymax=0.8)  # below the legend
    both = all((tiers == tier).any() for tier in TIERS)
    area = float(calibration.auc(values, tiers == 2, tiers > 0)) if both else np.nan
    axes.set_title(f'{name}: AUC {area:.2f}', fontsize=10)
    axes.set(xlim=(0, 1), xlabel='V(s₀)')
    axes.legend(fontsize=7.5, frameon=False, loc='upper center')
    axes.margins(y=0.28)  # room for the legend
    _tidy(axes)
  row[0].set_ylabel('% of the tier (dashed: mean)')
  figure.savefig(path, dpi=110)


def _tidy(axes) -> None:
  axes.tick_params(labelsize=8)
  axes.xaxis.label.set_size(9)
  axes.yaxis.label.set_size(9)
  axes.spines[['top', 'right']].set_visible(False)
