"""Attention over rows in the tree layout that visits only blocks of scores in which something is visible.

Token i sees token j iff j <= i < visible_until[j]: causality plus one integer per key (trees/layout.py). The
scores of a row are cut into blocks of `Sizes.q` queries by `Sizes.k` keys. A block is visited iff it lies on
the diagonal, or a `visible_until` of its keys is above its first query, which is so exactly where something
is visible: a row of six trees costs six trees, not a square. The list of visited blocks is made once for all
layers (`visits`); `attend` walks it, forward once and backward twice, by query blocks for dQ and by key
blocks for dK and dV. Softmax in float32; only its logarithmic normaliser is kept.

tree_attention_tpu.py and tree_attention_gpu.py hold the kernels; `models.decoder.dense_attention` is the
reference. Letters: B rows, T tokens of a row, H query heads, K key/value heads, G = H / K, h head width, n
and m blocks, C most blocks of a row.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxsearch.models.kernels import tree_attention_gpu, tree_attention_tpu
from jaxsearch.parallel import mesh as meshes

KERNELS = {'tpu': tree_attention_tpu, 'gpu': tree_attention_gpu}


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Queries and keys of a block of scores; one divides the other."""
  q: int
  k: int

  def padded(self, length: int) -> int:
    """Returns the length of a row that whole blocks cover."""
    return -(-length // max(self.q, self.k)) * max(self.q, self.k)

  def most(self, length: int) -> int:
    """Returns C: the blocks of a row that is one causal chain."""
    first = np.arange(0, self.padded(length), self.q)
    return int(np.sum(-(-(first + self.q) // self.k)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
  """The visited blocks of rows that are padded to whole blocks.

  A pair packs two block numbers into one integer, high << 16 | low: (query, key) in `by_query`,
  (key, query) in `by_key`; the list is sorted by `high`. Past a row's last pair the list repeats it.
  """
  visible_until: jax.Array                # [B, padded T] int32
  by_query: tuple[jax.Array, jax.Array]   # pairs [B, C]; starts [B, n + 1], the last is their number
  by_key: tuple[jax.Array, jax.Array]     # pairs [B, C]; starts [B, m + 1]


def visible_blocks(visible_until, sizes: Sizes):
  """Tells which blocks [B,n,m] of whole rows [B,T] have a query that sees a key, or are on the diagonal."""
  B, T = visible_until.shape
  first = {size: jnp.arange(0, T, size) for size in (sizes.q, sizes.k)}
  query, key = first[sizes.q][:, None], first[sizes.k]
  until = jnp.max(visible_until.reshape(B, 1, -1, sizes.k), axis=-1)
  # A token that sees itself is on the diagonal. There a block is visited in any case, or nobody would write
  # its results.
  return (key < query + sizes.q) & ((query < until) | (query < key + sizes.k))


def visits(visible_until, sizes: Sizes) -> Visits:
  """Lists what `attend` visits in rows `visible_until` [B,T] int."""
  T = visible_until.shape[1]
  length, most = sizes.padded(T), sizes.most(T)
  own = jnp.broadcast_to(jnp.arange(T, length) + 1, (len(visible_until), length - T))
  visible_until = jnp.concatenate([visible_until, own], axis=1).astype(jnp.int32)
  visible = visible_blocks(visible_until, sizes)
  return Visits(visible_until, listed(visible, most), listed(jnp.swapaxes(visible, 1, 2), most))


def listed(visible, most: int):
  """Lists what is visible in [B,n,m] bool: (pairs [B,most], starts [B,n+1])."""
  B, n, m = visible.shape
  within = jnp.cumsum(visible, axis=2, dtype=jnp.int32)
  starts = jnp.pad(jnp.cumsum(within[:, :, -1], axis=1), ((0, 0), (1, 0)))
  count = (starts[:, :-1, None] + within).reshape(B, -1)
  # Finds the block with `before` visible blocks ahead of it. A sort would compile for half a minute on TPUs.
  before = jnp.minimum(jnp.arange(most), count[:, -1:] - 1)
  place = jax.vmap(functools.partial(jnp.searchsorted, side='right'))(count, before)
  return (place // m << 16 | place % m).astype(jnp.int32), starts


def block_sizes(platform: str, length: int, group: int, width: int) -> Sizes:
  """Returns sizes for rows of `length` tokens, `group` query heads to a key, and heads of `width` bytes."""
  q, k = KERNELS[platform].block_sizes(group, width)
  shortest = max(128, 1 << (length - 1).bit_length())
  return Sizes(min(q, shortest), min(k, shortest))


def over_rows(visible_until, group: int, width: int, platform: str, interpret: bool = False):
  """Returns attention over rows `visible_until` [B,T]: a function of q, k, v, see `attend`.

  To be traced for devices of `platform`; the visits are the same for all layers.
  """
  sizes = block_sizes(platform, visible_until.shape[1], group, width)
  blocks = visits(visible_until, sizes)
  return lambda q, k, v: on_devices(functools.partial(attend, platform, sizes, interpret), q, k, v, blocks)


def on_devices(function, q, k, v, blocks: Visits):
  """Runs `function(q, k, v, visits)` on every device of the ambient mesh, each with its rows and its heads.

  The compiler does not split kernels by itself. Where `tensor` does not divide the key/value heads, they are
  copied to all devices that need them, as often as it takes for each copy to serve the same number of query
  heads.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or AxisType.Manual in mesh.axis_types:
    return function(q, k, v, blocks)
  H, K, tensor = q.shape[2], k.shape[2], mesh.shape['tensor']
  rows = meshes.BATCH_AXES if q.shape[0] % meshes.batch_size(mesh) == 0 else None
  heads = 'tensor' if H % tensor == 0 else None
  if heads and K % tensor:
    shared = math.gcd(H // K, H // tensor)  # query heads
    k, v = (x[:, :, np.arange(0, H, shared) // (H // K)] for x in (k, v))
  split = PartitionSpec(rows, None, heads)
  inputs = split, split, split, PartitionSpec(rows)
  return jax.shard_map(function, in_specs=inputs, out_specs=split, check_vma=False)(q, k, v, blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(platform: str, sizes: Sizes, interpret: bool, q, k, v, blocks: Visits):
  """Computes softmax(q k^T / sqrt(h)) v over what each query sees.

  Args:
    platform: 'tpu' or 'gpu', whose kernel it is.
    sizes: those that `blocks` was made with.
    interpret: runs the kernel as ordinary operations, on any device.
    q: [B,T,H,h]; k, v: [B,T,K,h], all of one dtype.
    blocks: the `visits` of the rows.
  Returns:
    [B,T,H,h] in the dtype of v.
  """
  return _forward(platform, sizes, interpret, q, k, v, blocks)[0]


def _forward(platform, sizes, interpret, q, k, v, blocks):
  T = q.shape[1]
  padded = (_padded(x, sizes) for x in (q, k, v))
  out, normaliser = KERNELS[platform].forward(*padded, blocks, sizes, interpret)
  return out[:, :T], (q, k, v, blocks, out[:, :T], normaliser)


def _backward(platform, sizes, interpret, saved, gradient):
  q, k, v, blocks, out, normaliser = saved
  T = q.shape[1]
  # What the softmax subtracts: sum over keys of weight * gradient of the weight.
  subtracted = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
  given = (_padded(x, sizes) for x in (q, k, v, gradient.astype(v.dtype), subtracted))
  gradients = KERNELS[platform].backward(*given, normaliser, blocks, sizes, interpret)
  return *(x[:, :T] for x in gradients), None


attend.defvjp(_forward, _backward)


def _padded(x, sizes: Sizes):
  """Appends zeros to [B,T,...], so that whole blocks cover it: tokens that see themselves alone."""
  return jnp.pad(x, ((0, 0), (0, sizes.padded(x.shape[1]) - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
