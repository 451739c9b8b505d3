"""The HTTP client of every tool behind a server: posts JSON and reads JSON back, within bounds.

Failures that may pass (a broken connection, a timeout, 408, 425, 429, 5xx) are retried with jittered exponential backoff,
not before the server's `Retry-After`, all attempts within one deadline. Everything else, and a response of an unexpected
shape, is an error at once. Errors name the URL and show no key.
"""

import email.utils
import json
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pydantic
import tenacity

MAX_RESPONSE_BYTES = 64 * 2**20
T = TypeVar('T')


class RequestError(RuntimeError):
  """A request without a usable response; `url`, `reason` and `status` (None without one) say where and why.

  `delay` is set on an attempt that may be retried: the seconds that the server asks for, else 0.
  """

  kind = 'request'

  def __init__(self, url: str, reason: str, status: int | None = None, delay: float | None = None):
    super().__init__(f'{self.kind} at {url} failed: {reason}')
    self.url, self.reason, self.status, self.delay = url, reason, status, delay


class JsonClient:
  """Posts to one address; may be called from several threads. A subclass names its `error` and a `default_path`.

  Args:
    url: the whole address; without a path, `default_path` is meant.
    timeout: seconds for one `post`, all attempts together.
    attempts: at most, the first one included.
    backoff: seconds before the second attempt, doubled for each further one (up to 5), plus jitter.
    token: a token or key sent with every request, and cut out of errors that quote the server.
    token_header: 'authorization' sends it as a bearer token, any other header as it is.
    rate: requests started per second, by all threads and retries included; None is any number. Waiting for the first
      turn does not count towards the timeout.

  Raises ValueError for another address than HTTP's, numbers out of range, and a token that cannot stand in a header.
  """

  error: type[RequestError] = RequestError
  default_path = ''
  _hint = ''  # why a request may be unauthorised

  def __init__(self, url: str | httpx.URL, *, timeout: float = 30.0, attempts: int = 4, backoff: float = 0.2,
               token: str | None = None, token_header: str = 'authorization', rate: float | None = None):
    address = parse_url(url)
    if timeout <= 0 or attempts < 1 or (rate is not None and rate <= 0):
      raise ValueError(f'timeout={timeout} and rate={rate} must be positive and attempts={attempts} at least 1')
    if self.default_path and address.path in ('', '/'):
      address = address.copy_with(path=self.default_path)
    # Errors end up in logs and observations: no password, no query string in them.
    self.url = f'{address.scheme}://{address.netloc.decode()}{address.path}'
    self._address, self._timeout, self._attempts, self._backoff = address, timeout, attempts, backoff
    self._token = check_secret(token, 'a token')
    self._gap, self._last_turn, self._lock = 1 / rate if rate else 0.0, float('-inf'), threading.Lock()
    headers = {'content-type': 'application/json'}
    if token:
      headers[token_header] = f'Bearer {token}' if token_header == 'authorization' else token
    # A proxy cannot reach this machine's own server.
    self._http = httpx.Client(headers=headers, trust_env=not re.fullmatch(r'localhost|127(\.\d+){3}|::1', address.host))

  def post(self, body: object, parse: Callable[[Any], T]) -> T:
    """What `parse` makes of the JSON of the response; it raises ValueError, or pydantic's, if that has another shape.

    Raises the client's `error`: no response in time, a refusal, or a response of another shape.
    """
    backoff, jitter = tenacity.wait_exponential(self._backoff, max=5.0), tenacity.wait_random(0, self._backoff)
    retrying = tenacity.Retrying(
      stop=tenacity.stop_after_attempt(self._attempts) | tenacity.stop_before_delay(self._timeout),
      wait=lambda state: max(backoff(state), state.outcome.exception().delay) + jitter(state),
      sleep=self._pause, retry=tenacity.retry_if_exception(lambda error: getattr(error, 'delay', None) is not None), reraise=True)
    self._pause()
    try:
      return parse(parse_json(retrying(self._attempt, json.dumps(body).encode(), time.monotonic() + self._timeout)))
    except self.error as failure:
      if failure.delay is None:
        raise
      attempts = retrying.statistics['attempt_number']
      raise self.error(self.url, f'{failure.reason} (attempts: {attempts})', failure.status) from failure
    except pydantic.ValidationError as error:
      first = error.errors(include_url=False)[0]
      reason = f'{".".join(map(str, first["loc"])) or "all of it"}: {first["msg"]}'
      raise self.error(self.url, f'not a valid response: {reason}') from error
    except (ValueError, RecursionError) as error:
      raise self.error(self.url, f'not a valid response: {error}') from error

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

  def _attempt(self, content: bytes, deadline: float) -> bytes:
    """The body of a successful response."""
    received = bytearray()
    try:
      with self._http.stream('POST', self._address, content=content, timeout=max(deadline - time.monotonic(), 0.01)) as response:
        for chunk in response.iter_bytes():
          received += chunk
          if len(received) > MAX_RESPONSE_BYTES:
            raise self.error(self.url, f'the response is longer than {MAX_RESPONSE_BYTES} bytes')
          if time.monotonic() > deadline:  # httpx limits the wait for each chunk, not for all of them
            raise self.error(self.url, f'no complete response within {self._timeout:g} s', delay=0.0)
    except httpx.TimeoutException as error:
      raise self.error(self.url, f'no response within {self._timeout:g} s ({type(error).__name__})', delay=0.0) from error
    except httpx.HTTPError as error:
      delay = 0.0 if isinstance(error, httpx.TransportError) else None
      raise self.error(self.url, f'{type(error).__name__}: {error}', delay=delay) from error
    if response.is_success:
      return bytes(received)
    status, text = response.status_code, received.decode(errors='replace')
    if self._token:  # some servers quote the key that they refuse
      text = text.replace(self._token, '[key]')
    reason = f'status {status}: {text[:200]}' + (self._hint if status == 401 else '')
    retried = response.is_server_error or status in (408, 425, 429)
    raise self.error(self.url, reason, status, _retry_after(response.headers.get('retry-after', '')) if retried else None)


def parse_url(url: str | httpx.URL) -> httpx.URL:
  """The address; ValueError if it is none of HTTP's."""
  try:
    address = httpx.URL(url)
  except httpx.InvalidURL:
    address = httpx.URL()
  if address.scheme not in ('http', 'https') or not address.host:
    raise ValueError(f'not an http address: {str(url)!r}')
  return address


def parse_json(content: bytes) -> Any:
  """Decodes JSON, with '?' for half a surrogate pair, which passes JSON and would break a tokenizer. Raises ValueError."""
  return json.loads(json.dumps(json.loads(content), ensure_ascii=False).encode('utf-8', 'replace'))


def secret_from_env(variable: str) -> str | None:
  """The token or key that an environment variable holds; None if it is not set or empty. Raises as `check_secret`."""
  return check_secret(os.environ.get(variable) or None, f'the key in {variable}')


def check_secret(secret: str | None, name: str) -> str | None:
  """`secret`, if it can stand in a header. Raises ValueError, without showing it, if it cannot."""
  if secret and not (secret.isascii() and secret.isprintable() and ' ' not in secret):
    raise ValueError(f'{name} must be printable ASCII without blanks or line ends')
  return secret


def _retry_after(value: str) -> float:
  """Seconds of a `Retry-After` header, which holds a number of them or a date; 0 for anything else."""
  if value.strip().isdecimal():
    return float(value)
  try:
    return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
  except (ValueError, OverflowError):
    return 0.0
