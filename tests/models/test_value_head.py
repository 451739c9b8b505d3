"""The heads of critics."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.models import value_head


def test_every_state_begins_at_a_half():
  head = value_head.initial_mlp(8, jax.random.key(0))
  hidden = jax.random.normal(jax.random.key(1), (2, 3, 8))
  np.testing.assert_array_equal(value_head.probabilities(head, hidden), 0.5 * np.ones((2, 3)))
  assert {name: x.shape for name, x in head.items()} == value_head.mlp_shapes(8)
  assert head.keys() == value_head.MLP_AXES.keys()
  assert sum(x.size for x in head.values()) == 8 * 8 + 8 + 8 + 1  # table 5: 12.85M at width 3584


def test_it_is_the_two_layers_that_it_says():
  rng = np.random.default_rng(0)
  head = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in value_head.mlp_shapes(4).items()}
  hidden = rng.normal(size=(5, 4)).astype(np.float32)
  inner = hidden @ np.asarray(head['inner_kernel']) + np.asarray(head['inner_bias'])
  gelu = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
  expected = 1 / (1 + np.exp(-(gelu @ np.asarray(head['kernel']) + float(head['bias']))))
  np.testing.assert_allclose(value_head.probabilities(head, hidden), expected, rtol=2e-4)
