"""BM25 over mapped postings against the formula in loops and against tools/bm25.py."""

import os
import resource

import numpy as np
import pytest

from jaxsearch.data.corpus import indexed
from jaxsearch.tools import sparse
from jaxsearch.tools.bm25 import BM25
from tests.tools.test_bm25 import random_corpus


def built(folder, passages, block):
  for first in range(0, len(passages), block):
    sparse.write_block(folder, first, [indexed(one) for one in passages[first:first + block]])
  sparse.merge(folder)
  return folder


@pytest.mark.parametrize(('block', 'merged'), [(1000, 10**6), (7, 40)])
def test_the_ranking_is_that_of_bm25_whatever_the_blocks(tmp_path, monkeypatch, block, merged):
  monkeypatch.setattr(sparse, 'MERGED', merged)
  passages, rng, vocabulary = random_corpus(300)
  ours, judge = sparse.Sparse(built(tmp_path, passages, block)), BM25(passages)
  for topk in (1, 3, 20, 1000):
    for _ in range(40):
      query = ' '.join(rng.choices(vocabulary, [1 / (i + 1) for i in range(300)], k=rng.randint(1, 12)))
      numbers, scores = ours.search(query, topk)
      expected = judge.search([query], topk)[0]
      assert [passages[i].id for i in numbers] == [one.id for one in expected]
      np.testing.assert_allclose(scores, [one.score for one in expected], atol=1e-8)


def test_more_blocks_than_a_process_may_open(tmp_path):
  passages, _, _ = random_corpus(100)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/dev/fd')) + 50, hard))
  try:
    built(tmp_path, passages, 1)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
