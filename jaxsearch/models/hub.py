"""Decoders in and out of files: Hugging Face folders and GGUF files in, Hugging Face folders out.

`load` reads the config (config_files.py), checks that the checkpoint holds exactly the tensors of that
decoder (tensor_files.py), and fills one parameter at a time: the stacked [layers, …] parameters are read
layer by layer, and of each layer only the part that a device holds, so that a host never has the whole model
beside its devices.

All families share one table of names. A second table says how a parameter's axes lie in the files, whose
matrices are [out, in] with heads and head width folded into one axis. Letters as in decoder.py.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.models import gguf_files, tensor_files
from jaxsearch.models.config_files import from_gguf, from_hugging_face, to_hugging_face
from jaxsearch.models.decoder import Decoder, DecoderConfig, parameter_axes, parameter_shapes
from jaxsearch.models.tensor_files import Tensors, read_json, reading, write_json
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel.mesh import shardings, whole

_NAMES = {
  'embedding': 'model.embed_tokens.weight', 'unembedding': 'lm_head.weight',
  'final_norm': 'model.norm.weight',
  'attn_norm': 'model.layers.{}.input_layernorm.weight',
  'mlp_norm': 'model.layers.{}.post_attention_layernorm.weight',
  **{name: f'model.layers.{{}}.self_attn.{name}_proj.weight' for name in 'qkvo'},
  **{f'{name}_bias': f'model.layers.{{}}.self_attn.{name}_proj.bias' for name in 'qkv'},
  **{f'{name}_norm': f'model.layers.{{}}.self_attn.{name}_norm.weight' for name in 'qk'},
  **{name: f'model.layers.{{}}.mlp.{name}_proj.weight' for name in ('gate', 'up', 'down')},
}  # fmt: skip
# The axes of a parameter (without `layers`) in the order in which they lie in a file; identity where not
# listed.
_ORDER = {'q': (1, 2, 0), 'k': (1, 2, 0), 'v': (1, 2, 0), 'o': (2, 0, 1),
          'gate': (1, 0), 'up': (1, 0), 'down': (1, 0)}
# The axis of a file that is heads and head width folded into one.
_FOLDED = {'q': 0, 'k': 0, 'v': 0, 'q_bias': 0, 'k_bias': 0, 'v_bias': 0, 'o': 1}
# RoPE tables are computed here; tied checkpoints may repeat their embedding as lm_head.
_HARMLESS = [r'.*rotary_emb\.inv_freq', r'rope_freqs\.weight']


def load(path: str | pathlib.Path, dtype: str = 'float32', *, param_dtype: str | None = None,
         mesh: jax.sharding.Mesh | None = None) -> Decoder:
  """Reads the decoder of a Hugging Face folder (config.json, safetensors), of a GGUF file, or of a folder
  with one.

  Args:
    dtype: of the activations.
    param_dtype: of the parameters; `dtype` if not given.
    mesh: where the parameters live, laid out as parallel/mesh.py says; each process reads only what its
      devices hold. The default device if not given.
  Raises:
    FileNotFoundError, ValueError: naming the file and the key or tensor that is missing, unexpected or
      mis-shaped.
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

  of_layers = shapes.pop('layers')
  layers = {name: fill(name, shape, placed['layers'].get(name)) for name, shape in of_layers.items()}
  params = {name: fill(name, shape, placed.get(name)) for name, shape in shapes.items()}
  return Decoder(config, params=params | {'layers': layers})


def architecture(path: str | pathlib.Path) -> DecoderConfig:
  """Reads the config of the decoder that `load` would return, and no tensor."""
  return _open(pathlib.Path(path))[0]


def _open(path: pathlib.Path) -> tuple[DecoderConfig, Mapping[str, str], Tensors]:
  """Opens a checkpoint: the config, the names that parameters have in this kind of file, and the tensors."""
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

  files = dict.fromkeys(file.tensors, file.path)
  return config, file.names(_NAMES), Tensors(file.path, file.tensors, files, read)


def _layout(config: DecoderConfig,
            names: Mapping[str, str]) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
  """Maps the tensors of a checkpoint, as they are written, to (parameter, layer or None, shape in a file)."""
  shapes = parameter_shapes(config)
  layers = shapes.pop('layers')
  every = [(name, None, shape) for name, shape in shapes.items()]
  every += [(name, i, shape[1:]) for i in range(config.num_layers) for name, shape in layers.items()]
  result = {}
  for name, layer, shape in every:
    shape = tuple(shape[axis] for axis in _ORDER.get(name, range(len(shape))))
    if (at := _FOLDED.get(name)) is not None:
      shape = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2:])
    result[names[name].format(layer)] = name, layer, shape
  return result


def _reader(name: str, template: str, shape: tuple[int, ...], tensors: Tensors,
            dtype: np.dtype) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """Returns the callback that reads the part of parameter `name` under an index: a slice for each axis."""
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
  """Reads the part `bounds` of one layer's parameter, or of an unstacked one, with its axes in our order."""
  order, at = _ORDER.get(name, range(len(shape))), _FOLDED.get(name)
  parts = [slice(*bounds[axis]) for axis in order]
  if at is None:
    return tensors.read(tensor, tuple(parts)).transpose(np.argsort(order))
  width = shape[order[at + 1]]  # of a head, which no layout splits
  parts[at:at + 2] = [slice(parts[at].start * width, parts[at].stop * width)]
  values = tensors.read(tensor, tuple(parts))
  values = values.reshape(*values.shape[:at], -1, width, *values.shape[at + 1:])
  return values.transpose(np.argsort(order))


RUN = 'jaxsearch.json'  # of an exported folder: what `save` was given as `run`


class NotFinite(ValueError):
  """Parameters with values that are not finite; the message names the first."""


def check_finite(params: Any, name: object) -> None:
  """Raises NotFinite if an array of `params` has a value that is not finite; `name` says whose they are.

  One reduction where the arrays lie; with several processes all of them call this.
  """
  for path, finite in jax.tree.leaves_with_path(jax.device_get(_finite(params))):
    if not finite:
      where = jax.tree_util.keystr(path, simple=True, separator='/')
      raise NotFinite(f'{name}: {where} has values that are not finite')


_finite = jax.jit(lambda params: jax.tree.map(lambda x: jnp.isfinite(x).all(), params))


def fingerprint(params: dict) -> list[float]:
  """Returns a mean absolute value per parameter, by which sets of parameters on any mesh can be compared.

  Do so with a relative tolerance of 1e-5: the order of summation depends on the mesh.
  """
  mean = lambda x: jnp.mean(jnp.abs(x.astype(jnp.float32)))
  return [float(value) for value in jax.tree.leaves(jax.jit(lambda tree: jax.tree.map(mean, tree))(params))]


def check_base(run: Mapping[str, Any], now: list[float], name: str) -> None:
  """Raises ValueError unless a run began with the parameters of model `name`, of fingerprint `now`."""
  then = run['reference']
  if len(then) != len(now) or not np.allclose(then, now, rtol=1e-5, atol=0):
    raise ValueError(f'model={name!r} has changed since this run began; its KL and its adapter refer to the '
                     'old one')


def save(model: Decoder, folder: str | pathlib.Path, tokenizer: Tokenizer | None = None, *,
         dtype: str | None = None, shard_bytes: int = 5 * 10**9,
         run: Mapping[str, Any] | None = None) -> None:
  """Writes config.json and safetensors that `load` and transformers' AutoModelForCausalLM read back.

  Makes the folder, or replaces weights and index in it. The parameters may be sharded; with several processes
  all of them call this, and the first writes.

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
  shapes = {tensor: shape for tensor, (_, _, shape) in layout.items()}
  tensor_files.save_folder(folder, shapes, read, dtype, shard_bytes)
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
  """Reads what `save` was given as `run`: None for a folder without it, and for a file.

  Raises ValueError if it has no `config`.
  """
  file = pathlib.Path(path) / RUN
  run = read_json(file) if file.is_file() else None
  if run is not None and not isinstance(run.get('config'), dict):
    raise ValueError(f'{file}: no config in it')
  return run
