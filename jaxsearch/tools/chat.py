"""Client of a server that speaks the chat protocol of OpenAI: vLLM, SGLang, llama.cpp, or a service that is paid.

`POST URL/chat/completions {"model", "messages", "temperature", "max_tokens"}`; the reply is the text of
`choices[0].message.content`. A `Chat` writes documents for `jaxsearch.tools.simulated` and can be a judge.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from jaxsearch.tools.cache import open_cache
from jaxsearch.tools.http_client import Poster, RequestError, key_from

Prompt = str | Sequence[Mapping[str, str]]  # of the user, or messages {'role', 'content'}


class ChatError(RequestError):
  """A prompt that got no usable reply; `url`, `reason` and `status` say from whom and why."""

  kind = 'chat'


class Chat:
  """Asks one model with one set of sampling parameters; may be called from several threads."""

  def __init__(self, url: str, model: str, *, temperature: float = 0.0, max_tokens: int = 512, timeout: float = 60.0,
               attempts: int = 5, backoff: float = 0.5, concurrency: int = 8, cache: str | os.PathLike | None = None,
               key_variable: str = 'OPENAI_API_KEY'):
    """Opens no connection yet.

    Args:
      url: the address that '/chat/completions' is put behind, such as 'http://127.0.0.1:8000/v1'.
      model: its name at the server.
      temperature, max_tokens: of every reply.
      timeout, attempts, backoff: of one `reply` once it has its turn, see `tools.post.Poster`.
      concurrency: requests under way at the same time; further ones wait for their turn.
      cache: file that keeps replies by prompt, model and sampling parameters; above temperature 0 too, so that a run
        that is repeated gets the same. None keeps nothing.
      key_variable: the environment variable that holds the API key. Without one none is sent: a server of one's own
        often wants none.
    """
    if not model:
      raise ValueError('a chat needs the name of a model')
    if concurrency < 1:
      raise ValueError(f'concurrency={concurrency} must be at least 1')
    key = key_from(key_variable)
    address = httpx.URL(url)
    self._poster = Poster(
      address.copy_with(path=address.path.rstrip('/') + '/chat/completions') if address.host else address, ChatError,
      'chat protocol', timeout=timeout, attempts=attempts, backoff=backoff, secret=key,
      headers={'authorization': f'Bearer {key}'} if key else {})
    self.url, self.model = self._poster.url, model
    self._settings = {'model': model, 'temperature': temperature, 'max_tokens': max_tokens}
    self._cache, self._concurrency, self._turns = open_cache(cache), concurrency, threading.Semaphore(concurrency)
    self._hint = '' if key else f' ({key_variable} holds no key)'

  def close(self) -> None:
    self._poster.close()

  def reply(self, prompt: Prompt) -> str:
    """The model's reply, which may be empty.

    Raises:
      ChatError: no reply in time, a refusal, or an answer that is not of the protocol.
    """
    messages = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    body = {**self._settings, 'messages': messages}
    return self._cache.answer(body, lambda: self._ask(body))

  def replies(self, prompts: Sequence[Prompt]) -> list[str | ChatError]:
    """The replies to all prompts, `concurrency` at a time; a `ChatError` stands where one failed."""
    def reply(prompt):
      try:
        return self.reply(prompt)
      except ChatError as error:
        return error

    with ThreadPoolExecutor(self._concurrency) as pool:
      return list(pool.map(reply, prompts))

  def _ask(self, body: dict) -> str:
    with self._turns:
      try:
        return self._poster.post(body, _text)
      except ChatError as error:
        if error.status != 401 or not self._hint:
          raise
        raise ChatError(error.url, error.reason + self._hint, error.status) from error


def _text(reply: object) -> str:
  """The text of an answer. Raises ValueError if there is none, as in a refusal or a call of a tool."""
  choices = reply.get('choices') if isinstance(reply, dict) else None
  first = choices[0] if isinstance(choices, list) and choices else None
  message = first.get('message') if isinstance(first, dict) else None
  content = message.get('content') if isinstance(message, dict) else None
  if not isinstance(content, str):
    raise ValueError("no text in 'choices[0].message.content'")
  return content.encode('utf-8', 'replace').decode()  # half a surrogate pair passes JSON and would break a tokenizer
