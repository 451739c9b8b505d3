"""Attention over rows of plain chains, by the kernels that come with JAX: splash attention on TPUs, which
MaxText and others train with, and Pallas's flash attention through Triton on GPUs.

Rows are those of `lay_out(chains=True)`: no prefix is shared, so `visible_until` identifies a token's chain,
and both kernels take it as the segment id. They visit all causal blocks of a row, those of other chains too;
tree_attention.py skips those. cuDNN is not used: its segments are private to JAX, and only a GPU can show
whether they compile. Letters as in tree_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as for_gpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as for_tpu,
  splash_attention_mask as masks,
)

from jaxsearch.models.kernels import tree_attention

BLOCK = {'tpu': 512, 'gpu': 128}  # queries and keys; rows are padded to whole ones


def over_rows(visible_until, platform: str, interpret: bool = False):
  """Returns attention over rows `visible_until` [B,T]: a function of q, k, v, see `attend`."""
  function = functools.partial(attend, platform, interpret)
  return lambda q, k, v: tree_attention.on_devices(function, q, k, v, visible_until)


def attend(platform: str, interpret: bool, q, k, v, chains):
  """Computes softmax(q k^T / sqrt(h)) v over the tokens of the same chain up to the query.

  Args:
    platform: 'tpu' or 'gpu', whose kernel it is.
    interpret: runs the kernel as ordinary operations, on any device.
    q: [B,T,H,h]; k, v: [B,T,K,h], all of one dtype.
    chains: [B,T] int, the number of each token's chain in its row.
  Returns:
    [B,T,H,h] in the dtype of q.
  """
  T, H, h = q.shape[1:]
  size = min(BLOCK[platform], max(128, 1 << (T - 1).bit_length()))
  padded = lambda x, value=0: jnp.pad(x, ((0, 0), (0, -T % size), *((0, 0),) * (x.ndim - 2)),
                                      constant_values=value)
  q, k, v, chains = padded(q), padded(k), padded(v), padded(chains.astype(jnp.int32), -1)
  if platform == 'gpu':
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    back = 64 if h * q.dtype.itemsize <= 128 else 32
    sizes = for_gpu.BlockSizes(size, 64, back, back, back, back)
    return for_gpu.mha(q, k, v, chains, h**-0.5, True, sizes, interpret=interpret)[:, :T]
  sizes = for_tpu.BlockSizes(**{name: size for name in (
    'block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv', 'block_q_dq', 'block_kv_dq')})
  causal = masks.MultiHeadMask([masks.CausalMask((q.shape[1],) * 2)] * H)
  with jax.ensure_compile_time_eval():  # its arrays would else be of the trace in which it is first made
    kernel = for_tpu.make_splash_mha_single_device(causal, block_sizes=sizes, interpret=interpret)
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in ((q * h**-0.5).astype(q.dtype), k, v))
  out = jax.vmap(kernel)(q, k, v, for_tpu.SegmentIds(chains, chains))
  return jnp.swapaxes(out, 1, 2)[:, :T]


# Matrix products of a block of scores, by the beginning of a kernel's name in a traced program.
_PRODUCTS = {'splash_mha_fwd': 2, 'splash_mha_dq': 3, 'splash_mha_dkv': 4,
             'mha_forward': 2, 'mha_backward': 7}


def flops(name: str, *arguments) -> int:
  """Returns the FLOPs of a call of a kernel from its arguments: of half of all scores, those before a token.

  0 where it is none of these.
  """
  products = next((n for start, n in _PRODUCTS.items() if name.startswith(start)), 0)
  if not products:
    return 0
  queries = next(x for x in arguments if x.ndim == 4)
  return products * queries.size * queries.shape[2 if name.startswith('splash') else 1]
