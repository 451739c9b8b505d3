"""R-Search's boxes and rewards, driven by hand."""

import numpy as np
import pytest

from jaxsearch.methods import r_search
from jaxsearch.sampler.requests import Ask, Search, ToolFailure
from jaxsearch.trees.tree import Role
from tests.methods.driving import context, drive

SEARCH = 'I look it up. <search> the author </search>'
EVIDENCE = '<original_evidence> Lovelace wrote it. </original_evidence>'
RIGHT = '<answer> Ada Lovelace </answer>'


def chain(*said, asked='Lovelace', **settings):
  return drive(said, grow=r_search.grow, asked=asked, template='r_search', evidence_template='r_search', **settings)


def test_a_chain_with_evidence():
  tree, requests, observations = chain(SEARCH, EVIDENCE + RIGHT)
  assert observations == ['\n<observation>Doc 1(Title: Title) text\n</observation>\n']
  assert isinstance(requests[1], Search) and requests[1].query == 'the author'
  assert isinstance(requests[-1], Ask) and requests[-1].service == 'reader'
  assert requests[-1].item == ('Take the answer to the question from these passages. Reply with the answer alone.\n'
                               'Passages: Lovelace wrote it.\nQuestion: Who wrote it?\nAnswer:')
  assert tree.answer == 'Ada Lovelace'
  assert r_search.reward(tree) == pytest.approx(1 + 1 + 0.4)
  assert r_search.reward(tree, evidence_weight=0.0) == pytest.approx(1.4)
  assert tree.metrics['reward_evidence'] == 1.0


@pytest.mark.parametrize('said, answer, evidence, form', [
  ([SEARCH, EVIDENCE + '<answer> Byron </answer>'], 0.0, 1.0, 0.4),
  ([RIGHT], 1.0, 0.0, 0.4),                                          # nothing retrieved: no evidence is asked for
  ([SEARCH, RIGHT], 1.0, 0.0, 0.2),                                  # retrieved, not quoted
  ([SEARCH, EVIDENCE + EVIDENCE + RIGHT], 1.0, 0.0, 0.2),            # evidence twice
  ([SEARCH, '<original_evidence> Lovelace wrote it. ' + RIGHT], 1.0, 0.0, 0.2),  # never closed
  ([SEARCH, EVIDENCE + '<answer> Ada', '<answer> Ada'], 0.0, 1.0, 0.2),  # no box with an answer
])
def test_rewards(said, answer, evidence, form):
  tree, *_ = chain(*said, max_turns=len(said) - 1)
  assert r_search.reward(tree) == pytest.approx(answer + evidence + form)
  assert [tree.metrics[f'reward_{part}'] for part in ('answer', 'evidence', 'format')] == pytest.approx([answer, evidence, form])


def test_a_search_that_found_nothing_asks_for_no_evidence():
  tree, *_ = chain(SEARCH, RIGHT, found=())
  assert r_search.reward(tree) == pytest.approx(1.4)


def test_a_reader_that_fails_gives_no_evidence_reward():
  tree, *_ = chain(SEARCH, EVIDENCE + RIGHT, asked=ToolFailure('down'))
  assert r_search.reward(tree) == pytest.approx(1.4)


def test_evidence_is_trained_and_observations_are_not():
  groups = [[chain(SEARCH, EVIDENCE + RIGHT)[0], chain(SEARCH, RIGHT)[0]]]
  r_search.credit(groups, context())
  rewards = np.array([2.4, 1.2])
  for tree, expected in zip(groups[0], (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)):
    for node in tree.walk():
      assert node.trained == (node.role is Role.POLICY)
      assert node.advantages == (pytest.approx(expected, abs=1e-5) if node.trained else None)
  with pytest.raises(ValueError, match="credit.estimator='dpo'"):
    r_search.credit(groups, context(), estimator='dpo')
  with pytest.raises(ValueError, match='critic.enabled'):
    r_search.credit(groups, context(), estimator='ppo')
