"""Answer matching: SQuAD's normalisation, the rules of its public scorers, and the traps."""

import collections
import re
import string

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxsearch.rewards.match import entity_match, exact_match, f1, normalize_answer, substring_match

QUICK = hypothesis.settings(max_examples=150, deadline=None)
words = st.sampled_from(['the', 'A', 'cat', 'Cat!', 'sat', '', 'yes', 'no', 'é', 'U.S.', '-'])
texts = st.lists(words, max_size=6).map(' '.join)


@pytest.mark.parametrize('text, expected', [
    ('The  Beatles', 'beatles'), ('An apple, a day.', 'apple day'), ('U.S.A.', 'usa'), ('  \t\n', ''),
    ('the', ''),
    ('theatre', 'theatre'), ('x-ray', 'xray'), ('a.k.a', 'aka'), ('ÉCOLE', 'école'), ('café', 'café'),
    ('„Straße“', '„straße“'), ('naïve—yes', 'naïve—yes'), ('12,345.6', '123456'),
    ('a\u00a0b', 'b'), ('', '')])
def test_normalisation(text, expected):
  assert normalize_answer(text) == expected


@QUICK
@hypothesis.given(texts)
def test_normalisation_leaves_no_punctuation_articles_or_double_spaces(text):
  got = normalize_answer(text)
  assert not set(got) & set(string.punctuation)
  assert not re.search(r'\b(a|an|the)\b|  |^ | $', got)
  assert got == got.lower() == normalize_answer(got)


@pytest.mark.parametrize('prediction, golds, expected', [
    ('Paris', ['paris'], 1), ('The Paris.', ['London', 'PARIS!'], 1), ('Paris, France', ['Paris'], 0),
    ('a', 'a cat', 0),             # a bare string is one gold: 'a' is not one of its letters
    ('cat', 'a cat', 1), ('c', 'cat', 0), ('', ['Paris'], 0), ('Paris', [''], 0), ('', [''], 1),
    ('the', ['?!'], 1), (None, [''], 0), (None, ['Paris'], 0), ('Paris', [], 0), ('é', ['e'], 0),
    ('É', ['é'], 1), ('Paris', np.array(['Rome', 'Paris']), 1)])
def test_exact_match(prediction, golds, expected):
  got = exact_match(prediction, golds)
  assert isinstance(got, float) and got == expected


@pytest.mark.parametrize('prediction, golds, expected', [
    ('It was Barack Obama, of course', ['Barack Obama'], 1), ('Barack H. Obama', ['Barack Obama'], 0),
    ('in Paris', ['Paris'], 1), ('Paris', ['Paris, France'], 0), ('something', [''], 0),
    ('something', ['the'], 0), ('', [''], 1), ('', ['x'], 0), ('the answer is 42', '42', 1),
    (None, ['x'], 0), ('x', [], 0)])
def test_substring_match(prediction, golds, expected):
  got = substring_match(prediction, golds)
  assert isinstance(got, float) and got == expected


@pytest.mark.parametrize('prediction, golds, expected', [
    ('It was Barack Obama', ['Barack Obama'], 1), ('in Paris', ['Paris'], 0), ('the Paris', ['Paris'], 1),
    ('yes, of course', ['yes'], 0), ('something', ['the'], 0), ('', ['a'], 1)])
def test_entity_match_wants_several_words_for_a_substring(prediction, golds, expected):
  # CARL, section 4: "For multi-word entity answers, we also accept predictions whose normalized form contains
  # the normalized gold as a substring."
  assert entity_match(prediction, golds) == expected


@pytest.mark.parametrize('prediction, golds, expected', [
    ('the cat sat', ['cat sat down'], 0.8),                 # 2 shared of 2 and 3 tokens
    ('cat cat', ['cat'], 2 / 3), ('cat', ['dog'], 0), ('cat sat', ['dog', 'sat on mat', 'cat sat'], 1),
    ('yes', ['yes'], 1), ('yes it is', ['yes'], 0), ('no', ['yes'], 0), ('yes', ['yes it is'], 0),
    ('noanswer', ['no answer'], 0), ('Yes.', 'yes', 1), ('', ['x'], 0), ('x', [''], 0), ('', [''], 1),
    ('a', ['the'], 1), (None, ['x'], 0), ('x', [], 0), ('12 may 1999', ['May 12, 1999'], 1)])
def test_f1(prediction, golds, expected):
  got = f1(prediction, golds)
  assert isinstance(got, float)
  assert got == pytest.approx(expected, abs=1e-12)


def hotpot_f1(prediction, gold):
  """HotpotQA's `hotpot_evaluate_v1.f1_score`: bags of tokens, harmonic mean of precision and recall."""
  closed = ('yes', 'no', 'noanswer')
  if prediction != gold and (prediction in closed or gold in closed):
    return 0.0
  shared = collections.Counter(prediction.split()) & collections.Counter(gold.split())
  if not sum(shared.values()):
    return 0.0
  precision, recall = (sum(shared.values()) / len(text.split()) for text in (prediction, gold))
  return 2 * precision * recall / (precision + recall)


@QUICK
@hypothesis.given(texts, st.lists(texts, min_size=1, max_size=3))
def test_scores_agree_with_the_public_scorers_except_for_empty_golds(prediction, golds):
  answer, gold_answers = normalize_answer(prediction), [normalize_answer(gold) for gold in golds]
  assert exact_match(prediction, golds) == float(answer in gold_answers)
  if all(gold_answers):
    assert f1(prediction, golds) == pytest.approx(max(hotpot_f1(answer, gold) for gold in gold_answers))
    assert substring_match(prediction, golds) == float(any(gold in answer for gold in gold_answers))


@QUICK
@hypothesis.given(texts, st.lists(texts, max_size=3))
def test_an_order_between_the_scores(prediction, golds):
  exact = exact_match(prediction, golds)
  assert exact <= entity_match(prediction, golds) <= substring_match(prediction, golds) <= 1.0
  assert exact <= f1(prediction, golds) <= 1.0
  assert f1(prediction, golds) == f1(prediction, golds[::-1])
