"""The client against a server that answers, or misbehaves, as told."""

import pytest

from jaxsearch.tools.evidence_client import SCHEMA, Evidence, EvidenceClient, EvidenceError
from tests.tools.serving import server

FOUND = {'evidence': 'Paris is the capital of France.', 'answer': 'Paris', 'searches': 2}
NOTHING = {'evidence': '', 'answer': None, 'searches': 0}


def test_request_and_reply():
  with server((200, [FOUND])) as (url, seen):
    assert EvidenceClient(url, token='secret')('capital of France?') == 'Paris is the capital of France.'
    EvidenceClient(url + '/v2/ask').find(['x'])
  path, headers, body = seen[0]
  assert path == '/evidence' and headers['authorization'] == 'Bearer secret' and body == {'question': ['capital of France?']}
  assert seen[1][0] == '/v2/ask' and 'authorization' not in seen[1][1]


def test_several_questions_are_one_request():
  with server((200, [FOUND, NOTHING])) as (url, seen):
    assert EvidenceClient(url).find(['a', 'b']) == [Evidence(*FOUND.values()), Evidence('', None, 0)]
  assert seen[0][2] == {'question': ['a', 'b']} and len(seen) == 1
  assert EvidenceClient('http://127.0.0.1:9').find([]) == []  # asks nobody
  with pytest.raises(TypeError, match='list of strings'):
    EvidenceClient('http://127.0.0.1:9').find('a')


def test_a_busy_server_is_asked_again_and_a_refusal_is_not():
  with server((429, b'busy'), (503, b'busy'), (200, [FOUND])) as (url, seen):
    assert EvidenceClient(url, backoff=0.01)('x')
  assert len(seen) == 3
  with server((401, {'error': 'a bearer token is needed'})) as (url, seen):
    with pytest.raises(EvidenceError, match=f'search for evidence at {url}/evidence failed: status 401: .*token') as error:
      EvidenceClient(url, token='wrong')('x')
  assert len(seen) == 1 and error.value.status == 401


@pytest.mark.parametrize(('body', 'reason'), [
  (b'<html>', 'Expecting value'), (FOUND, 'valid list'), ([], 'at least 1 item'), ([FOUND, FOUND], 'at most 1 item'),
  (['text'], r'0: .* dictionary'), ([{'answer': 'x', 'searches': 1}], r'0\.evidence: Field required'),
  ([FOUND | {'evidence': None}], r'0\.evidence: .* valid string'),
  ([FOUND | {'answer': 3}], r'0\.answer: .* valid string'), ([FOUND | {'searches': True}], r'0\.searches: .* valid integer'),
  ([FOUND | {'searches': -1}], r'0\.searches: .* greater than or equal to 0'),
  ([FOUND | {'searches': '2'}], r'0\.searches: .* valid integer'),
])  # fmt: skip
def test_garbage_is_refused_at_once(body, reason):
  with server((200, body)) as (url, seen), pytest.raises(EvidenceError, match=reason):
    EvidenceClient(url, backoff=0.01)('x')
  assert len(seen) == 1


def test_half_a_surrogate_pair_does_not_reach_a_tokenizer():
  with server((200, [FOUND | {'evidence': 'x\ud83d', 'answer': '\ud83d'}])) as (url, _):
    assert EvidenceClient(url).find(['x']) == [Evidence('x?', '?', 2)]


@pytest.mark.parametrize('settings', [dict(url='127.0.0.1:8001'), dict(url='http://a', token='se same'), dict(url='ftp://a')])
def test_impossible_settings(settings):
  with pytest.raises(ValueError, match=r'not an http address|printable') as error:
    EvidenceClient(**settings)
  assert 'same' not in str(error.value)


def test_the_schema_asks_for_what_the_server_takes():
  parameters = SCHEMA['function']['parameters']
  assert SCHEMA['type'] == 'function' and SCHEMA['function']['name'] == 'search_evidence'
  assert list(parameters['properties']) == parameters['required'] == ['question']
