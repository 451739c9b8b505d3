"""The study of R-Search: what evidence it makes, and when its rule decides."""

import random

import numpy as np
import pytest

from studies import r_search


def test_contrasts_are_of_the_first_over_the_second():
  of = lambda value: {'em': [value] * 4, 'f1': [value] * 4}
  policy = {'evidence': of(.75), 'observations': of(.5), 'another question': of(0.), 'own': [1] * 4,
            'written': [1] * 4, 'quoted': [1] * 4}
  rows = {'reader x': {'complete': of(1.), 'partial': of(0.), 'absent': of(0.)}, 'one search x': {'one search': of(.25)},
          'a, random documents': policy} | {f'{name} for x': policy for name in 'abc'}
  said = r_search.report(rows, 'x', list('abc'))
  assert '| **evidence - raw observations** | +25.0 [' in said and '| evidence - one search | +50.0 [' in said


def test_evidence_holds_what_its_name_says():
  for question in r_search.questions(20):
    of, answer = r_search.evidence_of(question, random.Random(0)), question.golden_answers[0]
    steps = question.metadata['steps']
    assert of['complete'] == f'{of["partial"]} {of["answer alone"]}' and f' {answer}.' in of['answer alone']
    assert len(of['partial'].split('. ')) >= len(steps) - 1 and of['absent'] == ''
    assert of['invented'].startswith(of['partial']) and of['invented'] != of['complete']
    assert all(step['query'] in of['passages'] for step in steps)


@pytest.mark.parametrize('complete, partial, policies, why', [
  (1.0, 0.02, 3, ''), (0.9, 0.02, 3, 'gate'), (1.0, 0.2, 3, 'gate'), (1.0, 0.02, 2, 'policies')])
def test_nothing_is_decided_past_the_gate_or_with_few_policies(complete, partial, policies, why):
  f1 = {'complete': complete, 'partial': partial, 'absent': 0.01}
  said = r_search.undecided({kind: {'f1': np.full(5, value)} for kind, value in f1.items()}, policies)
  assert why in said and bool(said) == bool(why)
