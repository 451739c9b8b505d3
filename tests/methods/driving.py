"""Drives `grow` without a sampler: the test says what the policy writes and what the tools reply, and sees
what was requested."""

import sys

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, search_r1
from jaxsearch.sampler.requests import LENGTH, Ask, Generate, RunPython, Score, Search, ToolFailure, Tools
from jaxsearch.tools.calls import ToolCall
from jaxsearch.trees import grammars
from jaxsearch.trees.grammar import SEARCH_R1
from jaxsearch.trees.tree import Role, Tree

QUESTION = Question('q1', 'Who wrote it?', ('Ada Lovelace', 'Lovelace'))
SEARCH = '<think>hm</think><search> the author </search>'
ANSWER = '<answer> Ada </answer>'
FOUND = (Document('1', 'Title', 'text'),)


class Letters:
  """A tokenizer of bytes."""
  special_tokens = ('<|end|>',)
  eos_ids = ()
  encode = staticmethod(lambda text: list(text.encode()))
  decode = staticmethod(lambda ids: bytes(ids).decode())


def segments(tree):
  """Returns the policy's spans that have tokens."""
  return [node for node in tree.nodes(Role.POLICY) if node.tokens]


def context(step=1):
  return Context(step, np.random.default_rng(step), {})


def drive(said, found=FOUND, stops=None, question=QUESTION, grow=search_r1.grow, asked=None, printed='',
          scored=None,
          logprobs=None, seed=0, template='world', speech=None, **settings):
  """Grows a tree; returns (tree, requests, observations). A list of requests is served at once, and recorded
  one by one.

  Args:
    said: the spans that the policy writes, in the order in which the method requests them; it must request
      them all.
    found, asked, printed, scored: the reply to every Search, Ask, RunPython and Score, or a function of the
      request. A `scored` that is no function is the log-probability of every token of every continuation.
    logprobs: for each span the log-probability of all of its tokens; by default spans have none.
    stops: why each span ends; by default the stop string at its end, or LENGTH.
    speech: the tree's grammar; by default that of the tags of the method that `grow` is of.
    settings: arguments of `grow`.
  """
  tags = getattr(sys.modules.get(getattr(grow, '__module__', '')), 'TAGS', SEARCH_R1)
  speech = speech or grammars.of_tags(Letters(), tags)
  tree = Tree(speech.tokenizer, question, np.random.default_rng(seed), speech)
  requests, spans, reasons, chances = [], list(said), list(stops or ()), list(logprobs or ())

  def serve(request):
    requests.append(request)
    reply = {Search: found, Ask: asked, RunPython: printed, Score: scored}.get(type(request))
    match request:
      case Generate():
        node = request.node.append(spans.pop(0), Role.POLICY)
        node.sampler_logprobs = [chances.pop(0)] * len(node.tokens) if chances else None
        ends = [*(end for end in request.stop if node.text.endswith(end)), LENGTH]
        node.stop = reasons.pop(0) if reasons else ends[0]
        return node
      case ToolCall() if not isinstance(request, Search | RunPython):
        return request.run(Tools())
      case _ if callable(reply):
        return reply(request)
      case Search() if not isinstance(reply, ToolFailure):
        return list(reply)
      case Score():
        return [[reply] * len(tree.tokenizer.encode(text)) for text in request.continuations]
    return reply

  growth, reply = grow(question, tree, template=template, **settings), None
  while True:
    try:
      wanted = growth.send(reply)
    except StopIteration:
      assert not spans, f'the method did not request {spans}'
      return tree, requests, [node.text for node in tree.nodes(Role.OBSERVATION)]
    reply = [serve(request) for request in wanted] if isinstance(wanted, list) else serve(wanted)
