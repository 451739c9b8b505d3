"""Text to token ids and back, with the bytes behind every id.

`Tokenizer` wraps a `tokenizers.Tokenizer` from a Hugging Face folder or a GGUF file and adds what a tree of
spans needs: encoding that never adds a token of its own, decoding that can be cut anywhere (`decode(a + b)`
is `decode(a) + decode(b)` up to a character split between them), and `pieces()`, from which the sampler finds
stop strings. transformers renders chat templates; tokenizer_files.py reads files.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from jaxsearch.files import write_json, write_whole
from jaxsearch.models import gguf_files, tokenizer_files
from jaxsearch.models.tensor_files import reading

# Unsets transformers' clock: templates that show today's date fall back to a fixed one.
_NO_CLOCK = '{% set strftime_now = no_clock %}\n'
# The byte behind each character of GPT-2's alphabet: a printable one is itself, others are those from 256 on.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_BYTES = dict(zip(_ALPHABET, sorted(range(256), key=lambda byte: chr(byte) not in _ALPHABET), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer and the ids that a sampler treats specially."""
  backend: tokenizers.Tokenizer  # does the work
  eos_ids: tuple[int, ...] = ()  # ids that end a generation, the tokenizer's own first; may be empty
  pad_id: int = 0  # fills positions without a token; where the model names none the first of eos_ids, else 0
  bos_id: int | None = None  # the token that documents began with in pretraining; `encode` does not add it
  chat_template: str | None = None  # Jinja source

  @classmethod
  def load(cls, path: str | pathlib.Path) -> 'Tokenizer':
    """Reads the tokenizer of a Hugging Face folder or of a GGUF file."""
    path = pathlib.Path(path)
    if (path / 'tokenizer.json').is_file():
      with reading(path):
        return cls(**tokenizer_files.from_folder(path))
    file = gguf_files.open_file(path)
    if file is None:
      raise FileNotFoundError(f'{path}: no tokenizer.json and no single .gguf file here')
    with reading(file.path):
      return cls(**tokenizer_files.from_gguf(file))

  def to_json(self) -> dict[str, Any]:
    """Returns all of it as JSON values."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return fields | {'backend': self.backend.to_str()}

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> 'Tokenizer':
    """Inverts `to_json`, by way of JSON. Raises ValueError for other values."""
    with reading('the tokenizer of the checkpoint'):
      backend = tokenizers.Tokenizer.from_str(values['backend'])
      return cls(**dict(values) | {'backend': backend, 'eos_ids': tuple(values['eos_ids'])})

  @functools.cached_property
  def vocab_size(self) -> int:
    """Returns one more than the largest id; a model's embedding may have more rows (they are padding)."""
    return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def special_tokens(self) -> tuple[str, ...]:
    """Lists `added_tokens` that can control a model: not those of one character, or of letters and spaces."""
    return tuple(token for token in self.added_tokens
                 if len(token.strip()) > 1 and not token.replace(' ', '').isalnum())

  @functools.cached_property
  def added_tokens(self) -> tuple[str, ...]:
    """Lists every string that `encode` turns into one id wherever it stands, special or merely added."""
    return tuple(token.content for token in self.backend.get_added_tokens_decoder().values())

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; special tokens in it become their ids, none is added."""
    return list(self._ids(text))

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`, special tokens too; bytes that are not UTF-8 become U+FFFD."""
    pieces, size = self._pieces, self.vocab_size
    return b''.join([pieces[i] for i in ids if i < size]).decode('utf-8', errors='replace')

  def pieces(self, size: int | None = None) -> list[bytes]:
    """Returns the bytes of each id, b'' without a token; a text is the concatenation of its ids' pieces.

    Raises ValueError if it is not (WordPiece), or the tokenizer has more than `size` tokens.
    """
    if size is not None:
      self.check_fits(size)
    return self._pieces + [b''] * ((size or 0) - self.vocab_size)

  def check_fits(self, size: int) -> None:
    """Raises ValueError if there are more tokens, or end tokens beyond the `size` embeddings of a model."""
    if self.vocab_size > size:
      raise ValueError(f'the tokenizer has {self.vocab_size} tokens, but the model {size} embeddings: it is '
                       'that of another model')
    if beyond := [token for token in self.eos_ids if token >= size]:
      raise ValueError(f'eos_token_id {beyond[0]} (generation_config.json, config.json) is beyond the {size} '
                       'embeddings of the model')

  def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
           **variables: Any) -> str:
    """Renders `messages` ([{'role', 'content'}, …], a system turn first) through the model's chat template.

    The template sees `variables` (`tools=…`) but no clock: the same call gives the same prompt every day.
    Raises ValueError if there is no template, or it rejects the messages.
    """
    if self.chat_template is None:
      raise ValueError('this model has no chat template')
    token = self.backend.id_to_token
    names = dict(bos_token='' if self.bos_id is None else token(self.bos_id),
                 eos_token=token(self.eos_ids[0]) if self.eos_ids else '', pad_token=token(self.pad_id))
    theirs = tokenizer_files.without_vocabulary()
    try:
      return theirs.apply_chat_template(
        list(messages), chat_template=_NO_CLOCK + self.chat_template, tokenize=False,
        add_generation_prompt=add_generation_prompt, **names | variables)
    except Exception as error:  # a template is code, and fails as code does
      raise ValueError(f'the chat template rejects these messages: {error}') from error

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, for `load` and transformers."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for left in ('special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja'):  # by another one
      (folder / left).unlink(missing_ok=True)
    write_whole(folder / 'tokenizer.json', self.backend.to_str(pretty=True))
    # not save_pretrained: the class that it names (TokenizersBackend) is unknown to transformers 4
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False}
    ids = {'pad_token': self.pad_id, 'eos_token': next(iter(self.eos_ids), None), 'bos_token': self.bos_id}
    tokens = {name: self.backend.id_to_token(i) for name, i in ids.items() if i is not None}
    write_json(folder / 'tokenizer_config.json', config | tokens)
    if self.chat_template is not None:
      write_whole(folder / 'chat_template.jinja', self.chat_template)

  @functools.cached_property
  def _ids(self) -> Callable[[str], list[int]]:
    """Remembers texts: siblings have the same prompt, an observation is measured before it is written."""
    return functools.lru_cache(64)(lambda text: self.backend.encode(text, add_special_tokens=False).ids)

  @functools.cached_property
  def _spell(self) -> Callable[[str], bytes]:
    """Returns token -> bytes: as GPT-2, SentencePiece, or plain."""
    decoder = {} if self.backend.decoder is None else json.loads(self.backend.decoder.__getstate__())
    kinds = {part.get('type', 'Fuse') for part in decoder.get('decoders', [decoder])}
    if 'ByteLevel' in kinds:
      return _spell_bytes
    if kinds & {'Metaspace', 'ByteFallback', 'Replace'}:
      return _spell_spaces
    if kinds <= {'Fuse'}:
      return str.encode
    raise ValueError('a WordPiece tokenizer drops spaces: its tokens do not stand for bytes')

  @functools.cached_property
  def _pieces(self) -> list[bytes]:
    result = [b''] * self.vocab_size
    for token, token_id in self.backend.get_vocab(with_added_tokens=False).items():
      result[token_id] = self._spell(token)
    for token_id, token in self.backend.get_added_tokens_decoder().items():
      result[token_id] = token.content.encode()  # matched in the text itself, before any alphabet
    return result


def _spell_bytes(token: str) -> bytes:
  # a control token may be kept in the vocabulary under its literal name
  return bytes(map(_BYTES.get, token)) if _BYTES.keys() >= set(token) else token.encode()


def _spell_spaces(token: str) -> bytes:
  if len(token) == 6 and token.startswith('<0x') and token.endswith('>'):
    return bytes([int(token[3:5], 16)])
  return token.replace('▁', ' ').encode()
