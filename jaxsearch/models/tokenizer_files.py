"""Tokenizers in files: folders of Hugging Face and the metadata of GGUF files.

transformers reads the files beside tokenizer.json. It needs PyTorch to read a GGUF file, and splits text as
GPT-2 does where it does not know `tokenizer.ggml.pre` ('smollm'), so that tokenizer is built here; what
`tokenizer.ggml.pre` means is in llama.cpp's convert_hf_to_gguf.py.
"""

import pathlib
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from jaxsearch.files import read_json
from jaxsearch.models import gguf_files

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


def from_gguf(file: gguf_files.File) -> dict[str, Any]:
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


def from_folder(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the fields of a `Tokenizer`: tokenizer.json, and what the files beside it say.

  Only the files beside it go through transformers. `AutoTokenizer` would rebuild the tokenizer itself from
  its model_type and change what tokenizer.json says: a Qwen2 folder gets Unicode normalisation, and the
  embedded world's text other ids.
  """
  try:
    backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  except Exception as error:  # the library raises nothing more precise
    raise ValueError(f'{folder / "tokenizer.json"}: not a tokenizer that can be read') from error
  backend.no_truncation()  # encoders' folders switch both on; a silently shortened text is a wrong result
  backend.no_padding()
  beside = ('tokenizer_config.json', 'special_tokens_map.json', 'config.json', 'generation_config.json')
  # Read here first, so that an error names the file.
  files = {name: read_json(folder / name) for name in beside if (folder / name).is_file()}
  named = without_vocabulary(folder)
  tokens = named.eos_token, named.pad_token, named.bos_token
  eos, pad, bos = (backend.token_to_id(token) if token else None for token in tokens)
  # transformers' tokenizers have one end token; the configs of the model list all of them
  model = files.get('config.json', {}) | files.get('generation_config.json', {})
  listed = model.get('eos_token_id')
  listed = listed if isinstance(listed, list) else [listed]
  eos_ids = tuple(dict.fromkeys(i for i in [eos, *listed] if i is not None and i >= 0))
  pad_id = next((i for i in (pad, model.get('pad_token_id'), *eos_ids) if i is not None and i >= 0), 0)
  template = named.chat_template
  if isinstance(template, dict):
    template = template.get('default')
  return dict(backend=backend, eos_ids=eos_ids, pad_id=pad_id, bos_id=bos, chat_template=template)


def without_vocabulary(folder: pathlib.Path | None = None):
  """Opens transformers' tokenizer class over an empty vocabulary, for names of tokens and chat templates."""
  from transformers import PreTrainedTokenizerFast
  empty = tokenizers.Tokenizer(tokenizers.models.BPE())
  if folder is None:
    return PreTrainedTokenizerFast(tokenizer_object=empty)
  try:
    return PreTrainedTokenizerFast.from_pretrained(folder, tokenizer_object=empty, local_files_only=True)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{folder}: transformers rejects tokenizer_config.json or a file beside it '
                     f'({error})') from error
