"""Decoders and encoders, their files and their tokenizers. Names are imported when they are first used."""

import importlib

_HOME = {
  'load': 'hub', 'save': 'hub', 'load_encoder': 'encoder', 'Decoder': 'decoder', 'Tokenizer': 'tokenizer',
  'DecoderConfig': 'architecture', 'PRESETS': 'architecture', 'preset': 'architecture',
}  # fmt: skip

__all__ = list(_HOME)


def __getattr__(name: str):
  if name not in _HOME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)
