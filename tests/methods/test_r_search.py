"""R-Search's boxes and rewards, driven by hand."""

import dataclasses

import pytest

from configs import r_search_without_evidence
from jaxsearch.methods import r_search
from jaxsearch.sampler.requests import Ask, Search, ToolFailure
from jaxsearch.trees import templates
from tests.methods.driving import FOUND, QUESTION, context, drive

SEARCH = 'I look it up. <search> the author </search>'
EVIDENCE = '<original_evidence> Lovelace wrote it. </original_evidence>'
RIGHT = '<answer> Ada Lovelace </answer>'


def chain(*said, asked='Lovelace', **settings):
  return drive(said, grow=r_search.grow, asked=asked, template='r_search', evidence_template='r_search',
               **settings)


def test_a_chain_with_evidence():
  tree, requests, observations = chain(SEARCH, EVIDENCE + RIGHT)
  assert observations == ['\n<observation>Doc 1(Title: Title) text\n</observation>\n']
  assert isinstance(requests[1], Search) and requests[1].query == 'the author'
  assert isinstance(requests[-1], Ask) and requests[-1].service == 'reader'
  assert requests[-1].item == (
    'Take the answer to the question from these passages. Reply with the answer alone.\n'
    'Passages: Lovelace wrote it.\nQuestion: Who wrote it?\nAnswer:')
  assert tree.answer == 'Ada Lovelace'
  assert r_search.reward(tree) == pytest.approx(1 + 1 + 0.4)
  assert r_search.reward(tree, evidence_weight=0.0) == pytest.approx(1.4)
  assert tree.metrics['reward_evidence'] == 1.0


@pytest.mark.parametrize('said, answer, evidence, form', [
  ([SEARCH, EVIDENCE + '<answer> Byron </answer>'], 0.0, 1.0, 0.4),
  # nothing retrieved: no evidence is asked for
  ([RIGHT], 1.0, 0.0, 0.4),
  ([SEARCH, RIGHT], 1.0, 0.0, 0.2),                                  # retrieved, not quoted
  ([SEARCH, EVIDENCE + EVIDENCE + RIGHT], 1.0, 0.0, 0.2),            # evidence twice
  ([SEARCH, '<original_evidence> Lovelace wrote it. ' + RIGHT], 1.0, 0.0, 0.2),  # never closed
  ([SEARCH, EVIDENCE + '<answer> Ada', '<answer> Ada'], 0.0, 1.0, 0.2),  # no box with an answer
])
def test_rewards(said, answer, evidence, form):
  tree, *_ = chain(*said, max_turns=len(said) - 1)
  assert r_search.reward(tree) == pytest.approx(answer + evidence + form)
  assert [tree.metrics[f'reward_{part}']
          for part in ('answer', 'evidence', 'format')] == pytest.approx([answer, evidence, form])


def test_both_f1_are_plain_token_f1():
  question = dataclasses.replace(QUESTION, golden_answers=('yes',))
  tree, *_ = chain(SEARCH, EVIDENCE + '<answer> yes it is </answer>', asked='yes', question=question)
  # 'yes it is' has one of its three tokens right
  assert r_search.reward(tree) == pytest.approx(0.5 + 1 + 0.4)
  tree, *_ = chain(SEARCH, EVIDENCE + '<answer> yes </answer>', asked='yes it is', question=question)
  assert r_search.reward(tree) == pytest.approx(1 + 0.5 + 0.4)


@pytest.mark.parametrize('said, founds, evidence, form', [
  ([EVIDENCE + SEARCH, RIGHT], [1], 0.0, 0.2),           # before the first search
  ([EVIDENCE + SEARCH, SEARCH, RIGHT], [1, 1], 0.0, 0.2),
  ([SEARCH, EVIDENCE + SEARCH, RIGHT], [0, 1], 0.0, 0.2),  # behind a search that found nothing
  ([SEARCH, EVIDENCE + SEARCH, RIGHT], [1, 0], 1.0, 0.4),
  ([EVIDENCE + SEARCH, EVIDENCE + RIGHT], [1], 0.0, 0.2),
  (['<original_evidence> x ' + RIGHT], [], 0.0, 0.2),    # opened, never closed
])
def test_evidence_counts_only_behind_documents(said, founds, evidence, form):
  replies = iter(founds)
  tree, *_ = chain(*said, found=lambda _: list(FOUND) * next(replies))
  assert r_search.reward(tree) == pytest.approx(1 + evidence + form)
  assert tree.metrics['evidence_unfounded'] == (evidence == 0)


def test_evidence_without_a_search_is_rewarded_by_equations_4_and_5_alone():
  groups = [[chain(EVIDENCE + RIGHT)[0], chain(RIGHT)[0]]]
  for needs_search, rewards in ((True, [1.2, 1.4]), (False, [2.4, 1.4])):
    r_search.credit(groups, context(), evidence_needs_search=needs_search)
    assert [tree.reward for tree in groups[0]] == pytest.approx(rewards)
  without = chain(SEARCH, EVIDENCE + RIGHT, asked=ToolFailure('down'))[0]
  assert r_search.reward(without) == pytest.approx(1.4)  # a reader that fails gives no reward


@pytest.mark.parametrize('said', [[RIGHT], [SEARCH, RIGHT], [SEARCH, EVIDENCE + RIGHT], [EVIDENCE + RIGHT]])
def test_without_evidence_no_box_counts(said):
  """The ablation of table 3: a guess earns no more than a chain that searched, and nobody earns anything for
  a box."""
  config = r_search_without_evidence.get_config()
  tree, *_ = chain(*said)
  r_search.credit([[tree]], context(), **config.credit)
  assert tree.reward == pytest.approx(1 + 0.2)
  for template in (config.grow.template, 'r_search_without_evidence'):
    assert 'evidence' not in templates.prompt('Who wrote it?', template)


def test_with_ppo_a_critic_is_needed():
  with pytest.raises(ValueError, match='critic.enabled'):
    r_search.credit([[chain(SEARCH, EVIDENCE + RIGHT)[0]]], context(), estimator='ppo')
