"""The servers over HTTP: retrieval, evidence, the address to listen on, and a server as a process."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.search_http import HttpSearch, SearchError

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
from jaxsearch.tools.http_server import SCHEMA, Limits, evidence_app, search_app
from tests.tools.running import serve

PASSAGES = [
  Document('a', 'Paris', 'Paris is the capital of France.'), Document('b', 'Lyon', 'A city of France.')]
JSON = {'content-type': 'application/json'}


class Held:
  """Finds nothing once it is told to, and remembers how many searches it had at a time."""

  def __init__(self):
    self.released, self.lock, self.now, self.most = threading.Event(), threading.Lock(), 0, 0

  def search(self, queries, topk):
    with self.lock:
      self.now += 1
      self.most = max(self.most, self.now)
    assert self.released.wait(20)
    with self.lock:
      self.now -= 1
    return [[] for _ in queries]


def get(url, **headers):
  return httpx.get(url, headers=headers, trust_env=False)


def post(url, content=None, headers=JSON, **body):
  content = {'content': content} if content is not None else {'json': body}
  return httpx.post(url, headers=headers, trust_env=False, timeout=20, **content)


def until(condition):
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


def in_flight(url):
  return get(url + '/health').json()['requests']


def running(backend, **settings):
  """Serves `backend` on a free port: a context that gives the address."""
  return serve(search_app(backend, **settings))


# Retrieval.


@pytest.fixture(scope='module')
def retrieval():
  with running(BM25(PASSAGES), limits=Limits(body_bytes=4000, texts=4, text_chars=1000, topk=10)) as url:
    yield url + '/retrieve'


def test_the_client_gets_what_the_back_end_finds_and_either_form_can_be_asked_for(retrieval):
  queries = ['capital', 'France', 'xylophone']
  assert HttpSearch(retrieval).search(queries, 2) == BM25(PASSAGES).search(queries, 2)
  document = {'id': 'a', 'contents': '"Paris"\nParis is the capital of France.'}
  score = BM25(PASSAGES).search(['capital'])[0][0].score
  assert post(retrieval, queries=['capital'], topk=1, return_scores=True).json() == {
    'result': [[{'document': document, 'score': score}]]}
  for other in ({'topk': None, 'return_scores': False}, {}):
    assert post(retrieval, queries=['capital'], **other).json() == {'result': [[document]]}


@pytest.mark.parametrize(('request_', 'status', 'reason'), [
  ({}, 400, 'queries: '), ({'queries': [1]}, 400, 'queries.0: '),
  ({'queries': ['x'] * 5}, 413, 'at most 4 items'), ({'queries': ['x' * 1001]}, 413, '1000 characters'),
  ({'queries': ['x'], 'topk': 11}, 400, 'topk: '), ({'queries': ['x'], 'topk': True}, 400, 'topk: '),
  ({'queries': ['x'], 'return_scores': 'yes'}, 400, 'return_scores: '),
  ({'queries': ['x'], 'more': 'x' * 5000}, 413, 'longer than 4000 bytes')])
def test_bad_searches_are_named(retrieval, request_, status, reason):
  response = post(retrieval, **request_)
  assert response.status_code == status and reason in response.json()['error']


def test_what_is_not_json_or_not_there(retrieval):
  for body in (b'{', b'[]', b'\xff', b'[' * 3000):
    assert post(retrieval, body).status_code == 400
  assert post(retrieval, (b'x' * 1000 for _ in range(10))).status_code == 413  # no content-length to believe
  for response, status in ((get(retrieval), 405), (post(retrieval + '/other'), 404)):
    assert response.status_code == status and response.json()['error']


@pytest.mark.parametrize('host', ['evil.example:8000', '10.0.0.1', '', 'localhost.evil.example'])
def test_a_page_of_another_site_is_refused(retrieval, host):
  """A name of an attacker's may resolve to this machine; and a browser sends a form without asking."""
  for page in ('/health', '/metrics'):
    assert get(retrieval.replace('/retrieve', page), host=host).status_code == 400
  body = b'{"queries": ["capital"]}'
  assert post(retrieval, body, JSON | {'host': host}).status_code == 400
  for headers in ({}, {'content-type': 'text/plain'}, {'content-type': 'application/x-www-form-urlencoded'}):
    assert post(retrieval, body, headers).status_code == 415
  for known in ('localhost', 'LOCALHOST:8000', '[::1]:8000', '127.0.0.1'):
    headers = {'host': known, 'content-type': 'application/json; charset=utf-8'}
    assert post(retrieval, body, headers).status_code == 200


def test_who_has_the_token_may_use_any_name_and_nobody_else_anything_but_health():
  with running(BM25(PASSAGES), token='sesame') as url:
    assert HttpSearch(url, token='sesame').search(['Lyon'], 1)[0][0].id == 'b'
    assert get(url + '/metrics', host='search.example', authorization='Bearer sesame').status_code == 200
    assert get(url + '/health', host='10.0.0.1').status_code == 200  # a probe
    for wrong in (None, 'sesam', 'sesame2'):
      with pytest.raises(SearchError, match='status 401'):
        HttpSearch(url, token=wrong).search(['Lyon'])
    for wrong in ({}, {'authorization': 'sesame'}, {'authorization': b'Bearer s\xe9same'}):
      refused = post(url + '/retrieve', headers=JSON | wrong, queries=['Lyon'])
      assert refused.status_code == 401 and refused.headers['www-authenticate'] == 'Bearer'
      assert 'token' in refused.json()['error'] and get(url + '/metrics', **wrong).status_code == 401


def test_searches_and_requests_at_once_are_limited_and_health_counts_them():
  backend = Held()
  limits = Limits(threads=2, requests=3)
  with running(backend, limits=limits) as url, ThreadPoolExecutor(5) as pool:
    assert get(url + '/health').json() == {'status': 'ok', 'requests': 0}
    waiting = [pool.submit(post, url + '/retrieve', queries=['x']) for _ in range(3)]
    until(lambda: in_flight(url) == 3 and backend.now == 2)
    refused = post(url + '/retrieve', queries=['x'])
    assert refused.status_code == 503 and refused.headers['retry-after'] == '1'
    turned_away = pool.submit(HttpSearch(url, attempts=50, backoff=0.05).search, ['x'])
    backend.released.set()
    assert {future.result().status_code for future in waiting} == {200} and turned_away.result() == [[]]
  assert backend.most == 2


def test_a_search_that_is_given_up_may_be_retried_and_keeps_its_thread_until_it_ends():
  backend = Held()
  never_ends = (time.sleep(0.5) or b'{' for _ in range(2))
  with running(backend, limits=Limits(seconds=0.2, threads=2)) as url:
    refused = [post(url + '/retrieve', queries=['x']) for _ in range(5)]
    refused.append(post(url + '/retrieve', never_ends))
    assert {(one.status_code, one.headers['retry-after']) for one in refused} == {(503, '1')}
    assert backend.most == 2 and 'longer than 0.2 s' in refused[0].json()['error']
    backend.released.set()


@pytest.mark.parametrize('lie', [[], None, RuntimeError('on fire')])
def test_a_back_end_that_fails_or_lies_is_a_server_error(lie, caplog):
  class Lying:
    def search(self, queries, topk):
      if isinstance(lie, Exception):
        raise lie
      return lie

  reason = r'status 500: .*the search failed \(.*\(attempts: 2\)'
  with running(Lying()) as url, pytest.raises(SearchError, match=reason):
    HttpSearch(url, attempts=2, backoff=0.01).search(['x'])
  assert 'Traceback' in caplog.text


# Evidence.


def found(questions):
  return [{'evidence': f'about {question}', 'answer': question.upper(), 'searches': 1, 'forfeited': False}
          for question in questions]


def test_one_question_and_a_list():
  with serve(evidence_app(found, token='sesame')) as url:
    bearer = {'authorization': 'Bearer sesame'}
    for asked, reply in ('who', found(['who'])[0]), (['a', 'bb'], found(['a', 'bb'])):
      assert post(url + '/evidence', headers=JSON | bearer, question=asked).json() == reply
    assert get(url + '/tool', **bearer).json() == SCHEMA and get(url + '/tool').status_code == 401
    assert post(url + '/evidence', question='who').status_code == 401


@pytest.fixture(scope='module')
def strict():
  def check(question):
    if 'long' in question:
      raise ValueError(f'{question!r} leaves no room')

  with serve(evidence_app(found, check=check, limits=Limits(body_bytes=1000, texts=3, text_chars=50))) as url:
    yield url


@pytest.mark.parametrize(('body', 'status', 'reason'), [
  (b'["who"]', 400, 'the body: '), (b'{"question": " "}', 400, 'question'),
  (b'{"question": []}', 400, 'question'), (b'{"question": ["who", null]}', 400, 'question'),
  (b'{"question": "' + b'x' * 51 + b'"}', 413, 'at most 50 characters'),
  (b'{"question": ["a", "b", "c", "d"]}', 413, 'at most 3 items'),
  (b'{"question": ["who", "very long"]}', 413, "'very long' leaves no room")])
def test_bad_questions_are_named(strict, body, status, reason):
  response = post(strict + '/evidence', body)
  assert response.status_code == status and reason in response.json()['error']


# The address, and the process.


SERVER = """
import time
import pydantic
from jaxsearch.tools import http_server

class Number(pydantic.BaseModel):
  number: int

def double(asked):
  print('asked', flush=True)
  time.sleep(0.3)
  return {'twice': 2 * asked.number}

app = http_server.make_app('/', Number, double, 'doubling', None, http_server.Limits())
http_server.run(app, http_server.bind('127.0.0.1', 0), 'doubling')
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_requests_under_way(number):
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  with subprocess.Popen([sys.executable, '-c', SERVER], env=environment, **pipes) as process:
    said = process.stdout.readline()
    assert said.startswith('doubling: http://127.0.0.1:')
    with ThreadPoolExecutor(1) as pool:
      reply = pool.submit(post, said.split()[1], number=21)
      assert process.stdout.readline() == 'asked\n'
      process.send_signal(number)
      assert reply.result(20).json() == {'twice': 42}
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
    assert 'Traceback' not in errors


def test_metrics_count_requests_by_status(retrieval):
  post(retrieval, queries=7)
  post(retrieval, queries=['capital'])
  text = get(retrieval.replace('/retrieve', '/metrics')).text
  figures = dict(line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
  for status in (400, 200):
    assert float(figures[f'jaxsearch_request_seconds_count{{status="{status}"}}']) >= 1
  assert figures['jaxsearch_requests_in_flight'] == '0.0'
  assert float(figures['process_resident_memory_bytes']) > 1e7
