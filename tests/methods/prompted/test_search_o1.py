"""Search-o1: documents are read in a call of their own, repeated queries are refused, searches and turns are
limited."""

import pytest

from jaxsearch.methods.prompted import search_o1
from jaxsearch.sampler.requests import Generate
from jaxsearch.trees.tree import Role, Stop
from tests.methods.prompted.asking import Q, ask, by_query, shown

ANSWER = 'So <answer> Ada </answer>'


def search(query):
  return f'hm <search> {query} </search>'


def test_a_search_is_served_even_where_a_thought_says_what_the_answer_is(tmp_path):
  tree, *_ = ask(search_o1, tmp_path, [f'I doubt that the answer is Bo. {search("it")}', ANSWER], found=by_query, extract=False)
  assert (tree.answer, tree.metrics['searches']) == ('Ada', 1)


def test_documents_are_read_before_they_enter_the_chain(tmp_path):
  tree, requests, observations = ask(search_o1, tmp_path, [search('it'), 'By <b>Ada</b>. </search>', ANSWER],
                                     found=by_query,
                                     max_searches=4, max_tokens=50, extract_tokens=20)
  assert shown(requests) == [
    f'search 4 {Q}:', ('it', None),
    # a call of its own, which sees the reasoning
    'hm (search> it (/search> | it Doc 1(Title: it) text\n:',
    # and the chain sees only what it wrote
    f'search 4 {Q}:{search("it")}\n<information>By Ada .</information>\n',
  ]  # fmt: skip
  assert [one.max_tokens for one in requests if isinstance(one, Generate)] == [50, 20, 50]
  assert observations == ['Doc 1(Title: it) text\n']
  assert [node.role for node in tree.leaves()[0].path()][-2] is Role.CONTEXT
  assert (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)


def test_a_repeated_query_is_refused(tmp_path):
  tree, requests, observations = ask(search_o1, tmp_path, [search('it'), 'x', search(' IT '), ANSWER],
                                     found=by_query)
  assert search_o1.REPEATED in observations[0] and tree.metrics['searches'] == tree.metrics['refused'] == 1


def test_searches_are_limited(tmp_path):
  said = [search('a'), search('b'), search('c'), search('a'), ANSWER]
  tree, requests, observations = ask(search_o1, tmp_path, said, found=by_query, max_searches=2, extract=False)
  assert [search_o1.LIMITED in one for one in observations] == [False, False, True, False]
  assert search_o1.REPEATED in observations[3]
  assert tree.metrics['searches'] == tree.metrics['refused'] == 2 and tree.answer == 'Ada'


@pytest.mark.parametrize('last, stop, malformed', [(search('b'), Stop.BUDGET, 0), ('hm', Stop.MALFORMED, 1)])
def test_turns_are_limited_and_a_span_without_an_action_ends_the_chain(last, stop, malformed, tmp_path):
  tree, requests, _ = ask(search_o1, tmp_path, [search('a'), last], found=by_query, max_turns=2,
                          extract=False)
  assert (tree.answer, tree.stop, tree.metrics['searches']) == (None, stop, 1)
  assert tree.metrics['malformed'] == malformed
