"""A page in headless Chromium: runs a script in it and hands back what that returns."""

import http.server
import json
import pathlib
import shutil
import subprocess
import tempfile
import threading

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


def run_in(page: str, script: str, seconds: float = 120):
  """Returns what `script`, the body of an async function, returns in a page (HTML); it may `await
  until(test)`.

  It begins once the page is ready. Asserts that nothing was thrown.
  """
  got, done = [], threading.Event()
  body = ('const until = async (test) => { for (let i = 0; !test(); i++) {'
          'if (i > 1000) throw Error(`never: ${test}`);'
          'await new Promise((next) => setTimeout(next, 20)) } };'
          'const errors = []; window.onerror = (message) => errors.push(message);'
          'window.onunhandledrejection = (event) => errors.push(String(event.reason));'
          "(async () => { try { await until(() => document.body && document.body.dataset.ready);"
          f'const result = await (async () => {{ {script} }})(); return {{result, errors}} }}'
          'catch (error) { return {errors: [error.stack]} } })()'
          ".then((found) => fetch('http://127.0.0.1:PORT/', {method: 'POST', mode: 'no-cors', "
          'body: JSON.stringify(found)}))')

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      got.append(json.loads(self.rfile.read(int(self.headers['content-length']))))
      self.send_response(204)
      self.end_headers()
      done.set()

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'page.html'
    script = body.replace('PORT', str(server.server_port))
    file.write_text(page.replace('</head>', f'<script>{script}</script></head>', 1))
    command = [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--remote-debugging-port=0',
               '--window-size=1500,950', f'--user-data-dir={folder}/user', file.as_uri()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
      assert done.wait(seconds), 'the page said nothing'
    finally:
      process.terminate()
      process.wait()
      server.shutdown()
      server.server_close()
  assert not got[0]['errors'], got[0]['errors']
  return got[0].get('result')
