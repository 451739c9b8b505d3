"""Decoders in and out of files: Hugging Face folders and GGUF files in, Hugging Face folders out.

`load` reads the config, checks that the checkpoint holds exactly the tensors of that decoder (tensor_files.py), and fills one
parameter at a time: the stacked [layers, …] parameters are read layer by layer, and of each layer only the part that a device
holds, so that a host never has the whole model in memory beside its devices.

All families share one table of names. A second table says how a parameter's axes lie in the files, whose matrices are
[out, in] with heads and head width folded into one axis. Letters as in decoder.py.

The config, of config.json or of GGUF metadata, goes through transformers, which knows every family's defaults and its older and
newer keys. Two checks stay ours. Its config classes fill a missing number with that of some other model, and they accept what
is not computed here: either would be a wrong model without a word.
"""

import dataclasses
import functools
import numbers
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.models import gguf_files, tensor_files
from jaxsearch.models.decoder import Decoder, DecoderConfig, RopeScaling, parameter_axes, parameter_shapes, rope_angles
from jaxsearch.models.tensor_files import Tensors, read_json, reading, write_json
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel.mesh import shardings, whole

_NAMES = {
  'embedding': 'model.embed_tokens.weight', 'unembedding': 'lm_head.weight', 'final_norm': 'model.norm.weight',
  'attn_norm': 'model.layers.{}.input_layernorm.weight', 'mlp_norm': 'model.layers.{}.post_attention_layernorm.weight',
  **{name: f'model.layers.{{}}.self_attn.{name}_proj.weight' for name in 'qkvo'},
  **{f'{name}_bias': f'model.layers.{{}}.self_attn.{name}_proj.bias' for name in 'qkv'},
  **{f'{name}_norm': f'model.layers.{{}}.self_attn.{name}_norm.weight' for name in 'qk'},
  **{name: f'model.layers.{{}}.mlp.{name}_proj.weight' for name in ('gate', 'up', 'down')},
}  # fmt: skip
# The axes of a parameter (without `layers`) in the order in which they lie in a file; identity where not listed.
_ORDER = {'q': (1, 2, 0), 'k': (1, 2, 0), 'v': (1, 2, 0), 'o': (2, 0, 1), 'gate': (1, 0), 'up': (1, 0), 'down': (1, 0)}
# The axis of a file that is heads and head width folded into one.
_FOLDED = {'q': 0, 'k': 0, 'v': 0, 'q_bias': 0, 'k_bias': 0, 'v_bias': 0, 'o': 1}
# RoPE tables are computed here; tied checkpoints may repeat their embedding as lm_head.
_HARMLESS = [r'.*rotary_emb\.inv_freq', r'rope_freqs\.weight']


def load(path: str | pathlib.Path, dtype: str = 'float32', *, param_dtype: str | None = None,
         mesh: jax.sharding.Mesh | None = None) -> Decoder:
  """The decoder of a Hugging Face folder (config.json, safetensors), of a GGUF file, or of a folder with one.

  Args:
    dtype: of the activations.
    param_dtype: of the parameters; `dtype` if not given.
    mesh: where the parameters live, laid out as parallel/mesh.py says; each process reads only what its devices hold.
      The default device if not given.
  Raises:
    FileNotFoundError, ValueError: naming the file and the key or tensor that is missing, unexpected or mis-shaped.
  """
  config, names, tensors = _open(pathlib.Path(path))
  config = dataclasses.replace(config, dtype=jnp.dtype(dtype).name)
  expected = {tensor: shape for tensor, (_, _, shape) in _layout(config, names).items()}
  tensor_files.check(tensors, expected, _HARMLESS + [r'lm_head\.weight'] * config.tie_embeddings)
  dtype = jnp.dtype(param_dtype or dtype)
  shapes = parameter_shapes(config)
  placed = {'layers': {}} if mesh is None else shardings(parameter_axes(config), shapes, mesh)

  def fill(name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> jax.Array:
    read = _reader(name, names[name], shape, tensors, dtype)
    if sharding is None:
      return jnp.asarray(read((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, read)

  layers = {name: fill(name, shape, placed['layers'].get(name)) for name, shape in shapes.pop('layers').items()}
  params = {name: fill(name, shape, placed.get(name)) for name, shape in shapes.items()}
  return Decoder(config, params=params | {'layers': layers})


def architecture(path: str | pathlib.Path) -> DecoderConfig:
  """The config of the decoder that `load` would return; no tensor is read."""
  return _open(pathlib.Path(path))[0]


def _open(path: pathlib.Path) -> tuple[DecoderConfig, Mapping[str, str], Tensors]:
  """The config, the names that parameters have in this kind of file, and the tensors."""
  if (path / 'config.json').is_file():
    with reading(path / 'config.json'):
      config = from_hugging_face(path / 'config.json')
    with reading(path):
      return config, _NAMES, tensor_files.open_folder(path)
  file = gguf_files.open_file(path)
  if file is None:
    raise FileNotFoundError(f'{path}: neither a folder with config.json or one .gguf file nor a .gguf file')
  with reading(file.path):
    config = from_gguf(file)

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    values = file.read(name)
    if file.get('general.architecture') == 'llama' and re.search(r'attn_[qk]\.weight$', name):
      # GGUF's Llamas rotate rows (0, 1), (2, 3), … of a head; ours are the two halves
      pairs = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
      values = pairs.swapaxes(1, 2).reshape(values.shape)
    return values[index]

  return config, file.names(_NAMES), Tensors(file.path, file.tensors, dict.fromkeys(file.tensors, file.path), read)


def _layout(config: DecoderConfig, names: Mapping[str, str]) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
  """Tensor -> (parameter, layer or None, shape in a file) of a checkpoint of `config`, in the order in which it is written."""
  shapes = parameter_shapes(config)
  layers = shapes.pop('layers')
  last = [(name, None) for name in shapes if name != 'embedding']
  result = {}
  for name, layer in [('embedding', None), *((name, i) for i in range(config.num_layers) for name in layers), *last]:
    shape = shapes[name] if layer is None else layers[name][1:]
    shape = tuple(shape[axis] for axis in _ORDER.get(name, range(len(shape))))
    if (at := _FOLDED.get(name)) is not None:
      shape = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2:])
    result[names[name].format(layer)] = name, layer, shape
  return result


def _reader(name: str, template: str, shape: tuple[int, ...], tensors: Tensors,
            dtype: np.dtype) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """The callback that returns the part of parameter `name` under an index: a slice for each axis."""
  @functools.cache  # devices that hold the same part share it
  def read(*bounds: tuple[int, int]) -> np.ndarray:
    if '{}' not in template:
      return _read_part(name, template, shape, bounds, tensors).astype(dtype)
    part = np.empty([stop - start for start, stop in bounds], dtype)
    for i, layer in enumerate(range(*bounds[0])):
      part[i] = _read_part(name, template.format(layer), shape[1:], bounds[1:], tensors)
    return part

  return lambda index: read(*(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)))


def _read_part(name: str, tensor: str, shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...],
               tensors: Tensors) -> np.ndarray:
  """The part `bounds` of one layer's parameter (or of an unstacked one), with its axes in our order."""
  order = _ORDER.get(name, tuple(range(len(shape))))
  parts, at = [slice(*bounds[axis]) for axis in order], _FOLDED.get(name)
  if at is None:
    return tensors.read(tensor, tuple(parts)).transpose(np.argsort(order))
  # a range of whole heads is a range of rows (or columns); a range inside each head is cut out afterwards
  width = shape[order[at + 1]]
  heads = slice(parts[at].start * width, parts[at].stop * width)
  values = tensors.read(tensor, (*parts[:at], heads, *parts[at + 2:]))
  values = values.reshape(*values.shape[:at], -1, width, *values.shape[at + 1:])
  return values[(slice(None),) * (at + 1) + (parts[at + 1],)].transpose(np.argsort(order))


RUN = 'jaxsearch.json'  # of an exported folder: what `save` was given as `run`


class NotFinite(ValueError):
  """Parameters with values that are not finite; the message names the first."""


def check_finite(params: Any, name: object) -> None:
  """Raises NotFinite if an array of a nested `params` has a value that is not finite; `name` says whose they are.

  One reduction where the arrays lie; with several processes all of them call this.
  """
  for path, finite in jax.tree.leaves_with_path(jax.device_get(_finite(params))):
    if not finite:
      raise NotFinite(f'{name}: {jax.tree_util.keystr(path, simple=True, separator="/")} has values that are not finite')


_finite = jax.jit(lambda params: jax.tree.map(lambda x: jnp.isfinite(x).all(), params))


def fingerprint(params: dict) -> list[float]:
  """A mean absolute value per parameter: tells whether two sets of parameters are the same, on any mesh.

  Compare it with a relative tolerance of 1e-5: the order of summation depends on the mesh.
  """
  means = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.mean(jnp.abs(x.astype(jnp.float32))), tree))(params)
  return [float(value) for value in jax.tree.leaves(means)]


def check_base(run: Mapping[str, Any], found: list[float], name: str) -> None:
  """Raises ValueError unless a run began with the parameters of model `name`, whose `fingerprint` is `found`."""
  then = run['reference']
  if len(then) != len(found) or not np.allclose(then, found, rtol=1e-5, atol=0):
    raise ValueError(f'model={name!r} has changed since this run began; its KL and its adapter refer to the old one')


def save(model: Decoder, folder: str | pathlib.Path, tokenizer: Tokenizer | None = None, *, dtype: str | None = None,
         shard_bytes: int = 5 * 10**9, run: Mapping[str, Any] | None = None) -> None:
  """Writes config.json and safetensors that `load` and transformers' AutoModelForCausalLM read back.

  Makes the folder, or replaces weights and index in it. The parameters may be sharded; with several processes all of them call
  this, and the first writes.

  Args:
    tokenizer: also written, with its end tokens in generation_config.json.
    dtype: 'float32' or 'bfloat16'; the dtype of the embedding if not given.
    shard_bytes: a larger checkpoint is split into several files with an index.
    run: also written, into jaxsearch.json: the run that the weights are from, for `read_run`.
  Raises:
    NotFinite: a parameter has values that are not finite; nothing is written.
    ValueError: for a configuration that no model family has.
  """
  folder, params = pathlib.Path(folder), model.params
  check_finite(params, folder)
  dtype = jnp.dtype(dtype or params['embedding'].dtype)
  config = to_hugging_face(model.config, dtype.name)
  layout = _layout(model.config, _NAMES)

  def read(tensor: str) -> np.ndarray:
    name, layer, shape = layout[tensor]
    value = params[name] if layer is None else params['layers'][name][layer]
    return whole(value).transpose(_ORDER.get(name, range(value.ndim))).reshape(shape)

  if jax.process_index():
    for tensor in layout:  # every process takes part in gathering what is spread over them
      read(tensor)
    return
  folder.mkdir(parents=True, exist_ok=True)
  tensor_files.save_folder(folder, {tensor: shape for tensor, (_, _, shape) in layout.items()}, read, dtype, shard_bytes)
  if tokenizer is not None:
    tokenizer.save(folder)
    eos_ids = list(tokenizer.eos_ids)
    ids = {'bos_token_id': tokenizer.bos_id, 'pad_token_id': tokenizer.pad_id,
           'eos_token_id': eos_ids[0] if len(eos_ids) == 1 else eos_ids or None}
    ids = {key: value for key, value in ids.items() if value is not None}
    write_json(folder / 'generation_config.json', ids)
    config |= ids
  write_json(folder / 'config.json', config)
  (folder / RUN).unlink(missing_ok=True)  # it told of other weights
  if run is not None:
    write_json(folder / RUN, run)


def read_run(path: str | pathlib.Path) -> dict[str, Any] | None:
  """What `save` was given as `run`; None for a folder without that, and for a file. Raises ValueError if it has no `config`."""
  file = pathlib.Path(path) / RUN
  run = read_json(file) if file.is_file() else None
  if run is not None and not isinstance(run.get('config'), dict):
    raise ValueError(f'{file}: no config in it')
  return run


# Configs.


def decoder_from_json(values: dict) -> DecoderConfig:
  """The inverse of `dataclasses.asdict`, by way of JSON."""
  scaling = values['rope_scaling']
  return DecoderConfig(**values | {'rope_scaling': scaling and RopeScaling(**scaling)})


_FAMILIES = {'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM', 'llama': 'LlamaForCausalLM'}
# Hugging Face key -> ours
_FIELDS = {
  'vocab_size': 'vocab_size', 'hidden_size': 'hidden_size', 'intermediate_size': 'intermediate_size',
  'num_hidden_layers': 'num_layers', 'num_attention_heads': 'num_heads', 'num_key_value_heads': 'num_kv_heads',
  'max_position_embeddings': 'max_position', 'rms_norm_eps': 'norm_eps', 'tie_word_embeddings': 'tie_embeddings',
}  # fmt: skip
# Hugging Face key -> GGUF key, of those that every file must have
_REQUIRED = {
  'hidden_size': 'embedding_length', 'intermediate_size': 'feed_forward_length', 'num_hidden_layers': 'block_count',
  'num_attention_heads': 'attention.head_count', 'max_position_embeddings': 'context_length',
}  # fmt: skip
MAX_LAYERS, MAX_SIZE = 4096, 2**28  # of a config.json; transformers makes a list of the layers
_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def parse_config(values: Mapping[str, Any], path: pathlib.Path, families: Iterable[str], required: Iterable[str],
                 only: Mapping[str, Any]) -> Any:
  """transformers' config of the `values` of a config.json.

  Raises ValueError, naming `path` and the key, where a `required` one is missing, the family is none of `families`, or a key of
  `only` has another value.
  """
  from transformers import AutoConfig  # imports PyTorch where that is installed
  values = {key: value for key, value in values.items() if value is not None}
  for key in ('model_type', *required):
    if key not in values:
      raise ValueError(f'{path}: the key {key} is missing')
    most = MAX_LAYERS if key == 'num_hidden_layers' else MAX_SIZE
    if key != 'model_type' and not (isinstance(values[key], numbers.Integral) and 1 <= values[key] <= most):
      raise ValueError(f'{path}: {key}={values[key]!r:.60} must be a whole number from 1 to {most}')
  if values['model_type'] not in families:
    raise ValueError(f'{path}: model_type {values["model_type"]!r} is not supported; supported are {", ".join(families)}')
  for key, supported in only.items():
    if values.get(key, supported) != supported:
      raise ValueError(f'{path}: {key}={values[key]!r} is not supported, only {supported!r} is')
  try:
    return AutoConfig.for_model(**values)
  except Exception as error:  # its validators raise errors of many types
    raise ValueError(f'{path}: {" ".join(str(error).rpartition("Error: ")[2].split())}') from error


def from_hugging_face(path: pathlib.Path, values: Mapping[str, Any] | None = None) -> DecoderConfig:
  """Reads config.json of Qwen2, Qwen2.5, Qwen3, Llama 3.x, SmolLM2; or takes its `values` from another file, `path`.

  Raises ValueError, naming the key, for a family, attention, activation or RoPE that the decoder does not compute.
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
    raise ValueError(f'{path}: layers that see a window only (layer_types, use_sliding_window) are not supported')
  rope = config.rope_parameters
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(f'{path}: rope_parameters.partial_rotary_factor={rope["partial_rotary_factor"]} is not supported')
  *factors, original = (rope.get(name) for name in _LLAMA3)
  return DecoderConfig(
    **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
    head_dim=getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads,
    rope_theta=float(rope['rope_theta']), qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3',
    rope_scaling=RopeScaling(*map(float, factors), int(original)) if kind == 'llama3' else None)


def to_hugging_face(config: DecoderConfig, dtype: str) -> dict[str, Any]:
  """The config.json of `config`, with the older RoPE keys, which every version of transformers reads.

  Raises ValueError for a combination that no family has (biases and QK norms at once).
  """
  if config.qkv_bias and config.qk_norm:
    raise ValueError('qkv_bias and qk_norm at once: neither Qwen2 nor Qwen3 nor Llama has both')
  family = 'qwen2' if config.qkv_bias else 'qwen3' if config.qk_norm else 'llama'
  if family == 'qwen2' and config.head_dim * config.num_heads != config.hidden_size:
    raise ValueError(f'head_dim={config.head_dim}: Qwen2 has hidden_size / num_heads and no key for another')
  result = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()} | {
    'architectures': [_FAMILIES[family]], 'model_type': family, 'hidden_act': 'silu', 'rope_theta': config.rope_theta,
    'torch_dtype': dtype}
  if family != 'qwen2':
    result |= {'head_dim': config.head_dim, 'attention_bias': False}
  if family != 'llama':
    result |= {'use_sliding_window': False}
  if config.rope_scaling is not None:
    result['rope_scaling'] = {'rope_type': 'llama3', **dict(zip(_LLAMA3, dataclasses.astuple(config.rope_scaling)))}
  return result


def from_gguf(file: gguf_files.File) -> DecoderConfig:
  """The config in a GGUF file's metadata. Not by `AutoConfig.from_pretrained(gguf_file=…)`: that needs PyTorch."""
  family = file.require('general.architecture')
  if family not in _FAMILIES:
    raise ValueError(f'{file.path}: general.architecture {family!r} is not supported; supported are {", ".join(_FAMILIES)}')
  get = lambda key, default: file.get(f'{family}.{key}', default)
  if get('rope.scaling.type', 'none') != 'none':
    raise ValueError(f'{file.path}: {family}.rope.scaling.type {get("rope.scaling.type", "")!r} is not supported')
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
    'num_key_value_heads': get('attention.head_count_kv', heads), 'rope_theta': float(get('rope.freq_base', 1e4)),
    'tie_word_embeddings': 'output.weight' not in file.tensors,
    'rms_norm_eps': float(str(norm_eps)),  # 1e-5 for the float32 9.999999747e-06: the number that was meant
  })
  if 'rope_freqs.weight' not in file.tensors:
    return config
  # Llama 3's scaling: GGUF keeps only what each frequency is divided by, [h/2]. The other three numbers are those of every
  # Llama 3.x; that they fit is checked.
  divisors = file.read('rope_freqs.weight')
  scaled = dataclasses.replace(config, rope_scaling=RopeScaling(float(divisors.max()), 1.0, 4.0, 8192))
  if not np.allclose(divisors, rope_angles(config, np.int32(1)) / rope_angles(scaled, np.int32(1)), rtol=1e-3):
    raise ValueError(f'{file.path}: rope_freqs.weight is not the RoPE scaling of a Llama 3.x')
  return scaled
