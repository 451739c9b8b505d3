"""Runs an application of ours on a free port of this machine."""

import contextlib
import threading
import time

import uvicorn

from jaxsearch.tools import http_server


@contextlib.contextmanager
def serve(app, lifespan='off'):
  """Yields the address; `lifespan` of uvicorn."""
  with http_server.bind('127.0.0.1', 0) as listener:
    config = http_server.make_server_config(app)
    config.lifespan = lifespan
    service = uvicorn.Server(config)
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
