"""Decoders by name: the architectures of the published base checkpoints, and of the embedded world's policy.

A preset has no weights. It serves training from scratch, benchmarks and the planning of a run; `hub.load`
reads the architecture of a checkpoint from its own folder.
"""

from jaxsearch.models.decoder import DecoderConfig, RopeScaling


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
