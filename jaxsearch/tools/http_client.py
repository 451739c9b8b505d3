"""Posting JSON to a server and getting JSON back: what the clients of servers share.

Faults that may pass (a connection that breaks, no reply in time, 429 and the like, 5xx) are tried again, after a
back-off with jitter and not before the server's `Retry-After`, all attempts within one deadline. Everything else, and
a reply of another shape than the client knows, is an error at once. Errors name the address and hold no key.
"""

from __future__ import annotations

import email.utils
import ipaddress
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx
import tenacity

MAX_REPLY_BYTES = 64 * 2**20
_RETRIED_STATUS = (408, 425, 429)  # and all 5xx
T = TypeVar('T')


class RequestError(RuntimeError):
  """A request that got no usable reply; `url`, `reason` and `status` (None without one) say from whom and why."""

  kind = 'request'

  def __init__(self, url: str, reason: str, status: int | None = None):
    super().__init__(f'{self.kind} at {url} failed: {reason}')
    self.url, self.reason, self.status = url, reason, status


class _Fault(Exception):
  """An attempt that failed; `after` is for how many seconds the server wants to be left alone."""

  def __init__(self, reason: str, status: int | None = None, *, passing: bool = False, after: float = 0.0):
    super().__init__(reason)
    self.reason, self.status, self.passing, self.after = reason, status, passing, after


class Poster:
  """Posts to one address; may be called from several threads.

  Args:
    url: the whole address.
    error: what is raised.
    protocol: the name of what the server should speak, for messages.
    timeout: seconds for one `post`, all attempts together.
    attempts: at most so many.
    backoff: seconds before the second attempt, doubled before each further one (up to 5), with jitter.
    headers: sent with every request.
    secret: the key in the headers, which is kept out of messages that quote the server.
    rate: requests begun per second at most, further attempts included; waiting for the first turn does not count as
      time of the request.
  """

  def __init__(self, url: str | httpx.URL, error: type[RequestError], protocol: str, *, timeout: float, attempts: int,
               backoff: float, headers: Mapping[str, str] | None = None, secret: str | None = None,
               rate: float | None = None):
    address = httpx.URL(url)
    if address.scheme not in ('http', 'https') or not address.host:
      raise ValueError(f'not an http address: {str(url)!r}')
    if timeout <= 0 or attempts < 1 or (rate is not None and rate <= 0):
      raise ValueError(f'timeout={timeout} and rate={rate} must be positive and attempts={attempts} at least 1')
    self._address, self._error, self._protocol = address, error, protocol
    # Messages end up in logs and observations: no password, no query string in them.
    self.url = f'{address.scheme}://{address.netloc.decode()}{address.path}'
    self._timeout, self._attempts, self._backoff, self._secret = timeout, attempts, backoff, secret
    self._turn = _Turns(rate).wait if rate else lambda: None
    self._client = httpx.Client(
      headers={**(headers or {}), 'content-type': 'application/json'},
      trust_env=not _is_loopback(address.host))  # a proxy cannot reach this machine's own server

  def close(self) -> None:
    self._client.close()

  def post(self, body: object, parse: Callable[[Any], T]) -> T:
    """What `parse` makes of the reply, decoded JSON; it raises ValueError if that has another shape.

    Raises:
      the `error` of this poster: no reply in time, a refusal, or a reply that is not of the protocol.
    """
    content = json.dumps(body).encode()
    backoff = tenacity.wait_exponential(self._backoff, max=5.0)
    jitter = tenacity.wait_random(0, self._backoff)
    retrying = tenacity.Retrying(
      stop=tenacity.stop_after_attempt(self._attempts) | tenacity.stop_before_delay(self._timeout),
      wait=lambda state: max(backoff(state), state.outcome.exception().after) + jitter(state),
      sleep=self._sleep, retry=tenacity.retry_if_exception(lambda e: isinstance(e, _Fault) and e.passing), reraise=True)
    self._turn()
    try:
      reply = retrying(self._attempt, content, time.monotonic() + self._timeout)
    except _Fault as fault:
      told = f' (attempts: {retrying.statistics["attempt_number"]})' if fault.passing else ''
      raise self._error(self.url, fault.reason + told, fault.status) from fault
    try:
      return parse(json.loads(reply))
    except (ValueError, RecursionError) as error:
      raise self._error(self.url, f'not an answer of the {self._protocol}: {error}') from error

  def _sleep(self, seconds: float) -> None:
    time.sleep(seconds)
    self._turn()

  def _attempt(self, content: bytes, deadline: float) -> bytes:
    """The body of a good reply."""
    left = max(deadline - time.monotonic(), 0.01)
    chunks, size = [], 0
    try:
      with self._client.stream('POST', self._address, content=content, timeout=left) as response:
        for chunk in response.iter_bytes():
          chunks.append(chunk)
          size += len(chunk)
          if size > MAX_REPLY_BYTES:
            raise _Fault(f'the reply is longer than {MAX_REPLY_BYTES} bytes')
          if time.monotonic() > deadline:  # httpx limits the wait for each piece, not for all of them
            raise _Fault(f'no whole reply within {self._timeout:g} s', passing=True)
    except httpx.TimeoutException as error:
      raise _Fault(f'no reply within {self._timeout:g} s ({type(error).__name__})', passing=True) from error
    except httpx.TransportError as error:
      raise _Fault(f'{type(error).__name__}: {error}', passing=True) from error
    except httpx.HTTPError as error:
      raise _Fault(f'{type(error).__name__}: {error}') from error
    reply = b''.join(chunks)
    if response.is_success:
      return reply
    text = reply.decode(errors='replace')
    if self._secret:  # some servers quote the key that they refuse
      text = text.replace(self._secret, '[key]')
    status = response.status_code
    raise _Fault(f'status {status}: {text[:200]}', status, passing=response.is_server_error or status in _RETRIED_STATUS,
                 after=_retry_after(response.headers.get('retry-after', '')))


class _Turns:
  """Gives out moments to begin, `rate` a second."""

  def __init__(self, rate: float):
    self._gap, self._last, self._lock = 1 / rate, float('-inf'), threading.Lock()

  def wait(self) -> None:
    with self._lock:
      now = time.monotonic()
      self._last = max(now, self._last + self._gap)
      seconds = self._last - now
    time.sleep(seconds)


def key_from(variable: str) -> str | None:
  """The key that an environment variable holds; None if it is not set or empty."""
  return checked_secret(os.environ.get(variable) or None, f'the key in {variable}')


def checked_secret(secret: str | None, name: str) -> str | None:
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


def _is_loopback(host: str) -> bool:
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:  # a name, not a number
    return False
