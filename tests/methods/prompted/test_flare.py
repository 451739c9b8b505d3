"""FLARE: looks ahead one sentence, searches where a token is improbable, masks such tokens in the query,
writes anew."""

import math

import pytest

from jaxsearch.methods.prompted import flare
from jaxsearch.sampler.requests import Generate
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import Letters
from tests.methods.prompted.asking import Q, ask, by_query, shown


def chances(*probabilities):
  return [math.log(p) for p in probabilities]


def test_only_an_unsure_sentence_is_searched_for_and_written_anew(tmp_path):
  said = ['It is a play. And', 'Bob wrote it.', 'Ada wrote it.', 'So the answer is: Ada.']
  tree, requests, _ = ask(flare, tmp_path, said, found=by_query, stops=['. '] + ['end'] * 3,
                          logprobs=chances(.9, .6, .1, .8),
                          search_below=0.8, mask_below=0.5, look_ahead=64)
  assert shown(requests) == [
    f'cot {Q}:',
    f'cot {Q}:It is a play.',                                         # without documents
    ('Bob wrote it.', None), f'reason Doc 1(Title: Bob wrote it.) text\n{Q}:It is a play.',
    # what was written anew is kept, however improbable
    f'cot {Q}:It is a play. Ada wrote it.',
  ]  # fmt: skip
  assert {one.max_tokens for one in requests if isinstance(one, Generate)} == {64}
  assert (tree.answer, tree.stop, tree.metrics['searches']) == ('Ada', Stop.ANSWERED, 1)


def span(text, probabilities):
  node = Tree(Letters()).root.append(text, Role.POLICY)
  node.sampler_logprobs = [math.log(p) for p in probabilities]
  return node


@pytest.mark.parametrize('probabilities, query', [
  ([.9] * 8, ''), ([.8] * 8, ''),                                     # at the threshold it is sure
  # unsure of one token, which stays in the query
  ([.9, .9, .7, .9, .9, .9, .9, .9], 'Ada B.'),
  ([.9, .9, .9, .9, .3, .9, .9, .9], 'Ada .'),                        # masked
  ([.1] * 8, ''),                                                     # nothing left to search for
  # what comes after the sentence does not count
  ([.9, .9, .9, .9, .9, .9, .1, .1], ''),
])  # fmt: skip
def test_the_query(probabilities, query):
  assert flare.unsure_query(span('Ada B. x', probabilities), 'Ada B.', 0.8, 0.4) == query
