"""The client of evidence; faults of servers are in test_server_faults.py."""

import pytest

from jaxsearch.tools.evidence_client import Evidence, EvidenceClient, EvidenceError
from tests.tools.serving import server

FOUND = {'evidence': 'Paris is the capital of France.', 'answer': 'Paris', 'searches': 2}
NOTHING = {'evidence': '', 'answer': None, 'searches': 0}


def test_several_questions_are_one_request():
  with server((200, [FOUND, NOTHING])) as (url, seen):
    found = EvidenceClient(url, token='secret').find(['capital of France?', 'b'])
    EvidenceClient(url + '/v2/ask').find(['a', 'b'])
  assert found == [Evidence(*FOUND.values()), Evidence('', None, 0)]
  (path, headers, body), other = seen
  assert path == '/evidence' and headers['authorization'] == 'Bearer secret'
  assert body == {'question': ['capital of France?', 'b']}
  assert other[0] == '/v2/ask' and 'authorization' not in other[1]
  assert EvidenceClient('http://127.0.0.1:9').find([]) == []  # asks nobody


@pytest.mark.parametrize(('body', 'reason'), [
  (FOUND, 'valid list'), ([], 'at least 1 item'), ([FOUND, FOUND], 'at most 1 item'),
  ([{'answer': 'x', 'searches': 1}], r'0\.evidence: Field required'),
  ([FOUND | {'searches': True}], r'0\.searches: .* valid integer'),
  ([FOUND | {'searches': -1}], r'0\.searches: .* greater than or equal to 0')])
def test_a_reply_of_another_shape_is_refused_at_once(body, reason):
  with server((200, body)) as (url, seen), pytest.raises(EvidenceError, match=reason):
    EvidenceClient(url, backoff=0.01).find(['x'])
  assert len(seen) == 1
