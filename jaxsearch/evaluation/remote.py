"""A policy behind an OpenAI-compatible chat server, for methods that need text alone.

`rollout` stands in for the one of the sampler: it drives the same `grow`, a thread for each question in flight. Spans become
messages: what the policy wrote is the assistant's, prompts and observations are the user's. A tokenizer of ours counts tokens, so
that limits on context and observations hold; the server counts by its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.data.questions import Question
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler import requests
from jaxsearch.sampler.requests import END, LENGTH, Generate, Sampling, ToolFailure
from jaxsearch.sampler.rollout import Agent
from jaxsearch.tools.chat import Chat
from jaxsearch.trees.tree import Node, Role, Stop, Tree

MAX_STOPS = 4  # stop strings of a request; OpenAI takes no more


@dataclasses.dataclass(frozen=True)
class Server:
  """What an `Agent` has for an engine: client, name of the model, the tokenizer that counts, tokens of the longest path, and
  questions in flight."""
  chat: Chat
  model: str
  tokenizer: Tokenizer
  length: int
  concurrency: int


def open_agent(config: ml_collections.ConfigDict, url: str, model: str, corpus: str = '') -> Agent:
  """The agent of a config with the model `model` at `url` for its policy."""
  chat = Chat(url, model, timeout=300.0)  # a large model thinks for minutes
  server = Server(chat, model, setup.load_tokenizer(config), config.sampler.length, config.sampler.slots)
  raw = {'chat': False} if 'chat' in config.grow else {}  # the server has the chat template
  return setup.make_agent(config, server, setup.open_tools(config, corpus), **dict(config.eval.grow) | raw)


def rollout(agent: Agent, questions: Sequence[Question], key, *, sampling: Sampling, numbers: Sequence[int],
            on_progress: Callable[[int, int, dict], object]) -> list[Tree]:
  """Grows a tree for each question; as `sampler.rollout.rollout`, without its metrics.

  Raises ChatError if the server fails, ValueError for a method that needs log-probabilities.
  """
  words = np.asarray(jax.random.key_data(key)).ravel().tolist()
  trees = [Tree(agent.engine.tokenizer, question, np.random.default_rng([*words, number]))
           for question, number in zip(questions, numbers, strict=True)]
  pool = ThreadPoolExecutor(agent.engine.concurrency)
  try:
    futures = [pool.submit(_grow, agent, tree, sampling, number) for tree, number in zip(trees, numbers)]
    for done, future in enumerate(as_completed(futures), start=1):
      future.result()
      on_progress(done, len(trees), {})
  finally:
    pool.shutdown(cancel_futures=True)
  return trees


def _grow(agent: Agent, tree: Tree, sampling: Sampling, number: int) -> None:
  growth, reply, asked = agent.grow(tree.question, tree), None, 0
  while True:
    try:
      yielded = growth.send(reply)
    except StopIteration:
      return
    replies = []
    for request in yielded if isinstance(yielded, (list, tuple)) else [yielded]:
      asked += 1
      # A seed for each request, so that samples of one question differ and a repeated run does not.
      replies.append(_serve(agent, request, sampling, number, asked))
    reply = replies if isinstance(yielded, (list, tuple)) else replies[0]


def _serve(agent: Agent, request: Any, sampling: Sampling, number: int, asked: int) -> Any:
  server, tools = agent.engine, agent.tools
  match request:
    case Generate():
      return _generate(server, request, request.sampling(sampling), seed=(number * 1000 + asked) % 2**31)
    case requests.Score():
      raise ValueError(requests.NO_LOGPROBS)
    case requests.Ask():
      return ToolFailure(f'there is no {request.service}')
  try:
    if isinstance(request, requests.Call):
      return request.function()
    if hasattr(tools.search, 'for_call'):  # it simulates: every call draws anew
      tools = dataclasses.replace(tools, search=tools.search.for_call(request.node.tree.question, number, asked))
    result = (tools.find(request.node, request.query, request.topk or tools.topk) if isinstance(request, requests.Search)
              else tools.run_python(request, []))
  except Exception as error:
    return requests.failure_of(error)
  return tools.observation(request, result, server.length - request.node.length, server.tokenizer)


def _generate(server: Server, request: Generate, sampling: Sampling, seed: int) -> Node:
  room = server.length - request.node.length
  if room <= 0:
    node = request.node.append([], Role.POLICY)
    node.stop = Stop.CONTEXT_FULL
    return node
  body = {'model': server.model, 'messages': messages(request.node), 'temperature': sampling.temperature,
          'max_tokens': min(request.max_tokens, room)}
  body |= {'stop': list(request.stop[:MAX_STOPS])} if request.stop else {}
  body |= {'top_p': sampling.top_p} if sampling.top_p < 1 else {}
  body |= {'seed': seed} if sampling.temperature > 0 else {}
  text, stop = ended(*server.chat.post(body, _reply), request.stop)
  end = [*server.tokenizer.eos_ids[:1]] if stop == END else []  # belongs to a span that ended itself
  node = request.node.append(server.tokenizer.encode(text) + end, Role.POLICY)
  node.stop = Stop.CONTEXT_FULL if stop == LENGTH and room < request.max_tokens else stop
  return node


def messages(node: Node) -> list[dict[str, str]]:
  """The path to the end of `node` as messages that take turns."""
  turns, eos = [], node.tree.tokenizer.eos_ids
  for span in node.path():
    role = 'assistant' if span.role in (Role.POLICY, Role.CONTEXT) else 'user'
    chose_to_end = role == 'assistant' and span.tokens and span.tokens[-1] in eos
    text = node.tree.tokenizer.decode(span.tokens[:-1]) if chose_to_end else span.text
    if turns and turns[-1]['role'] == role:
      turns[-1]['content'] += text
    elif text:
      turns.append({'role': role, 'content': text})
  return turns


def ended(text: str, reason: str, matched: object, stops: Sequence[str]) -> tuple[str, str]:
  """(text, why it ends) of a reply as a `Generate` has it: up to the end of the first stop string.

  Servers cut the stop string off. It is put back where they name it (vLLM, SGLang), and where it is the closing
  tag of the element that is open at the end. Otherwise the text stays without it and counts as ended by the policy.
  """
  if places := [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]:  # a server that does not stop
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
  """(text, finish_reason, stop string if the server names it) of a response; ValueError for one without text."""
  match response:
    case {'choices': [{'message': {'content': str(text)}, **rest}, *_]}:
      return text, str(rest.get('finish_reason')), rest.get('stop_reason', rest.get('matched_stop'))
  raise ValueError("no text in 'choices[0].message.content'")
