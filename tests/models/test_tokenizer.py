"""Round trips, the bytes behind ids, folders and chat templates; transformers is the judge of what is written."""

import dataclasses
import json

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

from jaxsearch.models.tokenizer import Tokenizer

TEXT = [
  'the capital of France is Paris', '<search> capital of Peru </search>', 'naïve Ünïcode façade 日本語 🙂',
  '1 + 1 = 2\n\n']
SPECIAL = ['<|end|>', '<|pad|>', '<|user|>']
MESSAGES = [{'role': 'user', 'content': ' Which capital? '}, {'role': 'assistant', 'content': 'Paris "é"'}]
CHATML = (
  "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
  "{{ raise_exception('who is ' + m['role'] + '?') }}{% endif %}"
  "<|user|>{{ m['role'] }}\n{{ m['content'] | trim }}{{ eos_token }}\n{% if loop.last %}{% break %}{% endif %}\n"
  '{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}')


def byte_level():
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
  backend.train_from_iterator(TEXT, trainer)
  return backend


def sentencepiece():
  vocab = {'<unk>': 0, '</s>': 1} | {f'<0x{byte:02X}>': 2 + byte for byte in range(256)}
  for token in ('▁', 'a', 'b', 'ab', '▁ab'):
    vocab[token] = len(vocab)
  model = tokenizers.models.BPE(vocab, [('a', 'b'), ('▁', 'ab')], byte_fallback=True, fuse_unk=True, unk_token='<unk>')
  backend = tokenizers.Tokenizer(model)
  backend.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
  backend.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
  backend.add_special_tokens(['<unk>', '</s>'])
  return backend


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer(byte_level(), eos_ids=(0,), pad_id=1, chat_template=CHATML)


words = st.lists(st.one_of(st.text(), st.sampled_from([*SPECIAL, *TEXT])), max_size=5).map(''.join)


@settings(max_examples=200, deadline=None)
@given(text=words)
def test_round_trip(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  pieces = tokenizer.pieces()
  assert b''.join(pieces[i] for i in ids) == text.encode()


def test_a_character_cut_in_two_is_replaced_not_lost(tokenizer):
  ids = tokenizer.encode('é¿')  # none of the training texts merges these bytes
  assert len(ids) > 2
  assert tokenizer.decode(ids[:1]) == '\ufffd'


def test_encode_adds_nothing():
  backend = byte_level()
  backend.post_processor = processors.TemplateProcessing(
    single='<|user|> $A <|end|>', special_tokens=[('<|user|>', 2), ('<|end|>', 0)])
  tokenizer = Tokenizer(backend)
  assert tokenizer.decode(tokenizer.encode('Paris')) == 'Paris'


def test_pieces_of_a_model_with_a_larger_vocabulary(tokenizer):
  pieces = tokenizer.pieces(tokenizer.vocab_size + 3)
  assert len(pieces) == tokenizer.vocab_size + 3 and pieces[-3:] == [b''] * 3
  assert pieces[:3] == [token.encode() for token in SPECIAL]
  assert {bytes([byte]) for byte in range(256)} <= set(pieces)
  assert tokenizer.decode([tokenizer.vocab_size + 1]) == ''
  with pytest.raises(ValueError, match='tokens, but the model 3 embeddings'):
    tokenizer.pieces(3)
  with pytest.raises(ValueError, match='eos_token_id 151645 .* is beyond the'):
    dataclasses.replace(tokenizer, eos_ids=(0, 151645)).check_fits(tokenizer.vocab_size)


def test_added_letters_and_words_are_not_special():
  backend = byte_level()
  backend.add_tokens(['ü', 'Paris', 'ab cd', '÷', '<tool_call>'])
  tokenizer = Tokenizer(backend)
  assert {*tokenizer.added_tokens} - {*tokenizer.special_tokens} == {'ü', 'Paris', 'ab cd', '÷'}
  assert '<tool_call>' in tokenizer.special_tokens and {*SPECIAL} <= {*tokenizer.special_tokens}


def test_sentencepiece_style():
  tokenizer = Tokenizer(sentencepiece())
  ids = tokenizer.encode('ab ab\né</s>')
  assert tokenizer.decode(ids) == ' ab ab\né</s>'  # the space that it puts before a text belongs to the first token
  pieces = tokenizer.pieces()
  assert [pieces[i] for i in ids] == [b' ab', b' ab', b'\n', b'\xc3', b'\xa9', b'</s>']


def test_wordpiece_has_no_pieces():
  vocab = {'[UNK]': 0, 'play': 1, '##ing': 2, 'now': 3}
  backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token='[UNK]'))
  backend.pre_tokenizer = pre_tokenizers.Whitespace()
  backend.decoder = decoders.WordPiece()
  tokenizer = Tokenizer(backend)
  assert tokenizer.encode('playing now') == [1, 2, 3]
  with pytest.raises(ValueError, match='WordPiece'):
    tokenizer.pieces()


# --- folders ---


def write(folder, **files):
  backend = byte_level()
  backend.enable_truncation(4)
  backend.enable_padding(length=64)
  backend.save(str(folder / 'tokenizer.json'))
  for name, value in files.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  return folder


@pytest.mark.parametrize('files, eos_ids, pad_id, bos_id', [
  (dict(tokenizer_config=dict(eos_token='<|end|>', pad_token='<|pad|>', bos_token='<|user|>')), (0,), 1, 2),
  (dict(tokenizer_config=dict(eos_token=dict(__type='AddedToken', content='<|user|>'), bos_token=None)), (2,), 2, None),
  (dict(special_tokens_map=dict(eos_token=dict(content='<|user|>'), pad_token='<|pad|>')), (2,), 1, None),
  (dict(tokenizer_config=dict(eos_token='<|user|>'), generation_config=dict(eos_token_id=[0, 2])), (2, 0), 2, None),
  (dict(config=dict(eos_token_id=2, pad_token_id=1)), (2,), 1, None),
  (dict(tokenizer_config=dict(eos_token='', pad_token='', bos_token=''), config=dict(eos_token_id=2, pad_token_id=1)),
   (2,), 1, None),
  (dict(config=dict(eos_token_id=2), generation_config=dict(eos_token_id=0)), (0,), 0, None),
  (dict(config=dict(eos_token_id=-1, pad_token_id=-1)), (), 0, None),
  ({}, (), 0, None),
])
def test_special_ids_of_a_folder(files, eos_ids, pad_id, bos_id, tmp_path):
  tokenizer = Tokenizer.load(write(tmp_path, **files))
  assert tokenizer.decode(tokenizer.encode(TEXT[2])) == TEXT[2]  # without truncation and padding
  assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id) == (eos_ids, pad_id, bos_id)


def test_transformers_reads_what_we_save(tokenizer, tmp_path):
  transformers = pytest.importorskip('transformers')
  tokenizer.save(tmp_path)
  again, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert (again.eos_ids, again.pad_id, again.chat_template) == (tokenizer.eos_ids, tokenizer.pad_id, CHATML)
  assert (theirs.eos_token, theirs.pad_token) == ('<|end|>', '<|pad|>')
  for add in (True, False):
    text = tokenizer.chat(MESSAGES, add_generation_prompt=add)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
    assert text.startswith('<|user|>user\nWhich capital?<|end|>\n')
  for text in [*TEXT, '<|user|>Paris<|end|>']:
    ids = tokenizer.encode(text)
    assert again.encode(text) == theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.decode(ids) == text


def test_nothing_of_another_tokenizer_stays_in_a_folder(tokenizer, tmp_path):
  tokenizer.save(tmp_path)
  write(tmp_path, special_tokens_map=dict(eos_token='<|user|>', pad_token='<|user|>'))
  dataclasses.replace(tokenizer, chat_template=None).save(tmp_path)
  again = Tokenizer.load(tmp_path)
  assert (again.eos_ids, again.pad_id, again.chat_template) == (tokenizer.eos_ids, tokenizer.pad_id, None)


# --- chat templates ---


def test_chat_template_of_a_folder(tmp_path):
  write(tmp_path, tokenizer_config=dict(chat_template=[
    dict(name='rag', template='rag'), dict(name='default', template='{{ messages[0].content }} {{ year }}')]))
  assert Tokenizer.load(tmp_path).chat([{'role': 'user', 'content': 'Hi'}], year=1999) == 'Hi 1999'
  (tmp_path / 'chat_template.jinja').write_text('{{ tools | tojson }}{{ strftime_now is defined }}')
  assert Tokenizer.load(tmp_path).chat([{'role': 'user', 'content': ''}], tools=[{'é': 1}]) == '[{"é": 1}]False'


def test_chat_that_the_template_rejects(tokenizer):
  with pytest.raises(ValueError, match='who is system'):
    tokenizer.chat([{'role': 'system', 'content': ''}])
  with pytest.raises(ValueError, match='no chat template'):
    Tokenizer(byte_level()).chat(MESSAGES)
