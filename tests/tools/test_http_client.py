"""The client of all servers; faults of servers are in test_server_faults.py."""

import time

import pytest

from jaxsearch.tools.http_client import JsonClient, RequestError, secret_from_env
from tests.tools.serving import server


class Failure(RequestError):
  kind = 'errand'


class ErrandClient(JsonClient):
  error = Failure


def client(*urls, **settings):
  return ErrandClient(urls, **{'timeout': 20.0, 'backoff': 0.01} | settings)


@pytest.fixture
def slept(monkeypatch):
  """Nothing sleeps; what would have been slept."""
  seconds = []
  monkeypatch.setattr(time, 'sleep', seconds.append)
  return seconds


def test_body_headers_and_reply():
  with server((200, {'a': 1})) as (url, seen):
    asking = client(url + '/x?y=1', token='k', token_header='x-key')
    assert asking.post({'q': 'ü'}, lambda reply: reply['a'] + 1) == 2
  path, headers, body = seen[0]
  assert (path, headers['x-key'], headers['content-type'], body) == (
    '/x?y=1', 'k', 'application/json', {'q': 'ü'})


@pytest.mark.parametrize('status', [408, 429, 503])
def test_faults_that_may_pass_are_tried_again_with_growing_jittered_waits(status, slept):
  failed = pytest.raises(Failure, match=rf'^errand at http://.*failed: status {status}: no \(attempts: 4\)')
  with server((status, b'no')) as (url, seen), failed as error:
    client(url, backoff=0.4).post({'n': 1}, dict)
  assert [body for _, _, body in seen] == [{'n': 1}] * 4 and error.value.status == status
  jitters = [seconds - wait for seconds, wait in zip(slept, [0.4, 0.8, 1.6], strict=True)]
  assert all(0 <= jitter <= 0.4 for jitter in jitters) and len(set(jitters)) == 3


def test_a_server_says_when_to_come_again_and_past_the_deadline_it_is_given_up(slept):
  waits = [(429, b'', {'retry-after': when}) for when in ('3', 'soon')]
  with server(*waits, (200, {})) as (url, _):
    assert client(url).post({}, dict) == {}
  assert 3 <= slept[0] <= 3.1 and slept[1] < 0.2
  given_up = pytest.raises(Failure, match=r'busy \(attempts: 1\)')
  with server((429, b'busy', {'retry-after': '600'})) as (url, seen), given_up:
    client(url, timeout=5.0).post({}, dict)
  assert len(seen) == 1 and len(slept) == 2


def test_requests_go_round_and_a_retry_goes_to_the_next_server():
  with server((200, {'of': 1})) as (one, _), server((503, b'full'), (200, {'of': 2})) as (two, seen):
    asking = client(one, two)
    assert [asking.post({}, dict)['of'] for _ in range(4)] == [1, 1, 1, 2]  # the second is full at first
    assert asking.url == f'{one}/,{two}/' and len(seen) == 2


def test_time_is_left_for_the_servers_that_are_tried_and_errors_name_the_last_of_them(monkeypatch):
  with server((200, {})) as (url, _):
    given, asking = [], client(*(f'{url}/{number}' for number in range(8)), timeout=8.0, attempts=2)

    def request(method, address, seconds, content):
      given.append(seconds)
      raise asking._failed(address, 'full', 'server')

    monkeypatch.setattr(asking, '_request', request)
    with pytest.raises(Failure, match=r'^errand at http://[^,]*/1 failed: full'):
      asking.post({}, dict)
  assert given == pytest.approx([4, 8], abs=0.5)


@pytest.mark.parametrize('settings', [
  dict(url='ftp://host'), dict(url='host:80'), dict(url='http://'), dict(url='http://a:70000'), dict(token='sesame\n')])
def test_impossible_settings(settings):
  with pytest.raises(ValueError, match='not an http address|printable') as error:
    client(settings.pop('url', 'http://a'), **settings)
  assert 'same' not in str(error.value)


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch):
  monkeypatch.setenv('HTTP_PROXY', 'http://127.0.0.1:9')
  monkeypatch.delenv('NO_PROXY', raising=False)
  monkeypatch.delenv('no_proxy', raising=False)
  with server((200, {})) as (url, _):
    assert client(url, attempts=1).post({}, dict) == {}
  with server((200, {'by': 'proxy'})) as (url, seen), server((200, {'by': 'own'})) as (own, _):
    monkeypatch.setenv('HTTP_PROXY', url)
    both = client(own, 'http://far.example/x', attempts=1)  # in turn
    assert [both.post({}, dict)['by'] for _ in range(4)] == ['own', 'proxy'] * 2
    assert seen[0][0] == 'http://far.example/x'


def test_keys_from_the_environment(monkeypatch):
  for name, value in (('SOME_KEY', 'sesame'), ('EMPTY_KEY', ''), ('ODD_KEY', 'sesame\n')):
    monkeypatch.setenv(name, value)
  assert [secret_from_env(name) for name in ('SOME_KEY', 'EMPTY_KEY', 'NO_KEY')] == ['sesame', None, None]
  with pytest.raises(ValueError, match='ODD_KEY') as error:
    secret_from_env('ODD_KEY')
  assert 'sesame' not in str(error.value)
