"""Configs of decoders in and out of files: config.json of Hugging Face, and the metadata of GGUF files.

They go through transformers, which knows every family's defaults and its older and newer keys. Two checks
stay ours. Its config classes fill a missing number with that of some other model, and they accept what is not
computed here: either would be a wrong model without a word.
"""

import dataclasses
import numbers
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxsearch.models import gguf_files
from jaxsearch.models.decoder import DecoderConfig, RopeScaling, rope_angles
from jaxsearch.models.tensor_files import read_json


def decoder_from_json(values: dict) -> DecoderConfig:
  """Inverts `dataclasses.asdict`, by way of JSON."""
  scaling = values['rope_scaling']
  return DecoderConfig(**values | {'rope_scaling': scaling and RopeScaling(**scaling)})


_FAMILIES = {'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM', 'llama': 'LlamaForCausalLM'}
# Hugging Face key -> ours
_FIELDS = {
  'vocab_size': 'vocab_size', 'hidden_size': 'hidden_size', 'intermediate_size': 'intermediate_size',
  'num_hidden_layers': 'num_layers', 'num_attention_heads': 'num_heads',
  'num_key_value_heads': 'num_kv_heads', 'max_position_embeddings': 'max_position',
  'rms_norm_eps': 'norm_eps', 'tie_word_embeddings': 'tie_embeddings',
}  # fmt: skip
# Hugging Face key -> GGUF key, of those that every file must have
_REQUIRED = {
  'hidden_size': 'embedding_length', 'intermediate_size': 'feed_forward_length',
  'num_hidden_layers': 'block_count', 'num_attention_heads': 'attention.head_count',
  'max_position_embeddings': 'context_length',
}  # fmt: skip
MAX_LAYERS, MAX_SIZE = 4096, 2**28  # of a config.json; transformers makes a list of the layers
_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def parse_config(values: Mapping[str, Any], path: pathlib.Path, families: Iterable[str],
                 required: Iterable[str], only: Mapping[str, Any]) -> Any:
  """Returns transformers' config of the `values` of a config.json.

  Raises ValueError, naming `path` and the key, where a `required` one is missing, the family is none of
  `families`, or a key of `only` has another value.
  """
  from transformers import AutoConfig  # imports PyTorch where that is installed
  values = {key: value for key, value in values.items() if value is not None}
  for key in ('model_type', *required):
    if key not in values:
      raise ValueError(f'{path}: the key {key} is missing')
    most = MAX_LAYERS if key == 'num_hidden_layers' else MAX_SIZE
    number = isinstance(values[key], numbers.Integral) and 1 <= values[key] <= most
    if key != 'model_type' and not number:
      raise ValueError(f'{path}: {key}={values[key]!r:.60} must be a whole number from 1 to {most}')
  if values['model_type'] not in families:
    raise ValueError(f'{path}: model_type {values["model_type"]!r} is not supported; supported are '
                     f'{", ".join(families)}')
  for key, supported in only.items():
    if values.get(key, supported) != supported:
      raise ValueError(f'{path}: {key}={values[key]!r} is not supported, only {supported!r} is')
  try:
    return AutoConfig.for_model(**values)
  except Exception as error:  # its validators raise errors of many types
    raise ValueError(f'{path}: {" ".join(str(error).rpartition("Error: ")[2].split())}') from error


def from_hugging_face(path: pathlib.Path, values: Mapping[str, Any] | None = None) -> DecoderConfig:
  """Reads config.json of Qwen2, Qwen2.5, Qwen3, Llama 3.x, SmolLM2; or takes its `values` from another file,
  `path`.

  Raises ValueError, naming the key, for a family, attention, activation or RoPE that the decoder does not
  compute.
  """
  values = read_json(path) if values is None else values
  if values.get('quantization_config'):
    raise ValueError(f'{path}: quantization_config is not supported: for quantised weights use a GGUF file')
  key = 'rope_parameters' if values.get('rope_parameters') else 'rope_scaling'
  rope = values.get(key) or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind not in ('default', 'llama3'):
    raise ValueError(f'{path}: {key}.rope_type {kind!r} is not supported; supported are default and llama3')
  if kind == 'llama3' and (missing := [name for name in _LLAMA3 if rope.get(name) is None]):
    raise ValueError(f'{path}: the key {key}.{missing[0]} is missing')
  family = values.get('model_type')
  only = {'hidden_act': 'silu'}
  if family != 'qwen2':  # its biases are part of the family, whatever its keys say
    only |= {'attention_bias': False, 'mlp_bias': False}
  config = parse_config(values, path, _FAMILIES, ['vocab_size', *_REQUIRED], only)
  if any(layer != 'full_attention' for layer in getattr(config, 'layer_types', None) or []):
    raise ValueError(f'{path}: layers that see a window only (layer_types, use_sliding_window) are not '
                     'supported')
  rope = config.rope_parameters
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    factor = rope['partial_rotary_factor']
    raise ValueError(f'{path}: rope_parameters.partial_rotary_factor={factor} is not supported')
  *factors, original = (rope.get(name) for name in _LLAMA3)
  return DecoderConfig(
    **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
    head_dim=getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads,
    rope_theta=float(rope['rope_theta']), qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3',
    rope_scaling=RopeScaling(*map(float, factors), int(original)) if kind == 'llama3' else None)


def to_hugging_face(config: DecoderConfig, dtype: str) -> dict[str, Any]:
  """Returns the config.json of `config`, with the older RoPE keys, which every version of transformers reads.

  Raises ValueError for a combination that no family has (biases and QK norms at once).
  """
  if config.qkv_bias and config.qk_norm:
    raise ValueError('qkv_bias and qk_norm at once: neither Qwen2 nor Qwen3 nor Llama has both')
  family = 'qwen2' if config.qkv_bias else 'qwen3' if config.qk_norm else 'llama'
  if family == 'qwen2' and config.head_dim * config.num_heads != config.hidden_size:
    raise ValueError(f'head_dim={config.head_dim}: Qwen2 has hidden_size / num_heads and no key for another')
  result = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()} | {
    'architectures': [_FAMILIES[family]], 'model_type': family, 'hidden_act': 'silu',
    'rope_theta': config.rope_theta, 'torch_dtype': dtype}
  if family != 'qwen2':
    result |= {'head_dim': config.head_dim, 'attention_bias': False}
  if family != 'llama':
    result |= {'use_sliding_window': False}
  if config.rope_scaling is not None:
    scaling = dict(zip(_LLAMA3, dataclasses.astuple(config.rope_scaling)))
    result['rope_scaling'] = {'rope_type': 'llama3'} | scaling
  return result


def from_gguf(file: gguf_files.File) -> DecoderConfig:
  """Reads the config in a GGUF file's metadata; `AutoConfig.from_pretrained(gguf_file=…)` needs PyTorch."""
  family = file.require('general.architecture')
  if family not in _FAMILIES:
    raise ValueError(f'{file.path}: general.architecture {family!r} is not supported; supported are '
                     f'{", ".join(_FAMILIES)}')
  get = lambda key, default: file.get(f'{family}.{key}', default)
  if get('rope.scaling.type', 'none') != 'none':
    scaling = get('rope.scaling.type', '')
    raise ValueError(f'{file.path}: {family}.rope.scaling.type {scaling!r} is not supported')
  values = {ours: file.require(f'{family}.{key}') for ours, key in _REQUIRED.items()}
  heads = values['num_attention_heads']
  head_dim = get('attention.key_length', values['hidden_size'] // heads)
  if get('rope.dimension_count', head_dim) != head_dim:
    raise ValueError(f'{file.path}: {family}.rope.dimension_count is not the width of a head ({head_dim})')
  if 'token_embd.weight' not in file.tensors:
    raise ValueError(f'{file.path}: missing tensor token_embd.weight')
  norm_eps = np.float32(file.require(f'{family}.attention.layer_norm_rms_epsilon'))
  config = from_hugging_face(file.path, values | {
    'model_type': family, 'vocab_size': file.tensors['token_embd.weight'][0], 'head_dim': head_dim,
    'num_key_value_heads': get('attention.head_count_kv', heads),
    'rope_theta': float(get('rope.freq_base', 1e4)),
    'tie_word_embeddings': 'output.weight' not in file.tensors,
    'rms_norm_eps': float(str(norm_eps)),  # 1e-5 for the float32 9.999999747e-06: the number that was meant
  })
  if 'rope_freqs.weight' not in file.tensors:
    return config
  # Llama 3's scaling: GGUF keeps only what each frequency is divided by, [h/2]. The other three numbers are
  # those of every Llama 3.x; that they fit is checked.
  divisors = file.read('rope_freqs.weight')
  scaled = dataclasses.replace(config, rope_scaling=RopeScaling(float(divisors.max()), 1.0, 4.0, 8192))
  expected = rope_angles(config, np.int32(1)) / rope_angles(scaled, np.int32(1))
  if not np.allclose(divisors, expected, rtol=1e-3):
    raise ValueError(f'{file.path}: rope_freqs.weight is not the RoPE scaling of a Llama 3.x')
  return scaled
