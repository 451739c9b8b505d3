import email.utils
import itertools
import json
import threading
import time
import tracemalloc

import pytest

from jaxsearch.tools.http_client import JsonClient, RequestError, check_secret, parse_json, secret_from_env
from tests.tools.serving import server


class Failure(RequestError):
  kind = 'errand'


class ErrandClient(JsonClient):
  error = Failure


def client(url, **settings):
  return ErrandClient(url, **{'timeout': 20.0, 'backoff': 0.01} | settings)


@pytest.fixture
def slept(monkeypatch):
  """Nothing sleeps; what would have been slept."""
  seconds = []
  monkeypatch.setattr(time, 'sleep', seconds.append)
  return seconds


def test_body_headers_and_reply():
  with server((200, {'a': 1})) as (url, seen):
    assert client(url + '/x?y=1', token='k', token_header='x-key').post({'q': 'ü'}, lambda reply: reply['a'] + 1) == 2
  path, headers, body = seen[0]
  assert (path, headers['x-key'], headers['content-type'], body) == ('/x?y=1', 'k', 'application/json', {'q': 'ü'})


def test_what_the_parser_refuses_is_an_error_and_not_asked_again():
  def parse(reply):
    raise ValueError('no such thing')

  with server((200, {})) as (url, seen), pytest.raises(Failure, match='errand at .*failed: not a valid response: no such'):
    client(url).post({}, parse)
  assert len(seen) == 1


@pytest.mark.parametrize('status', [408, 429, 503])
def test_faults_that_may_pass_are_tried_again_with_growing_jittered_waits(status, slept):
  with server((status, b'no')) as (url, seen), pytest.raises(Failure, match=rf'{status}: no \(attempts: 4\)') as error:
    client(url, backoff=0.4).post({'n': 1}, dict)
  assert [body for _, _, body in seen] == [{'n': 1}] * 4 and error.value.status == status
  jitters = [seconds - wait for seconds, wait in zip(slept, [0.4, 0.8, 1.6], strict=True)]
  assert all(0 <= jitter <= 0.4 for jitter in jitters) and len(set(jitters)) == 3


def test_retry_after_in_seconds_and_as_a_date(slept):
  date = email.utils.formatdate(time.time() + 7, usegmt=True)
  waits = [(429, b'', {'retry-after': when}) for when in ('3', date, 'soon')]
  with server(*waits, (200, {})) as (url, _):
    assert client(url).post({}, dict) == {}
  assert 3 <= slept[0] <= 3.1 and 5 < slept[1] <= 7.1 and slept[2] < 0.2


def test_a_server_that_wants_to_be_left_alone_past_the_deadline_is_given_up_at_once(slept):
  with server((429, b'busy', {'retry-after': '600'})) as (url, seen):
    with pytest.raises(Failure, match=r'busy \(attempts: 1\)'):
      client(url, timeout=5.0).post({}, dict)
  assert len(seen) == 1 and not slept


def test_a_slow_server_runs_into_the_deadline_of_all_attempts():
  released = threading.Event()
  with server(lambda handler: released.wait(20)) as (url, _):
    start = time.monotonic()
    with pytest.raises(Failure, match=r'no complete response within 0\.3 s'):
      client(url, timeout=0.3).post({}, dict)
    assert time.monotonic() - start < 6
    released.set()


def test_the_key_is_in_no_message():
  echo = lambda handler: (handler.send_response(403), handler.end_headers(),
                          handler.wfile.write(b'x' * 190 + b'refused: sesame-open'))
  with server(echo) as (url, _), pytest.raises(Failure) as error:
    client(url.replace('//', '//user:sesame-open@') + '/?key=sesame-open', token='sesame-open').post({}, dict)
  assert 'sesame' not in str(error.value) and 'status 403' in str(error.value)


def test_requests_begin_at_the_rate(monkeypatch):
  now, lock = [100.0], threading.Lock()

  def sleep(seconds):
    with lock:
      now[0] += seconds

  with server((500, b''), (200, {})) as (url, seen):
    paced = client(url, rate=4.0)
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(time, 'sleep', sleep)
    begun = []
    attempt = paced._attempt
    paced._attempt = lambda *args: (begun.append(now[0]), attempt(*args))[1]
    for _ in range(3):
      paced.post({}, dict)
    monkeypatch.undo()
  assert len(begun) == len(seen) == 4  # the second attempt takes a turn as well
  assert [b - a for a, b in itertools.pairwise(begun)] == pytest.approx([0.25] * 3, abs=0.03)


@pytest.mark.parametrize('settings', [
  dict(url='ftp://host'), dict(url='host:80'), dict(url='http://'), dict(timeout=0), dict(attempts=0), dict(rate=0),
  dict(token='se same'), dict(token='sesame\n')])
def test_impossible_settings(settings):
  with pytest.raises(ValueError, match='not an http address|must be positive|printable') as error:
    client(**{'url': 'http://a'} | settings)
  assert 'same' not in str(error.value)


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch):
  monkeypatch.setenv('HTTP_PROXY', 'http://127.0.0.1:9')
  monkeypatch.delenv('NO_PROXY', raising=False)
  monkeypatch.delenv('no_proxy', raising=False)
  with server((200, {})) as (url, _):
    assert client(url, attempts=1).post({}, dict) == {}


def test_keys_from_the_environment(monkeypatch):
  monkeypatch.setenv('SOME_KEY', 'sesame')
  monkeypatch.setenv('EMPTY_KEY', '')
  monkeypatch.setenv('ODD_KEY', 'sesame\n')
  monkeypatch.delenv('NO_KEY', raising=False)
  assert [secret_from_env(name) for name in ('SOME_KEY', 'EMPTY_KEY', 'NO_KEY')] == ['sesame', None, None]
  with pytest.raises(ValueError, match='ODD_KEY') as error:
    secret_from_env('ODD_KEY')
  assert 'sesame' not in str(error.value)
  assert check_secret(None, 'it') is None


def test_half_a_surrogate_pair_does_not_reach_a_tokenizer():
  content = b'{"a": ["\\ud83d", {"\\ude00b": 1.5}], "c": "\\ud83d\\ude00"}'
  assert parse_json(content) == {'a': ['?', {'?b': 1.5}], 'c': '😀'}
  assert parse_json(b'"x\xed\xa0\xbd"') == 'x?'


def test_cookies_do_not_pile_up():
  answers = [(200, {}, {'set-cookie': f'c{i}=x'}) for i in range(3)]
  with server(*answers) as (url, seen):
    asking = client(url)
    for _ in range(3):
      asking.post({}, dict)
  assert not any('cookie' in headers for _, headers, _ in seen)


@pytest.mark.parametrize('value', [b'[]', b'{}', b'{"a":1}', '"é"'.encode(), b'1e5', b'999'])
def test_what_would_take_many_times_its_size_is_not_decoded(value):
  content = b'[' + b','.join([value] * 400_000) + b']'
  tracemalloc.start()
  with pytest.raises(ValueError, match='more values than text'):
    parse_json(content)
  held = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert held < 2**16


def test_decoding_takes_few_times_the_size_of_a_reply():
  page = 'Text of a page [1] with commas, numbers (1,000 of them) and, as it is, brackets as well. ' * 64
  hits = [{'document': {'id': str(i), 'contents': page}, 'score': i / 7} for i in range(1000)]
  content = json.dumps({'result': [hits]}).encode()
  tracemalloc.start()
  assert len(parse_json(content)['result'][0]) == 1000
  held = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert held < 6 * len(content)
