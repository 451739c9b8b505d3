import pytest
from scipy import stats

from jaxsearch.data.corpus import Document
from jaxsearch.evaluation.metrics import (
  answer_found,
  retrieval_recall,
  searches_per_question,
  student_interval,
)


def documents(*texts):
  return [Document(str(i), f'Title {i}', text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(('golds', 'text', 'found'), [
    (['The Beatles'], 'She met beatles, in 1964.', True), (['U.S.'], 'a us city', True),
    (['us'], 'a house', False), (['new york'], 'york new', False), (['new york'], 'New York-born', False),
    (['x', 'city'], 'A city.', True), (['the'], 'the end', False), (['title 0'], '', True), ([], 'x', False)])
def test_answer_found(golds, text, found):
  assert answer_found(golds, documents(text)) is found


def test_an_answer_does_not_span_two_documents():
  assert not answer_found(['red title'], documents('red', 'blue'))


def test_means_over_episodes():
  episodes = [
      dict(golden_answers=['Paris'], documents=documents('Lyon', 'In Paris.'), searches=2),
      dict(golden_answers=['Rome'], documents=[], searches=0),
      dict(golden_answers=['Rome'], documents=documents('Roman'), searches=1),
      dict(golden_answers=('Oslo',), documents=documents('Oslo'), searches=3)]
  assert retrieval_recall(episodes) == 0.5
  assert searches_per_question(episodes) == 1.5
  with pytest.raises(ValueError, match='no episodes'):
    retrieval_recall([])


@pytest.mark.parametrize('confidence', [0.95, 0.8])
def test_student_interval_equals_scipy(confidence):
  values = [0.61, 0.66, 0.64, 0.7]
  expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
  assert student_interval(values, confidence) == pytest.approx((expected.low, expected.high))
  with pytest.raises(ValueError, match='at least two'):
    student_interval([1.0])
