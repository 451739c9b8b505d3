"""Requests that make no sense are refused where they are made; what failed is named, and said when it is most of a rollout."""

import pytest

from jaxsearch.sampler.requests import Generate, Sampling, Score, ToolFailure, add_failures, failing, failure_of
from jaxsearch.tools.calls import one_line
from jaxsearch.trees.tree import Tree


@pytest.mark.parametrize('wrong', [
  {'max_tokens': 0}, {'stop': '</search>'}, {'stop': ('',)}, {'temperature': -1.0}, {'temperature': float('nan')}])
def test_what_is_wrong_is_named(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    Sampling(**wrong) if 'temperature' in wrong else Generate(Tree(None).root, **wrong)


def test_a_score_records_its_cue_apart():
  assert Score(Tree(None).root, (' Ada', [7]), 'So: ').describe([[-1.0, -0.5], None]) == {
    'tool': 'score', 'query': ' Ada | [7]', 'cue': 'So: ', 'reply': [-1.5, None]}


class Refused(ConnectionError):
  fault = 'refused'


class Odd(RuntimeError):
  fault = 404


@pytest.mark.parametrize('error, fault', [
  (TimeoutError('x'), 'timeout'), (ConnectionResetError('x'), 'connection'), (Refused('x'), 'refused'), (Odd('x'), 'error'),
  (OSError('x'), 'error'), (KeyboardInterrupt('x'), 'error')])
def test_an_error_of_a_tool_has_a_kind(error, fault):
  assert failure_of(error) == ToolFailure(f'{type(error).__name__}: x', fault)
  assert failure_of(error, 'judge').reason == f'judge: {type(error).__name__}: x'
  assert len(failure_of(type(error)('x ' * 5000)).reason) == 500


def figures(failed=0, asked=0, services_failed=0, services=0, calls_failed=None, reason='down'):
  return {'searches_failed': failed, 'searches_asked': asked, 'tool_calls': asked, 'last_failure': reason,
          'tool_calls_failed': failed if calls_failed is None else calls_failed, 'service_calls': services,
          'service_calls_failed': services_failed, 'last_service_failure': 'judge: off', 'seconds': 1.0}


@pytest.mark.parametrize('metrics, said', [
  ({}, None), (figures(), None), (figures(1, 2), None), (figures(2, 3), '2 of 3 searches failed; the last: down'),
  (figures(0, 3, calls_failed=2), '2 of 3 tool calls failed; the last: down'),
  (figures(1, 3, 4, 5), '4 of 5 calls of judge or reader failed; the last: judge: off'),
  ({'judgements': 4, 'judge_failed': 2}, None),
  ({'judgements': 4, 'judge_failed': 3, 'last_judge_failure': 'judge: off'}, '3 of 4 judgements failed; the last: judge: off'),
  (figures(3, 3, 1, 1), '3 of 3 searches failed; the last: down; 1 of 1 calls of judge or reader failed; the last: judge: off')])
def test_what_mostly_failed_is_said(metrics, said):
  assert failing(metrics) == said


def test_a_reason_is_said_once():
  assert failing(figures(3, 4), before=figures(3, 3)) == '3 of 4 searches failed, as before'
  assert failing(figures(3, 4), before=figures(1, 3)) == '3 of 4 searches failed; the last: down'  # was not said before
  assert failing(figures(3, 4, reason='refused'), before=figures(3, 3)).endswith('; the last: refused')
  assert failing(figures(0, 4), before=figures(3, 3)) is None
  unsaid = {'searches_asked': 4, 'searches_failed': 3}
  assert failing(unsaid, before=unsaid) == '3 of 4 searches failed, as before'


def test_all_that_failed_is_said_where_it_is_asked_for():
  assert failing(figures(1, 4, 1, 4), most=False) == (
    '1 of 4 searches failed; the last: down; 1 of 4 calls of judge or reader failed; the last: judge: off')
  assert failing(figures(1, 4, calls_failed=2), most=False) == (
    '1 of 4 searches failed; the last: down; 2 of 4 tool calls failed; the last: down')
  assert failing(figures(0, 4), most=False) is None


def test_failures_are_added_up():
  total = add_failures([figures(1, 4), figures(2, 2, 1, 2, reason='refused') | {'tool_calls_failed_timeout': 2}])
  assert total.pop('searches_failed_share') == 3 / 6
  assert total | {'seconds': 1.0} == figures(3, 6, 1, 2, reason='refused') | {'tool_calls_failed_timeout': 2}
  judged = add_failures([{'judgements': 4, 'judge_failed': 3, 'last_judge_failure': 'judge: down'}, {'judgements': 4}])
  assert failing(judged, most=False) == '3 of 8 judgements failed; the last: judge: down'


def test_a_reason_takes_one_line_and_cannot_steer_a_terminal():
  assert one_line('<html>\n  \x1b[2Jgone\r\n\u202ehere') == '<html> [2Jgone here'
  assert one_line('é' * 300) == 'é' * 199 + '…'
