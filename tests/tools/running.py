"""Runs an application of ours on a free port of this machine."""

import contextlib
import threading
import time

import uvicorn

from jaxsearch.tools import http_server


@contextlib.contextmanager
def serve(app):
  """Yields the address."""
  with http_server.bind('127.0.0.1', 0) as listener:
    service = uvicorn.Server(http_server.make_server_config(app))
    thread = threading.Thread(target=service.run, kwargs={'sockets': [listener]})
    thread.start()
    while not service.started:
      assert thread.is_alive()
      time.sleep(0.01)
    try:
      yield f'http://127.0.0.1:{listener.getsockname()[1]}'
    finally:
      service.should_exit = True
      thread.join(10)
