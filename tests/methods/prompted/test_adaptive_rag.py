"""Adaptive-RAG: who classifies, and where a question goes."""

import importlib

import pytest

from jaxsearch.evaluation import agents
from jaxsearch.methods.prompted import adaptive_rag
from jaxsearch.sampler.requests import Ask, Score, ToolFailure
from tests.methods.prompted.asking import Q, ask, shown

ROUTES = [('A', 'direct', ['Ada'], 'direct'), ('B', 'rag', ['Ada'], 'read'),
          ('C', 'ircot', ['answer is: a', 'Ada'], 'reason')]


@pytest.mark.parametrize('letter, name, said, call', ROUTES)
def test_the_policy_sends_a_question_to_one_of_three(letter, name, said, call, tmp_path):
  scores = [[-1.0] if one == letter else [-2.0] for one in 'ABC']
  tree, requests, _ = ask(adaptive_rag, tmp_path, said, scored=lambda _: scores)
  assert isinstance(requests[0], Score) and requests[0].continuations == (' A', ' B', ' C')
  assert tree.tokenizer.decode(requests[0].node.path_tokens()) == f'hard {Q}?'
  assert next(one for one in shown(requests) if isinstance(one, str)).startswith(call)
  assert tree.answer == 'Ada'
  assert [key for key, value in tree.metrics.items() if key.startswith('route')
          and value] == [f'route_{name}']


@pytest.mark.parametrize('letter, name, said, call', ROUTES)
def test_or_a_model_does(letter, name, said, call, tmp_path):
  tree, requests, _ = ask(adaptive_rag, tmp_path, said, classifier='model', asked=f'Level {letter}.')
  assert isinstance(requests[0], Ask)
  assert (requests[0].service, requests[0].item) == ('classifier', f'hard {Q}?')
  assert tree.metrics[f'route_{name}'] == 1 and tree.metrics['unclassified'] == 0


@pytest.mark.parametrize('settings', [dict(classifier='model', asked='who knows'),
                                      dict(scored=lambda _: [[-1.0], None, [-2.0]])])
def test_without_a_class_it_is_rag(settings, tmp_path):
  tree, requests, _ = ask(adaptive_rag, tmp_path, ['Ada'], **settings)
  assert tree.metrics['unclassified'] == tree.metrics['route_rag'] == 1


def test_a_classifier_that_fails_is_an_error(tmp_path):
  with pytest.raises(RuntimeError, match="grow.classifier='model': gone"):
    ask(adaptive_rag, tmp_path, [], classifier='model', asked=ToolFailure('gone'))


def test_an_evaluation_opens_the_classifier_but_no_judge():
  config = importlib.import_module('configs.prompted.adaptive_rag').get_config()
  assert list(agents.open_agent(config).tools.services) == ['classifier']
  assert not agents.open_agent(importlib.import_module('configs.search_r2').get_config()).tools.services
