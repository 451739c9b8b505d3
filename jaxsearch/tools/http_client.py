"""The HTTP client of every tool behind a server: posts JSON and reads JSON back, within bounds.

Failures that may pass (a broken connection, a timeout, 408, 425, 429, 5xx) are retried with jittered
exponential backoff, not before the server's `Retry-After`, all attempts within one deadline. Everything else,
and a response of an unexpected shape, is an error at once. Errors name the URL, say what kind of fault it
was, and show no key.

Requests run on one event loop, in a thread of its own: only there can a deadline hold for a whole response. A
blocking client limits the wait for each read alone, and a server that sends a byte of its headers now and
then holds a thread.
"""

import asyncio
import email.utils
import functools
import http.cookiejar
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pydantic
import tenacity

MAX_RESPONSE_BYTES = 8 * 2**20  # ten passages have some 10 kB, ten long pages of an encyclopedia 5 MB
# In Python a value takes up to 27 times its bytes in JSON (lists of nothing). Text has a comma or bracket in
# some fifty bytes; replies with many log-probabilities or vectors have more, and nothing here asks for them.
FEW_VALUES, BYTES_PER_VALUE = 2**18, 16
MAX_REASON = 300  # characters of an error: it goes into observations and onto the terminal
T = TypeVar('T')
_STARTING = threading.Lock()
_PARSING = threading.Lock()  # one reply at a time: it is work for one thread anyway, and takes memory


class RequestError(RuntimeError):
  """A request without a usable response; `url`, `reason` and `status` (None without one) say where and why.

  `fault` is its kind, one of `tools.calls.FAULTS`. `delay` is set on an attempt that may be retried: the
  seconds that the server asks for, else 0.
  """

  kind = 'request'

  def __init__(self, url: str, reason: str, fault: str = 'error', status: int | None = None,
               delay: float | None = None):
    super().__init__(f'{self.kind} at {url} failed: {reason}')
    self.url, self.reason, self.fault, self.status, self.delay = url, reason, fault, status, delay


class JsonClient:
  """Posts to one address; may be called from several threads. A subclass names its `error` and a
  `default_path`.

  Args:
    url: the whole address; without a path, `default_path` is meant.
    timeout: seconds for one `post`, all attempts together.
    attempts: at most, the first one included.
    backoff: seconds before the second attempt, doubled for each further one (up to 5), plus jitter.
    token: a token or key sent with every request, and cut out of errors that quote the server.
    token_header: 'authorization' sends it as a bearer token, any other header as it is.
    rate: requests started per second, by all threads and retries included; None is any number. Waiting for
      the first turn does not count towards the timeout.

  Raises ValueError for another address than HTTP's, numbers out of range, and a token that cannot stand in a
  header.
  """

  error: type[RequestError] = RequestError
  default_path = ''
  _hint = ''  # why a request may be unauthorised

  def __init__(self, url: str | httpx.URL, *, timeout: float = 30.0, attempts: int = 4, backoff: float = 0.2,
               token: str | None = None, token_header: str = 'authorization', rate: float | None = None):
    address = parse_url(url)
    if timeout <= 0 or attempts < 1 or (rate is not None and rate <= 0):
      raise ValueError(f'timeout={timeout} and rate={rate} must be positive, attempts={attempts} at least 1')
    if self.default_path and address.path in ('', '/'):
      address = address.copy_with(path=self.default_path)
    # Errors end up in logs and observations: no password, no query string in them.
    self.url = f'{address.scheme}://{address.netloc.decode()}{address.path}'
    self._address, self._timeout, self._attempts, self._backoff = address, timeout, attempts, backoff
    self._token = check_secret(token, 'a token')
    self._gap, self._last_turn, self._lock = 1 / rate if rate else 0.0, float('-inf'), threading.Lock()
    headers = {'content-type': 'application/json', 'accept-encoding': 'identity'}
    if token:
      headers[token_header] = f'Bearer {token}' if token_header == 'authorization' else token
    # A proxy cannot reach this machine's own server. Cookies would pile up.
    trust_env = not re.fullmatch(r'localhost|127(\.\d+){3}|::1', address.host)
    cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=()))
    self._http = httpx.AsyncClient(headers=headers, timeout=None, cookies=cookies, trust_env=trust_env)

  def post(self, body: object, parse: Callable[[Any], T], times: int = 1, timeout: float | None = None,
           attempts: int | None = None) -> T:
    """Returns what `parse` makes of the JSON of the response; it raises ValueError for another shape.

    `timeout` and `attempts` take the place of the client's.

    Raises the client's `error`: no response in time, a refusal, a response of another shape, or one of more
      bytes than
    `times` MAX_RESPONSE_BYTES.
    """
    timeout = timeout or self._timeout
    backoff = tenacity.wait_exponential(self._backoff, max=5.0)
    jitter = lambda: random.uniform(0, self._backoff)
    wait = lambda state: max(backoff(state), state.outcome.exception().delay) + jitter()
    retrying = tenacity.Retrying(
      stop=tenacity.stop_after_attempt(attempts or self._attempts) | tenacity.stop_before_delay(timeout),
      retry=tenacity.retry_if_exception(lambda error: getattr(error, 'delay', None) is not None),
      wait=wait, sleep=self._pause, reraise=True)
    self._pause()
    deadline = time.monotonic() + timeout
    try:
      received = retrying(self._attempt, 'POST', self._address, json.dumps(body).encode(), deadline,
                          MAX_RESPONSE_BYTES * times)
    except self.error as failure:
      if failure.delay is None:
        raise
      reason = f'{failure.reason} (attempts: {retrying.statistics["attempt_number"]})'
      raise self._failed(reason, failure.fault, failure.status) from failure
    return self._parsed(received, parse)

  def get(self, path: str, timeout: float) -> Any:
    """Returns the JSON at another path of the server, asked for once, within the bounds of `post`."""
    address, deadline = self._address.copy_with(path=path, query=None), time.monotonic() + timeout
    received = self._attempt('GET', address, b'', deadline, MAX_RESPONSE_BYTES)
    return self._parsed(received, lambda response: response)

  def _parsed(self, content: bytes, parse: Callable[[Any], T]) -> T:
    try:
      with _PARSING:
        return parse(parse_json(content))
    except pydantic.ValidationError as error:
      first = error.errors(include_url=False, include_input=False)[0]
      reason = f'{".".join(map(str, first["loc"])) or "all of it"}: {first["msg"]}'
    except (ValueError, RecursionError, OverflowError) as error:
      reason = str(error)
    raise self._failed(f'not a valid response: {reason}', 'malformed')

  def _failed(self, reason: str, fault: str, status: int | None = None,
              delay: float | None = None) -> RequestError:
    """Returns the error with this reason, on one line and without the key: servers quote what they refuse."""
    reason = reason.replace(self._token, '[key]') if self._token else reason
    reason = ''.join(character if character.isprintable() else ' ' for character in reason[:MAX_REASON])
    return self.error(self.url, ' '.join(reason.split()), fault, status, delay)

  def _pause(self, seconds: float = 0.0) -> None:
    """Sleeps before a retry, then until the rate allows another request."""
    if seconds:
      time.sleep(seconds)
    with self._lock:
      now = time.monotonic()
      self._last_turn = max(now, self._last_turn + self._gap)
      wait = self._last_turn - now
    if wait:
      time.sleep(wait)

  def _attempt(self, method: str, address: httpx.URL, content: bytes, deadline: float, limit: int) -> bytes:
    """Returns the body of a successful response."""
    seconds = max(deadline - time.monotonic(), 0.01)
    try:
      receiving = self._receive(method, address, content, seconds, limit)
      response, body = asyncio.run_coroutine_threadsafe(receiving, _event_loop()).result()
    except TimeoutError as error:
      raise self._failed(f'no complete response within {self._timeout:g} s', 'timeout', delay=0.0) from error
    except httpx.TransportError as error:
      raise self._failed(f'{type(error).__name__}: {error}', 'connection', delay=0.0) from error
    except httpx.HTTPError as error:
      raise self._failed(f'{type(error).__name__}: {error}', 'malformed') from error
    if len(body) > limit:
      raise self._failed(f'the response is longer than {limit} bytes', 'too_long')
    if (encoding := response.headers.get('content-encoding', 'identity')) != 'identity':
      raise self._failed(f'not a valid response: {encoding!r}, which was not asked for', 'malformed')
    if response.is_success:
      return body
    status, text = response.status_code, body.decode(errors='replace')
    reason = f'status {status}: {text}' + (self._hint if status == 401 else '')
    if response.is_server_error or status in (408, 425, 429):
      raise self._failed(reason, 'server', status, _retry_after(response.headers.get('retry-after', '')))
    raise self._failed(reason, 'refused', status)

  async def _receive(self, method: str, address: httpx.URL, content: bytes, seconds: float,
                     limit: int) -> tuple[httpx.Response, bytes]:
    """Returns the response and its body as it was sent, no more than `limit` bytes and one chunk."""
    body = bytearray()
    async with asyncio.timeout(seconds), self._http.stream(method, address, content=content) as response:
      async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
          break
    return response, bytes(body)


def _event_loop() -> asyncio.AbstractEventLoop:
  """Returns the running event loop of all clients."""
  with _STARTING:
    return _start_loop()


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, daemon=True, name='http').start()
  return loop


def parse_url(url: str | httpx.URL) -> httpx.URL:
  """Returns the address. Raises ValueError if it is none of HTTP's."""
  try:
    address = httpx.URL(url)
  except httpx.InvalidURL:
    address = httpx.URL()
  if address.scheme not in ('http', 'https') or not address.host:
    raise ValueError(f'not an http address: {str(url)!r}')
  return address


def parse_json(content: bytes) -> Any:
  """Decodes JSON, with '?' for half a surrogate pair, which passes JSON and would break a tokenizer.

  Raises ValueError, also for so many values in so few bytes that they would take many times the memory.
  """
  if sum(map(content.count, (b'[', b'{', b','))) > max(FEW_VALUES, len(content) // BYTES_PER_VALUE):
    raise ValueError('it holds more values than text')
  return json.loads(json.dumps(json.loads(content), ensure_ascii=False).encode('utf-8', 'replace'))


def secret_from_env(variable: str) -> str | None:
  """Returns the token or key that an environment variable holds; None if it is not set or empty."""
  return check_secret(os.environ.get(variable) or None, f'the key in {variable}')


def check_secret(secret: str | None, name: str) -> str | None:
  """Returns `secret`. Raises ValueError, without showing it, if it cannot stand in a header."""
  if secret and not (secret.isascii() and secret.isprintable() and ' ' not in secret):
    raise ValueError(f'{name} must be printable ASCII without blanks or line ends')
  return secret


def _retry_after(value: str) -> float:
  """Returns the seconds of a `Retry-After` header, which holds a number of them or a date.

  0 for anything else.
  """
  if value.strip().isdecimal():
    return float(value)
  try:
    return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
  except (ValueError, OverflowError):
    return 0.0
