"""Plot of a critic's calibration (CARL, figure 2a)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from jaxsearch.evaluation import calibration

COLOURS = ('#1f5a8a', '#d1495b', '#2a9d60', '#edae49', '#7b4fa3', '#00a5b5')
BINS = 10


def calibration_curve(probabilities, outcomes, bins: int = BINS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean prediction, mean outcome (both NaN in an empty bin) and count, each [bins], in the bins of `calibration.ece`."""
  probabilities, outcomes = np.asarray(probabilities, np.float32), np.asarray(outcomes, np.float64)
  bin_of = np.digitize(probabilities, (np.arange(1, bins) / bins).astype(np.float32))
  counts = np.bincount(bin_of, minlength=bins)
  with np.errstate(invalid='ignore'):
    predicted, actual = (np.bincount(bin_of, x, minlength=bins) / counts for x in (probabilities, outcomes))
  return predicted, actual, counts


def plot_calibration(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike) -> None:
  """Writes the reliability diagram of each name -> (probabilities [N], outcomes [N]) into a PNG, with bin counts below.

  A dot is as large as its bin is full, since a bin of a few rollouts says little.
  """
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  figure = Figure(figsize=(5.2, 6), layout='constrained')
  upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
  upper.plot([0, 1], [0, 1], color='#b0b8c1', linewidth=1, linestyle='--', zorder=1)
  width = 1 / BINS / (len(curves) + 0.5)
  for i, (name, (probabilities, outcomes)) in enumerate(curves.items()):
    colour = COLOURS[i % len(COLOURS)]
    predicted, actual, counts = calibration_curve(probabilities, outcomes)
    filled = counts > 0
    label = f'{name}: ECE {float(calibration.ece(probabilities, outcomes, bins=BINS)):.3f}, n {len(probabilities)}'
    upper.plot(predicted[filled], actual[filled], color=colour, linewidth=1.2, alpha=0.6, label=label, zorder=2)
    sizes = 6 + 250 * counts[filled] / max(len(probabilities), 1)
    upper.scatter(predicted[filled], actual[filled], sizes, color=colour, zorder=3, clip_on=False)
    centres = (np.arange(BINS) + 0.5) / BINS + (i - (len(curves) - 1) / 2) * width
    lower.bar(centres, counts, width, color=colour, alpha=0.55, linewidth=0)
  upper.set(xlim=(0, 1), ylim=(0, 1), ylabel='share right')
  upper.grid(alpha=0.25)
  lower.set(xlabel='predicted: V(s₀)', ylabel='count', xticks=np.arange(0, 1.01, 0.2))
  figure.legend(fontsize=8, frameon=False, loc='outside upper left')
  for axes in (upper, lower):
    axes.tick_params(labelsize=8)
    axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, dpi=110)
