"""Iter-RetGen: the rounds, their queries, and what each round is shown."""

import pytest

from jaxsearch.methods.prompted import iter_retgen
from tests.methods.prompted.asking import Q, ask, by_query, shown


@pytest.mark.parametrize('reason, call', [(True, 'reason'), (False, 'read')])
def test_each_round_searches_for_the_question_and_the_last_answer(reason, call, tmp_path):
  said = ['The answer is Bob.', 'The answer is Ada', 'So the answer is: Eve.']
  tree, requests, _ = ask(iter_retgen, tmp_path, said, found=by_query, reason=reason)
  queries = [Q, f'{Q} The answer is Bob.', f'{Q} The answer is Ada']  # the last answer alone, not all of them
  assert shown(requests) == [one for query in queries
                             for one in ((query, None), f'{call} Doc 1(Title: {query}) text\n{Q}:')]
  assert tree.answer == 'Eve' and tree.metrics['searches'] == 3
