"""Pallas kernels for attention, for TPUs and GPUs; models/attention.py is their reference.

Those of trees walk blocks of keys and keep, for each query, the highest score so far, the sum of the weights
relative to it, and the weighted sum of the values: `visit`.
"""

import jax.numpy as jnp

NEGATIVE = -1e30  # not -inf, whose differences are not numbers


def visit(carry, scores, values, product):
  """Adds a block of keys to (highest [..,n,1], total [..,n,1], sums [..,n,h]), all float32.

  Args:
    scores: [..,n,m] float32, NEGATIVE where a query does not see a key; values: [..,m,h].
    product: of matrices [..,n,m] and [..,m,h] in the dtype of the values, summed in float32.
  """
  highest, total, sums = carry
  new = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
  weights, faded = jnp.exp(scores - new), jnp.exp(highest - new)
  sums = faded * sums + product(weights.astype(values.dtype), values)
  return new, faded * total + jnp.sum(weights, axis=-1, keepdims=True), sums
