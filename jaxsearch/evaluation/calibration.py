"""How good a critic is: does it rank, is it calibrated, does it explain outcomes, are its signs right.

Pure functions of arrays, jit-able, importing nothing of the project: the figures of CARL's warm-up gate and appendix I, and the
plot of its figure 2a. All arrays are [N], one entry for each prediction; `mask` is 1 where a prediction counts (None: all count),
and the other entries may hold anything. Each figure is a float32 scalar; an undefined one (no positives, no variance, everything
masked out) is NaN, which passes no threshold.
"""

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

COLOURS = ('#1f5a8a', '#d1495b', '#2a9d60', '#edae49', '#7b4fa3', '#00a5b5')
BINS = 10  # of CARL's table 11


def auc(scores: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """The probability that a positive (label 1) scores above a negative (0), ties counted half: the area under the ROC curve."""
  counted, scores, labels = _counted(mask, scores, labels)
  negative = counted & (labels <= 0.5)
  negatives = jnp.sum(negative)
  below = jnp.sort(jnp.where(negative, scores, jnp.inf))
  # Non-negatives were sorted to the end as infinity, where they must not tie with infinite scores.
  less = jnp.searchsorted(below, scores, side='left')
  less_or_equal = jnp.minimum(jnp.searchsorted(below, scores, side='right'), negatives)
  return _mean(0.5 * (less + less_or_equal) / negatives, counted & (labels > 0.5))


def ece(probabilities: jax.Array, outcomes: jax.Array, mask: jax.Array | None = None, bins: int = BINS) -> jax.Array:
  """Expected calibration error, `sum over bins n_b / n |mean outcome - mean probability|` (Guo et al. 2017).

  Probabilities and outcomes are in [0, 1]. A probability on the border of two of the equally wide bins belongs to the upper one.
  """
  counted, probabilities, outcomes = _counted(mask, probabilities, outcomes)
  # The borders are the float32 numbers nearest to 0.1, 0.2, …; `bins * probability` would round.
  borders = (np.arange(1, bins) / bins).astype(np.float32)
  gaps = jnp.where(counted, outcomes - probabilities, 0.0)
  per_bin = jax.ops.segment_sum(gaps, jnp.digitize(probabilities, borders), bins)
  return jnp.sum(jnp.abs(per_bin)) / jnp.sum(counted)


def brier(probabilities: jax.Array, outcomes: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """The mean squared difference of probability and outcome."""
  counted, probabilities, outcomes = _counted(mask, probabilities, outcomes)
  return _mean(jnp.square(probabilities - outcomes), counted)


def explained_variance(predictions: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """`1 - Var(targets - predictions) / Var(targets)` (CARL, appendix I.2): 1 is perfect, a constant offset is free."""
  counted, predictions, targets = _counted(mask, predictions, targets)
  total, left = (_mean(jnp.square(x - _mean(x, counted)), counted) for x in (targets, targets - predictions))
  return jnp.where(total > 0, 1.0 - left / total, jnp.nan)


def sign_accuracy(changes: jax.Array, expected: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """The share of value changes V(after) - V(before) whose sign is that of `expected` (CARL, appendix I.1)."""
  # A change of 0 goes in no direction and is wrong; an expected direction of 0 does not count.
  counted, changes, expected = _counted(mask, changes, expected)
  return _mean(changes * jnp.sign(expected) > 0, counted & (expected != 0))


def curve(probabilities, outcomes, bins: int = BINS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean prediction, mean outcome (both NaN in an empty bin) and count, each [bins], in the bins of `ece`."""
  probabilities, outcomes = np.asarray(probabilities, np.float32), np.asarray(outcomes, np.float64)
  bin_of = np.digitize(probabilities, (np.arange(1, bins) / bins).astype(np.float32))
  counts = np.bincount(bin_of, minlength=bins)
  with np.errstate(invalid='ignore'):
    return *(np.bincount(bin_of, x, minlength=bins) / counts for x in (probabilities, outcomes)), counts


def plot(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike) -> None:
  """Writes the reliability diagram of each name -> (probabilities [N], outcomes [N]) into a PNG, with bin counts below."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  figure = Figure(figsize=(5.2, 6), layout='constrained')
  upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
  upper.plot([0, 1], [0, 1], color='#b0b8c1', linewidth=1, linestyle='--', zorder=1)
  width = 1 / BINS / (len(curves) + 0.5)
  for i, (name, (probabilities, outcomes)) in enumerate(curves.items()):
    colour = COLOURS[i % len(COLOURS)]
    predicted, actual, counts = curve(probabilities, outcomes)
    filled = counts > 0
    label = f'{name}: ECE {float(ece(probabilities, outcomes)):.3f}, n {len(probabilities)}'
    upper.plot(predicted[filled], actual[filled], color=colour, linewidth=1.2, alpha=0.6, label=label, zorder=2)
    # A dot is as large as its bin is full, since a bin of a few rollouts says little.
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


def plot_tiers(values: np.ndarray, tiers: np.ndarray, path: str | os.PathLike) -> None:
  """Writes the distributions of V(s_0) [N] on tier 1 and tier 2 (CARL's figure 4) into a PNG."""
  from matplotlib.figure import Figure
  figure = Figure(figsize=(5.2, 3.4), layout='constrained')
  axes = figure.subplots()
  for tier, colour, hatch in ((1, COLOURS[1], '//'), (2, COLOURS[0], '')):
    own = values[tiers == tier]
    mean = f', mean {own.mean():.2f}' if len(own) else ''
    axes.hist(own, bins=2 * BINS, range=(0, 1), density=len(own) > 0, alpha=0.5, color=colour, hatch=hatch,
              label=f'tier {tier}: n {len(own)}{mean}')
  axes.set(xlim=(0, 1), xlabel='V(s₀)', ylabel='density')
  axes.legend(fontsize=8, frameon=False)
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, dpi=110)


def _counted(mask, *arrays):
  arrays = [jnp.asarray(x).astype(jnp.float32) for x in arrays]
  counted = jnp.ones(arrays[0].shape, bool) if mask is None else jnp.asarray(mask) != 0
  return counted, *(jnp.where(counted, x, 0.0) for x in arrays)


def _mean(x, counted):
  return jnp.sum(jnp.where(counted, x, 0.0)) / jnp.sum(counted)
