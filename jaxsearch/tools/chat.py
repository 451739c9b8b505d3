"""Client of a server that speaks OpenAI's chat protocol: vLLM, SGLang, llama.cpp, or a paid service.

`POST URL/chat/completions {"model", "messages", "temperature", "max_tokens"}`; the reply is the text of
`choices[0].message.content`. A `Chat` can be a judge, a reader, or the writer of `jaxsearch.tools.simulated`.
"""

import collections
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxsearch.tools.cache import Cache
from jaxsearch.tools.http_client import MAY_PASS, JsonClient, RequestError, parse_url, secret_from_env

KEY = 'OPENAI_API_KEY'  # the environment variable of the key; many local servers want none
Prompt = str | Sequence[Mapping[str, str]]  # of the user, or messages {'role', 'content'}


class ChatError(RequestError):
  kind = 'chat'


class Chat(JsonClient):
  """Prompts one model with one set of sampling parameters; may be called from several threads.

  Args:
    url: the address that '/chat/completions' is appended to, such as 'http://127.0.0.1:8000/v1', or several,
      divided by commas.
    concurrency: prompts of one `replies` in flight.
    cache: file that keeps replies by url, prompt, model and sampling parameters, above temperature 0 too.
    options: of `JsonClient`; the timeout is that of one `reply`.
  """

  error = ChatError

  def __init__(self, url: str, model: str, *, temperature: float = 0.0, max_tokens: int = 512,
               concurrency: int = 8, cache: str | os.PathLike | None = None, **options):
    if not model:
      raise ValueError('a chat needs the name of a model')
    key, servers = secret_from_env(KEY), map(parse_url, url.split(','))
    addresses = [server.copy_with(path=server.path.rstrip('/') + '/chat/completions') for server in servers]
    super().__init__(addresses, token=key, **{'timeout': 60.0, 'attempts': 5, 'backoff': 0.5} | options)
    self._settings = {'model': model, 'temperature': temperature, 'max_tokens': max_tokens}
    self._concurrency, self._cache = concurrency, Cache(cache)
    self._in_a_row, self._again = collections.deque(maxlen=2 * concurrency), 0.0  # failures; see `replies`
    self._reasons = False  # whether it turned out to be an OpenAI reasoning model
    self._hint = '' if key else f' ({KEY} holds no key)'

  def reply(self, prompt: Prompt, seed: int | None = None) -> str:
    """Returns the model's reply, which may be empty. `seed` goes to the server, above temperature 0.

    Raises ChatError.
    """
    messages = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
    body = {**self._settings, 'messages': messages}
    if seed is not None and self._settings['temperature'] > 0:
      body['seed'] = seed
    return self._cache.get([self.identity, body], lambda: self.post(body, _text))

  def post(self, body: Mapping[str, Any], parse: Callable[[Any], Any]) -> Any:
    """Posts as `JsonClient` does. Once an OpenAI reasoning model refuses, reposts and goes on in its form:

    `max_completion_tokens` (thoughts included) for `max_tokens`, and no temperature: it always samples.
    """
    if not self._reasons:
      try:
        return super().post(body, parse)
      except ChatError as error:
        if error.status != 400 or 'max_completion_tokens' not in error.reason:
          raise
      self._reasons = True
      warnings.warn(f'{body["model"]} takes no temperature, and thinks within max_tokens', stacklevel=2)
    taken = {name: value for name, value in body.items() if name not in ('max_tokens', 'temperature')}
    return super().post(taken | {'max_completion_tokens': body['max_tokens']}, parse)

  def replies(self, prompts: Sequence[Prompt],
              seeds: Sequence[int | None] | None = None) -> list[str | ChatError]:
    """Returns the replies to all prompts, `concurrency` at a time; a `ChatError` stands where one failed.

    After twice as many failures in a row that may pass, prompts fail at once for a minute: a server that is
    gone would hold a step for hours.
    """
    def reply(prompt, seed):
      failed = list(self._in_a_row)
      if len(failed) == self._in_a_row.maxlen and time.monotonic() < self._again:
        return failed[-1]
      try:
        text = self.reply(prompt, seed)
      except ChatError as error:
        if error.fault in MAY_PASS:
          self._in_a_row.append(error)
          self._again = time.monotonic() + 60
        return error
      self._in_a_row.clear()
      return text

    with ThreadPoolExecutor(self._concurrency) as pool:
      return list(pool.map(reply, prompts, seeds or [None] * len(prompts)))


def _text(response: object) -> str:
  """Returns the text of a response. Raises ValueError if there is none, as in a refusal or a tool call."""
  match response:
    case {'choices': [{'message': {'content': str(text)}}, *_]}:
      return text
  raise ValueError("no text in 'choices[0].message.content'")
