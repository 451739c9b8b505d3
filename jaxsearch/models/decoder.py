"""One decoder for Qwen2.5, Qwen3 and Llama 3.x: the families differ by a few switches of `DecoderConfig`.

The forward pass is written as pure functions of (config, params); `Decoder` is the Flax container of the
parameters. Training and cached decoding share `_block` and pass it different attention (attention.py): over
rows in the tree layout, or over a KV cache. In order: the container, two forward passes, one layer, logits.
Sizes and parameters: architecture.py.

Letters: B rows, S slots, T tokens of a row, n new tokens, D embed, H query heads, K key/value heads, G = H/K
query heads that share one, h head width, F feed-forward width, V vocabulary, L layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.models.attention import adapted_matmul, dense_attention, matmul
from jaxsearch.models.kernels import flash_attention, tree_attention
from jaxsearch.models.sampling_weights import Quantised, Transposed
from jaxsearch.parallel.mesh import ambient_platform, keep_batch_split

_REMAT = {'none': None, 'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
          'full': jax.checkpoint_policies.nothing_saveable}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A matrix under training of its adapter: computes with `merged`, differentiates through a and b alone."""
  merged: jax.Array  # the frozen matrix + a b, see models/lora.py
  a: jax.Array       # [leading axes, rank]
  b: jax.Array       # [rank, other axes], times the scale of the adapter


def product(x, w):
  """Multiplies as `matmul`, with an adapted, quantised or transposed matrix too."""
  if isinstance(w, Quantised | Transposed):
    return w.multiply(x)
  return adapted_matmul(x, w.merged, w.a, w.b) if isinstance(w, Adapted) else matmul(x, w)


class Parameters(nnx.Module):
  """Holds a config and its parameters: arrays by name, those of all layers stacked under `layers`."""

  def __init__(self, config, params: dict):
    self.config = config
    self.layers = nnx.Dict({name: nnx.Param(value) for name, value in params['layers'].items()})
    for name, value in params.items():
      if name != 'layers':
        setattr(self, name, nnx.Param(value))

  @property
  def params(self) -> dict:
    """Returns the parameters as a nested dict of arrays, which is what all functions and programs take."""
    return nnx.to_pure_dict(nnx.state(self, nnx.Param))


class Decoder(Parameters):
  """Holds the parameters; calling it on `tokens[B,T]` alone gives causal logits `[B,T,V]` in float32."""

  def __call__(self, tokens, positions=None, visible_until=None):
    return logits(self.params, hidden_states(self.config, self.params, tokens, positions, visible_until))


def hidden_states(config: DecoderConfig, params: dict, tokens, positions=None, visible_until=None):
  """Runs the decoder over rows `tokens` [B,T] in the tree layout.

  Args:
    positions: [B,T] int, a token's depth on its own path (RoPE position); its index in the row by default.
    visible_until: [B,T] int: token i sees token j iff j <= i < visible_until[j]; T (plain causal) by default.
  Returns:
    [B,T,D] hidden states after the final norm, in the compute dtype.
  """
  T = tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(T), tokens.shape) if positions is None else positions
  visible_until = jnp.full(tokens.shape, T) if visible_until is None else visible_until
  angles = rope_angles(config, positions)
  attend = row_attention(config, visible_until)

  def layer(x, weights):
    x, _ = _block(config, weights, x, angles, lambda q, k, v: (attend(q, k, v), None))
    return keep_batch_split(x), None

  if _REMAT[config.remat] is not None:
    layer = jax.checkpoint(layer, policy=_REMAT[config.remat], prevent_cse=False)
  x = keep_batch_split(params['embedding'][tokens].astype(config.dtype))
  x, _ = jax.lax.scan(layer, x, params['layers'])
  return rms_norm(x, params['final_norm'], config.norm_eps)


def forward_cached(config: DecoderConfig, params: dict, tokens, starts, cache: list, attend):
  """Runs the decoder over new tokens of cached sequences.

  Padding of `tokens` writes garbage behind the end of a sequence. Nothing attends to it, and later tokens
  overwrite it.

  Args:
    params: nested dict whose `layers` is a list of per-layer dicts (`unstack`), so that XLA sees each layer's
      weights and cache as arrays of their own and updates the caches in place.
    tokens: [S,n] int, the new tokens of each sequence.
    starts: [S] int, how many of its tokens the cache already holds.
    cache: list over layers of what `attend` takes.
    attend: (q [S,n,H,h], k, v [S,n,K,h], the cache of a layer, starts) -> ([S,n,H,h], that cache with k, v),
      as attention.py and kernels/paged_attention.py have it.
  Returns:
    ([S,n,D] hidden states after the final norm, updated cache).
  """
  angles = rope_angles(config, starts[:, None] + jnp.arange(tokens.shape[1]))
  x = params['embedding'][tokens].astype(config.dtype)
  written = []
  for weights, layer in zip(params['layers'], cache, strict=True):
    x, layer = _block(config, weights, x, angles, lambda q, k, v, layer=layer: attend(q, k, v, layer, starts))
    written.append(layer)
  return rms_norm(x, params['final_norm'], config.norm_eps), written


def unstack(params: dict, num_layers: int) -> dict:
  """Returns the parameters with `layers` as a list of per-layer dicts, as `forward_cached` takes them."""
  layers = [{name: value[i] for name, value in params['layers'].items()} for i in range(num_layers)]
  return params | {'layers': layers}


def fuse(config: DecoderConfig, params: dict) -> dict:
  """Joins q, k, v of unstacked parameters as `qkv` [D,K,G+2,h], gate and up as `gate_up` [D,2F].

  For decoding on one device, where every product is a pass over its weights. Heads cannot be split then.
  """
  K, h = config.num_kv_heads, config.head_dim

  def by_kv_head(w, suffix):
    parts = (w[name + suffix] for name in 'qkv')
    return jnp.concatenate([part.reshape(*part.shape[:-2], K, -1, h) for part in parts], axis=-2)

  def layer(w):
    fused = {'qkv': by_kv_head(w, ''), 'gate_up': jnp.concatenate([w['gate'], w['up']], axis=-1)}
    if config.qkv_bias:
      fused['qkv_bias'] = by_kv_head(w, '_bias')
    kept = {'attn_norm', 'mlp_norm', 'q_norm', 'k_norm', 'o', 'down'}
    return fused | {name: value for name, value in w.items() if name in kept}

  return params | {'layers': [layer(w) for w in params['layers']]}


def _block(config, weights, x, angles, attend):
  """Runs one transformer layer: attention and gated feed-forward, each added to the residual stream."""
  dtype, (B, T, _), h = x.dtype, x.shape, config.head_dim
  matrices = {name: value for name, value in weights.items() if 'norm' not in name}
  kept = lambda matrix: isinstance(matrix, Quantised | Transposed)  # they cast themselves
  w = jax.tree.map(lambda w: w if kept(w) else w.astype(dtype), matrices, is_leaf=kept)

  y = rms_norm(x, weights['attn_norm'], config.norm_eps)
  if 'qkv' in w:
    together = product(y, w['qkv']).reshape(B, T, config.num_kv_heads, -1, h) + w.get('qkv_bias', 0)
    q, k, v = together[..., :-2, :].reshape(B, T, -1, h), together[..., -2, :], together[..., -1, :]
  else:
    q, k, v = (product(y, w[name]).reshape(B, T, -1, h) for name in 'qkv')
    if config.qkv_bias:
      q, k, v = q + w['q_bias'], k + w['k_bias'], v + w['v_bias']
  if config.qk_norm:
    q = rms_norm(q, weights['q_norm'], config.norm_eps)
    k = rms_norm(k, weights['k_norm'], config.norm_eps)
  q, k = rotate(q, angles), rotate(k, angles)
  attended, cache = attend(q, k, v)
  x = x + product(attended.reshape(B, T, -1), w['o'])

  y = rms_norm(x, weights['mlp_norm'], config.norm_eps)
  if 'gate_up' in w:
    gate, up = jnp.split(product(y, w['gate_up']), 2, axis=-1)
  else:
    gate, up = product(y, w['gate']), product(y, w['up'])
  return x + product(jax.nn.silu(gate) * up, w['down']), cache


def row_attention(config: DecoderConfig, visible_until):
  """Returns the attention over rows `visible_until` [B,T]: (q [B,T,H,h], k, v [B,T,K,h]) -> [B,T,H,h].

  A kernel in a program traced for TPUs or GPUs (`parallel.mesh.ambient`): 'auto' visits only what is visible,
  'flash' is for rows of plain chains. Elsewhere dense.
  """
  platform = ambient_platform()
  if config.attention == 'auto' and platform in tree_attention.KERNELS:
    width = config.head_dim * jnp.dtype(config.dtype).itemsize
    group = config.num_heads // config.num_kv_heads
    return tree_attention.over_rows(visible_until, group, width, platform)
  if config.attention == 'flash' and platform in flash_attention.BLOCK:
    return flash_attention.over_rows(visible_until, platform)
  return functools.partial(dense_attention, visible_until=visible_until)


def rms_norm(x, scale, eps):
  """Computes RMSNorm in float32, with a result in the dtype of `x`."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rope_angles(config: DecoderConfig, positions):
  """Returns [..., T, h/2] float32 angles; llama3 scaling stretches the long wavelengths by `factor`."""
  h = config.head_dim
  frequency = 1.0 / config.rope_theta ** (jnp.arange(0, h, 2, dtype=jnp.float32) / h)
  if (scaling := config.rope_scaling) is not None:
    turns = scaling.original_max_position * frequency / (2 * jnp.pi)  # within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
  return positions[..., None].astype(jnp.float32) * frequency


def rotate(x, angles):
  """Applies RoPE in the half-split form of Hugging Face checkpoints. x: [B,T,N,h], angles: [B,T,h/2]."""
  sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def logits(params: dict, hidden):
  """Returns [..., V] float32 logits of hidden states [..., D]."""
  table = params.get('unembedding', params['embedding'])
  if isinstance(table, Transposed):
    return table.multiply(hidden, jnp.float32)
  return jnp.einsum('...d,vd->...v', hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32)
