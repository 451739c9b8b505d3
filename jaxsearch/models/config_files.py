"""The numbers of a decoder in files: config.json of a Hugging Face folder, and GGUF metadata.

What this decoder does not compute must be refused here: a key that is silently ignored is a wrong model.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsearch.models.decoder import DecoderConfig, RopeScaling, rope_angles
from jaxsearch.models.gguf_files import File
from jaxsearch.models.tensor_files import read_json

_FAMILIES = {'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM', 'llama': 'LlamaForCausalLM'}


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from `path`; errors name the file."""
  if not path.is_file():
    raise FileNotFoundError(f'{path}: missing')
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as error:
    raise ValueError(f'{path}: not valid JSON ({error})') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: not a JSON object')
  return value


def from_hugging_face(path: pathlib.Path) -> DecoderConfig:
  """Reads config.json of Qwen2, Qwen2.5, Qwen3, Llama 3.x, SmolLM2.

  Raises:
    ValueError: naming the key, for a family, attention, activation or RoPE that the decoder does not compute.
  """
  config = read_json(path)

  def require(key: str) -> Any:
    if config.get(key) is None:
      raise ValueError(f'{path}: the key {key} is missing')
    return config[key]

  family = require('model_type')
  if family not in _FAMILIES:
    raise ValueError(f'{path}: model_type {family!r} is not supported; supported are {", ".join(_FAMILIES)}')
  _refuse_unsupported(config, path)
  heads, hidden = require('num_attention_heads'), require('hidden_size')
  # transformers' Qwen3Config has a default of its own; the other two divide
  head_dim = config.get('head_dim') or (128 if family == 'qwen3' else hidden // heads)
  theta, scaling = _rope(config, path)
  return DecoderConfig(
    vocab_size=require('vocab_size'), hidden_size=hidden, intermediate_size=require('intermediate_size'),
    num_layers=require('num_hidden_layers'), num_heads=heads,
    num_kv_heads=config.get('num_key_value_heads') or heads, head_dim=head_dim, rope_theta=theta,
    rope_scaling=scaling, qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3',
    tie_embeddings=config.get('tie_word_embeddings', False), norm_eps=config.get('rms_norm_eps', 1e-6),
    max_position=require('max_position_embeddings'))


def _refuse_unsupported(config: Mapping[str, Any], path: pathlib.Path) -> None:
  def refuse(key: str, why: str):
    raise ValueError(f'{path}: {key}={config[key]!r} is not supported ({why})')

  if config.get('hidden_act', 'silu') != 'silu':
    refuse('hidden_act', 'only silu is')
  for key in ('attention_bias', 'mlp_bias'):  # Qwen2 has no such key: its biases are part of the family
    if config.get(key) and config['model_type'] != 'qwen2':
      refuse(key, 'output and feed-forward projections have no bias here')
  if config.get('quantization_config'):
    refuse('quantization_config', 'only floating-point weights are; for quantised ones use a GGUF file')
  if any(kind != 'full_attention' for kind in config.get('layer_types') or []):
    refuse('layer_types', 'only full_attention is')
  windowed_from = config.get('max_window_layers', 28)  # transformers' default
  if config.get('use_sliding_window') and windowed_from < config.get('num_hidden_layers', 0):
    refuse('use_sliding_window', f'layers from {windowed_from} on would see a window only')


def _rope(config: Mapping[str, Any], path: pathlib.Path) -> tuple[float, RopeScaling | None]:
  """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
  key = 'rope_parameters' if config.get('rope_parameters') else 'rope_scaling'
  rope = config.get(key) or {}
  theta = float(rope.get('rope_theta') or config.get('rope_theta') or 1e4)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  for holder, where in ((rope, f'{key}.partial_rotary_factor'), (config, 'partial_rotary_factor')):
    if holder.get('partial_rotary_factor', 1.0) != 1.0:
      raise ValueError(f'{path}: {where}={holder["partial_rotary_factor"]} is not supported')
  if kind == 'default':
    return theta, None
  if kind != 'llama3':
    raise ValueError(f'{path}: {key}.rope_type {kind!r} is not supported; supported are default and llama3')
  names = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')
  missing = [name for name in names if rope.get(name) is None]
  if missing:
    raise ValueError(f'{path}: the key {key}.{missing[0]} is missing')
  factor, low, high, original = (rope[name] for name in names)
  return theta, RopeScaling(float(factor), float(low), float(high), int(original))


def to_hugging_face(config: DecoderConfig, dtype: str) -> dict[str, Any]:
  """The config.json of `config`, with the older RoPE keys, which every version of transformers reads.

  Raises:
    ValueError: for a combination that no family has (biases and QK norms at once).
  """
  if config.qkv_bias and config.qk_norm:
    raise ValueError('qkv_bias and qk_norm at once: neither Qwen2 nor Qwen3 nor Llama has both')
  family = 'qwen2' if config.qkv_bias else 'qwen3' if config.qk_norm else 'llama'
  if family == 'qwen2' and config.head_dim * config.num_heads != config.hidden_size:
    raise ValueError(f'head_dim={config.head_dim}: Qwen2 has hidden_size / num_heads and no key for another')
  result = {
    'architectures': [_FAMILIES[family]], 'model_type': family, 'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size, 'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers, 'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads, 'hidden_act': 'silu', 'rms_norm_eps': config.norm_eps,
    'max_position_embeddings': config.max_position, 'tie_word_embeddings': config.tie_embeddings,
    'rope_theta': config.rope_theta, 'torch_dtype': dtype,
  }  # fmt: skip
  if family != 'qwen2':
    result |= {'head_dim': config.head_dim, 'attention_bias': False}
  if family != 'llama':
    result |= {'use_sliding_window': False}
  if (scaling := config.rope_scaling) is not None:
    result['rope_scaling'] = {
      'rope_type': 'llama3', 'factor': scaling.factor, 'low_freq_factor': scaling.low_freq_factor,
      'high_freq_factor': scaling.high_freq_factor,
      'original_max_position_embeddings': scaling.original_max_position}
  return result


def from_gguf(file: File) -> DecoderConfig:
  """Reads the metadata of a GGUF file; the same families, the same refusals."""
  family = file.require('general.architecture')
  if family not in _FAMILIES:
    known = ', '.join(_FAMILIES)
    raise ValueError(f'{file.path}: general.architecture {family!r} is not supported; supported are {known}')

  def require(key: str) -> Any:
    return file.require(f'{family}.{key}')

  def get(key: str, default: Any = None) -> Any:
    return file.get(f'{family}.{key}', default)

  if get('rope.scaling.type', 'none') != 'none':
    raise ValueError(f'{file.path}: {family}.rope.scaling.type {get("rope.scaling.type")!r} is not supported')
  heads, hidden = require('attention.head_count'), require('embedding_length')
  head_dim, theta = get('attention.key_length', hidden // heads), float(get('rope.freq_base', 1e4))
  if get('rope.dimension_count', head_dim) != head_dim:
    raise ValueError(f'{file.path}: {family}.rope.dimension_count is not the width of a head ({head_dim})')
  if 'token_embd.weight' not in file.tensors:
    raise ValueError(f'{file.path}: missing tensor token_embd.weight')
  config = DecoderConfig(
    vocab_size=file.tensors['token_embd.weight'][0], hidden_size=hidden,
    intermediate_size=require('feed_forward_length'), num_layers=require('block_count'), num_heads=heads,
    num_kv_heads=get('attention.head_count_kv', heads), head_dim=head_dim, rope_theta=theta,
    qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3',
    tie_embeddings='output.weight' not in file.tensors,
    norm_eps=_shortest(require('attention.layer_norm_rms_epsilon')), max_position=require('context_length'))
  return _with_gguf_scaling(config, file)


def _shortest(value: float) -> float:
  """1e-5 for the float32 9.999999747e-06: the number that was meant."""
  return float(str(np.float32(value)))


def _with_gguf_scaling(config: DecoderConfig, file: File) -> DecoderConfig:
  """Llama 3's scaling, of which GGUF keeps what each frequency is divided by (rope_freqs.weight, [h/2])."""
  if 'rope_freqs.weight' not in file.tensors:
    return config
  divisors = file.read('rope_freqs.weight')
  # the other three numbers are those of every Llama 3.x; that they fit is checked
  scaling = RopeScaling(float(divisors.max()), 1.0, 4.0, 8192)
  scaled = dataclasses.replace(config, rope_scaling=scaling)
  one = np.ones(1, np.int32)
  if not np.allclose(divisors, rope_angles(config, one)[0] / rope_angles(scaled, one)[0], rtol=1e-3):
    raise ValueError(f'{file.path}: rope_freqs.weight is not the RoPE scaling of a Llama 3.x')
  return scaled
