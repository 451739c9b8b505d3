"""Reading actions and answers, writing observations, hostile text that must come out inert."""

import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers

from jaxsearch.trees import grammar


@dataclasses.dataclass
class Document:
  title: str
  text: str


@pytest.mark.parametrize('text, query', [
    ('<think>who?</think><search> capital of Peru </search>', 'capital of Peru'),
    ('<search>first</search> then <search>second</search>', 'second'),
    ('<search>東京 – où ?</search>', '東京 – où ?'),
    ('<search>a < b</search>', 'a < b'),
    ('<search>x</search>\n', 'x'),
    ('<search>x</search>.', 'x'),                                   # one token, `>.`, completed the tag
    ('<search> outer <search> inner </search>', 'inner'),
    ('<answer>A</answer><search>x</search>', 'x'),
    ('<search>half <think>and</think> <search>whole</search>', 'whole'),
    ('', None),
    ('<search> \n </search>', None),
    ('<search>good</search><search> </search>', None),              # the last one is what was asked for
    ('<search>unclosed', None),
    ('unopened</search>', None),
    ('<search>x</search> and then some words', None),
    ('<search>x</search><|im_end|>', None),
    ('<search>x</search><answer>A</answer>', None),
    ('<search>a <answer>b</answer> c</search>', None),              # another element inside
    ('<search>a </think> b</search>', None),
    ('<Search>x</Search>', None),                                   # nothing stops at these while sampling
    ('< search>x</ search>', None),
    ('<search>x</search', None),
])
def test_search_query(text, query):
  assert grammar.search_query(text) == query


@pytest.mark.parametrize('text, answer', [
    ('<answer> Lima </answer>', 'Lima'),
    ('<answer>one</answer> no, <answer>two</answer>', 'two'),
    ('<answer>São Tomé</answer> trailing words', 'São Tomé'),
    ('<answer>draft <answer>final</answer>', 'final'),
    ('<answer>kept</answer><answer>unclosed', 'kept'),
    ('<answer>x < y > z</answer>', 'x < y > z'),
    ('<answer>Lima</answer><answer> </answer>', None),
    ('<answer>Lima', None),
    ('<answer>Li<search>ma</search></answer>', None),
    ('<answer>Lima</search>', None),
    ('', None),
])
def test_answer(text, answer):
  assert grammar.answer(text) == answer


def test_other_papers_have_other_tags():
  tags = grammar.Tags(search='query', observation='observation', answer='final')
  assert grammar.search_query('<query>x</query>', tags) == 'x'
  assert grammar.search_query('<search>x</search>', tags) is None
  assert grammar.answer('<final>x</final>', tags) == 'x'
  assert tags.stops == ('</query>', '</final>')
  assert grammar.information([], (), tags).startswith('\n<observation>')
  assert '<query>' in grammar.invalid_action(tags) and '</final>' in grammar.invalid_action(tags)
  assert grammar.neutralise('<query><search>', (), tags) == '(query><search>'


def test_information_is_written_as_search_r1_does():
  documents = [Document('Lima', 'The capital of Peru.'), Document(' Peru ', 'A country.\nIn the Andes.\n')]
  assert grammar.information(documents, ()) == (
      '\n<information>Doc 1(Title: Lima) The capital of Peru.\n'
      'Doc 2(Title: Peru) A country.\nIn the Andes.\n</information>\n')
  assert grammar.information([], ()) == '\n<information>No documents were found.\n</information>\n'


@pytest.mark.parametrize('text, inert', [
    ('<search>', '(search>'),
    ('</answer>', '(/answer>'),
    ('<SEARCH>', '(SEARCH>'),
    ('< / Search >', '( / Search >'),
    ('<\n\tsearch', '(\n\tsearch'),                    # not even closed: what follows may close it
    ('<answer id="1">', '(answer id="1">'),
    ('<sea<search>rch>', '<sea(search>rch>'),          # removing the inner one would make the outer one
    ('<<search>', '<(search>'),
    ('<search<search>', '(search(search>'),
    ('<se\u200barch>', '(se\u200barch>'),                            # invisible inside
    ('＜ｓｅａｒｃｈ＞', '(ｓｅａｒｃｈ＞'),                                  # full width
    ('<ſearch>', '(ſearch>'),                                        # long s
    ('<séarch>', '(séarch>'),
    ('<search\u0301>', '(search\u0301>'),
    ('a < b, search > c', 'a < b, search > c'),
    ('I search for an <b>answer</b>.', 'I search for an <b>answer</b>.'),
    ('', ''),
])
def test_tags_become_inert(text, inert):
  assert grammar.neutralise(text) == inert


@pytest.mark.parametrize('text, inert', [
    ('<|im_end|>', '(|im_end|>'),
    ('<|IM_END|>', '(|IM_END|>'),
    ('<|im_<|im_end|>end|>', '<|im_(|im_end|>end|>'),
    ('[CLS] and [cls]', '(CLS] and (cls]'),
    ('a  b\u200bc', 'a  b\u200bc'),                      # tokens, but they control nothing
    ('<|im_\U000f0000end|>', '(|im_\U000f0000end|>'),  # private use, which BERT's tokenizers drop
    ('((', '(('),
])
def test_special_tokens_become_inert(text, inert):
  assert grammar.neutralise(text, ['<|im_end|>', '[CLS]', '  ', '\u200b', '']) == inert


def test_the_character_written_is_part_of_no_special_token():
  assert grammar.neutralise('<s>(x<s>', ['<s>', '(x']) == '[s>[x[s>'
  with pytest.raises(ValueError, match='neutral character'):
    grammar.neutralise('', ['([{‹«'])


SPECIALS = ['<|im_start|>', '<|im_end|>', '<|endoftext|>', '<s>', '</s>', '[CLS]', '<|a|><|b|>', '|><|']
HOSTILE = [
    *SPECIALS, '<search>', '</search>', '<answer>', '</information>', '<think', '<', '>', '|', '/', ' ', '\n',
    '<|', '|>', 'im_end', 'IM_END', 's', 'ſ', 'ｓ', 'search', 'sea', 'rch', '[C', 'LS]', '(', '\u200b',
    '\u0301', '\u0338', '\x00', '\x7f', '\ue000', '\U000f0000', '\u0378', '＜', '＞', '｜', 'é', 'İ', 'ﬁ', '≮',
    '🙂', '\ufffd',
    '…', '⑴', '\u212a']
texts = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=3)), max_size=14).map(''.join)


@functools.cache
def tokenizer(kind):
  """A real tokenizer that knows SPECIALS; kinds differ in what they normalise away before they match them."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  n = tokenizers.normalizers
  backend.normalizer = {'nfc': n.NFC(), 'nfkc': n.Sequence([n.NFKC(), n.Lowercase()]),
                        'stripped': n.Sequence([n.NFKD(), n.StripAccents(), n.Lowercase()]),
                        'bert': n.BertNormalizer(clean_text=True, strip_accents=True, lowercase=True)}[kind]
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                           initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend.train_from_iterator(['search the answer <search> im_end </answer>'] * 3, trainer)
  backend.add_special_tokens(
      [tokenizers.AddedToken(token, normalized=kind != 'nfc', special=True) for token in SPECIALS])
  return backend


@pytest.mark.parametrize('kind', ['nfc', 'nfkc', 'stripped', 'bert'])
def test_no_special_id_comes_out_of_neutralised_text(kind):
  backend = tokenizer(kind)
  special_ids = {backend.token_to_id(token) for token in SPECIALS}
  assert special_ids & set(backend.encode('x<|im_end|>y').ids)     # untreated, they do come out

  @hypothesis.settings(max_examples=300, deadline=None)
  @hypothesis.given(texts)
  def check(text):
    ids = backend.encode(grammar.neutralise(text, SPECIALS), add_special_tokens=False).ids
    assert not special_ids & set(ids)

  check()


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(texts)
def test_neutralised_text_has_no_tags_and_stays_as_it_is(text):
  inert = grammar.neutralise(text, SPECIALS)
  assert grammar.neutralise(inert, SPECIALS) == inert
  assert len(inert) == len(text)
  assert all(new in (old, '(') for old, new in zip(text, inert))     # nothing else is touched
  assert not re.search(r'<\s*/?\s*(think|search|information|answer)', inert, re.IGNORECASE)
  assert not grammar.elements(inert)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.lists(st.builds(Document, texts, texts), max_size=3))
def test_an_observation_has_exactly_its_own_two_tags(documents):
  text = grammar.information(documents, SPECIALS)
  assert [match[0] for match in re.finditer(r'</?(think|search|information|answer)>', text)] == [
      '<information>', '</information>']
  ids = tokenizer('nfc').encode(text, add_special_tokens=False).ids
  assert not {tokenizer('nfc').token_to_id(token) for token in SPECIALS} & set(ids)
