"""The chat client against a server that speaks the protocol; faults of servers are in test_server_faults.py."""

import json
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


def answer(handler, text):
  content = json.dumps(told(text)).encode()
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
  assert [message['role'] for message in seen[1][2]['messages']] == ['system', 'user']


def test_seeds_are_sent_where_replies_are_sampled():
  with server((200, told('x'))) as (url, seen):
    for temperature in (0.0, 0.7):
      Chat(url, 'm', temperature=temperature, concurrency=1).replies(['a', 'b'], [3, 4])
  assert [body.get('seed') for _, _, body in seen] == [None, None, 3, 4]


def test_a_key_that_is_missed_is_named_and_a_wrong_one_is_not_shown(monkeypatch):
  with server((401, b'who are you, sk-sesame?')) as (url, seen):
    with pytest.raises(ChatError, match=r'sk-sesame\? \(OPENAI_API_KEY holds no key\)$') as error:
      Chat(url, 'm').reply('x')
    monkeypatch.setenv('OPENAI_API_KEY', 'sk-sesame')
    with pytest.raises(ChatError, match=r'who are you, \[key\]\?$'):
      Chat(url, 'm').reply('x')
  assert error.value.status == 401 and len(seen) == 2


@pytest.mark.parametrize('body', [
  {}, {'choices': []}, {'choices': [None]}, {'choices': [{'text': 'old'}]}, {'choices': {'0': 1}},
  {'choices': [{'message': {'content': None, 'refusal': 'no'}}]}, {'choices': [{'message': {'content': [{'text': 'x'}]}}]}])
def test_a_reply_of_another_shape_is_refused_at_once(body):
  with server((200, body)) as (url, seen), pytest.raises(ChatError, match='chat at .* not a valid response') as error:
    Chat(url, 'm').reply('x')
  assert url in str(error.value) and len(seen) == 1


def test_replies_come_in_order_and_failures_stand_in_their_place():
  released = threading.Event()

  def serve(handler):
    prompt = json.loads(handler.body)['messages'][0]['content']
    if prompt == 'bad':
      return handler.send_error(400)
    if prompt == 'slow':
      released.wait(20)
    answer(handler, prompt.upper())

  with server(serve) as (url, _):
    first, bad, slow, last = Chat(url, 'm', timeout=2.0, attempts=1).replies(['a', 'bad', 'slow', 'c'])
    released.set()
    assert Chat(url, 'm').replies([]) == []
  assert (first, last) == ('A', 'C') and isinstance(bad, ChatError) and bad.status == 400
  assert isinstance(slow, ChatError) and 'no complete response within 2 s' in slow.reason


def test_requests_at_a_time_are_limited_over_all_threads_and_waiting_is_not_counted():
  lock, now, most = threading.Lock(), 0, 0

  def serve(handler):
    nonlocal now, most
    with lock:
      now += 1
      most = max(most, now)
    time.sleep(0.1)
    with lock:
      now -= 1
    answer(handler, 'x')

  with server(serve) as (url, seen), ThreadPoolExecutor(6) as pool:
    chat = Chat(url, 'm', concurrency=3, timeout=1.0, attempts=1)
    waiting = [pool.submit(chat.replies, ['a'] * 12) for _ in range(3)]
    assert [future.result(60) for future in waiting] == [['x'] * 12] * 3  # 1.2 s in all
  assert len(seen) == 36 and most == 3


def test_replies_are_kept_by_prompt_model_and_sampling_parameters_and_failures_are_not(tmp_path):
  kept = dict(cache=tmp_path / 'replies')
  with server((400, b''), (200, told('1'))) as (url, seen):
    chat = Chat(url, 'm', **kept)
    with pytest.raises(ChatError):
      chat.reply('a')
    assert chat.replies(['a'] * 5) == ['1'] * 5 and len(seen) == 2
    for other in (Chat(url, 'n', **kept), Chat(url, 'm', temperature=1.0, **kept), Chat(url, 'm', max_tokens=3, **kept)):
      other.reply('a')
    assert len(seen) == 5
    chat.reply('b')
  assert len(seen) == 6
  assert Chat(url, 'm', **kept).reply('b') == '1'  # nobody serves any more


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
  with server((400, b'no')) as (url, seen):  # refusals do not keep the rest from being asked
    Chat(url, 'm', concurrency=2).replies([str(i) for i in range(9)])
  assert len(seen) == 9


def test_a_reply_far_longer_than_was_asked_for_is_a_fault():
  with server((200, told('x' * 640)), (200, told('x' * 641))) as (url, _):
    chat = Chat(url, 'm', max_tokens=10)
    assert chat.reply('a') == 'x' * 640
    with pytest.raises(ChatError, match='641 characters for max_tokens=10') as error:
      chat.reply('a')
  assert error.value.fault == 'too_long'
