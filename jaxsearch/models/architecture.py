"""Sizes and parameters of decoders: configs, presets, names and shapes of parameters, new ones.

A preset is the architecture of a published base checkpoint, or of the embedded world's policy, without
weights. It serves training from scratch, benchmarks and the planning of a run; `hub.load` reads the
architecture of a checkpoint from its own folder.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3.1's stretch of the low RoPE frequencies (`rope_type: llama3` in a Hugging Face config)."""
  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The sizes and switches of a decoder; those from `dtype` on change how it runs, not what it computes."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 1e6
  rope_scaling: RopeScaling | None = None
  qkv_bias: bool = False  # Qwen2.5
  qk_norm: bool = False  # Qwen3
  tie_embeddings: bool = False
  norm_eps: float = 1e-6
  max_position: int = 32768
  dtype: str = 'float32'  # of activations
  remat: str = 'none'  # 'none' | 'dots' (keep matrix products) | 'full' (keep layer inputs only)
  attention: str = 'auto'  # over rows, see `decoder.row_attention`: 'auto' | 'flash' | 'dense'

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}')


def config_from_json(values: dict) -> DecoderConfig:
  """Inverts `dataclasses.asdict`, by way of JSON."""
  scaling = values['rope_scaling']
  return DecoderConfig(**values | {'rope_scaling': scaling and RopeScaling(**scaling)})


_LAYER_AXES = {
  'attn_norm': 'norm',
  'q': 'embed heads head_dim', 'k': 'embed kv_heads head_dim', 'v': 'embed kv_heads head_dim',
  'q_bias': 'heads head_dim', 'k_bias': 'kv_heads head_dim', 'v_bias': 'kv_heads head_dim',
  'q_norm': 'head_dim', 'k_norm': 'head_dim', 'o': 'heads head_dim embed',
  'mlp_norm': 'norm', 'gate': 'embed mlp', 'up': 'embed mlp', 'down': 'mlp embed',
}  # fmt: skip
INPUTS = {'q': 1, 'k': 1, 'v': 1, 'o': 2, 'gate': 1, 'up': 1, 'down': 1}  # leading axes of a layer's matrices


def parameter_axes(config: DecoderConfig) -> dict:
  """Returns the axis names of every parameter, nested as they are; parallel/mesh.py maps them to a mesh."""
  absent = set() if config.qkv_bias else {'q_bias', 'k_bias', 'v_bias'}
  absent |= set() if config.qk_norm else {'q_norm', 'k_norm'}
  layers = {name: ('layers', *axes.split()) for name, axes in _LAYER_AXES.items() if name not in absent}
  axes = {'embedding': ('vocab', 'embed'), 'layers': layers, 'final_norm': ('norm',)}
  return axes if config.tie_embeddings else axes | {'unembedding': ('vocab', 'embed')}


def parameter_shapes(config: DecoderConfig) -> dict:
  """Returns the shapes of every parameter, nested as they are."""
  size = dict(layers=config.num_layers, embed=config.hidden_size, norm=config.hidden_size,
              mlp=config.intermediate_size, heads=config.num_heads, kv_heads=config.num_kv_heads,
              head_dim=config.head_dim, vocab=config.vocab_size)
  return jax.tree.map(lambda axes: tuple(size[axis] for axis in axes), parameter_axes(config),
                      is_leaf=lambda axes: isinstance(axes, tuple))


def initial_params(config: DecoderConfig, key, dtype=jnp.float32) -> dict:
  """Initialises as GPT-2: normal(0.02), divided by sqrt(2L) for what is added to the residual stream."""
  def create(name, shape, key):
    if 'norm' in name:
      return jnp.ones(shape, dtype)
    if 'bias' in name:
      return jnp.zeros(shape, dtype)
    scale = 0.02 / (2 * config.num_layers) ** 0.5 if name in ('o', 'down') else 0.02
    return (scale * jax.random.normal(key, shape)).astype(dtype)

  return create_each(create, parameter_shapes(config), key)


def create_each(create, shapes: dict, key) -> dict:
  """Returns `create(name, shape, key of its own)` of every shape, nested as they are."""
  leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
  keys = jax.random.split(key, len(leaves))
  values = [create(path[-1].key, shape, key) for (path, shape), key in zip(leaves, keys)]
  return jax.tree.unflatten(treedef, values)


def _qwen2_5(hidden, ffn, layers, heads, kv_heads, *, vocab=151936, eps=1e-6, tied=False,
             max_position=131072):
  return DecoderConfig(vocab, hidden, ffn, layers, heads, kv_heads, hidden // heads,
                       qkv_bias=True, tie_embeddings=tied, norm_eps=eps, max_position=max_position)


def _qwen3(hidden, ffn, layers, heads, *, tied):
  return DecoderConfig(151936, hidden, ffn, layers, heads, 8, 128, qk_norm=True, tie_embeddings=tied,
                       max_position=40960)


def _llama3(hidden, ffn, layers, heads, head_dim, *, factor, tied):
  scaling = RopeScaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
  return DecoderConfig(128256, hidden, ffn, layers, heads, 8, head_dim, rope_theta=5e5, rope_scaling=scaling,
                       tie_embeddings=tied, norm_eps=1e-5, max_position=131072)


PRESETS: dict[str, DecoderConfig] = {
  'world-tiny': DecoderConfig(
    vocab_size=4096, hidden_size=192, intermediate_size=512, num_layers=4, num_heads=6, num_kv_heads=2,
    head_dim=32, rope_theta=1e4, qkv_bias=True, tie_embeddings=True, max_position=2048),
  'world-reader': DecoderConfig(  # Llama's architecture: another family than the policy
    vocab_size=4096, hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=32, rope_theta=1e4, tie_embeddings=True, max_position=2048),
  'smollm2-135m': DecoderConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64, rope_theta=1e5, tie_embeddings=True, norm_eps=1e-5, max_position=8192),
  'llama3.2-1b': _llama3(2048, 8192, 16, 32, 64, factor=32.0, tied=True),
  'llama3.2-3b': _llama3(3072, 8192, 28, 24, 128, factor=32.0, tied=True),
  'llama3.1-8b': _llama3(4096, 14336, 32, 32, 128, factor=8.0, tied=False),
  'qwen2.5-0.5b': _qwen2_5(896, 4864, 24, 14, 2, tied=True, max_position=32768),
  'qwen2.5-1.5b': _qwen2_5(1536, 8960, 28, 12, 2, tied=True),
  'qwen2.5-3b': _qwen2_5(2048, 11008, 36, 16, 2, tied=True, max_position=32768),
  'qwen2.5-7b': _qwen2_5(3584, 18944, 28, 28, 4, vocab=152064),
  'qwen2.5-14b': _qwen2_5(5120, 13824, 48, 40, 8, vocab=152064, eps=1e-5),
  'qwen2.5-32b': _qwen2_5(5120, 27648, 64, 40, 8, vocab=152064, eps=1e-5),
  'qwen3-0.6b': _qwen3(1024, 3072, 28, 16, tied=True),
  'qwen3-1.7b': _qwen3(2048, 6144, 28, 16, tied=True),
  'qwen3-4b': _qwen3(2560, 9728, 36, 32, tied=True),
  'qwen3-8b': _qwen3(4096, 12288, 36, 32, tied=False),
}


def preset(name: str) -> DecoderConfig:
  """Returns the config of the decoder called `name`; ValueError lists the known names."""
  if name not in PRESETS:
    raise ValueError(f'{name!r} is no preset; known are {", ".join(PRESETS)}')
  return PRESETS[name]
