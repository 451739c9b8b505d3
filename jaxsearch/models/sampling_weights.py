"""Matrices as sampling keeps them: transposed on CPUs, or of 8 bits: decoding is bound by reading them.

int8, or float8 (e4m3), each output of a matrix with a float32 scale of its own, dequantised in the product;
norms, biases, embedding and unembedding stay as they are. The policy that samples is then another than the
one that is trained: `losses.importance_weights` correct for it, and the metric `logprob_gap` is how far they
are apart. Qwix does the same to Linen and NNX modules, by wrapping their operations; here a product is a
function of arrays.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsearch.models.architecture import INPUTS
from jaxsearch.models.attention import matmul

KINDS = {'int8': jnp.int8, 'fp8': jnp.float8_e4m3fn}
_LEADING = INPUTS | {'qkv': 1, 'gate_up': 1}  # axes of the inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
  """Holds a matrix that is the left factor of its products: twice as fast on CPUs where the rows are few.

  The other factor is rounded to its dtype, the sum is in float32.
  """
  values: jax.Array  # [outputs, inputs]

  def multiply(self, x, dtype=None):
    """Multiplies x [..., n] as `attention.matmul`; in `dtype`, that of x by default."""
    rows = x.reshape(-1, x.shape[-1]).astype(self.values.dtype)
    product = jnp.einsum('mn,sn->ms', self.values, rows, preferred_element_type=jnp.float32)
    product = jax.lax.optimization_barrier(product)  # or XLA makes x the left factor
    return product.T.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
  """Holds a matrix: `values * scale`; both may be arrays, or what describes them."""
  values: jax.Array  # [inputs, outputs]
  scale: jax.Array   # [outputs] float32

  def multiply(self, x):
    """Multiplies x [..., n] as `attention.matmul`: x @ values, then the scales; in the dtype of x."""
    return (matmul(x, self.values.astype(x.dtype)) * self.scale.reshape(-1)).astype(x.dtype)


def transpose(layer: dict, dtype: str) -> dict:
  """Returns the parameters of one layer with every matrix as `Transposed`, in `dtype`."""
  turned = lambda w, inputs: Transposed(w.reshape(math.prod(w.shape[:inputs]), -1).T.astype(dtype))
  return _with_matrices(turned, layer)


@functools.cache
def dtype_on_cpu(dtype: str) -> str:
  """Returns what this CPU keeps matrices of `dtype` in: bfloat16 where it multiplies that, else float32."""
  processor = pathlib.Path('/proc/cpuinfo')
  multiplies = processor.exists() and 'avx512_bf16' in processor.read_text()
  return 'bfloat16' if dtype == 'bfloat16' and multiplies else 'float32'


def quantise(layer: dict, kind: str) -> dict:
  """Returns the parameters of one layer with every matrix as `Quantised` of a `kind` of KINDS."""
  dtype = jnp.dtype(KINDS[kind])
  largest = float(jnp.iinfo(dtype).max if kind == 'int8' else jnp.finfo(dtype).max)

  def one(w, inputs):
    w = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w), axis=range(inputs)) / largest
    values = w / jnp.where(scale > 0, scale, 1)
    return Quantised((jnp.round(values) if kind == 'int8' else values).astype(dtype), scale)

  return _with_matrices(one, layer)


def _with_matrices(changed: Callable, layer: dict) -> dict:
  return layer | {name: changed(layer[name], _LEADING[name]) for name in layer.keys() & _LEADING.keys()}
