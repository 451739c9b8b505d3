"""Matrix products whose results have the dtype of their operands, in the form in which devices are fast.

XLA's compiler for CPUs has kernels for bfloat16 operands, twice as fast as those for float32 where the
processor has AVX512-BF16, but uses them only where the result is float32; where it is not, all operands
become float32 first. So in a program that is traced for CPUs (`parallel.mesh.ambient`) results are rounded
after the product, in both gradients too. TPUs and GPUs round inside it.
"""

import functools
import re

import jax
import jax.numpy as jnp

from jaxsearch.parallel.mesh import ambient_platform


def product(spec: str, x, y):
  """Computes `jnp.einsum(spec, x, y)` of one dtype; an index of an operand is in the other or the result."""
  return _rounded(spec, x, y) if _rounds_after(x) else jnp.einsum(spec, x, y)


def matrix_product(x, w):
  """Multiplies x [..., n] by a matrix whose leading axes have n entries -> [..., m], its others as one."""
  n = x.shape[-1]
  w = w.reshape(n, -1)  # two axes: XLA would transpose `o` for every token
  if not _rounds_after(x):
    return x @ w
  return _rounded('xn,nm->xm', x.reshape(-1, n), w).reshape(*x.shape[:-1], -1)


def _rounds_after(x) -> bool:
  return x.dtype == jnp.bfloat16 and ambient_platform() == 'cpu'


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(spec, x, y):
  return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32).astype(x.dtype)


def _gradients(spec, operands, gradient):
  x, y = operands
  a, b, result = re.split(',|->', spec)
  return _rounded(f'{result},{b}->{a}', gradient, y), _rounded(f'{a},{result}->{b}', x, gradient)


_rounded.defvjp(lambda spec, x, y: (_rounded(spec, x, y), (x, y)), _gradients)
