"""Searches that find passages about other things."""

import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools.noise import NoisySearch

CORPUS = [Document(str(number), f'title {number // 2}', f'text {number}') for number in range(40)]


class First:
  """Finds the first passages of the corpus, whatever the query."""

  def search(self, queries, topk=3):
    return [CORPUS[:topk] for _ in queries]


def noisy(share=0.3, each='call', seed=0):
  return NoisySearch(First(), CORPUS, share, each, seed=seed)


def finds(search, query='q', **call):
  return search.search([query], 3, **call)[0] == CORPUS[:3]


def test_share_of_searches_that_find_others():
  right = [finds(noisy(), call=(number,)) for number in range(2000)]
  assert np.mean(right) == pytest.approx(0.7, abs=0.03)
  assert all(finds(noisy(0), call=(number,)) for number in range(50))


def test_others_are_true_and_about_something_else():
  for number in range(50):
    found, = noisy(1).search(['q'], 3, call=(number,))
    assert len({document.id for document in found}) == 3
    assert all(document in CORPUS and document.title not in ('title 0', 'title 1') for document in found)


def test_a_call_draws_anew_and_a_query_once():
  by_call, by_query = noisy(0.5), noisy(0.5, 'query')
  for search, alike in ((by_call, False), (by_query, True)):
    several = [[finds(search.for_call(None, 3, call), f'query {query}') for call in range(20)]
               for query in range(20)]
    assert all(len(set(of_query)) == 1 for of_query in several) == alike
    search.set_step(2, 10)
    again = [[finds(search.for_call(None, 3, call), f'query {query}') for call in range(20)]
             for query in range(20)]
    assert (again == several) == alike
    search.set_step(0, 10)
    assert several == [[finds(search.for_call(None, 3, call), f'query {query}') for call in range(20)]
                       for query in range(20)]


def test_a_call_opens_documents_as_the_back_end_does():
  class Library(First):
    def open(self, name):
      return [document for document in CORPUS if document.id == name]

  search = NoisySearch(Library(), CORPUS, 0.3, 'call').for_call(None, 1, 2)
  assert search.open('7') == [CORPUS[7]] and not hasattr(noisy().for_call(None, 1), 'open')


def test_a_small_corpus_has_fewer_others():
  search = NoisySearch(First(), CORPUS[:6], 1, 'call')
  assert [len(found) for found in search.search(['q'], 3)] == [2]
