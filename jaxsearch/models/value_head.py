"""A critic's head: hidden states in, one value a state out.

Letters: D width of the hidden states.
"""

import jax
import jax.numpy as jnp

AXES = {'kernel': ('embed',), 'bias': ()}


def initial_head(width: int, dtype=jnp.float32) -> dict:
  """{'kernel' [D], 'bias' []}, both 0: before the first update every state is worth 0."""
  return {'kernel': jnp.zeros((width,), dtype), 'bias': jnp.zeros((), dtype)}


def values(head: dict, hidden: jax.Array) -> jax.Array:
  """Values [...] float32 of hidden states [..., D]."""
  return hidden.astype(jnp.float32) @ head['kernel'].astype(jnp.float32) + head['bias'].astype(jnp.float32)
