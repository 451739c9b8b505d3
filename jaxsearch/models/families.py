"""Model families in files: config.json of Hugging Face, the metadata of GGUF files, and the names of tensors.

A family that computes what another one does is an entry of FAMILIES; one with a switch of its own adds it to
`DecoderConfig` too. transformers knows every family's defaults and its older and newer keys. But it fills a
missing number with that of some other model, and accepts what is not computed here: both are checked first.
"""

import dataclasses
import numbers
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxsearch.files import read_json
from jaxsearch.models import gguf_files
from jaxsearch.models.architecture import INPUTS, DecoderConfig, RopeScaling
from jaxsearch.models.decoder import rope_angles
from jaxsearch.models.tensor_files import InFile


class Family(NamedTuple):
  architecture: str  # its class in transformers
  qkv_bias: bool = False
  qk_norm: bool = False


FAMILIES = {  # model_type -> Family
  'qwen2': Family('Qwen2ForCausalLM', qkv_bias=True), 'qwen3': Family('Qwen3ForCausalLM', qk_norm=True),
  'llama': Family('LlamaForCausalLM'),
}  # fmt: skip
# The tensor of each parameter; all families share the names.
TENSORS = {
  'embedding': InFile('model.embed_tokens.weight'), 'unembedding': InFile('lm_head.weight'),
  'final_norm': InFile('model.norm.weight'),
  'attn_norm': InFile('model.layers.{}.input_layernorm.weight'),
  'mlp_norm': InFile('model.layers.{}.post_attention_layernorm.weight'),
  **{name: InFile(f'model.layers.{{}}.self_attn.{name}_proj.weight', INPUTS[name]) for name in 'qkvo'},
  **{f'{name}_bias': InFile(f'model.layers.{{}}.self_attn.{name}_proj.bias', 0) for name in 'qkv'},
  **{f'{name}_norm': InFile(f'model.layers.{{}}.self_attn.{name}_norm.weight') for name in 'qk'},
  **{name: InFile(f'model.layers.{{}}.mlp.{name}_proj.weight', 1) for name in ('gate', 'up', 'down')},
}  # fmt: skip
# RoPE tables are computed here; tied checkpoints may repeat their embedding as lm_head.
HARMLESS = [r'.*rotary_emb\.inv_freq', r'rope_freqs\.weight']
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

  Raises ValueError, naming `path` and the key, where a `required` number is missing, the family is none of
  `families`, or a key of `only` has another value.
  """
  from transformers import AutoConfig  # imports PyTorch where that is installed
  values = {key: value for key, value in values.items() if value is not None}
  if (family := values.get('model_type')) not in families:
    raise ValueError(f'{path}: model_type {family!r} is not supported; supported are {", ".join(families)}')
  for key in required:
    most = MAX_LAYERS if key == 'num_hidden_layers' else MAX_SIZE
    if key not in values:
      raise ValueError(f'{path}: the key {key} is missing')
    if not isinstance(values[key], numbers.Integral) or not 1 <= values[key] <= most:
      raise ValueError(f'{path}: {key}={values[key]!r:.60} must be a whole number from 1 to {most}')
  for key, supported in only.items():
    if values.get(key, supported) != supported:
      raise ValueError(f'{path}: {key}={values[key]!r} is not supported, only {supported!r} is')
  try:
    return AutoConfig.for_model(**values)
  except Exception as error:  # its validators raise errors of many types
    raise ValueError(f'{path}: {" ".join(str(error).rpartition("Error: ")[2].split())}') from error


def from_hugging_face(path: pathlib.Path, values: Mapping[str, Any] | None = None) -> DecoderConfig:
  """Reads the config.json of a decoder; or takes its `values` from another file, `path`.

  Raises ValueError, naming the key, for a family, attention, activation or RoPE that the decoder does not
  compute.
  """
  values = read_json(path) if values is None else values
  own, older = (values.get(key) or {} for key in ('rope_parameters', 'rope_scaling'))
  if own and older and own != older:
    raise ValueError(f'{path}: rope_parameters and rope_scaling differ; leave one of them out')
  key, rope = ('rope_parameters', own) if own else ('rope_scaling', older)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind not in ('default', 'llama3'):
    raise ValueError(f'{path}: {key}.rope_type {kind!r} is not supported; supported are default and llama3')
  only = {'hidden_act': 'silu', 'partial_rotary_factor': 1}
  factor = rope.get('partial_rotary_factor', 1)
  config = parse_config({'partial_rotary_factor': factor} | values, path, FAMILIES,
                        ['vocab_size', *_REQUIRED], only)
  if set(getattr(config, 'layer_types', None) or ()) - {'full_attention'}:
    raise ValueError(f'{path}: layers that see a window only (layer_types, use_sliding_window) are not '
                     'supported')
  rope, (_, qkv_bias, qk_norm) = config.rope_parameters, FAMILIES[values['model_type']]
  return DecoderConfig(
    **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
    head_dim=getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads,
    rope_theta=float(rope['rope_theta']), qkv_bias=qkv_bias, qk_norm=qk_norm,
    rope_scaling=RopeScaling(*(rope[name] for name in _LLAMA3)) if kind == 'llama3' else None)


def to_hugging_face(config: DecoderConfig, dtype: str) -> dict[str, Any]:
  """Returns the config.json of `config`, with the older RoPE keys, which every version of transformers reads.

  Raises ValueError for a combination that no family has (biases and QK norms at once).
  """
  switches = config.qkv_bias, config.qk_norm
  family = next((name for name, (_, *own) in FAMILIES.items() if switches == tuple(own)), None)
  if family is None:
    raise ValueError('qkv_bias and qk_norm at once: no family has both')
  result = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()} | {
    'architectures': [FAMILIES[family].architecture], 'model_type': family, 'hidden_act': 'silu',
    'head_dim': config.head_dim, 'rope_theta': config.rope_theta, 'torch_dtype': dtype}
  if config.rope_scaling is not None:
    scaling = dict(zip(_LLAMA3, dataclasses.astuple(config.rope_scaling)))
    result['rope_scaling'] = {'rope_type': 'llama3'} | scaling
  return result


def from_gguf(file: gguf_files.File) -> DecoderConfig:
  """Reads the config in a GGUF file's metadata; `AutoConfig.from_pretrained(gguf_file=…)` needs PyTorch."""
  family = file.require('general.architecture')
  get = lambda key, default: file.get(f'{family}.{key}', default)
  if (scaling := get('rope.scaling.type', 'none')) != 'none':
    raise ValueError(f'{file.path}: {family}.rope.scaling.type {scaling!r} is not supported')
  values = {ours: file.require(f'{family}.{key}') for ours, key in _REQUIRED.items()}
  heads = values['num_attention_heads']
  head_dim = get('attention.key_length', values['hidden_size'] // heads)
  norm_eps = np.float32(file.require(f'{family}.attention.layer_norm_rms_epsilon'))
  config = from_hugging_face(file.path, values | {
    'model_type': family, 'vocab_size': file.tensors['token_embd.weight'][0], 'head_dim': head_dim,
    'num_key_value_heads': get('attention.head_count_kv', heads),
    'rope_theta': float(get('rope.freq_base', 1e4)),
    'partial_rotary_factor': get('rope.dimension_count', head_dim) / head_dim,
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
