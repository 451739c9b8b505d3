"""Gradients of frozen weights: random projections of them, how noisy they are, and where they point.

The gradient of an action's log-probability (2.4 M numbers for the world's policy) is kept as a sketch: signs
drawn once, sums of every WIDTH-th number. Scalar products are preserved up to 1/sqrt(WIDTH) = 0.8 % of the
product of the norms. An estimator of a policy gradient is a weighted sum of sketches, whatever the weights.

For mini-batches of gradients it estimates the squared norm of the mean, by products of different mini-batches
("signal", unbiased), and the trace of the covariance ("noise"). Letters: Q questions, B mini-batches, D draws
of a bootstrap, the first of which is the sample itself.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.evaluation.verdicts import Estimate
from jaxsearch.models.decoder import hidden_states
from jaxsearch.models.vocabulary import target_logprobs
from jaxsearch.trees.tree import Node

WIDTH = 16381  # a prime, so that no dimension of a matrix divides it
DRAWS = 2000


class Sketches:
  """Gradients of the log-probability of spans, as sketches [N,width]."""

  def __init__(self, model: Any, params: dict, width: int = WIDTH, rows: int = 8):
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    signs = jax.random.rademacher(jax.random.key(0), (size,), jnp.float32)

    def logprob(params, tokens, places):  # [L], [M]: 0 is padding
      states = hidden_states(model, params, tokens[None])[:, places - 1]
      logprobs, _ = target_logprobs(params, states, tokens[None, places], chunk=len(places))
      return jnp.sum(jnp.where(places > 0, logprobs[0], 0))

    @jax.jit
    def sketched(params, tokens, places):
      grads = jax.vmap(jax.grad(logprob), (None, 0, 0))(params, tokens, places)
      parts = [leaf.reshape(len(tokens), -1) for leaf in jax.tree.leaves(grads)]
      flat = jnp.pad(jnp.concatenate(parts, axis=1) * signs, ((0, 0), (0, -size % width)))
      return flat.reshape(len(tokens), -1, width).sum(axis=1)

    self.width, self.rows, self.sketched = width, rows, functools.partial(sketched, params)

  def __call__(self, spans: Sequence[Sequence[Node]]) -> np.ndarray:
    """Returns the sketches [N,width] of lists of spans, each on the path to its last; 0 for an empty list.

    Duplicates, which siblings often are, are computed once.
    """
    found, by_shape = np.zeros((len(spans), self.width), np.float32), {}
    for index, nodes in enumerate(spans):
      if any(node.tokens for node in nodes):
        path = np.array(nodes[-1].path_tokens(), np.int32)
        trained = np.concatenate([np.arange(node.length - len(node.tokens), node.length) for node in nodes])
        shape = -(-len(path) // 64) * 64, 64 if len(trained) <= 64 else -(-len(trained) // 320) * 320
        key, distinct = (path.tobytes(), trained.tobytes()), by_shape.setdefault(shape, {})
        distinct.setdefault(key, (path, trained, []))[2].append(index)
    for (length, most), distinct in sorted(by_shape.items()):
      several = iter(distinct.values())  # Python 3.11 has no itertools.batched
      while part := list(itertools.islice(several, self.rows)):
        tokens, places = np.zeros((self.rows, length), np.int32), np.zeros((self.rows, most), np.int32)
        for row, (path, trained, _) in enumerate(part):
          tokens[row, :len(path)], places[row, :len(trained)] = path, trained
        for sketch, (_, _, indices) in zip(np.asarray(self.sketched(tokens, places)), part):
          found[indices] = sketch
    return found


def cut(values: np.ndarray, number: int) -> np.ndarray:
  """Returns the means [number,width] of as many parts of values [Q,width]."""
  return values.reshape(number, -1, values.shape[-1]).mean(axis=1)


def resamples(number: int, rng: np.random.Generator) -> np.ndarray:
  """Returns weights [1 + DRAWS,number] of mini-batches: as they are, then drawn anew."""
  drawn = rng.multinomial(number, np.full(number, 1 / number), size=DRAWS)
  return np.concatenate([np.ones((1, number)), drawn])


def moments(of: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Estimates squared length of the mean and trace of the covariance of mini-batches [B,width].

  For each row of weights [D,B]. The first is the mean product of different mini-batches, which is unbiased.
  """
  gram = of.astype(float) @ of.T
  square, total = np.diag(gram), weights.sum(axis=1)
  pairs = np.einsum('db,bc,dc->d', weights, gram, weights, optimize=True) - weights**2 @ square
  signal = pairs / (total**2 - (weights**2).sum(axis=1))
  return signal, weights @ square / total - signal


def figures(of: np.ndarray, scale: float, target: np.ndarray, weights: np.ndarray,
            target_weights: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the figures [D] of mini-batches [B,width], the noise times `scale`.

  Where a squared norm is not positive they are NaN, 'noise over signal' infinite.
  """
  signal, noise = moments(of, weights)
  length, _ = moments(target, target_weights)
  products = (weights @ (of.astype(float) @ target.T) * target_weights).sum(axis=1)
  product = products / weights.sum(axis=1) / target_weights.sum(axis=1)
  root = lambda x: np.sqrt(np.where(x > 0, x, np.nan))
  ratio = scale * noise / np.where(signal > 0, signal, 1)
  return {'noise over signal': np.where(signal > 0, ratio, np.inf),
          'own': root(signal) / root(signal + scale * noise), 'direction': product / root(signal * length),
          'towards': product / root((np.maximum(signal, 0) + scale * noise) * length)}


def estimate(values: np.ndarray) -> Estimate:
  """Estimates from a value and its draws [1 + DRAWS]; a NaN draw may lie on either side."""
  draws, unknown = values[1:], np.isnan(values[1:])
  low = np.quantile(np.where(unknown, -np.inf, draws), 0.025, method='lower')
  high = np.quantile(np.where(unknown, np.inf, draws), 0.975, method='higher')
  p = 2 * min(np.mean(unknown | (draws <= 0)), np.mean(unknown | (draws >= 0)))
  return Estimate(float(values[0]), float(low), float(high), float(np.clip(p, 1 / len(draws), 1)))


def brief(of: Estimate) -> list[float | None]:
  """Returns an estimate as a row holds it, [mean, low, high, p] of four digits; None is not finite."""
  return [float(f'{x:.4g}') if x is not None and math.isfinite(x) else None for x in of]
