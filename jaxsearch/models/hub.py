"""Decoders out of Hugging Face folders and GGUF files, and into Hugging Face folders; adapters in and out.

Parameters are read one at a time, layer by layer, and of each layer only the part that a device holds: a host
never has the whole model beside its devices.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from jaxsearch.files import read_json, write_json, write_whole
from jaxsearch.models import gguf_files, tensor_files
from jaxsearch.models.architecture import DecoderConfig, config_from_json, parameter_axes, parameter_shapes
from jaxsearch.models.decoder import Decoder, rope_angles
from jaxsearch.models.families import HARMLESS, TENSORS, from_gguf, from_hugging_face, to_hugging_face
from jaxsearch.models.lora import adapter_shapes
from jaxsearch.models.tensor_files import InFile, Tensors, reading
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel.mesh import shardings
from jaxsearch.parallel.transfer import check_finite, whole

RUN = 'jaxsearch.json'  # what `save` and `save_adapter` were given as `run`
ADAPTER = 'adapter.safetensors'


def load(path: str | pathlib.Path, dtype: str = 'float32', *, param_dtype: str | None = None,
         mesh: jax.sharding.Mesh | None = None) -> Decoder:
  """Reads the decoder of a Hugging Face folder (config.json, safetensors), of a GGUF file or a folder of one.

  Args:
    dtype: of the activations, and of the parameters without `param_dtype`.
    mesh: where the parameters live, laid out as parallel/mesh.py says; the default device if not given.
  Raises FileNotFoundError or ValueError that names the file, and the key or tensor that does not fit.
  """
  config, files, tensors = _open(pathlib.Path(path))
  config = dataclasses.replace(config, dtype=jnp.dtype(dtype).name)
  shapes = parameter_shapes(config)
  harmless = HARMLESS + [r'lm_head\.weight'] * config.tie_embeddings
  placed = None if mesh is None else shardings(parameter_axes(config), shapes, mesh)
  dtype = jnp.dtype(param_dtype or dtype)
  if config.tie_embeddings and not _are_tied(tensors):
    raise ValueError(f'{path}: tie_word_embeddings is true, but lm_head.weight is another than '
                     'model.embed_tokens.weight; set it to false in config.json')
  return Decoder(config, params=read_params(tensors, files, shapes, dtype, harmless, placed))


def _are_tied(tensors: Tensors) -> bool:
  """Tells whether the `lm_head` of a tied checkpoint, if it has one, equals its embedding."""
  head, embedding = (TENSORS[name].name for name in ('unembedding', 'embedding'))
  if not {head, embedding} <= tensors.shapes.keys():  # without an embedding it is refused by name
    return True
  values = [tensors.read(name, (slice(None), slice(None))) for name in (head, embedding)]
  return np.array_equal(*values)


def architecture(path: str | pathlib.Path) -> DecoderConfig:
  """Reads the config of the decoder that `load` would return, and no tensor."""
  return _open(pathlib.Path(path))[0]


def _open(path: pathlib.Path) -> tuple[DecoderConfig, Mapping[str, InFile], Tensors]:
  """Opens a checkpoint: the config, the tensors of parameters in this kind of file, and their contents."""
  described = (path / 'config.json').is_file()
  file = None if described and any(path.glob('*.safetensors*')) else gguf_files.open_file(path)
  if described and file is None:
    with reading(path / 'config.json'):
      config = from_hugging_face(path / 'config.json')
    return config, TENSORS, tensor_files.open_folder(path)
  if file is None:
    what = 'neither a folder with config.json or one .gguf file nor a .gguf file'
    raise FileNotFoundError(f'{path}: {what if path.exists() else "no such file or folder"}')
  with reading(file.path):
    config = from_gguf(file)
    names = file.names({key: tensor.name for key, tensor in TENSORS.items()})

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    values = file.read(name)
    if file.get('general.architecture') == 'llama' and re.search(r'attn_[qk]\.weight$', name):
      # GGUF's Llamas rotate rows (0, 1), (2, 3), … of a head; ours are the two halves
      pairs = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
      values = pairs.swapaxes(1, 2).reshape(values.shape)
    return values[index]

  files = {key: TENSORS[key]._replace(name=name) for key, name in names.items()}
  return config, files, Tensors(file.path, file.tensors, read)


def read_params(tensors: Tensors, files: Mapping[str, InFile], shapes: dict, dtype: np.dtype,
                harmless: Sequence[str], placed: dict | None = None) -> dict:
  """Reads parameters of the given (nested) shapes from `files`.

  Args:
    harmless: patterns of tensors that the checkpoint may have besides.
    placed: shardings, nested as `shapes`; the default device if not given.
  """
  expected = tensor_files.layout(files, shapes)
  tensor_files.check(tensors, {tensor: shape for tensor, (_, _, shape) in expected.items()}, harmless)

  def read(path, shape, sharding=None):
    file = files[path[-1].key]

    @functools.cache  # devices that hold the same part share it
    def part(*bounds):
      if '{}' not in file.name:
        return file.read(tensors, shape, bounds).astype(dtype)
      values = np.empty([stop - start for start, stop in bounds], dtype)
      for i, layer in enumerate(range(*bounds[0])):
        values[i] = file._replace(name=file.name.format(layer)).read(tensors, shape[1:], bounds[1:])
      return values

    if sharding is None:
      return jnp.asarray(part(*((0, size) for size in shape)))
    bounds = lambda index: (cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
    return jax.make_array_from_callback(shape, sharding, lambda index: part(*bounds(index)))

  is_shape = lambda x: isinstance(x, tuple)
  return jax.tree.map_with_path(read, shapes, *([] if placed is None else [placed]), is_leaf=is_shape)


def fingerprint(params: dict) -> list[float]:
  """Returns a mean absolute value per parameter, by which sets of parameters on any mesh can be compared.

  Do so with a relative tolerance of 1e-5: the order of summation depends on the mesh.
  """
  mean = lambda x: jnp.mean(jnp.abs(x.astype(jnp.float32)))
  return [float(value) for value in jax.tree.leaves(jax.jit(lambda tree: jax.tree.map(mean, tree))(params))]


def check_base(run: Mapping[str, Any], now: list[float], name: str, what: str = 'this run') -> None:
  """Raises ValueError unless `what` began with the parameters of model `name`, of fingerprint `now`."""
  then = run['reference']
  if len(then) != len(now) or not np.allclose(then, now, rtol=1e-5, atol=0):
    raise ValueError(f'model={name!r} has changed since {what} began; what it learned refers to the old one')


def save(model: Decoder, folder: str | pathlib.Path, tokenizer: Tokenizer | None = None, *,
         dtype: str | None = None, shard_bytes: int = 5 * 10**9,
         run: Mapping[str, Any] | None = None) -> None:
  """Writes config.json and safetensors that `load` and transformers' AutoModelForCausalLM read back.

  Replaces weights that are in the folder. With several processes all of them call this, and the first writes.

  Args:
    tokenizer: also written, with its end tokens in generation_config.json.
    dtype: 'float32' or 'bfloat16'; the dtype of the embedding if not given.
    shard_bytes: a larger checkpoint is split into several files with an index.
    run: the run that the weights are from, for `read_run`.
  Raises NotFinite, before anything is written; ValueError for a configuration that no model family has.
  """
  folder, params = pathlib.Path(folder), model.params
  check_finite(params, folder)
  dtype = jnp.dtype(dtype or params['embedding'].dtype)
  config = to_hugging_face(model.config, dtype.name)
  layout = tensor_files.layout(TENSORS, parameter_shapes(model.config))

  def read(tensor: str) -> np.ndarray:
    name, layer, _ = layout[tensor]
    return TENSORS[name].write(whole(params[name] if layer is None else params['layers'][name][layer]))

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
  for left in (RUN, ADAPTER):  # of other weights
    (folder / left).unlink(missing_ok=True)
  if run is not None:
    write_json(folder / RUN, run)


def save_gguf(model: Decoder, path: pathlib.Path, tokenizer: Tokenizer) -> None:
  """Writes a GGUF file in float16 for llama.cpp, by the keys of its convert_hf_to_gguf.py.

  It is for engines that get ids: how text is split (tokenizer.ggml.pre) is not in it. Raises NotFinite.
  """
  gguf, config, params = gguf_files.library(), model.config, model.params
  check_finite(params, path)
  path.parent.mkdir(parents=True, exist_ok=True)
  family = to_hugging_face(config, 'float16')['model_type']
  writer = gguf.GGUFWriter(path, family)
  for add, value in {'block_count': config.num_layers, 'context_length': config.max_position,
                     'embedding_length': config.hidden_size, 'feed_forward_length': config.intermediate_size,
                     'head_count': config.num_heads, 'head_count_kv': config.num_kv_heads,
                     'key_length': config.head_dim, 'value_length': config.head_dim,
                     'rope_dimension_count': config.head_dim, 'rope_freq_base': config.rope_theta,
                     'layer_norm_rms_eps': config.norm_eps, 'vocab_size': config.vocab_size}.items():
    getattr(writer, f'add_{add}')(value)
  gguf_files.add_vocabulary(writer, tokenizer, config.vocab_size)
  names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_layers)
  for tensor, (name, layer, shape) in tensor_files.layout(TENSORS, parameter_shapes(config)).items():
    values = TENSORS[name].write(whole(params[name] if layer is None else params['layers'][name][layer]))
    if family == 'llama' and name in 'qk':  # as `_open` reads them
      values = values.reshape(-1, 2, config.head_dim // 2, shape[1]).swapaxes(1, 2).reshape(shape)
    kind = np.float16 if len(shape) == 2 else np.float32
    writer.add_tensor(names.get_name(tensor, ('.weight', '.bias')), np.ascontiguousarray(values.astype(kind)))
  if config.rope_scaling is not None:
    plain = dataclasses.replace(config, rope_scaling=None)
    divisors = rope_angles(plain, np.int32(1)) / rope_angles(config, np.int32(1))
    writer.add_tensor('rope_freqs.weight', np.asarray(divisors, np.float32).ravel())
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def is_adapter(path: str | pathlib.Path) -> bool:
  """Tells whether `save_adapter` wrote this folder."""
  return (pathlib.Path(path) / ADAPTER).is_file()


def save_adapter(adapter: dict, folder: str | pathlib.Path, run: Mapping[str, Any]) -> None:
  """Writes an adapter in its dtype, and `run`: at least its `config`, `step`, `decoder` (by
  `dataclasses.asdict`) and `reference` (the base's `fingerprint`)."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  named = traverse_util.flatten_dict(jax.tree.map(np.ascontiguousarray, adapter), sep='/')  # as written
  write_whole(folder / ADAPTER, safetensors.numpy.save(named))
  write_json(folder / RUN, run)


def load_adapter(folder: str | pathlib.Path) -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Reads (the decoder, the adapter as host arrays, `run`) from a folder that `save_adapter` wrote.

  Raises FileNotFoundError, NotFinite, or ValueError where files cannot be read or do not belong together.
  """
  folder = pathlib.Path(folder)
  run = read_run(folder)
  try:
    config = config_from_json(run['decoder'])
    rank, targets = (run['config']['lora'][name] for name in ('rank', 'targets'))
    shapes = adapter_shapes(config, rank, targets)
  except (KeyError, TypeError) as error:
    raise ValueError(f'{folder / RUN} does not say what {ADAPTER} is an adapter of') from error
  try:
    adapter = traverse_util.unflatten_dict(safetensors.numpy.load_file(folder / ADAPTER), sep='/')
  except safetensors.SafetensorError as error:
    raise ValueError(f'{folder / ADAPTER} cannot be read ({error})') from error
  if jax.tree.map(np.shape, adapter) != shapes:
    raise ValueError(f'{folder / ADAPTER}: its shapes are not those of lora.rank={rank}')
  check_finite(adapter, folder)
  return config, adapter, run


def read_run(path: str | pathlib.Path) -> dict[str, Any] | None:
  """Reads what a folder was saved with as `run`: None for a model's without it, and for a file.

  Raises FileNotFoundError for an adapter without it, ValueError if it has no `config`.
  """
  file = pathlib.Path(path) / RUN
  if not file.is_file() and not is_adapter(path):
    return None
  run = read_json(file)
  if not isinstance(run.get('config'), dict):
    raise ValueError(f'{file}: no config in it')
  return run
