"""The chat client against a server that speaks the protocol, and one that does not."""

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsearch.tools.chat import Chat, ChatError
from tests.tools.serving import server


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
  monkeypatch.delenv('OPENAI_API_KEY', raising=False)


def told(text):
  return {'choices': [{'index': 0, 'message': {'role': 'assistant', 'content': text}, 'finish_reason': 'stop'}]}


def answer(handler, body):
  content = json.dumps(body).encode()
  handler.send_response(200)
  handler.send_header('content-length', str(len(content)))
  handler.end_headers()
  handler.wfile.write(content)


def test_request_and_reply(monkeypatch):
  monkeypatch.setenv('OPENAI_API_KEY', 'sk-sesame')
  with server((200, told('Paris\ud83d'))) as (url, seen):
    chat = Chat(url + '/v1/', 'small', temperature=0.7, max_tokens=9)
    assert chat.reply('capital?') == 'Paris?'
    chat.reply([{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'capital?'}])
  path, headers, body = seen[0]
  assert path == '/v1/chat/completions' and headers['authorization'] == 'Bearer sk-sesame'
  assert body == {'model': 'small', 'temperature': 0.7, 'max_tokens': 9,
                  'messages': [{'role': 'user', 'content': 'capital?'}]}
  assert [m['role'] for m in seen[1][2]['messages']] == ['system', 'user']


def test_seeds_are_sent_where_replies_are_sampled():
  with server((200, told('x'))) as (url, seen):
    for temperature in (0.0, 0.7):
      Chat(url, 'm', temperature=temperature, concurrency=1).replies(['a', 'b'], [3, 4])
  assert [body.get('seed') for _, _, body in seen] == [None, None, 3, 4]


def test_another_variable_may_hold_the_key_and_none_has_to(monkeypatch):
  monkeypatch.setenv('JUDGE_KEY', 'k')
  with server((200, told(''))) as (url, seen):
    assert Chat(url, 'm').reply('x') == Chat(url, 'm', key_variable='JUDGE_KEY').reply('x') == ''
  assert 'authorization' not in seen[0][1] and seen[1][1]['authorization'] == 'Bearer k'


def test_a_key_that_is_missed_is_named():
  with server((401, b'who are you?')) as (url, seen), pytest.raises(ChatError) as error:
    Chat(url, 'm').reply('x')
  assert str(error.value) == (f'chat at {url}/chat/completions failed: status 401: who are you? '
                              '(OPENAI_API_KEY holds no key)')
  assert error.value.status == 401 and len(seen) == 1


def test_a_wrong_key_is_not_shown(monkeypatch, caplog):
  monkeypatch.setenv('OPENAI_API_KEY', 'sk-sesame')
  with caplog.at_level(logging.DEBUG), server((401, b'wrong key sk-sesame')) as (url, _):
    with pytest.raises(ChatError, match=r'wrong key \[key\]$') as error:
      Chat(url, 'm').reply('x')
  assert 'sesame' not in str(error.value) + repr(error.value) and 'sesame' not in caplog.text


@pytest.mark.parametrize('body', [
  b'<html>', [], {}, {'choices': []}, {'choices': [None]}, {'choices': [{'text': 'old'}]}, {'choices': {'0': 1}},
  {'choices': [{'message': {'content': None, 'refusal': 'no'}}]}, {'choices': [{'message': {'content': [{'text': 'x'}]}}]}])
def test_garbage_is_refused_at_once(body):
  with server((200, body)) as (url, seen), pytest.raises(ChatError, match='chat at .* not a valid response') as error:
    Chat(url, 'm').reply('x')
  assert url in str(error.value) and len(seen) == 1


def test_a_busy_server_is_asked_again():
  with server((429, b''), (503, b''), (200, told('yes'))) as (url, seen):
    assert Chat(url, 'm', backoff=0.01).reply('x') == 'yes'
  assert len(seen) == 3


def test_replies_come_in_order_and_failures_stand_in_their_place():
  def serve(handler):
    prompt = seen[-1][2]['messages'][0]['content']
    if prompt == 'bad':
      handler.send_error(400)
    else:
      answer(handler, told(prompt.upper()))

  with server(serve) as (url, seen):
    first, bad, last = Chat(url, 'm', concurrency=1).replies(['a', 'bad', 'c'])
    assert Chat(url, 'm').replies([]) == []
  assert (first, last) == ('A', 'C') and isinstance(bad, ChatError) and bad.status == 400


def test_a_slow_reply_is_given_up_and_the_others_come():
  released = threading.Event()

  def serve(handler):
    if json.loads(handler.body)['messages'][0]['content'] == 'slow':
      released.wait(20)
    answer(handler, told('x'))

  with server(serve) as (url, _):
    first, slow, last = Chat(url, 'm', timeout=2.0, attempts=1).replies(['a', 'slow', 'c'])
    released.set()
  assert (first, last) == ('x', 'x') and isinstance(slow, ChatError) and 'no complete response within 2 s' in slow.reason


def test_a_reply_that_trickles_is_given_up_at_the_deadline():
  released = threading.Event()

  def serve(handler):
    handler.send_response(200)
    handler.send_header('content-length', '1000000')
    handler.end_headers()
    while not released.wait(0.02):
      handler.wfile.write(b' ')
      handler.wfile.flush()

  with server(serve) as (url, _):
    with pytest.raises(ChatError, match=r'no complete response within 0\.5 s'):
      Chat(url, 'm', timeout=0.5, attempts=1).reply('a')
    released.set()


def test_a_server_that_is_down_fails_every_prompt():
  with server((200, told('x'))) as (url, _):
    chat = Chat(url, 'm', attempts=2, backoff=0.01)
    assert chat.reply('a') == 'x'
  replies = chat.replies(['a', 'b', 'c'])
  assert all(isinstance(reply, ChatError) and '(attempts: 2)' in reply.reason for reply in replies)


def test_requests_at_a_time_are_limited_over_all_threads():
  lock, now, most = threading.Lock(), 0, 0

  def serve(handler):
    nonlocal now, most
    with lock:
      now += 1
      most = max(most, now)
    time.sleep(0.02)
    with lock:
      now -= 1
    answer(handler, told('x'))

  with server(serve) as (url, seen), ThreadPoolExecutor(6) as pool:
    chat = Chat(url, 'm', concurrency=3)
    waiting = [pool.submit(chat.replies, ['a', 'b', 'c', 'd']) for _ in range(3)] + [pool.submit(chat.reply, 'e')]
    for future in waiting:
      future.result(60)
  assert len(seen) == 13 and most == 3


def test_the_wait_for_a_turn_is_not_counted():
  def serve(handler):
    time.sleep(0.2)
    answer(handler, told('x'))

  with server(serve) as (url, _):
    assert Chat(url, 'm', concurrency=1, timeout=1.0, attempts=1).replies(['a'] * 8) == ['x'] * 8


def test_replies_are_kept_by_prompt_model_and_sampling_parameters(tmp_path):
  kept = dict(cache=tmp_path / 'replies')
  with server((200, told('1'))) as (url, seen):
    chat = Chat(url, 'm', **kept)
    assert chat.replies(['a'] * 5) == ['1'] * 5 and len(seen) == 1
    for other in (Chat(url, 'n', **kept), Chat(url, 'm', temperature=1.0, **kept), Chat(url, 'm', max_tokens=3, **kept)):
      other.reply('a')
    assert len(seen) == 4
    chat.reply('b')
  assert len(seen) == 5
  assert Chat(url, 'm', **kept).reply('b') == '1'  # nobody serves any more


def test_failures_are_not_kept(tmp_path):
  with server((400, b''), (200, told('now'))) as (url, seen):
    chat = Chat(url, 'm', cache=tmp_path / 'replies')
    with pytest.raises(ChatError):
      chat.reply('a')
    assert chat.reply('a') == 'now'


@pytest.mark.parametrize('settings', [dict(url='localhost/v1'), dict(model=''), dict(concurrency=0), dict(timeout=0)])
def test_impossible_settings(settings):
  with pytest.raises(ValueError, match='not an http address|name of a model|at least 1'):
    Chat(**{'url': 'http://a/v1', 'model': 'm'} | settings)


def test_a_server_that_is_gone_is_not_asked_by_every_prompt_of_a_batch():
  with server(lambda handler: handler.connection.close()) as (url, seen):
    chat = Chat(url, 'm', attempts=1, concurrency=2)
    replies = chat.replies([str(i) for i in range(50)])
    assert 2 <= len(seen) <= 4 and [reply.fault for reply in replies] == ['connection'] * 50
    assert 'not asked, since' in replies[-1].reason
    chat.replies(['the next batch asks again'])
  assert any('the next batch' in str(body) for _, _, body in seen)


def test_refusals_do_not_keep_the_rest_from_being_asked():
  with server((400, b'no')) as (url, seen):
    Chat(url, 'm', concurrency=2).replies([str(i) for i in range(9)])
  assert len(seen) == 9


def test_a_reply_far_longer_than_was_asked_for_is_a_fault():
  with server((200, told('x' * 640)), (200, told('x' * 641))) as (url, _):
    chat = Chat(url, 'm', max_tokens=10)
    assert chat.reply('a') == 'x' * 640
    with pytest.raises(ChatError, match='641 characters for max_tokens=10') as error:
      chat.reply('a')
  assert error.value.fault == 'too_long'
