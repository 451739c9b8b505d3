import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.search_client import HttpSearch, SearchError

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
from jaxsearch.tools.search_server import Limits, make_app
from tests.tools.running import serve

PASSAGES = [
    Document('a', 'Paris', 'Paris is the capital of France.'), Document('b', 'Lyon', 'A city of France.')]


def running(backend, **settings):
  """Serves `backend` on a free port: a context that gives the address."""
  return serve(make_app(backend, **settings))


@pytest.fixture(scope='module')
def address():
  with running(BM25(PASSAGES), limits=Limits(body_bytes=4000, queries=4, query_chars=1000, topk=10)) as url:
    yield url + '/retrieve'


def post(address, **request):
  return httpx.post(address, json=request, trust_env=False)


def test_the_client_gets_what_the_back_end_finds(address):
  queries = ['capital', 'France', 'xylophone']
  assert HttpSearch(address).search(queries, 2) == BM25(PASSAGES).search(queries, 2)


def test_both_reply_forms(address):
  document = {'id': 'a', 'contents': '"Paris"\nParis is the capital of France.'}
  score = BM25(PASSAGES).search(['capital'])[0][0].score
  assert post(address, queries=['capital'], topk=1, return_scores=True).json() == {
      'result': [[{'document': document, 'score': score}]]}
  assert post(address, queries=['capital'], topk=None, return_scores=False).json() == {'result': [[document]]}
  assert post(address, queries=['capital']).json() == {'result': [[document]]}


@pytest.mark.parametrize(('request_', 'status', 'reason'), [
    ({}, 400, "'queries'"), ({'queries': 'Paris'}, 400, "'queries'"), ({'queries': [1]}, 400, "'queries'"),
    ({'queries': ['x'] * 5}, 413, 'at most 4 queries'), ({'queries': ['x' * 1001]}, 413, '1000 characters'),
    ({'queries': ['x'], 'topk': 0}, 400, "'topk'"), ({'queries': ['x'], 'topk': 11}, 400, "'topk'"),
    ({'queries': ['x'], 'topk': True}, 400, "'topk'"),
    ({'queries': ['x'], 'return_scores': 'yes'}, 400, "'return_scores'"),
    ({'queries': ['x'], 'more': 'x' * 5000}, 413, 'longer than 4000 bytes')])
def test_bad_requests_are_named(address, request_, status, reason):
  response = post(address, **request_)
  assert response.status_code == status and reason in response.json()['error']


def test_what_is_not_json_or_not_there(address):
  for body in (b'{', b'[]', b'\xff', b'[' * 3000):
    assert httpx.post(address, content=body, trust_env=False).status_code == 400
  chunks = (b'x' * 1000 for _ in range(10))  # no content-length to believe
  assert httpx.post(address, content=chunks, trust_env=False).status_code == 413
  assert httpx.get(address, trust_env=False).status_code == 405
  assert httpx.post(address + '/other', trust_env=False).status_code == 404


def test_the_token_is_asked_for():
  with running(BM25(PASSAGES), token='sesame') as url:
    assert HttpSearch(url, token='sesame').search(['Lyon'], 1)[0][0].id == 'b'
    odd = httpx.post(url + '/retrieve', headers={'authorization': b'Bearer s\xe9same'}, trust_env=False)
    assert odd.status_code == 401
    for wrong in (None, 'sesam', 'sesame2'):
      with pytest.raises(SearchError, match='status 401'):
        HttpSearch(url, token=wrong).search(['Lyon'])


class Slow:
  def __init__(self):
    self.now = self.most = 0
    self.lock = threading.Lock()

  def search(self, queries, topk):
    with self.lock:
      self.now += 1
      self.most = max(self.most, self.now)
    time.sleep(0.1)
    with self.lock:
      self.now -= 1
    return [[Document('1', 'T', query)] for query in queries]


def test_searches_at_once_are_limited_and_the_rest_waits():
  backend = Slow()
  with running(backend, limits=Limits(threads=2)) as url, ThreadPoolExecutor(8) as pool:
    client = HttpSearch(url, attempts=1)
    found = list(pool.map(lambda i: client.search([f'q{i}']), range(8)))
  assert [documents[0][0].text for documents in found] == [f'q{i}' for i in range(8)]
  assert backend.most == 2


def test_too_many_requests_are_turned_away_and_come_again():
  with running(Slow(), limits=Limits(threads=1, requests=1)) as url, ThreadPoolExecutor(4) as pool:
    once = list(pool.map(lambda i: post(url + '/retrieve', queries=['x']).status_code, range(4)))
    assert set(once) == {200, 503}
    client = HttpSearch(url, attempts=50, backoff=0.05)
    assert len(list(pool.map(lambda i: client.search(['x']), range(4)))) == 4


def test_a_request_that_never_ends_is_given_up():
  with running(BM25(PASSAGES), limits=Limits(body_seconds=0.2)) as url:
    with socket.create_connection(('127.0.0.1', int(url.rsplit(':', 1)[1])), timeout=5) as connection:
      connection.sendall(b'POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{')
      assert b' 408 ' in connection.recv(1000)


class Broken:
  def search(self, queries, topk):
    raise RuntimeError('index on fire')


def test_a_back_end_that_fails_is_a_server_error():
  reason = r'status 500.*RuntimeError.*\(attempts: 2\)'
  with running(Broken()) as url, pytest.raises(SearchError, match=reason):
    HttpSearch(url, attempts=2, backoff=0.01).search(['x'])
