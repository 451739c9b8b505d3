"""The client of evidence; faults of servers are in test_server_faults.py."""


from jaxsearch.tools.evidence_client import Evidence, EvidenceClient
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
