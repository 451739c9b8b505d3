"""Answer matching: SQuAD's normalisation, the rules of its public scorers, and the traps."""

import collections
import string
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxsearch.rewards.match import (
  answer_found,
  entity_match,
  exact_match,
  f1,
  matches,
  normalize_answer,
  numeric_match,
  read_number,
  substring_match,
  token_f1,
  vote,
)

QUICK = hypothesis.settings(max_examples=150, deadline=None)
words = st.sampled_from(['the', 'A', 'cat', 'Cat!', 'sat', '', 'yes', 'no', 'é', 'U.S.', '-'])
texts = st.lists(words, max_size=6).map(' '.join)


@pytest.mark.parametrize('how, alike, other', [
    ('numeric', ['18', '18.00', 'The answer is 18', '1,800%'], '1.8'), ('numeric', ['-5', '-5.0'], '5'),
    ('numeric', ['12.5%', '0.125', '1/8'], '125'), ('numeric', ['Yes', 'yes.'], 'no'),
    ('stated', ['It is. Exact Answer: Paris\nsure', 'Exact Answer: paris'], 'Paris, it is.'),
    ('exact', ['The Beatles', 'beatles'], 'Beatle')])
def test_alike_predictions_have_the_same_vote(how, alike, other):
  votes = {normalize_answer(vote(one, how)) for one in alike}
  assert len(votes) == 1 and normalize_answer(vote(other, how)) not in votes and vote(None, how) is None


@pytest.mark.parametrize('text, expected', [
    ('The  Beatles', 'beatles'), ('An apple, a day.', 'apple day'), ('U.S.A.', 'usa'), ('  \t\n', ''),
    ('the', ''),
    ('theatre', 'theatre'), ('x-ray', 'xray'), ('a.k.a', 'aka'), ('ÉCOLE', 'école'), ('café', 'café'),
    ('„Straße“', '„straße“'), ('naïve—yes', 'naïve—yes'), ('12,345.6', '123456'),
    ('a\u00a0b', 'b'), ('', '')])
def test_normalisation(text, expected):
  assert normalize_answer(text) == expected


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


@pytest.mark.parametrize('prediction, golds, expected', [
    ('yes it is', ['yes'], 0.5), ('no', ['no way'], 2 / 3), ('no', ['yes'], 0),
    ('noanswer', ['noanswer at all'], 0.5),
    ('the cat sat', ['cat sat down'], 0.8), ('a', ['the'], 1), (None, ['x'], 0), ('x', [], 0),
    ('x', [''], 0)])
def test_token_f1_has_no_rule_for_closed_answers(prediction, golds, expected):
  assert token_f1(prediction, golds) == pytest.approx(expected, abs=1e-12)


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


@pytest.mark.parametrize('text, value', [
    ('72', 72), ('72.0', 72), ('72.', 72), ('$1,234.50', '1234.5'), ('-3/4', '-3/4'), ('3 / 4', '3/4'),
    ('about 72 dollars', 72),
    ('12 * 6 = 72.', 72), ('-$5', -5), ('$-5', -5),
    ('- $ 5', -5), ('\u22125', -5), ('+5', 5), ('(-5)', -5), ('= -5', -5), ('.5', '.5'),
    ('-.5', '-.5'), ('...72', 72), ('€ 1,000,000', 10**6), ('\\$72', 72), ('$72$', 72), ('72kg', 72),
    ('5 km2', 5), ('5 m^2', 5), ('5 m^{2}', 5), ('10{,}000', 10_000), (r'-\frac{3}{4}', '-3/4'), (r'\dfrac {1}{20} m', '1/20'),
    ('30 t of CO2', 30), ('covid-19', 19), ('3-4', 4), ('$3-$5', 5), ('1, 2, 3', 3), ('1,2,3', 3),
    ('1.5e6', 1500000), ('10^6', 10**6), (r'-1.5 \times 10^{-3}', '-3/2000'), ('2 × 10^3kg', 2000),
    ('1e-05', '1/100000'), ('12/05/2020', 2020), ('3/4.5', '4.5'), ('1.5 million', '1.5'), ('US$72', 72)])
def test_the_last_number_of_a_text(text, value):
  assert read_number(text) == (Fraction(value), False)


@pytest.mark.parametrize('text',
                         ['12.5%', '12.5 %', '12.5\\%', '12.5 percent', '12.5 per cent', 'up by 12.50%.'])
def test_the_sign_of_a_percentage(text):
  assert read_number(text) == (Fraction(25, 2), True)


@pytest.mark.parametrize('text', ['', 'yes', 'km2', '½', '٣', '1/0', '9' * 5000, '1e99999999',
                                  '1/' + '9' * 5000, '-', '$', '%'])
def test_texts_without_a_number_that_can_be_used(text):
  assert read_number(text) is None
  assert numeric_match(text, ['0', '1', '9']) == 0.0


@pytest.mark.parametrize('prediction, golds, tolerance, expected', [
    ('72', ['72'], 0, 1), ('72.0', '72', 0, 1), ('72', ['7', '2'], 0, 0), ('72', '71', 0, 0),
    ('72', ['1', '$72'], 0, 1),
    (None, ['72'], 0, 0),
    ('12.5%', ['0.125'], 0, 1), ('12.5%', ['12.5'], 0, 1), ('12.5', ['12.5%'], 0, 1),
    ('0.125', ['12.5%'], 0, 1),
    ('12.5%', ['12.5%'], 0, 1), ('0.125%', ['12.5%'], 0, 0), ('1250%', ['12.5%'], 0, 0),
    ('12.5', ['0.125'], 0, 0),
    ('0.125', ['12.5'], 0, 0), ('0.3', ['3/10'], 0, 1), ('0.333', ['1/3'], 0, 0), ('0.333', ['1/3'], 0.01, 1),
    ('101', ['100'], 0.01, 1), ('101.01', ['100'], 0.01, 0), ('-99', ['-100'], 0.01, 1),
    ('100', ['-100'], 0.01, 0),
    ('0.001', ['0'], 0.01, 0), ('0', ['0.0'], 0, 1), ('9007199254740993', ['9007199254740992'], 0, 0),
    ('Yes.', ['yes'], 0, 1), ('yes, 5', ['yes'], 0, 0), ('no', ['yes'], 0, 0), ('yes', ['1'], 0, 0),
    ('5', [], 0, 0),
    ('5', np.array(['4', '5']), 0, 1), ('', [''], 0, 1)])
def test_numeric_match(prediction, golds, tolerance, expected):
  got = numeric_match(prediction, golds, tolerance=tolerance)
  assert isinstance(got, float) and got == expected


numbers = st.decimals(min_value=-10**12, max_value=10**12, places=4, allow_nan=False)
STYLES = (
    '{:f}', '{:.6f}', '{:,.4f}', '${:,.4f}', '€ {:f}', '{:f} dollars', 'about {:f} km2',
    'The answer is {:f}.', '{:E}',
    '3 * 4 = 12, so {:f}', '\\${:f}', '({:f})', '{:f}0')


@QUICK
@hypothesis.given(numbers, numbers, st.sampled_from(STYLES), st.sampled_from(STYLES))
def test_a_number_is_matched_however_it_is_written_and_another_is_not(number, other, style, gold_style):
  assert numeric_match(style.format(number), [gold_style.format(number)]) == 1.0
  assert numeric_match(style.format(number), [gold_style.format(other)]) == float(number == other)


@QUICK
@hypothesis.given(st.text(alphabet='0123456789.,-+/%$eE \\^x', max_size=40))
def test_any_text_can_be_read(text):
  number = read_number(text)
  assert numeric_match(text, [text]) == 1.0
  assert (number is None or any(digit in text for digit in string.digits))


def test_matches_takes_the_rule_by_its_name():
  assert matches('Paris', ['paris']) == matches('the Paris', ['Paris'], 'exact') == 1.0
  assert matches('It was Barack Obama', ['Barack Obama']) == 0.0
  assert matches('$72.00', ['72']) == 0.0 and matches('$72.00', ['72'], 'numeric') == 1.0
  assert matches('73', ['72'], 'numeric', 0.02) == 1.0 and matches('73', ['72'], 'numeric') == 0.0
  with pytest.raises(ValueError, match="'number'; known: exact, numeric"):
    matches('1', ['1'], 'number')


@pytest.mark.parametrize(('golds', 'text', 'found'), [
  (['The Beatles'], 'She met beatles, in 1964.', True), (['U.S.'], 'a us city', True),
  (['us'], 'a house', False),
  (['new york'], 'york new', False), (['new york'], 'New York-born', False), (['x', 'city'], 'A city.', True),
  (['the'], 'the end', False), ([], 'x', False)])
def test_an_answer_is_found_as_whole_words(golds, text, found):
  assert answer_found(golds, text) is found
