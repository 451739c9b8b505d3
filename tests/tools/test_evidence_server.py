"""The server around a function that finds evidence, asked over HTTP."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxsearch.tools.evidence_client import SCHEMA, Evidence, EvidenceError, EvidenceTool

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
from jaxsearch.tools.evidence_server import Limits, make_app
from tests.tools.running import serve


def found(questions):
  return [Evidence(f'about {question}', question.upper(), len(question)) for question in questions]


def about(question):
  return {'evidence': f'about {question}', 'answer': question.upper(), 'searches': len(question)}


class Gate:
  """Finds evidence once it is told to, and remembers its batches."""

  def __init__(self):
    self.batches, self.entered, self.opened, self.now, self.most = [], threading.Event(), threading.Event(), 0, 0

  def __call__(self, questions):
    self.now += 1
    self.most = max(self.most, self.now)
    self.batches.append(list(questions))
    self.entered.set()
    assert self.opened.wait(20)
    self.now -= 1
    return found(questions)


def post(url, question, **headers):
  return httpx.post(url + '/evidence', json={'question': question}, headers=headers, trust_env=False, timeout=20)


def health(url):
  return httpx.get(url + '/health', trust_env=False).json()


def until(condition):
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


@contextlib.contextmanager
def gated(**limits):
  """A server whose first batch, the question 'first', is under way; the pool for further requests."""
  gate = Gate()
  with serve(make_app(gate, limits=Limits(**limits))) as url, ThreadPoolExecutor(16) as pool:
    first = pool.submit(post, url, 'first')
    assert gate.entered.wait(20)
    try:
      yield url, gate, pool
    finally:
      gate.opened.set()
    assert first.result().json() == about('first')


def test_one_question_and_a_list():
  with serve(make_app(found)) as url:
    assert post(url, 'who').json() == about('who')
    assert post(url, ['who', 'what']).json() == [about('who'), about('what')]
    assert post(url, ['who']).json() == [about('who')]
    assert EvidenceTool(url).find(['a', 'bb']) == found(['a', 'bb'])
    assert EvidenceTool(url)('a') == 'about a'


def test_none_is_null():
  with serve(make_app(lambda questions: [Evidence('', None, 0)])) as url:
    assert post(url, 'who').json() == {'evidence': '', 'answer': None, 'searches': 0}


def test_requests_that_come_while_the_sampler_runs_are_its_next_batch():
  with gated() as (url, gate, pool):
    questions = [f'q{i}' for i in range(5)] + [['a', 'b'], ['c', 'd', 'e']]
    replies = [pool.submit(post, url, question) for question in questions]
    until(lambda: health(url)['questions'] == 11)
    gate.opened.set()
    for question, reply in zip(questions, replies):
      expected = about(question) if isinstance(question, str) else [about(one) for one in question]
      assert reply.result().json() == expected
    until(lambda: health(url)['questions'] == 0)
  assert gate.batches[0] == ['first'] and gate.most == 1
  # A few may not have reached the queue yet when the first batch ended; one by one they would be eight batches.
  assert sum(map(len, gate.batches)) == 11 and len(gate.batches) <= 4


def test_more_than_may_wait_come_again_later():
  with gated(waiting=4) as (url, gate, pool):
    second = pool.submit(post, url, ['a', 'b'])
    until(lambda: health(url)['questions'] == 3)
    refused = post(url, ['c', 'd'])
    assert refused.status_code == 429 and refused.headers['retry-after'] == '1'
    assert refused.json() == {'error': '3 questions are being answered, of 4 at most'}
    third = pool.submit(EvidenceTool(url, backoff=0.05, attempts=50).find, ['c', 'd'])
    gate.opened.set()
    assert second.result().json() == [about('a'), about('b')] and third.result() == found(['c', 'd'])


def test_requests_at_once_are_limited():
  with gated(requests=1) as (url, gate, _):
    refused = post(url, 'second')
    assert refused.status_code == 503 and '1 requests are being served' in refused.json()['error']
    assert health(url) == {'status': 'ok', 'questions': 1}


@pytest.mark.parametrize(('body', 'status', 'reason'), [
  (b'{', 400, 'bad JSON'), (b'["who"]', 400, 'JSON object'), (b'{}', 400, "'question' must be"),
  (b'{"question": ""}', 400, 'not blank'), (b'{"question": " "}', 400, 'not blank'), (b'{"question": 7}', 400, 'text'),
  (b'{"question": []}', 400, "'question' must be"), (b'{"question": ["who", null]}', 400, "'question' must be"),
  (b'{"question": ["a", "b", "c", "d"]}', 413, 'at most 3 questions of 50 characters'),
  (b'{"question": "' + b'x' * 51 + b'"}', 413, '50 characters'), (b' ' * 1001, 413, 'longer than 1000 bytes'),
  (b'{"question": ["who", "very long"]}', 413, "'very long' leaves no room"),
])  # fmt: skip
def test_bad_requests_are_named(address, body, status, reason):
  response = httpx.post(address + '/evidence', content=body, trust_env=False)
  assert response.status_code == status and reason in response.json()['error']


@pytest.fixture(scope='module')
def address():
  def check(question):
    if 'long' in question:
      raise ValueError(f'{question!r} leaves no room')

  with serve(make_app(found, check=check, limits=Limits(body_bytes=1000, questions=3, question_chars=50))) as url:
    yield url


def test_other_paths_and_methods_are_refused_in_json(address):
  for response, status in ((httpx.get(address + '/evidence', trust_env=False), 405),
                           (httpx.get(address + '/else', trust_env=False), 404)):
    assert response.status_code == status and response.json()['error']


def test_the_token_is_asked_for():
  with serve(make_app(found, token='sesame')) as url:
    for headers in ({}, {'authorization': 'Bearer sesam'}, {'authorization': 'sesame'}):
      refused = post(url, 'who', **headers)
      assert refused.status_code == 401 and refused.headers['www-authenticate'] == 'Bearer' and 'token' in refused.json()['error']
      assert httpx.get(url + '/tool', headers=headers, trust_env=False).status_code == 401
    assert EvidenceTool(url, token='sesame')('who') == 'about who'
    assert httpx.get(url + '/tool', headers={'authorization': 'Bearer sesame'}, trust_env=False).json() == SCHEMA
    assert health(url) == {'status': 'ok', 'questions': 0}
    with pytest.raises(EvidenceError, match='status 401'):
      EvidenceTool(url)('who')


def test_half_a_surrogate_pair_does_not_reach_the_tokenizer():
  asked = []
  with serve(make_app(lambda questions: asked.extend(questions) or found(questions))) as url:
    body = b'{"question": "who \\ud83d?"}'
    assert httpx.post(url + '/evidence', content=body, trust_env=False).status_code == 200
  assert asked == ['who ??']


def test_a_sampler_that_fails_is_a_server_error_and_the_server_lives_on(caplog):
  def answer(questions):
    if 'bad' in questions:
      raise RuntimeError('out of memory')
    return found(questions)

  with serve(make_app(answer)) as url:
    response = post(url, 'bad')
    assert response.status_code == 500 and response.json() == {'error': 'the search for evidence failed (RuntimeError)'}
    assert post(url, 'who').json() == about('who') and health(url)['questions'] == 0
  assert 'out of memory' in caplog.text
