"""A server on this machine that answers, or misbehaves, as told."""

import contextlib
import http.server
import json
import threading


def send(handler, content, status=200, headers=(), length=None):
  """Sends a whole response; `length` is the number of bytes that it claims."""
  handler.send_response(status)
  for name, value in dict(headers).items():
    handler.send_header(name, value)
  handler.send_header('content-length', str(len(content) if length is None else length))
  handler.end_headers()
  handler.wfile.write(content)


class Service(http.server.ThreadingHTTPServer):
  """With room for the callers of the tests: a full queue would look like a connection that fails."""
  request_queue_size, daemon_threads = 128, True


@contextlib.contextmanager
def server(*answers, port=0):
  """Gives each request the next of `answers`, the last one for ever; yields its address and what was asked.

  An answer is (status, body) or (status, body, headers) with body bytes or JSON, or a function of the
  handler that does what it likes.
  """
  seen = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = self.body = self.rfile.read(int(self.headers.get('content-length', 0)))
      answer = answers[min(len(seen), len(answers) - 1)]
      seen.append((self.path, dict(self.headers), json.loads(body or b'null')))
      if callable(answer):
        return answer(self)
      status, body, headers = (*answer, {})[:3]
      send(self, body if isinstance(body, bytes) else json.dumps(body).encode(), status, headers)

    do_GET = do_POST

    def log_message(self, *args):
      """Quiet."""

  service = Service(('127.0.0.1', port), Handler)
  thread = threading.Thread(target=service.serve_forever, kwargs={'poll_interval': 0.01})
  thread.start()
  try:
    yield f'http://127.0.0.1:{service.server_port}', seen
  finally:
    service.shutdown()
    thread.join()
    service.server_close()
