"""Drives `grow` by hand: what the policy says is given, what the method asks for is recorded."""

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, search_r1
from jaxsearch.sampler.requests import LENGTH, Ask, Generate, ToolFailure
from jaxsearch.trees.tree import Role, Tree

QUESTION = Question('q1', 'Who wrote it?', ('Ada Lovelace', 'Lovelace'))
SEARCH = '<think>hm</think><search> the author </search>'
ANSWER = '<answer> Ada </answer>'


class Letters:
  """A tokenizer of bytes."""
  special_tokens = ('<|end|>',)
  eos_ids = ()
  encode = staticmethod(lambda text: list(text.encode()))
  decode = staticmethod(lambda ids: bytes(ids).decode())


def context(step=1):
  return Context(step, np.random.default_rng(step), {})


def drive(said, found=(Document('1', 'Title', 'text'),), stops=None, question=QUESTION, grow=search_r1.grow, asked=None,
          template='world', **settings):
  """Grows a tree for a policy that says these spans; returns (tree, requests, observations). `asked` answers every Ask."""
  tree = Tree(Letters(), question)
  growth = grow(question, tree, template=template, **settings)
  requests, reply, spans = [], None, list(said)
  while True:
    try:
      request = growth.send(reply)
    except StopIteration:
      assert not spans     # the method asked for all of them
      return tree, requests, [node.text for node in tree.nodes(Role.OBSERVATION)]
    requests.append(request)
    if isinstance(request, Generate):
      reply = request.node.append(spans.pop(0), Role.POLICY)
      reply.stop = stops[len(said) - len(spans) - 1] if stops else LENGTH
    elif isinstance(request, Ask):
      reply = asked
    else:
      reply = found if isinstance(found, ToolFailure) else list(found)
