"""The chat client; faults of servers are in test_server_faults.py."""

import json
import threading
import time

import pytest

from jaxsearch.tools.chat import Chat, ChatError
from tests.tools.serving import send, server


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
  monkeypatch.delenv('OPENAI_API_KEY', raising=False)


def told(text):
  return {'choices': [{'message': {'role': 'assistant', 'content': text}, 'finish_reason': 'stop'}]}


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


def test_a_model_that_refuses_max_tokens_is_asked_as_it_wants():
  refused = {'error': {'message': "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                                  "'max_completion_tokens' instead."}}
  with server((400, refused), (200, told('1'))) as (url, seen):
    chat = Chat(url, 'm', max_tokens=9)
    with pytest.warns(UserWarning, match='m takes no temperature, and thinks within max_tokens'):
      assert chat.reply('a') == '1'
    assert chat.reply('b') == '1'
  assert [{*body} - {'model', 'messages'} for _, _, body in seen] == [
    {'temperature', 'max_tokens'}, {'max_completion_tokens'}, {'max_completion_tokens'}]
  assert seen[1][2]['max_completion_tokens'] == 9


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


def test_replies_come_in_order_and_failures_stand_in_their_place():
  released = threading.Event()

  def serve(handler):
    prompt = json.loads(handler.body)['messages'][0]['content']
    if prompt == 'bad':
      return handler.send_error(400)
    if prompt == 'slow':
      released.wait(20)
    send(handler, json.dumps(told(prompt.upper())).encode())

  with server(serve) as (url, _):
    first, bad, slow, last = Chat(url, 'm', timeout=2.0, attempts=1).replies(['a', 'bad', 'slow', 'c'])
    released.set()
    assert Chat(url, 'm').replies([]) == []
    assert [Chat(f'{url},{url}/', 'm').reply(text) for text in 'ab'] == ['A', 'B']
  assert (first, last) == ('A', 'C') and isinstance(bad, ChatError) and bad.status == 400
  assert isinstance(slow, ChatError) and 'no complete response within 2 s' in slow.reason


def test_a_server_that_is_gone_is_not_waited_for_by_every_prompt(monkeypatch):
  status = [503]
  serve = lambda handler: handler.send_error(503) if status[0] == 503 else send(handler, json.dumps(told('A')).encode())
  with server(serve) as (url, seen):
    chat = Chat(url, 'm', attempts=1, concurrency=2)
    replies = chat.replies('abcdefghij')
    assert len(replies) == 10 and all(reply.status == 503 for reply in replies) and 4 <= len(seen) <= 5
    status[0], asked = 200, len(seen)
    assert chat.replies('a')[0].status == 503 and len(seen) == asked
    now = time.monotonic()
    monkeypatch.setattr(time, 'monotonic', lambda: now + 61)
    assert chat.replies('ab') == ['A', 'A']


def test_replies_are_kept_by_address_prompt_model_and_sampling_parameters_and_failures_are_not(tmp_path):
  kept = dict(cache=tmp_path / 'replies')
  with server((400, b''), (200, told('1'))) as (url, seen):
    chat = Chat(url, 'm', **kept)
    with pytest.raises(ChatError):
      chat.reply('a')
    assert chat.replies(['a'] * 5) == ['1'] * 5 and len(seen) == 2
    for model, other in (('n', {}), ('m', {'temperature': 1.0}), ('m', {'max_tokens': 3})):
      Chat(url, model, **kept, **other).reply('a')
    Chat(f'{url}/v1?key=sesame', 'm', **kept).reply('a')  # of another server
    assert len(seen) == 6
    chat.reply('b')
  assert Chat(url, 'm', **kept).reply('b') == '1' and len(seen) == 7  # nobody serves any more
