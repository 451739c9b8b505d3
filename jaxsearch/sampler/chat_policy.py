"""The policy of a rollout behind an OpenAI-compatible chat server, for methods that need text alone.

`ChatServer` stands in for the engine of an `Agent`. Spans become messages: what the policy wrote is the
assistant's, prompts and observations are the user's. With `native.ServerCalls` the server is sent the tools,
and their results as tool messages. A tokenizer of ours counts tokens, so that limits on context and
observations hold; the server counts by its own.
"""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.driver import Pending, Schedule
from jaxsearch.sampler.requests import END, LENGTH, Generate, NoLogprobs, Sampling
from jaxsearch.sampler.served import ServedDecoding, Span
from jaxsearch.tools.chat import Chat
from jaxsearch.trees.grammar import FENCE
from jaxsearch.trees.native import ServerCalls, text_of
from jaxsearch.trees.tree import Node, Role

MAX_STOPS = 4  # stop strings of a request; OpenAI takes no more


@dataclasses.dataclass(frozen=True)
class ChatServer:
  """Stands in for the engine of an `Agent`."""
  chat: Chat
  model: str  # its name at the server
  tokenizer: Tokenizer
  length: int  # tokens of the longest path
  slots: int  # questions in flight
  figures, episode_deadline = types.MappingProxyType({}), math.inf
  episodes = property(lambda self: self.slots)

  def decoding(self, key: jax.Array, sampling: Sampling, schedule: Schedule) -> 'ChatDecoding':
    """Returns the policy of one rollout."""
    return ChatDecoding(self, key, sampling, schedule)

  def generate(self, request: Generate, most: int, sampling: Sampling, seed: int) -> Span:
    """Returns the span after `request.node`. Raises ChatError if the server fails."""
    grammar = request.node.tree.grammar
    calls = isinstance(grammar, ServerCalls)
    body = {'model': self.model, 'messages': messages(request.node), 'temperature': sampling.temperature,
            'max_tokens': most}
    body |= {'stop': list(request.stop[:MAX_STOPS])} if request.stop else {}
    body |= {'seed': seed} if sampling.temperature > 0 else {}
    body |= {'tools': grammar.offered} if calls and grammar.tools else {}
    read = functools.partial(_reply, said=grammar.said if calls else text_of)
    text, stop = ended(*self.chat.post(body, read), request.stop)
    end = [*self.tokenizer.eos_ids[:1]] if stop == END else []  # belongs to a span that ended itself
    return Span(self.tokenizer.encode(text) + end, stop)


class ChatDecoding(ServedDecoding):
  """One rollout by a chat server."""

  def score(self, pending: Pending) -> None:
    """Refuses at once, before further requests are paid: a chat server gives no log-probabilities."""
    raise NoLogprobs


def messages(node: Node) -> list[dict[str, Any]]:
  """Returns the path to the end of `node` as messages; those of calls aside, they take turns."""
  turns, grammar = [], node.tree.grammar
  for span in node.path():
    if isinstance(grammar, ServerCalls) and (own := grammar.messages(span)):
      turns += own
      continue
    authors = (Role.POLICY,) if isinstance(grammar, ServerCalls) else (Role.POLICY, Role.CONTEXT)
    role = 'assistant' if span.role in authors else 'user'
    text = span.text_without_end if role == 'assistant' else span.text
    if turns and turns[-1]['role'] == role:
      turns[-1]['content'] += text
    elif text:
      turns.append({'role': role, 'content': text})
  return turns


def ended(text: str, reason: str, matched: object, stops: Sequence[str]) -> tuple[str, str]:
  """Returns (text, why it ends) of a reply as a `Generate` has it: up to the end of the first stop string.

  Servers cut the stop string off. It is put back where they name it (vLLM, SGLang), and where it closes what
  is open at the end, see `_opened`. Otherwise the text stays without it and counts as ended by the policy.
  """
  places = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
  if places:  # a server that does not stop
    end, stop = min(places)
    return text[:end], stop
  if reason == 'length':
    return text, LENGTH
  opened = {stop: _opened(text, stop) for stop in stops}
  stop = matched if matched in stops else max(opened, key=opened.get, default=None)
  if stop is None or (stop != matched and opened[stop] < 0):
    return text, END
  return text + stop, stop


def _opened(text: str, stop: str) -> int:
  """Returns where the tag, block or bracket begins that `stop` closes; -1 where none is open at the end."""
  if stop.startswith('</'):
    return text.rfind(stop.replace('</', '<', 1))
  if stop == FENCE:
    fences = [fence.start() for fence in re.finditer(r'^```', text, re.MULTILINE)]
    return fences[-1] if len(fences) % 2 else -1
  if stop.startswith(']'):
    bracket = re.search(r'\[[^\]\n]*\Z', text)
    return bracket.start() if bracket else -1
  return -1


def _reply(response: object, said: Callable[[Mapping], str]) -> tuple[str, str, object]:
  """Reads (text, finish_reason, stop string if the server names it); ValueError without a message."""
  match response:
    case {'choices': [{'message': {**message}, **rest}, *_]}:
      return said(message), str(rest.get('finish_reason')), rest.get('stop_reason', rest.get('matched_stop'))
  raise ValueError("no 'choices[0].message'")
