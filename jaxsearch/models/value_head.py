"""Critics' heads: hidden states [..., D] in, one value per state out.

`values` is one linear layer, for PPO with a decoder of its own as critic (Search-R1). `probabilities` is
CARL's head on the backbone that it shares with the policy (table 5): two layers with a GELU between them and
a sigmoid at the end. The last layer starts at 0, so every state starts at 0.5.
"""

import jax
import jax.numpy as jnp

AXES = {'kernel': ('embed',), 'bias': ()}
MLP_AXES = {'inner_kernel': ('embed', 'mlp'), 'inner_bias': ('mlp',), 'kernel': ('mlp',), 'bias': ()}


def initial_head(width: int, dtype=jnp.float32) -> dict:
  """Returns {'kernel' [D], 'bias' []}, both 0: before the first update the value of every state is 0."""
  return {'kernel': jnp.zeros((width,), dtype), 'bias': jnp.zeros((), dtype)}


def values(head: dict, hidden: jax.Array) -> jax.Array:
  """Returns values [...] float32 of hidden states [..., D]."""
  return hidden.astype(jnp.float32) @ head['kernel'].astype(jnp.float32) + head['bias'].astype(jnp.float32)


def mlp_shapes(width: int) -> dict:
  """Returns the shapes of the head of `probabilities`, nested as its parameters are."""
  return {'inner_kernel': (width, width), 'inner_bias': (width,), 'kernel': (width,), 'bias': ()}


def initial_mlp(width: int, key, dtype=jnp.float32) -> dict:
  """Returns a new head for `probabilities`: the inner layer normal with variance 1/D, all else 0."""
  zeros = {name: jnp.zeros(shape, dtype) for name, shape in mlp_shapes(width).items()}
  return zeros | {'inner_kernel': (jax.random.normal(key, (width, width)) / width**0.5).astype(dtype)}


def probabilities(head: dict, hidden: jax.Array) -> jax.Array:
  """Returns, for hidden states [..., D], the probability [...] float32 that the answer will be right."""
  kernel, bias = (head[name].astype(jnp.float32) for name in ('inner_kernel', 'inner_bias'))
  return jax.nn.sigmoid(values(head, jax.nn.gelu(hidden.astype(jnp.float32) @ kernel + bias)))
