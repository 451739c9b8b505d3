"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) for the matrices of the decoder's layers.

An adapter is {'layers': {name: {'a', 'b'}}}: two factors for each matrix W that it changes, `a` with the
leading axes of W and the rank r, `b` with the rank and the other axes. The policy is the base with every W
replaced by W + alpha / r * a b (equation 3). Other letters as in decoder.py.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsearch.models.architecture import INPUTS, DecoderConfig, create_each, parameter_axes, parameter_shapes
from jaxsearch.models.decoder import Adapted


def adapter_axes(config: DecoderConfig, targets: Sequence[str]) -> dict:
  """Returns logical axis names: of `q` {'a': (layers, embed, rank), 'b': (layers, rank, heads, head_dim)}."""
  return _factors(parameter_axes(config), 'rank', targets)


def adapter_shapes(config: DecoderConfig, rank: int, targets: Sequence[str]) -> dict:
  """Returns the shapes of every target's factors: of `q` {'a': (L, D, r), 'b': (L, r, H, h)}."""
  if rank < 1:
    raise ValueError(f'an adapter of rank {rank}: at least 1')
  return _factors(parameter_shapes(config), rank, targets)


def _factors(values: dict, rank, targets: Sequence[str]) -> dict:
  """Cuts what each target has for its axes (names or sizes) in two, with `rank` at the cut."""
  if not targets or not set(targets) <= set(INPUTS):
    raise ValueError(f'targets of an adapter are some of {list(INPUTS)}: got {list(targets)}')

  def cut(axes, leading):
    return {'a': (*axes[:1 + leading], rank), 'b': (axes[0], rank, *axes[1 + leading:])}

  return {'layers': {name: cut(values['layers'][name], INPUTS[name]) for name in targets}}


def initial_adapter(config: DecoderConfig, rank: int, targets: Sequence[str], key, dtype=jnp.float32) -> dict:
  """Returns an adapter that changes nothing: `b` 0, `a` normal with variance 1 / (3 * inputs), as PEFT's."""
  def create(name, shape, key):
    if name == 'b':
      return jnp.zeros(shape, dtype)
    return (jax.random.normal(key, shape) / (3 * math.prod(shape[1:-1])) ** 0.5).astype(dtype)

  return create_each(create, adapter_shapes(config, rank, targets), key)


def merge(params: dict, adapter: dict, alpha: float) -> dict:
  """Returns the parameters W + alpha / rank * a b, in the dtype of W; those without an adapter are unchanged.

  The factors are rounded to the dtype of W, multiplied, and added in float32, so the dtype of the adapter
  itself does not change the result. In bfloat16 an entry of W changes once the product is half a unit in
  its last place, as in a bfloat16 copy of float32 parameters. PEFT adds to x W instead, where less counts.
  """
  def add(w, a, b):
    product = jnp.tensordot(a.astype(w.dtype), b.astype(w.dtype), 1, preferred_element_type=jnp.float32)
    return (w.astype(jnp.float32) + alpha / a.shape[-1] * product).astype(w.dtype)

  layers = params['layers']
  merged = {name: jax.vmap(add)(layers[name], **factors) for name, factors in adapter['layers'].items()}
  return params | {'layers': layers | merged}


def adapted(merged: dict, adapter: dict, alpha: float) -> dict:
  """Wraps the parameters `merged` so that gradients go to the factors of `adapter`, never to a matrix.

  `merge(base, adapter, alpha)` is computed once for many of them. In the dtype of `merged`.
  """
  def wrap(w, factors):
    a, b = (factors[name].astype(w.dtype) for name in 'ab')
    return Adapted(w, a, (alpha / a.shape[-1] * b).astype(w.dtype))

  layers = merged['layers']
  wrapped = {name: wrap(layers[name], factors) for name, factors in adapter['layers'].items()}
  return merged | {'layers': layers | wrapped}
