"""The client against real servers on this machine: ours, and one that misbehaves as told."""

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
  path, headers, body = seen[0]
  assert path == '/retrieve' and headers['authorization'] == 'Bearer secret'
  assert body == {'queries': ['capital of France'], 'topk': 5, 'return_scores': True}


def test_a_path_of_its_own_is_kept():
  with server((200, GOOD)) as (url, seen):
    HttpSearch(url + '/v2/find').search(['x'])
    HttpSearch(url + '/').search(['x'])
  assert [path for path, _, _ in seen] == ['/v2/find', '/retrieve']


def test_no_queries_ask_nobody():
  assert HttpSearch('http://127.0.0.1:9').search([]) == []
  with pytest.raises(TypeError, match='list of strings'):
    HttpSearch('http://127.0.0.1:9').search('Paris')


@pytest.mark.parametrize('status', [500, 503, 429])
def test_fails_twice_and_then_answers(status):
  with server((status, b'busy'), (status, b'busy'), (200, GOOD)) as (url, seen):
    assert HttpSearch(url, backoff=0.01).search(['x']) == [[PARIS]]
  assert len(seen) == 3


def test_a_dropped_connection_is_tried_again():
  with server(lambda handler: handler.connection.close(), (200, GOOD)) as (url, seen):
    assert HttpSearch(url, backoff=0.01).search(['x']) == [[PARIS]]
  assert len(seen) == 2


def test_attempts_are_bounded_and_the_error_says_who_and_why():
  with server((500, b'index not loaded')) as (url, seen):
    with pytest.raises(SearchError) as error:
      HttpSearch(url, attempts=3, backoff=0.01).search(['x'])
  assert len(seen) == 3
  assert error.value.url == f'{url}/retrieve'
  assert str(error.value) == f'search at {url}/retrieve failed: status 500: index not loaded (attempts: 3)'


@pytest.mark.parametrize('status', [400, 401, 404, 302])
def test_a_refusal_is_not_tried_again(status):
  with server((status, b'no')) as (url, seen):
    with pytest.raises(SearchError, match=f'status {status}: no'):
      HttpSearch(url, backoff=0.01).search(['x'])
  assert len(seen) == 1


def test_nobody_listens():
  with pytest.raises(SearchError, match=r'ConnectError.*\(attempts: 2\)'):
    HttpSearch('http://127.0.0.1:9', attempts=2, backoff=0.01).search(['x'])


def hang(handler):
  time.sleep(8)


def trickle(handler):
  handler.send_response(200)
  handler.end_headers()
  with contextlib.suppress(OSError):  # the client hangs up
    for _ in range(160):
      handler.wfile.write(b' ')
      handler.wfile.flush()
      time.sleep(0.05)


@pytest.mark.parametrize('answer', [hang, trickle])
def test_the_timeout_covers_all_attempts(answer):
  with server(answer) as (url, _):
    start = time.monotonic()
    with pytest.raises(SearchError, match=r'within 0\.3 s'):
      HttpSearch(url, timeout=0.3, attempts=5, backoff=0.01).search(['x'])
    assert time.monotonic() - start < 6


def test_back_off_never_outlasts_the_timeout():
  with server((503, b'busy')) as (url, seen):
    start = time.monotonic()
    with pytest.raises(SearchError, match='attempts: '):
      HttpSearch(url, timeout=0.5, attempts=100, backoff=0.1).search(['x'])
    assert time.monotonic() - start < 6 and 1 <= len(seen) < 10


@pytest.mark.parametrize(('body', 'reason'), [
    (b'<html>It works!</html>', 'Expecting value'), (b'\xff\xfe\xff', 'decode'),
    (b'[' * 100_000, 'recursion'), ([], 'valid dictionary'), ({}, 'result: Field required'),
    ({'result': {}}, 'result: .* valid list'),
    ({'result': []}, 'result: 0 lists for 1 queries'),
    ({'result': [[], []]}, 'result: 2 lists for 1 queries'), ({'result': [None]}, r'result\.0: .* valid list'),
    ({'result': [['text']]}, r'result\.0\.0\.document: .* valid dictionary'),
    ({'result': [[{'document': {'id': '1'}}]]}, r'result\.0\.0\.document\.contents: Field required'),
    ({'result': [[{'document': {'id': '1', 'contents': None}}]]}, r'document\.contents: .* valid string'),
    ({'result': [[{'document': {'contents': 'x'}, 'score': float('nan')}]]}, r'result\.0\.0\.score: .* finite number'),
    ({'result': [[{'document': {'contents': 'x'}, 'score': True}]]}, r'result\.0\.0\.score: .* valid number'),
    ({'result': [[{'document': {'contents': 'x'}, 'score': 'high'}]]}, r'result\.0\.0\.score: .* valid number')])
def test_garbage_is_refused_at_once(body, reason):
  with server((200, body)) as (url, seen):
    with pytest.raises(SearchError, match=reason) as error:
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


def test_an_endless_reply_is_cut_off(monkeypatch):
  monkeypatch.setattr('jaxsearch.tools.http_client.MAX_RESPONSE_BYTES', 1000)
  with server((200, b' ' * 5000)) as (url, _), pytest.raises(SearchError, match='longer than 1000 bytes'):
    HttpSearch(url).search(['x'])


def test_no_more_is_read_than_a_reply_may_have():
  sent = 0

  def serve(handler):
    nonlocal sent
    handler.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n')
    with contextlib.suppress(OSError):
      while sent < 2**30:
        sent += handler.connection.send(b' ' * 2**16)

  with server(serve) as (url, _), pytest.raises(SearchError, match=f'longer than {MAX_RESPONSE_BYTES} bytes') as error:
    HttpSearch(url).search(['x'])
  assert error.value.fault == 'too_long' and sent < 3 * MAX_RESPONSE_BYTES  # what lies in the buffers of the connection beside


def test_a_health_that_drips_is_given_up():
  with server(trickle) as (url, _), pytest.raises(SearchError) as error:
    start = time.monotonic()
    HttpSearch(url, timeout=0.3).corpus_hash()
  assert error.value.fault == 'timeout' and time.monotonic() - start < 6


def test_of_a_health_no_more_is_read_than_of_any_reply():
  sent = 0

  def serve(handler):
    nonlocal sent
    handler.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n')
    with contextlib.suppress(OSError):
      while sent < 2**27:
        sent += handler.connection.send(b' ' * 2**16)

  with server(serve) as (url, _):
    assert HttpSearch(url).corpus_hash() == ''
  assert sent < 3 * MAX_RESPONSE_BYTES


def test_of_millions_of_hits_the_first_are_looked_at():
  found = Response.model_validate({'result': [[{'contents': 'x'}] * MAX_HITS + [7] * 10**6]}).result
  assert len(found[0]) == MAX_HITS


def test_an_id_of_any_size_is_kept_short():
  with server((200, {'result': [[{'document': {'id': ['x' * 10**6], 'contents': 'x'}}]]})) as (url, _):
    assert len(HttpSearch(url).search(['x'])[0][0].id) == 1000


def test_both_forms_missing_ids_and_too_many_documents():
  document = {'contents': '"T"\nt\ud83d'}
  scored = {'document': {'id': 7, 'contents': 'T\nt'}, 'score': 1}
  with server((200, {'result': [[document] * 5]}), (200, {'result': [[], [scored]]})) as (url, _):
    assert HttpSearch(url).search(['x'], 2) == [[Document('', 'T', 't?')] * 2]
    assert HttpSearch(url).search(['x', 'y'], 3) == [[], [Document('7', 'T', 't', 1.0)]]


def test_messages_hold_no_password():
  backend = HttpSearch('http://user:hidden@127.0.0.1:9/find?key=hidden', attempts=1)
  with pytest.raises(SearchError) as error:
    backend.search(['x'])
  assert 'hidden' not in str(error.value) and backend.url == 'http://127.0.0.1:9/find'


@pytest.mark.parametrize('settings', [
    dict(url='127.0.0.1:8000'), dict(url='ftp://host'), dict(url='http://'), dict(url='http://a', timeout=0),
    dict(url='http://a', attempts=0), dict(url='http://a', token='se same'),
    dict(url='http://a', token='sesame\n')])
def test_impossible_settings(settings):
  with pytest.raises(ValueError, match=r'not an http address|timeout|printable') as error:
    HttpSearch(**settings)
  assert 'same' not in str(error.value)


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch):
  monkeypatch.setenv('HTTP_PROXY', 'http://127.0.0.1:9')
  monkeypatch.delenv('NO_PROXY', raising=False)
  monkeypatch.delenv('no_proxy', raising=False)
  with server((200, GOOD)) as (url, _):
    assert HttpSearch(url, attempts=1).search(['x']) == [[PARIS]]


def test_the_token_of_search_servers_goes_to_them_alone(monkeypatch):
  monkeypatch.setenv('JAXSEARCH_SEARCH_TOKEN', 'sesame')
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  with server((200, {'result': [[]], 'organic': [], 'choices': [{'message': {'content': 'Doc 1: a'}}]})) as (url, seen):
    for kind in ('http', 'web', 'simulated'):
      config = base.get_config()
      config.search.update(backend=kind, url=url, writer='chat', writer_model='m')
      open_backend(config).search(['a'])
  assert [headers.get('authorization') for _, headers, _ in seen] == ['Bearer sesame', None, None]
