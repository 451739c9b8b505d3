import collections
import math
import random

import pytest

from jaxsearch.data.corpus import Document, words
from jaxsearch.tools.bm25 import BM25

PASSAGES = [
    Document('a', 'Paris', 'Paris is the capital of France.'),
    Document('b', 'Lyon', 'Lyon is a city of France.'),
    Document('c', 'Berlin', 'Berlin is the capital of Germany.'),
    Document('d', 'Łódź', 'A city in Poland; café culture.')]


engines = pytest.mark.parametrize('engine', ['rank_bm25', 'sparse'])


def random_corpus(count, seed=0):
  """Zipf-like words, passages of ragged length, some of them equal, one empty."""
  rng = random.Random(seed)
  vocabulary = [f'w{i}' for i in range(300)]
  weights = [1 / (i + 1) for i in range(300)]
  texts = [' '.join(rng.choices(vocabulary, weights, k=rng.randint(3, 60))) for _ in range(count)]
  texts[5:8] = [texts[4]] * 3
  passages = [Document(str(i), '', text) for i, text in enumerate(texts)] + [Document('none', '', '...')]
  return passages, rng, vocabulary


def scores_by_hand(passages, query, k1=0.9, b=0.4):
  """The formula of the module, in loops."""
  documents = [f'{p.title} {p.text.removesuffix("...")}'.split() for p in passages]
  average = sum(map(len, documents)) / len(documents)
  holders = {word: sum(word in document for document in documents) for word in query.split()}
  scores = []
  for document in documents:
    counts, score = collections.Counter(document), 0.0
    for word in dict.fromkeys(query.split()):
      if counts[word]:
        idf = math.log(1 + (len(documents) - holders[word] + 0.5) / (holders[word] + 0.5))
        score += idf * counts[word] * (k1 + 1) / (counts[word] + k1 * (1 - b + b * len(document) / average))
    scores.append(score)
  return scores


@engines
def test_ranking_and_scores_equal_the_formula(engine):
  passages, rng, vocabulary = random_corpus(80)
  backend = BM25(passages, engine=engine)
  for _ in range(40):
    query = ' '.join(rng.choices(vocabulary, k=rng.randint(1, 8)))
    expected = scores_by_hand(passages, query)
    order = sorted((i for i, s in enumerate(expected) if s), key=lambda i: (-round(expected[i], 9), i))[:10]
    found = backend.search([query], 10)[0]
    assert [d.id for d in found] == [passages[i].id for i in order]
    assert [d.score for d in found] == pytest.approx([expected[i] for i in order], abs=1e-8)


@engines
def test_ties_stand_in_corpus_order(engine):
  twins = [Document(str(i), 'Same', 'the same words') for i in range(20)]
  assert [d.id for d in BM25(twins, engine=engine).search(['same'], 5)[0]] == ['0', '1', '2', '3', '4']


@engines
def test_nothing_known_nothing_found(engine):
  backend = BM25(PASSAGES, engine=engine)
  assert backend.search(['xylophone', '', '?!', 'xylophone Berlin'], 3) == [
      [], [], [], backend.search(['berlin'], 3)[0]]
  assert [d.id for d in backend.search(['Berlin'], 3)[0]] == ['c']  # not filled up with others
  assert backend.search([], 3) == []


@engines
def test_a_word_in_every_passage_of_a_tiny_corpus_still_finds(engine):
  found = BM25(PASSAGES[:2], engine=engine).search(['France', 'Paris'], 3)
  assert [[d.id for d in documents] for documents in found] == [['a', 'b'], ['a']]


def test_titles_count_and_spelling_variants_are_one_word():
  backend = BM25(PASSAGES)
  assert [d.id for d in backend.search(['BERLIN,'], 1)[0]] == ['c']
  assert [d.id for d in backend.search(['CAFE'], 1)[0]] == ['d']
  assert backend.search(['łódź'], 1)[0][0].title == 'Łódź'
  assert words('Fannā’s 2½ naïve_STRASSE') == words("fanna's 2½ naive_straße")
  assert words('北京是Beijing') == ['北', '京', '是', 'beijing'] and words('हिन्दी भाषा') == ['हनद', 'भष']
  assert words('東京タワー 2') == ['東', '京', 'タ', 'ワ', 'ー', '2']


def test_a_repeated_word_counts_once():
  backend = BM25(PASSAGES)
  assert backend.search(['capital Berlin'], 4) == backend.search(['capital berlin capital CAPITAL'], 4)


def test_a_corpus_without_words_is_named():
  for corpus in ([], [Document('a', '', '...')]):
    with pytest.raises(ValueError, match='cannot index'):
      BM25(corpus)
