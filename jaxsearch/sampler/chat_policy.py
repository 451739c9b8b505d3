"""The policy of a rollout behind an OpenAI-compatible chat server, for methods that need text alone.

`ChatServer` stands in for the engine of an `Agent`. Spans become messages: what the policy wrote is the
assistant's, prompts and observations are the user's. A tokenizer of ours counts tokens, so that limits on
context and observations hold; the server counts by its own.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence

import jax

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.driver import Episode, Pending, Schedule
from jaxsearch.sampler.requests import END, LENGTH, Generate, NoLogprobs, Sampling
from jaxsearch.tools.chat import Chat
from jaxsearch.trees.tree import Node, Role, Stop

MAX_STOPS = 4  # stop strings of a request; OpenAI takes no more


@dataclasses.dataclass(frozen=True)
class ChatServer:
  """Stands in for the engine of an `Agent`."""
  chat: Chat
  model: str  # its name at the server
  tokenizer: Tokenizer
  length: int  # tokens of the longest path
  concurrency: int  # questions in flight

  def decoding(self, key: jax.Array, sampling: Sampling, schedule: Schedule) -> 'ChatDecoding':
    """Returns the policy of one rollout."""
    return ChatDecoding(self, sampling, schedule)

  def generate(self, request: Generate, sampling: Sampling, seed: int) -> Node:
    """Returns the span after `request.node`. Raises ChatError if the server fails."""
    room = self.length - request.node.length
    if room <= 0:
      node = request.node.append([], Role.POLICY)
      node.stop = Stop.CONTEXT_FULL
      return node
    body = {'model': self.model, 'messages': messages(request.node), 'temperature': sampling.temperature,
            'max_tokens': min(request.max_tokens, room)}
    body |= {'stop': list(request.stop[:MAX_STOPS])} if request.stop else {}
    body |= {'top_p': sampling.top_p} if sampling.top_p < 1 else {}
    body |= {'seed': seed} if sampling.temperature > 0 else {}
    text, stop = ended(*self.chat.post(body, _reply), request.stop)
    end = [*self.tokenizer.eos_ids[:1]] if stop == END else []  # belongs to a span that ended itself
    node = request.node.append(self.tokenizer.encode(text) + end, Role.POLICY)
    node.stop = Stop.CONTEXT_FULL if stop == LENGTH and room < request.max_tokens else stop
    return node


class ChatDecoding(contextlib.nullcontext):
  """One rollout by a server, as a `Schedule` drives it: spans are calls on threads, like those of tools."""
  deterministic, episode_deadline = False, math.inf
  room = True  # replies wait for nothing
  busy = decodes = False
  evicted = seconds_waited = 0

  def __init__(self, server: ChatServer, sampling: Sampling, schedule: Schedule):
    super().__init__()
    self.server, self.sampling, self.schedule, self.length = server, sampling, schedule, server.length
    self.active = 0  # episodes under way

  def claim(self, waiting: collections.deque[Episode]) -> Episode | None:
    """Takes the first of the episodes that wait, unless enough are under way."""
    self.active += (free := self.active < self.server.concurrency)
    return waiting.popleft() if free else None

  def release(self, episode: Episode) -> None:
    """Notes that an episode has ended."""
    self.active -= 1

  def generate(self, pending: Pending) -> None:
    """Asks the server, with a seed for each request: samples of one question differ, and a repeated run does
    not."""
    episode, request = pending.episode, pending.request
    episode.requests += 1
    seed = (episode.number * 1000 + episode.requests + episode.calls) % 2**31
    span = functools.partial(self.server.generate, request, request.sampling(self.sampling), seed)
    self.schedule.start(pending, span, 'spans', self.server.concurrency)

  def score(self, pending: Pending) -> None:
    """Refuses: a chat server gives no log-probabilities."""
    raise NoLogprobs

  def place(self) -> list:
    """Does nothing: a server has no cache of ours."""
    return []


def messages(node: Node) -> list[dict[str, str]]:
  """Returns the path to the end of `node` as messages that take turns."""
  turns = []
  for span in node.path():
    role = 'assistant' if span.role in (Role.POLICY, Role.CONTEXT) else 'user'
    text = span.text_without_end if role == 'assistant' else span.text
    if turns and turns[-1]['role'] == role:
      turns[-1]['content'] += text
    elif text:
      turns.append({'role': role, 'content': text})
  return turns


def ended(text: str, reason: str, matched: object, stops: Sequence[str]) -> tuple[str, str]:
  """Returns (text, why it ends) of a reply as a `Generate` has it: up to the end of the first stop string.

  Servers cut the stop string off. It is put back where they name it (vLLM, SGLang), and where it is the
  closing tag of the element that is open at the end. Otherwise the text stays without it and counts as ended
  by the policy.
  """
  places = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
  if places:  # a server that does not stop
    end, stop = min(places)
    return text[:end], stop
  if reason == 'length':
    return text, LENGTH
  tags = {stop: text.rfind(stop.replace('</', '<', 1)) for stop in stops if stop.startswith('</')}
  stop = matched if matched in stops else max(tags, key=tags.get, default=None)
  if stop is None or (stop != matched and tags[stop] < 0):
    return text, END
  return text + stop, stop


def _reply(response: object) -> tuple[str, str, object]:
  """Reads (text, finish_reason, stop string if the server names it); ValueError without a text."""
  match response:
    case {'choices': [{'message': {'content': str(text)}, **rest}, *_]}:
      return text, str(rest.get('finish_reason')), rest.get('stop_reason', rest.get('matched_stop'))
  raise ValueError("no text in 'choices[0].message.content'")
