"""SuRe: candidates, a summary for each, validity and ranking in both orders, and the sum of both."""

import itertools

import numpy as np
import pytest

from jaxsearch.methods.prompted import sure
from tests.methods.prompted.asking import Q, ask, document, shown

DOCUMENT = 'Doc 1(Title: T1) text 1\n'
VERDICTS = list(itertools.product(['True', 'no'], ['true.', 'False'], *[['Passage 1', 'passage 2', '?']] * 2))


def test_what_is_asked(tmp_path):
  said = ['(a) Ada, (b) Bob Roe.', 'sum A', ' sum B ', 'True', 'False', 'Passage 1', 'Passage 2']
  tree, requests, _ = ask(sure, tmp_path, said, found=[document(1)], max_tokens=9, summary_tokens=77)
  assert shown(requests) == [
    (Q, None), f'two {DOCUMENT}{Q}:', f'for Ada {DOCUMENT}{Q}:', f'for Bob Roe {DOCUMENT}{Q}:',
    f'sum A supports Ada {Q}?', f'sum B supports Bob Roe {Q}?', f'1 sum A 2 sum B {Q}?',
    f'1 sum B 2 sum A {Q}?',
  ]  # fmt: skip
  assert [one.max_tokens for one in requests[1:]] == [9, 77, 77, 8, 8, 8, 8]
  assert tree.answer == 'Ada' and tree.root.data['scores'] == {'Ada': 2.0, 'Bob Roe': 0.0}


@pytest.mark.parametrize('verdicts', VERDICTS)
def test_the_sum_decides(verdicts, tmp_path):
  valid, ranked = verdicts[:2], [{'1': 1, '2': 0, '?': .5}[verdict[-1]] for verdict in verdicts[2:]]
  matrix = np.array([[0, ranked[0]], [ranked[1], 0]])  # [i, j]: whether i wins as the first of i and j
  scores = np.array(['true' in verdict.lower() for verdict in valid]) + matrix.sum(1)
  tree, *_ = ask(sure, tmp_path, ['(a) Ada (b) Bob', 's', 't', *verdicts])
  assert tree.answer == ['Ada', 'Bob'][scores.argmax()]


@pytest.mark.parametrize('said, answer',
                         [('(a) Ada (b) Ada', 'Ada'), ('The answer is Ada.', 'Ada'), ('(a)', '(a)')])
def test_one_candidate_needs_no_judge(said, answer, tmp_path):
  tree, requests, _ = ask(sure, tmp_path, [said])
  assert tree.answer == answer and len(requests) == 2
