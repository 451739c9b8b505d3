"""The address to listen on, and a server's life as a process. What `endpoint` refuses is in test_server.py."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
from jaxsearch.tools import http_server


def test_a_bound_address_keeps_nobody_waiting():
  with http_server.bind('127.0.0.1', 0) as listener:
    port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(('127.0.0.1', port), timeout=5)


def test_an_address_that_cannot_be_had_is_named():
  with http_server.bind('127.0.0.1', 0) as taken:
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=f'cannot listen on 127.0.0.1:{port}: Address already in use'):
      http_server.bind('127.0.0.1', port)
  with pytest.raises(ValueError, match='cannot listen on 192.0.2.1:0'):  # no address of this machine
    http_server.bind('192.0.2.1', 0)
  with pytest.raises(ValueError, match='cannot listen on 127.0.0.1:70000'):
    http_server.bind('127.0.0.1', 70000)


SERVER = """
import asyncio
from starlette.routing import Route
from jaxsearch.tools import http_server

async def double(request):
  print('asked', flush=True)
  await asyncio.sleep(0.3)
  return {'twice': 2 * request['number']}

app = http_server.make_app(Route('/', http_server.endpoint(double, None, http_server.Limits()), methods=['POST']))
http_server.run(app, http_server.bind('127.0.0.1', 0), 'doubling')
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_requests_under_way(number):
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  with subprocess.Popen([sys.executable, '-c', SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        env=environment) as process:
    said = process.stdout.readline()
    assert said.startswith('doubling: http://127.0.0.1:')
    with httpx.Client(trust_env=False) as client, ThreadPoolExecutor(1) as pool:
      reply = pool.submit(client.post, said.split()[1], json={'number': 21})
      assert process.stdout.readline() == 'asked\n'
      process.send_signal(number)
      assert reply.result(20).json() == {'twice': 42}
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM) and 'Traceback' not in errors
