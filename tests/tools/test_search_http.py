"""The client of a retrieval server; faults of servers are in test_server_faults.py."""

import contextlib
import time

import pytest

from configs import base
from jaxsearch.data.corpus import Document
from jaxsearch.setup import open_backend
from jaxsearch.tools.http_client import MAX_RESPONSE_BYTES
from jaxsearch.tools.search_http import MAX_HITS, HttpSearch, Response, SearchError
from tests.tools.serving import server

GOOD = {'result': [[{'document': {'id': '1', 'contents': '"Paris"\nA city.'}, 'score': 2.5}]]}
PARIS = Document('1', 'Paris', 'A city.', 2.5)


def test_request_and_answer():
  with server((200, GOOD)) as (url, seen):
    assert HttpSearch(url, token='secret').search(['capital of France'], 5) == [[PARIS]]
    HttpSearch(url + '/v2/find').search(['x'])
    HttpSearch(url + '/').search(['x'])
  path, headers, body = seen[0]
  assert path == '/retrieve' and headers['authorization'] == 'Bearer secret'
  assert body == {'queries': ['capital of France'], 'topk': 5, 'return_scores': True}
  assert [path for path, _, _ in seen[1:]] == ['/v2/find', '/retrieve']


def test_no_queries_ask_nobody():
  assert HttpSearch('http://127.0.0.1:9').search([]) == []
  with pytest.raises(TypeError, match='list of strings'):
    HttpSearch('http://127.0.0.1:9').search('Paris')


def test_attempts_are_bounded_and_the_error_says_who_and_why():
  with server((500, b'index not loaded')) as (url, seen), pytest.raises(SearchError) as error:
    HttpSearch(url, attempts=3, backoff=0.01).search(['x'])
  assert len(seen) == 3 and error.value.url == f'{url}/retrieve'
  assert str(error.value) == f'search at {url}/retrieve failed: status 500: index not loaded (attempts: 3)'


@pytest.mark.parametrize(('body', 'reason'), [
  (b'<html>It works!</html>', 'Expecting value'), ([], 'valid dictionary'), ({}, 'result: Field required'),
  ({'result': {}}, 'result: .* valid list'), ({'result': [[], []]}, 'result: 2 lists for 1 queries'),
  ({'result': [None]}, r'result\.0: .* valid list'), ({'result': [['text']]}, r'result\.0\.0\.document: .* dictionary'),
  ({'result': [[{'document': {'id': '1'}}]]}, r'result\.0\.0\.document\.contents: Field required'),
  ({'result': [[{'document': {'contents': 'x'}, 'score': float('nan')}]]}, r'result\.0\.0\.score: .* finite number'),
  ({'result': [[{'document': {'contents': 'x'}, 'score': True}]]}, r'result\.0\.0\.score: .* valid number')])
def test_a_reply_of_another_shape_is_refused_at_once(body, reason):
  with server((200, body)) as (url, seen), pytest.raises(SearchError, match=reason) as error:
    HttpSearch(url, backoff=0.01).search(['x'])
  assert len(seen) == 1 and url in str(error.value)


def test_millions_of_things_of_another_shape_are_refused_at_the_first():
  ones = b'{"result": [[' + b','.join([b'1'.ljust(16)] * 480_000) + b']]}'
  with server((200, ones)) as (url, _), pytest.raises(SearchError, match=r'result\.0\.0\.document: '):
    start = time.process_time()
    try:
      HttpSearch(url, timeout=120.0).search(['x'])
    finally:
      assert time.process_time() - start < 3  # tens of seconds and gigabytes if each were told of


@pytest.mark.parametrize('ask', [
  lambda client: client.search(['x']), lambda client: client.corpus_hash()], ids=['search', 'health'])
def test_no_more_is_read_than_a_reply_may_have(ask):
  sent = 0

  def serve(handler):
    nonlocal sent
    handler.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n')
    with contextlib.suppress(OSError):
      while sent < 2**27:
        sent += handler.connection.send(b' ' * 2**16)

  with server(serve) as (url, _), contextlib.suppress(SearchError):
    assert ask(HttpSearch(url)) == ''
  assert sent < 3 * MAX_RESPONSE_BYTES  # what lies in the buffers of the connection beside


def test_a_health_that_drips_is_given_up():
  def drip(handler):
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):  # the client hangs up
      for _ in range(160):
        handler.wfile.write(b' ')
        time.sleep(0.05)

  with server(drip) as (url, _), pytest.raises(SearchError) as error:
    start = time.monotonic()
    HttpSearch(url, timeout=0.3).corpus_hash()
  assert error.value.fault == 'timeout' and time.monotonic() - start < 6


def test_of_millions_of_hits_the_first_are_looked_at_and_ids_are_kept_short():
  found = Response.model_validate({'result': [[{'contents': 'x'}] * MAX_HITS + [7] * 10**6]}).result
  assert len(found[0]) == MAX_HITS
  with server((200, {'result': [[{'document': {'id': ['x' * 10**6], 'contents': 'x'}}]]})) as (url, _):
    assert len(HttpSearch(url).search(['x'])[0][0].id) == 1000


def test_both_forms_missing_ids_and_too_many_documents():
  document = {'contents': '"T"\nt\ud83d'}
  scored = {'document': {'id': 7, 'contents': 'T\nt'}, 'score': 1}
  with server((200, {'result': [[document] * 5]}), (200, {'result': [[], [scored]]})) as (url, _):
    assert HttpSearch(url).search(['x'], 2) == [[Document('', 'T', 't?')] * 2]
    assert HttpSearch(url).search(['x', 'y'], 3) == [[], [Document('7', 'T', 't', 1.0)]]


def test_the_token_of_search_servers_goes_to_them_alone(monkeypatch):
  monkeypatch.setenv('JAXSEARCH_SEARCH_TOKEN', 'sesame')
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  reply = {'result': [[]], 'organic': [], 'choices': [{'message': {'content': 'Doc 1: a'}}]}
  with server((200, reply)) as (url, seen):
    for kind in ('http', 'web', 'simulated'):
      config = base.get_config()
      config.search.update(backend=kind, url=url, writer='chat', writer_model='m')
      open_backend(config).search(['a'])
  assert [headers.get('authorization') for _, headers, _ in seen] == ['Bearer sesame', None, None]
