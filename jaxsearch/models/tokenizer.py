"""Text to token ids and back, with the bytes behind every id.

`Tokenizer` wraps a `tokenizers.Tokenizer` from a Hugging Face folder or a GGUF file and adds what a tree of
spans needs: encoding that never adds a token of its own, decoding that can be cut anywhere (`decode(a + b)`
is `decode(a) + decode(b)` up to a character split between them), and `pieces()`, from which the sampler makes
its stop flags. GGUF metadata is read in gguf_files.py.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxsearch.models import gguf_files


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer and the ids that have a meaning for a sampler.

  Attributes:
    backend: the `tokenizers.Tokenizer` that does the work.
    eos_ids: ids that end a generation, the tokenizer's own first; may be empty.
    pad_id: fills what is no token; the first of `eos_ids`, else 0, where the model has none of its own.
    bos_id: the token that documents began with in pretraining, or None. `encode` does not add it.
    chat_template: jinja source, or None.
  """
  backend: tokenizers.Tokenizer
  eos_ids: tuple[int, ...] = ()
  pad_id: int = 0
  bos_id: int | None = None
  chat_template: str | None = None

  @classmethod
  def of(cls, backend: tokenizers.Tokenizer, *, eos: str | Sequence[str] = (), pad: str | None = None,
         bos: str | None = None, chat_template: str | None = None) -> 'Tokenizer':
    """Wraps `backend`; its end, padding and begin tokens are given as strings, and must be tokens of it."""
    eos_ids = tuple(_id_of(backend, token) for token in ([eos] if isinstance(eos, str) else eos))
    pad_id = _id_of(backend, pad) if pad is not None else (eos_ids or (0,))[0]
    return cls(backend, eos_ids, pad_id, _id_of(backend, bos) if bos is not None else None, chat_template)

  @classmethod
  def load(cls, path: str | pathlib.Path) -> 'Tokenizer':
    """Reads the tokenizer of a Hugging Face folder (tokenizer.json and its side files) or of a GGUF file."""
    path = pathlib.Path(path)
    if path.is_dir() and (path / 'tokenizer.json').is_file():
      return _from_folder(path)
    gguf_path = gguf_files.find(path)
    if gguf_path is None:
      raise FileNotFoundError(f'{path}: no tokenizer.json and no single .gguf file here')
    return cls(**gguf_files.read_tokenizer(gguf_path))

  @property
  def eos_id(self) -> int:
    if not self.eos_ids:
      raise ValueError('this tokenizer names no end token (eos_token)')
    return self.eos_ids[0]

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id; a model's embedding may have more rows (they are padding)."""
    return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def special_tokens(self) -> tuple[str, ...]:
    """Every string that `encode` turns into one id wherever it stands in a text, special or merely added."""
    return tuple(token.content for token in self.backend.get_added_tokens_decoder().values())

  def encode(self, text: str, *, specials: bool = False) -> list[int]:
    """The ids of `text`; its special tokens become their ids.

    Args:
      text: any string.
      specials: also add what the tokenizer puts around a text ([CLS] and [SEP] of an encoder, Llama's begin
        token).
    """
    return self.backend.encode(text, add_special_tokens=specials).ids

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`, special tokens shown. Bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
    if self._style == 'words':
      return self.backend.decode(list(map(int, ids)), skip_special_tokens=False)
    pieces = self._pieces
    return b''.join(pieces[i] for i in ids if i < len(pieces)).decode('utf-8', errors='replace')

  def pieces(self, size: int | None = None) -> list[bytes]:
    """The bytes each id stands for, so that a text is the concatenation of the pieces of its ids.

    Args:
      size: length of the list, at least `vocab_size` (its default); ids without a token are b''.
    Raises:
      ValueError: for a tokenizer whose text is no concatenation (WordPiece), or a size that is too small.
    """
    size = self.vocab_size if size is None else size
    if self._style == 'words':
      raise ValueError('a WordPiece tokenizer drops spaces: its tokens do not stand for bytes')
    if size < self.vocab_size:
      raise ValueError(f'{size} pieces asked for, but the tokenizer has {self.vocab_size} tokens')
    return self._pieces + [b''] * (size - self.vocab_size)

  def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
           **variables: Any) -> str:
    """Renders `messages` ([{'role', 'content'}, …]) through the model's chat template.

    The template sees no clock: `strftime_now` stays undefined, so that the same call gives the same prompt
    every day (templates that show a date fall back to a fixed one). `variables` reach the template:
    `date_string='…'`, `tools=…`.
    Raises:
      ValueError: there is no template, or it rejects the messages.
    """
    if self.chat_template is None:
      raise ValueError('this model has no chat template')
    import jinja2
    token = self.backend.id_to_token
    names = dict(
      bos_token='' if self.bos_id is None else token(self.bos_id),
      eos_token=token(self.eos_ids[0]) if self.eos_ids else '', pad_token=token(self.pad_id))
    try:
      return _compile_template(self.chat_template).render(
        messages=list(messages), add_generation_prompt=add_generation_prompt, **(names | variables))
    except jinja2.TemplateError as error:
      raise ValueError(f'the chat template rejects these messages: {error}') from error

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, for `load` and transformers."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self.backend.save(str(folder / 'tokenizer.json'))
    token = self.backend.id_to_token
    config = {
      'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False,
      'pad_token': token(self.pad_id)}
    if self.eos_ids:
      config['eos_token'] = token(self.eos_ids[0])
    if self.bos_id is not None:
      config['bos_token'] = token(self.bos_id)
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    if self.chat_template is not None:
      (folder / 'chat_template.jinja').write_text(self.chat_template, encoding='utf-8')

  @functools.cached_property
  def _style(self) -> str:
    """How tokens spell text: 'bytes' (GPT-2), 'spaces' (SentencePiece), 'plain', or 'words' (with loss)."""
    decoder = self.backend.decoder
    parts = [] if decoder is None else json.loads(decoder.__getstate__())
    parts = parts.get('decoders', [parts]) if isinstance(parts, dict) else parts
    kinds = {part['type'] for part in parts}
    if 'ByteLevel' in kinds:
      return 'bytes'
    if kinds & {'Metaspace', 'ByteFallback', 'Replace'}:
      return 'spaces'
    return 'plain' if kinds <= {'Fuse'} else 'words'

  @functools.cached_property
  def _pieces(self) -> list[bytes]:
    result = [b''] * self.vocab_size
    for token, token_id in self.backend.get_vocab(with_added_tokens=False).items():
      result[token_id] = _SPELL[self._style](token)
    for token_id, token in self.backend.get_added_tokens_decoder().items():
      result[token_id] = token.content.encode()  # matched in the text itself, before any alphabet
    return result


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int:
  token_id = backend.token_to_id(token)
  if token_id is None:
    raise ValueError(f'{token!r} is no token of this tokenizer')
  return token_id


@functools.cache
def _byte_alphabet() -> dict[str, int]:
  """GPT-2's printable character for every byte (openai/gpt-2 encoder.py, bytes_to_unicode), inverted."""
  printable = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
  hidden = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _spell_bytes(token: str) -> bytes:
  alphabet = _byte_alphabet()
  if all(char in alphabet for char in token):
    return bytes(alphabet[char] for char in token)
  return token.encode()  # a control token kept in the vocabulary under its literal name


def _spell_spaces(token: str) -> bytes:
  if len(token) == 6 and token.startswith('<0x') and token.endswith('>'):
    return bytes([int(token[3:5], 16)])
  return token.replace('▁', ' ').encode()


_SPELL = {'bytes': _spell_bytes, 'spaces': _spell_spaces, 'plain': str.encode}


@functools.lru_cache(maxsize=16)
def _compile_template(source: str):
  """A chat template as transformers compiles it: sandboxed, blocks trimmed, with `raise_exception`."""
  import jinja2.exceptions
  import jinja2.sandbox

  def raise_exception(message: str):
    raise jinja2.exceptions.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'])
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  environment.globals['raise_exception'] = raise_exception
  return environment.from_string(source)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as error:
    raise ValueError(f'{path}: not valid JSON ({error})') from error


def _from_folder(folder: pathlib.Path) -> Tokenizer:
  """The tokenizer of a folder; its side files name the end, padding and begin tokens."""
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  backend.no_truncation()  # encoders' folders switch both on; a silently shortened text is a wrong result
  backend.no_padding()
  config = _read_json(folder / 'tokenizer_config.json')
  model = _read_json(folder / 'config.json') | _read_json(folder / 'generation_config.json')

  def named(key: str) -> int | None:
    token = config.get(key)
    token = token['content'] if isinstance(token, dict) else token
    return None if token is None else backend.token_to_id(token)

  listed = model.get('eos_token_id')
  listed = [] if listed is None else [listed] if isinstance(listed, int) else listed
  own = named('eos_token')
  eos_ids = tuple(dict.fromkeys([*([] if own is None else [own]), *listed]))
  pads = (named('pad_token'), model.get('pad_token_id'), *eos_ids)
  pad_id = next((i for i in pads if i is not None and i >= 0), 0)
  bos_id = named('bos_token')
  return Tokenizer(backend, eos_ids, pad_id, bos_id, _chat_template(folder, config))


def _chat_template(folder: pathlib.Path, config: Mapping[str, Any]) -> str | None:
  if (folder / 'chat_template.jinja').is_file():
    return (folder / 'chat_template.jinja').read_text(encoding='utf-8')
  template = config.get('chat_template')
  if isinstance(template, list):  # several named ones
    template = {entry['name']: entry['template'] for entry in template}.get('default')
  return template
