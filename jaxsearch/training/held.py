"""Episodes that are not finished, as checkpoints hold them: by what their generators were told.

A generator cannot be saved. Given the same replies a fresh one asks for the same things and makes the same
tree, so `replay` brings it to where it was, and checks what it asks on the way.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from jaxsearch.data.corpus import Document
from jaxsearch.rewards.judge import Reasoned
from jaxsearch.sampler.driver import Episode
from jaxsearch.sampler.requests import Request, ToolFailure
from jaxsearch.tools.calls import NoRoom, is_documents
from jaxsearch.trees.tree import Node, Role


def to_json(request: Request, reply: Any) -> list:
  """Returns [digest of what was asked, reply] as JSON; take it before the generator goes on.

  Raises TypeError for a reply that is no span, text, number, failure, document, or list of these.
  """
  return [digest(request), _encode(reply)]


def digest(request: Request) -> str:
  """Identifies a request by its kind, its context, and those of its fields that are plain values."""
  plain = {name: value for name, value in vars(request).items()
           if isinstance(value, (str, int, float, tuple))}
  context = request.node.path_tokens() if request.node else None
  said = repr((type(request).__name__, getattr(request, 'query', ''), plain, context))
  return hashlib.blake2b(said.encode(errors='surrogatepass'), digest_size=8).hexdigest()


def _encode(reply: Any) -> Any:
  match reply:
    case Node():
      return {'span': reply.tokens[:], 'logprobs': reply.sampler_logprobs and reply.sampler_logprobs[:],
              'stop': reply.stop, 'data': dict(reply.data), 'place': reply.parent.children.index(reply)}
    case Reasoned():
      return {'score': int(reply), 'reason': reply.reason}
    case ToolFailure():
      return {'failure': dataclasses.astuple(reply)}
    case [*_] if is_documents(reply) and (reply or isinstance(reply, NoRoom)):
      return {'documents': list(map(dataclasses.asdict, reply))}
    case [*items]:
      return list(map(_encode, items))
    case None | str() | int() | float():
      return reply
  raise TypeError(f'train.carry: a reply {type(reply).__name__} cannot be saved with an unfinished tree')


def _decode(saved: Any, request: Request) -> Any:
  match saved:
    case {'span': tokens}:
      node = request.node.append(tokens, Role.POLICY, sampler_logprobs=saved['logprobs'])
      node.stop, node.data = saved['stop'], dict(saved['data'])
      return node
    case {'score': score}:
      return Reasoned(score, saved['reason'])
    case {'failure': failure}:
      return ToolFailure(*failure)
    case {'documents': documents}:
      return [Document(**document) for document in documents] or NoRoom()
    case [*items]:
      return [_decode(item, request) for item in items]
  return saved


def episode_to_json(episode: Episode, told: Sequence[list]) -> dict[str, Any] | None:
  """Returns what `replay` needs of an unfinished episode; `told` are `to_json` of all that it was told."""
  if episode.done:
    return None
  holds = [to_json(*pair) for pair in zip(episode.asked, episode.replies or ())]
  return {'told': [*told, *holds], 'requests': episode.requests, 'calls': episode.calls}


def replay(episode: Episode, saved: dict[str, Any], observer: Callable[[Any, Request, Any], None]) -> list:
  """Brings a new episode to where a saved one was, with the last replies held; returns what it was told.

  Raises ValueError where the generator asks for something else than the saved one did.
  """
  left, reply, told = saved['told'], None, []
  while left:
    yielded = episode.growth.send(reply)
    episode.several = isinstance(yielded, (list, tuple))
    asked = yielded if episode.several else [yielded]
    now, left = left[:len(asked)], left[len(asked):]
    if [digest(request) for request in asked] != [name for name, _ in now]:
      raise ValueError(f'question {episode.tree.question.id}: an unfinished tree asks for other things than '
                       'when it was saved; this version of its method or tools is another')
    place = lambda i: now[i][1].get('place', 0) if isinstance(now[i][1], dict) else 0
    in_turn = sorted(range(len(asked)), key=place)  # spans in the order in which they were appended
    replies = {i: _decode(now[i][1], asked[i]) for i in in_turn}
    episode.asked, episode.replies = asked, [replies[i] for i in range(len(asked))]
    if left:
      told += now
      for request, each in zip(asked, episode.replies):
        observer(episode.tree, request, each)
      reply = episode.replies if episode.several else episode.replies[0]
  episode.requests, episode.calls = saved['requests'], saved['calls']
  return told
