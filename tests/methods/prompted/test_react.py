"""ReAct: thought, action, observation; searches, lookups, the end; a policy that writes tags."""

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.methods.prompted import react
from jaxsearch.trees.tree import Stop
from tests.methods.driving import ANSWER, SEARCH
from tests.methods.prompted.asking import Q, ask, document, shown

FINISH = ' I know.\nAction 2: Finish[Ada]\n'


@pytest.mark.parametrize('ends, head', [('\n', 'Observation'), ('', '\nObservation'), ('\nObservation', '')])
def test_the_trace(ends, head, tmp_path):
  said = f' Hm.\nAction 1: Search[ the author ]{ends}'
  tree, requests, _ = ask(react, tmp_path, [said, FINISH], found=[document(1)], max_tokens=30)
  assert shown(requests) == [
    f'act {Q}:', ('the author', None), f'act {Q}:{said}{head} 1: Doc 1(Title: T1) text 1\nThought 2:']
  assert requests[0].stop == (']\n', '\nObservation') and requests[0].max_tokens == 30
  assert (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)


def test_a_lookup_goes_through_what_was_found(tmp_path):
  found = [Document('1', 'T', 'Ada was born. Bob was not.'), Document('2', 'U', 'Later Ada wrote it.')]
  said = ['Search[a]', 'Lookup[ada]', 'Lookup[ada]', 'Lookup[ada]', 'Lookup[Bob]', 'Finish[x]']
  tree, _, observations = ask(react, tmp_path, said, found=found)
  assert [one.split(': ', 1)[1].strip() for one in observations[1:]] == [
    'Ada was born.', 'Later Ada wrote it.', 'No more results.', 'Bob was not.']
  assert tree.metrics['searches'] == 1


def test_an_unknown_action_is_told_and_costs_a_step(tmp_path):
  tree, _, observations = ask(react, tmp_path, ['Hm.', 'Search[ ]', 'Action: Finish[]'])
  assert all('That is no action' in one for one in observations)
  assert (tree.metrics['malformed'], len(observations), tree.stop) == (3, 2, Stop.MALFORMED)


def test_a_policy_may_write_tags(tmp_path):
  tree, requests, observations = ask(react, tmp_path, [SEARCH, ANSWER], tagged=True, max_steps=2)
  assert tree.answer == 'Ada'
  assert observations == ['\n<information>Doc 1(Title: Title) text\n</information>\n']
