"""The HTTP client of every tool behind a server: posts JSON and reads JSON back, within bounds.

Failures that may pass (a broken connection, a timeout, 408, 425, 429, 5xx) are retried with jittered backoff,
not before the server's `Retry-After`, all attempts within one deadline. Errors name the URL, say what kind of
fault it was, and show no key. Requests run on one event loop, in a thread of its own: only there can a
deadline hold for a whole response.
"""

import asyncio
import functools
import hashlib
import itertools
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx
import pydantic

from jaxsearch.tools.calls import one_line

MAX_REASON = 300  # characters of an error: it goes into observations and onto the terminal
MAY_PASS = ('timeout', 'connection', 'server')  # faults that are retried
T = TypeVar('T')


class RequestError(RuntimeError):
  """A request without a usable response: `url`, `reason`, `status` (None without one), and `fault`, one of
  `tools.calls.FAULTS`; `delay` is what the server asks for before a retry, in seconds."""
  kind = 'request'

  def __init__(self, url: str, reason: str, fault: str = 'error', status: int | None = None,
               delay: float = 0.0):
    super().__init__(f'{self.kind} at {url} failed: {reason}')
    self.url, self.reason, self.fault, self.status, self.delay = url, reason, fault, status, delay


class JsonClient:
  """Posts to a server, or to several alike; may be called from several threads.

  Args:
    urls: whole addresses; without a path, `default_path` is meant. Requests go round, and a retry goes to the
      next server.
    timeout: seconds for one `post`, all attempts together.
    attempts: at most, the first one included.
    backoff: seconds before the second attempt, doubled for each further one (up to 5), plus jitter.
    token: sent with every request, and cut out of errors that quote the server.
    token_header: 'authorization' sends it as a bearer token, any other header as it is.
  """
  error: type[RequestError] = RequestError
  default_path = '/'
  most_bytes = 8 * 2**20  # of a response: ten passages have some 10 kB, ten long encyclopedia pages 5 MB
  _hint = ''  # why a request may be unauthorised

  def __init__(self, urls: Sequence[str | httpx.URL], *, timeout: float = 30.0, attempts: int = 4,
               backoff: float = 0.2, token: str | None = None, token_header: str = 'authorization'):
    self._addresses = [address if address.path.strip('/') else address.copy_with(path=self.default_path)
                       for address in map(parse_url, urls)]
    self.url = ','.join(map(_shown, self._addresses))
    whole = ','.join(map(str, self._addresses))  # what is kept of replies goes by it
    self.identity = self.url if whole == self.url else hashlib.sha256(whole.encode()).hexdigest()
    self._timeout, self._attempts, self._backoff = timeout, attempts, backoff
    self._token, self._turn = check_secret(token, 'a token'), itertools.count()
    headers = {'content-type': 'application/json', 'accept-encoding': 'identity'}
    if token:
      headers[token_header] = f'Bearer {token}' if token_header == 'authorization' else token
    # A proxy cannot reach this machine's own servers.
    own = [re.fullmatch(r'localhost|127(\.\d+){3}|::1', address.host) for address in self._addresses]
    past = {f'all://{address.netloc.decode()}': None for address, local in zip(self._addresses, own) if local}
    limits = httpx.Limits()  # no limit but our threads; by default httpx lets all but a hundred wait
    self._http = httpx.AsyncClient(headers=headers, timeout=None, trust_env=not all(own), mounts=past,
                                   limits=limits)
    self._loop = event_loop()

  def post(self, body: object, parse: Callable[[Any], T]) -> T:
    """Returns what `parse` makes of the JSON of the response; it raises ValueError for another shape.

    Raises the client's `error`: no response in time, a refusal, a response of another shape, or one of more
    than `most_bytes`.
    """
    content, deadline, turn = json.dumps(body).encode(), time.monotonic() + self._timeout, next(self._turn)
    for attempt in itertools.count(1):
      others = max(min(len(self._addresses), self._attempts) - attempt, 0)  # leave time for untried servers
      address = self._addresses[(turn + attempt - 1) % len(self._addresses)]
      try:
        received = self._request('POST', address, (deadline - time.monotonic()) / (1 + others), content)
        break
      except self.error as failure:
        if failure.fault not in MAY_PASS:
          raise
        wait = min(self._backoff * 2 ** (attempt - 1), 5.0) + random.uniform(0, self._backoff) + failure.delay
        if attempt >= self._attempts or time.monotonic() + wait > deadline:
          reason = f'{failure.reason} (attempts: {attempt})'
          raise self._failed(address, reason, failure.fault, failure.status) from failure
      time.sleep(wait)
    try:
      return parse(parse_json(received))
    except pydantic.ValidationError as error:
      first = error.errors(include_url=False, include_input=False)[0]
      reason = f'{".".join(map(str, first["loc"])) or "all of it"}: {first["msg"]}'
    except (ValueError, RecursionError, OverflowError) as error:
      reason = str(error)
    raise self._failed(address, f'not a valid response: {reason}', 'malformed')

  def _failed(self, address: httpx.URL, reason: str, fault: str, status: int | None = None,
              delay: float = 0.0) -> RequestError:
    """Returns the error with this reason, on one line and without the key: servers quote what they refuse."""
    reason = reason.replace(self._token, '[key]') if self._token else reason
    return self.error(_shown(address), one_line(reason, MAX_REASON), fault, status, delay)

  def _request(self, method: str, address: httpx.URL, seconds: float, content: bytes = b'') -> bytes:
    """Returns the body of a successful response, as it was sent."""
    body = bytearray()

    async def receive() -> httpx.Response:
      timeout = asyncio.timeout(max(seconds, 0.01))
      async with timeout, self._http.stream(method, address, content=content) as response:
        async for chunk in response.aiter_raw():
          body.extend(chunk)
          if len(body) > self.most_bytes:
            raise self._failed(address, f'the response is longer than {self.most_bytes} bytes', 'too_long')
      return response

    try:
      response = asyncio.run_coroutine_threadsafe(receive(), self._loop).result()
    except TimeoutError as error:
      reason = f'no complete response within {round(seconds, 1):g} s'
      raise self._failed(address, reason, 'timeout') from error
    except httpx.TransportError as error:
      raise self._failed(address, f'{type(error).__name__}: {error}', 'connection') from error
    if response.is_success:
      return bytes(body)
    status, text = response.status_code, body.decode(errors='replace')
    reason = f'status {status}: {text}' + (self._hint if status == 401 else '')
    if response.is_server_error or status in (408, 425, 429):
      after = response.headers.get('retry-after', '').strip()
      raise self._failed(address, reason, 'server', status, float(after) if after.isdecimal() else 0.0)
    raise self._failed(address, reason, 'refused', status)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
  """Returns the running event loop of all clients."""
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, daemon=True, name='http').start()
  return loop


def _shown(address: httpx.URL) -> str:
  """Returns an address without password and query string: errors end up in logs and observations."""
  return f'{address.scheme}://{address.netloc.decode()}{address.path}'


def parse_url(url: str | httpx.URL) -> httpx.URL:
  """Returns the address. Raises ValueError if it is none of HTTP's."""
  try:
    address = httpx.URL(url)
  except httpx.InvalidURL:
    address = httpx.URL()
  if address.scheme not in ('http', 'https') or not address.host or (address.port or 0) > 65535:
    raise ValueError(f'not an http address: {str(url)!r}')
  return address


def parse_json(content: bytes) -> Any:
  """Decodes JSON, with '?' for half a surrogate pair, which passes JSON and would break a tokenizer.

  Raises ValueError.
  """
  return json.loads(json.dumps(json.loads(content), ensure_ascii=False).encode('utf-8', 'replace'))


def secret_from_env(variable: str) -> str | None:
  """Returns the token or key that an environment variable holds; None if it is not set or empty."""
  return check_secret(os.environ.get(variable) or None, f'the key in {variable}')


def check_secret(secret: str | None, name: str) -> str | None:
  """Returns `secret`. Raises ValueError, without showing it, if it cannot stand in a header."""
  if secret and not (secret.isascii() and secret.isprintable() and ' ' not in secret):
    raise ValueError(f'{name} must be printable ASCII without blanks or line ends')
  return secret
