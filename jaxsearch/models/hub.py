"""Decoders in and out of files: Hugging Face folders and GGUF files in, Hugging Face folders out.

`load` reads the numbers (config_files.py), checks that the checkpoint holds exactly the tensors of that
decoder (tensor_files.py), and fills one parameter at a time: the stacked [layers, …] parameters are read
layer by layer, and of each layer only the part that a device holds, so that a host never has the whole model
in memory beside its devices.

A model family is a table of names; one table more says how a parameter's axes lie in the files, whose
matrices are [out, in] with the heads folded into rows or columns. Letters as in decoder.py.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxsearch.models import config_files, gguf_files, tensor_files
from jaxsearch.models.decoder import Decoder, DecoderConfig, parameter_axes, parameter_shapes
from jaxsearch.models.tensor_files import Tensors
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel.mesh import shardings

# The axes of a parameter (without `layers`) in the order in which they lie in a file; identity where not
# listed.
_ORDER = {
  'q': (1, 2, 0), 'k': (1, 2, 0), 'v': (1, 2, 0), 'o': (2, 0, 1),
  'gate': (1, 0), 'up': (1, 0), 'down': (1, 0),
}  # fmt: skip

_HUGGING_FACE = {
  'embedding': 'model.embed_tokens.weight', 'unembedding': 'lm_head.weight',
  'final_norm': 'model.norm.weight',
  'attn_norm': 'model.layers.{}.input_layernorm.weight',
  'q': 'model.layers.{}.self_attn.q_proj.weight', 'q_bias': 'model.layers.{}.self_attn.q_proj.bias',
  'k': 'model.layers.{}.self_attn.k_proj.weight', 'k_bias': 'model.layers.{}.self_attn.k_proj.bias',
  'v': 'model.layers.{}.self_attn.v_proj.weight', 'v_bias': 'model.layers.{}.self_attn.v_proj.bias',
  'o': 'model.layers.{}.self_attn.o_proj.weight',
  'q_norm': 'model.layers.{}.self_attn.q_norm.weight', 'k_norm': 'model.layers.{}.self_attn.k_norm.weight',
  'mlp_norm': 'model.layers.{}.post_attention_layernorm.weight',
  'gate': 'model.layers.{}.mlp.gate_proj.weight', 'up': 'model.layers.{}.mlp.up_proj.weight',
  'down': 'model.layers.{}.mlp.down_proj.weight',
}  # fmt: skip
_GGUF = {
  'embedding': 'token_embd.weight', 'unembedding': 'output.weight', 'final_norm': 'output_norm.weight',
  'attn_norm': 'blk.{}.attn_norm.weight',
  'q': 'blk.{}.attn_q.weight', 'q_bias': 'blk.{}.attn_q.bias',
  'k': 'blk.{}.attn_k.weight', 'k_bias': 'blk.{}.attn_k.bias',
  'v': 'blk.{}.attn_v.weight', 'v_bias': 'blk.{}.attn_v.bias',
  'o': 'blk.{}.attn_output.weight',
  'q_norm': 'blk.{}.attn_q_norm.weight', 'k_norm': 'blk.{}.attn_k_norm.weight',
  'mlp_norm': 'blk.{}.ffn_norm.weight',
  'gate': 'blk.{}.ffn_gate.weight', 'up': 'blk.{}.ffn_up.weight', 'down': 'blk.{}.ffn_down.weight',
}  # fmt: skip
# RoPE tables are computed here; tied checkpoints may repeat their embedding as lm_head
_HARMLESS = [r'.*rotary_emb\.inv_freq', r'rope_freqs\.weight']
_HARMLESS_TIED = [r'lm_head\.weight']


def load(path: str | pathlib.Path, dtype: str = 'float32', *, param_dtype: str | None = None,
         mesh: jax.sharding.Mesh | None = None, remat: str = 'none') -> Decoder:
  """The decoder of a Hugging Face folder (config.json, safetensors), of a GGUF file, or of a folder with one.

  Args:
    path: the folder or file.
    dtype: of the activations.
    param_dtype: of the parameters; `dtype` if not given.
    mesh: where the parameters live, laid out as parallel/mesh.py says; each process reads only what its
      devices hold. The default device if not given.
    remat: what the backward pass recomputes, see `DecoderConfig`.
  Returns:
    a `Decoder`; its `config` says what was found.
  Raises:
    FileNotFoundError, ValueError: naming the file and the key or tensor that is missing, unexpected or
    mis-shaped.
  """
  config, names, tensors = _open(pathlib.Path(path))
  config = dataclasses.replace(config, dtype=jnp.dtype(dtype).name, remat=remat)
  harmless = _HARMLESS + (_HARMLESS_TIED if config.tie_embeddings else [])
  tensor_files.check(tensors, _expected(config, names), harmless)
  dtype = jnp.dtype(param_dtype or dtype)

  shapes = parameter_shapes(config)
  placed = {} if mesh is None else shardings(parameter_axes(config), shapes, mesh)

  def fill(name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> jax.Array:
    read = _reader(name, names[name], shape, tensors, dtype)
    if sharding is None:
      return jnp.asarray(read((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, read)

  placed_layers = placed.get('layers', {})
  params = {name: fill(name, shape, placed.get(name)) for name, shape in shapes.items() if name != 'layers'}
  layers = {name: fill(name, shape, placed_layers.get(name)) for name, shape in shapes['layers'].items()}
  return Decoder(config, params=params | {'layers': layers})


def read_config(path: str | pathlib.Path) -> DecoderConfig:
  """The numbers of the decoder that `load(path)` would return, without its weights."""
  path = pathlib.Path(path)
  if (path / 'config.json').is_file():
    return config_files.from_hugging_face(path / 'config.json')
  return config_files.from_gguf(gguf_files.open_file(_find_gguf(path)))


def _find_gguf(path: pathlib.Path) -> pathlib.Path:
  found = gguf_files.find(path)
  if found is None:
    raise FileNotFoundError(f'{path}: neither a folder with config.json or one .gguf file nor a .gguf file')
  return found


def _open(path: pathlib.Path) -> tuple[DecoderConfig, Mapping[str, str], Tensors]:
  """The numbers, the names that parameters have in this kind of file, and the tensors."""
  if (path / 'config.json').is_file():
    return read_config(path), _HUGGING_FACE, tensor_files.open_folder(path)
  file = gguf_files.open_file(_find_gguf(path))
  config = config_files.from_gguf(file)
  interleaved = file.get('general.architecture') == 'llama'

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    values = file.read(name)
    if interleaved and re.search(r'attn_[qk]\.weight$', name):
      values = _deinterleave(values, config.head_dim)
    return values[index]

  return config, _GGUF, Tensors(file.path, file.tensors, dict.fromkeys(file.tensors, file.path), read)


def _deinterleave(matrix: np.ndarray, head_dim: int) -> np.ndarray:
  """[H*h, D] -> the same with each head's rows as two halves: GGUF's Llamas rotate rows (0, 1), (2, 3), …"""
  rows, columns = matrix.shape
  return matrix.reshape(-1, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _expected(config: DecoderConfig, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
  """Name -> shape of every tensor that a checkpoint of `config` has, in the order in which it is written."""
  shapes = parameter_shapes(config)
  layers = shapes.pop('layers')
  result = {names['embedding']: _file_shape('embedding', shapes['embedding'])}
  for i in range(config.num_layers):
    result |= {names[name].format(i): _file_shape(name, shape[1:]) for name, shape in layers.items()}
  return result | {names[name]: _file_shape(name, shape) for name, shape in shapes.items()}


def _file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape in a file of a parameter with `shape` here: axes reordered, heads and their width folded."""
  shape = [shape[axis] for axis in _ORDER.get(name, range(len(shape)))]
  if name in ('q', 'k', 'v', 'q_bias', 'k_bias', 'v_bias'):
    shape[:2] = [shape[0] * shape[1]]
  elif name == 'o':
    shape[1:] = [shape[1] * shape[2]]
  return tuple(shape)


def _reader(name: str, template: str, shape: tuple[int, ...], tensors: Tensors,
            dtype: np.dtype) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """The callback that returns the part of parameter `name` under an index: a slice for each axis."""
  read_parts = {}  # devices that hold the same part share it

  def read(index: tuple[slice, ...]) -> np.ndarray:
    bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    if bounds not in read_parts:
      part = np.empty([stop - start for start, stop in bounds], dtype)
      if '{}' in template:
        for i, layer in enumerate(range(*bounds[0])):
          part[i] = _read_part(name, template.format(layer), shape[1:], bounds[1:], tensors)
      else:
        part[...] = _read_part(name, template, shape, bounds, tensors)
      read_parts[bounds] = part
    return read_parts[bounds]

  return read


def _read_part(name: str, tensor: str, shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...],
               tensors: Tensors) -> np.ndarray:
  """The part `bounds` of one layer's parameter (or of an unstacked one), with its axes in our order."""
  order = _ORDER.get(name, tuple(range(len(shape))))
  sizes, parts = [shape[axis] for axis in order], [slice(*bounds[axis]) for axis in order]
  folded = _file_shape(name, shape)
  if len(folded) == len(shape):
    return tensors.read(tensor, tuple(parts)).transpose(np.argsort(order))
  # a range of whole heads is a range of rows (or columns); a range inside each head is cut out afterwards
  at = 1 if name == 'o' else 0
  width = sizes[at + 1]
  rows = slice(parts[at].start * width, parts[at].stop * width)
  values = tensors.read(tensor, (*parts[:at], rows, *parts[at + 2:]))
  values = values.reshape(*values.shape[:at], -1, width, *values.shape[at + 1:])
  values = values[(slice(None),) * (at + 1) + (parts[at + 1],)]
  return values.transpose(np.argsort(order))


def save(model: Decoder, folder: str | pathlib.Path, tokenizer: Tokenizer | None = None, *,
         dtype: str | None = None, shard_bytes: int = 5 * 10**9) -> None:
  """Writes config.json and safetensors that `load` and transformers' AutoModelForCausalLM read back.

  Weights and index that stand in the folder are replaced. With several processes all of them call this, and
  the first writes.

  Args:
    model: the decoder; its parameters may be sharded.
    folder: made if it does not exist.
    tokenizer: also written, with its end tokens in generation_config.json.
    dtype: 'float32' or 'bfloat16'; the dtype of the embedding if not given.
    shard_bytes: a larger checkpoint goes into several files with an index.
  Raises:
    ValueError: for a configuration that no model family has.
  """
  folder, params = pathlib.Path(folder), model.params
  dtype = jnp.dtype(dtype or params['embedding'].dtype)
  config = config_files.to_hugging_face(model.config, dtype.name)
  shapes = _expected(model.config, _HUGGING_FACE)
  located = {_HUGGING_FACE[name]: (name, value) for name, value in params.items() if name != 'layers'}
  for name, value in params['layers'].items():
    located |= {_HUGGING_FACE[name].format(i): (name, (value, i)) for i in range(model.config.num_layers)}

  def read(tensor: str) -> np.ndarray:
    name, value = located[tensor]
    value = value[0][value[1]] if isinstance(value, tuple) else value
    return _to_host(value).transpose(_ORDER.get(name, range(value.ndim))).reshape(shapes[tensor])

  if jax.process_index():
    for tensor in shapes:  # every process takes part in gathering what is spread over them
      read(tensor)
    return
  folder.mkdir(parents=True, exist_ok=True)
  tensor_files.save_folder(folder, shapes, read, dtype, shard_bytes)
  if tokenizer is not None:
    tokenizer.save(folder)
    config |= _token_ids(tokenizer)
    _write_json(folder / 'generation_config.json', _token_ids(tokenizer))
  _write_json(folder / 'config.json', config)


def _to_host(value: jax.Array) -> np.ndarray:
  if value.is_fully_addressable:
    return np.asarray(value)
  return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
  ids = {'bos_token_id': tokenizer.bos_id, 'pad_token_id': tokenizer.pad_id}
  if tokenizer.eos_ids:
    ids['eos_token_id'] = tokenizer.eos_ids[0] if len(tokenizer.eos_ids) == 1 else list(tokenizer.eos_ids)
  return {key: value for key, value in ids.items() if value is not None}


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
