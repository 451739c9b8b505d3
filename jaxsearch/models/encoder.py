"""BERT encoders (E5, MiniLM, BGE): token ids in, one hidden state a token out. Pooling is the caller's.

The forward pass is written like decoder.py's: a pure function of (config, params), layers stacked and
scanned, and a Flax container that holds the parameters. Letters: B texts, T tokens, D width, H heads, h head
width, F feed-forward width, L layers.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsearch.models import tensor_files
from jaxsearch.models.attention import NEGATIVE
from jaxsearch.models.config_files import read_json


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The numbers of one encoder, and the dtype that it computes in."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  max_position: int
  num_types: int = 2
  norm_eps: float = 1e-12
  dtype: str = 'float32'


class Encoder(nnx.Module):
  """Holds the parameters; calling it on (tokens[B,T], mask[B,T]) gives hidden states [B,T,D]."""

  def __init__(self, config: EncoderConfig, params: dict):
    self.config = config
    self.layers = nnx.Dict({name: nnx.Param(value) for name, value in params['layers'].items()})
    for name, value in params.items():
      if name != 'layers':
        setattr(self, name, nnx.Param(value))

  @property
  def params(self) -> dict:
    """The parameters as a plain nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(self, nnx.Param))

  def __call__(self, tokens, mask=None):
    """tokens: [B,T] int; mask: [B,T], 0 at padding, all ones by default -> [B,T,D] (garbage at padding)."""
    if tokens.shape[1] > self.config.max_position:
      raise ValueError(f'{tokens.shape[1]} tokens, but the encoder has {self.config.max_position} positions')
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    return encode(self.config, self.params, jnp.asarray(tokens), mask)


@functools.partial(jax.jit, static_argnums=0)
def encode(config: EncoderConfig, params: dict, tokens, mask):
  """The forward pass (Devlin et al. 2018, post-norm). tokens: [B,T] int; mask: [B,T] bool -> [B,T,D]."""
  h = config.hidden_size // config.num_heads
  bias = jnp.where(mask, 0.0, NEGATIVE)[:, None, None, :]
  x = params['embedding'][tokens] + params['position'][: tokens.shape[1]] + params['type'][0]
  x = layer_norm(x.astype(config.dtype), params['norm_scale'], params['norm_bias'], config.norm_eps)

  def layer(x, w):
    w = {name: value if 'norm' in name else value.astype(x.dtype) for name, value in w.items()}
    heads = (*x.shape[:2], config.num_heads, h)
    q, k, v = ((x @ w[name] + w[f'{name}_bias']).reshape(heads) for name in 'qkv')
    scores = jnp.einsum('bthd,bshd->bhts', q, k, preferred_element_type=jnp.float32) * h**-0.5 + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    attended = jnp.einsum('bhts,bshd->bthd', weights, v).reshape(x.shape)
    x = x + attended @ w['o'] + w['o_bias']
    x = layer_norm(x, w['attn_norm_scale'], w['attn_norm_bias'], config.norm_eps)
    y = jax.nn.gelu(x @ w['up'] + w['up_bias'], approximate=False)
    x = x + y @ w['down'] + w['down_bias']
    return layer_norm(x, w['mlp_norm_scale'], w['mlp_norm_bias'], config.norm_eps), None

  return jax.lax.scan(layer, x, params['layers'])[0]


def layer_norm(x, scale, bias, eps):
  """LayerNorm in float32, result in the dtype of `x`."""
  y = x.astype(jnp.float32)
  y = y - y.mean(axis=-1, keepdims=True)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


_OUTER = {
  'embedding': 'embeddings.word_embeddings.weight', 'position': 'embeddings.position_embeddings.weight',
  'type': 'embeddings.token_type_embeddings.weight',
  'norm_scale': 'embeddings.LayerNorm.weight', 'norm_bias': 'embeddings.LayerNorm.bias',
}  # fmt: skip
_LINEAR = {
  'q': 'attention.self.query', 'k': 'attention.self.key', 'v': 'attention.self.value',
  'o': 'attention.output.dense', 'up': 'intermediate.dense', 'down': 'output.dense',
}  # fmt: skip
_NORM = {'attn_norm': 'attention.output.LayerNorm', 'mlp_norm': 'output.LayerNorm'}
# the pooler and the heads of pretraining lie above the hidden states; position_ids are 0, 1, 2, …
_HARMLESS = [r'(bert\.)?embeddings\.position_ids', r'(bert\.)?pooler\..*', r'cls\..*']


def load_encoder(folder: str | pathlib.Path, dtype: str = 'float32') -> Encoder:
  """The encoder of a Hugging Face BERT folder (config.json and safetensors).

  Args:
    folder: of a BertModel, or of a model with one inside (names that begin with `bert.`).
    dtype: of the parameters and activations.
  Raises:
    FileNotFoundError, ValueError: naming the file and the key or tensor that is missing, unsupported or
    mis-shaped.
  """
  folder = pathlib.Path(folder)
  config = _read_config(folder / 'config.json', dtype)
  tensors = tensor_files.open_folder(folder)
  prefix = 'bert.' if any(name.startswith('bert.') for name in tensors.shapes) else ''
  outer, layers = _names(config, prefix)
  expected = dict(outer.values()) | {name: shape for names in layers.values() for name, shape in names}
  tensor_files.check(tensors, expected, _HARMLESS)

  def read(name: str, parameter: str) -> np.ndarray:
    value = tensors.read(name, ()).astype(dtype)
    return value.T if parameter in _LINEAR else value  # files hold [out, in]

  params = {key: jnp.asarray(read(name, key)) for key, (name, _) in outer.items()}
  params['layers'] = {
    key: jnp.asarray(np.stack([read(name, key) for name, _ in names])) for key, names in layers.items()}
  return Encoder(config, params)


def _names(config: EncoderConfig, prefix: str) -> tuple[dict, dict]:
  """Parameter -> (tensor, shape) outside the layers, and parameter -> [(tensor, shape) of each layer]."""
  D, F = config.hidden_size, config.intermediate_size
  rows = {'embedding': config.vocab_size, 'position': config.max_position, 'type': config.num_types}
  outer = {key: (prefix + name, (rows[key], D) if key in rows else (D,)) for key, name in _OUTER.items()}
  sizes = {'up': (F, D), 'down': (D, F)}
  inner = {key: (f'{name}.weight', sizes.get(key, (D, D))) for key, name in _LINEAR.items()}
  inner |= {f'{key}_bias': (f'{name}.bias', (F,) if key == 'up' else (D,)) for key, name in _LINEAR.items()}
  inner |= {f'{key}_scale': (f'{name}.weight', (D,)) for key, name in _NORM.items()}
  inner |= {f'{key}_bias': (f'{name}.bias', (D,)) for key, name in _NORM.items()}
  layers = {
    key: [(f'{prefix}encoder.layer.{i}.{name}', shape) for i in range(config.num_layers)]
    for key, (name, shape) in inner.items()}
  return outer, layers


def _read_config(path: pathlib.Path, dtype: str) -> EncoderConfig:
  config = read_json(path)
  only = {'model_type': 'bert', 'hidden_act': 'gelu', 'position_embedding_type': 'absolute'}
  for key, supported in only.items():
    if config.get(key, supported) != supported:
      raise ValueError(f'{path}: {key} {config[key]!r} is not supported; supported is {supported}')
  if config.get('is_decoder'):
    raise ValueError(f'{path}: is_decoder is set: this is no encoder')
  names = {
    'vocab_size': 'vocab_size', 'hidden_size': 'hidden_size', 'intermediate_size': 'intermediate_size',
    'num_layers': 'num_hidden_layers', 'num_heads': 'num_attention_heads',
    'max_position': 'max_position_embeddings', 'num_types': 'type_vocab_size',
  }  # fmt: skip
  for key in names.values():
    if config.get(key) is None:
      raise ValueError(f'{path}: the key {key} is missing')
  numbers = {ours: config[key] for ours, key in names.items()}
  return EncoderConfig(**numbers, norm_eps=config.get('layer_norm_eps', 1e-12), dtype=dtype)
