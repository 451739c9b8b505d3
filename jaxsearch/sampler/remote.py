"""Rollouts on servers of other projects: token ids and log-probabilities over HTTP, weights through a disk.

`RemoteEngine` stands in for an `engine.Engine`: `load` writes a model folder and has every server take it,
`decoding` is a rollout in which spans are calls on threads. A branch or a rewind is just another prompt, so
trees grow as on our engine; a question's trees go to one server, whose cache has what they share.

A server that does not answer rests while others take its requests, and takes the newest weights before the
next one: it may have been started anew. A run ends where no server answers, never with fewer spans.
"""

import functools
import itertools
import math
import os
import pathlib
import shutil
import socket
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from jaxsearch.models import hub
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.models.decoder import Decoder
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import transfer
from jaxsearch.sampler import stops
from jaxsearch.sampler.driver import Schedule
from jaxsearch.sampler.protocols import PROTOCOLS, Reply
from jaxsearch.sampler.requests import END, LENGTH, Generate, Sampling, Score
from jaxsearch.sampler.served import ServedDecoding, Span
from jaxsearch.tools.http_client import MAY_PASS, JsonClient, RequestError, parse_url, secret_from_env

KEY = 'ROLLOUT_API_KEY'  # the environment variable of the servers' key; most want none
EPISODES = 2  # under way for every request in flight: some wait for tools
BLOCK = 16  # tokens asked of a server that does not stop where the span ends
REST = 60.0  # seconds that a server which fails again and again is left alone, at most
GAP = 0.5  # nats by which a sampled token's log-probability may differ from the same token's in a prompt
T = TypeVar('T')


class ServerError(RequestError):
  kind = 'rollout server'


class Server:
  """One server, and the label of the weights that it is known to have; None where that is not known.

  `told`: whether it is this process that tells it of new weights.
  """

  def __init__(self, url: str, protocol: Any, timeout: float):
    self.protocol, self.label, self.timeout, self.told = protocol, None, timeout, True
    self.lock, self.rests_until, self.rest = threading.Lock(), 0.0, 1.0
    self.reach(url)

  def reach(self, url: str) -> None:
    """Sets the address, which changes where a server is started again."""
    address = parse_url(url)
    on_this_host = address.host in ('localhost', '127.0.0.1', '::1')
    self.url = url
    self.name = [socket.gethostname() if on_this_host else '', url]  # the same for all processes

    @functools.cache
    def client(path: str) -> JsonClient:
      whole = address.copy_with(path=address.path.rstrip('/') + path)
      made = JsonClient([whole], timeout=self.timeout, attempts=1, token=secret_from_env(KEY))
      made.error, made.most_bytes = ServerError, 2**26  # of a whole vocabulary, such as Qwen's: some 13 MB
      return made

    self.client = client

  def post(self, path: str, body: dict, read: Callable[[Any], T]) -> T:
    def parse(reply: Any) -> T:
      try:
        return read(reply)
      except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'{type(error).__name__}: {error}') from error
    return self.client(path).post(body, parse)

  def has(self, folder: pathlib.Path, label: str) -> bool:
    """Has it take the weights in `folder`, unless it has them; False while another thread does."""
    if self.label == label:
      return True
    if not self.lock.acquire(blocking=False):
      return False
    try:
      self.take(folder, label)
      self.label = label
    finally:
      self.lock.release()
    return True

  def take(self, folder: pathlib.Path, label: str) -> None:
    for path, body in self.protocol.load(str(folder), label):
      self.post(path, body, lambda _: None)

  def failed(self) -> None:
    """Lets it rest; it may come back with other weights."""
    self.label, now = None, time.monotonic()
    if now >= self.rests_until:  # of several requests in flight each fails
      self.rests_until, self.rest = now + self.rest, min(2 * self.rest, REST)


class OwnLlama(Server):
  """llama.cpp's server inside this process, started anew with each set of weights."""

  def __init__(self, protocol: Any, timeout: float, slots: int, length: int):
    try:
      import xllamacpp
    except ImportError as error:
      raise ImportError("sampler.engine='llama_cpp' without sampler.urls needs xllamacpp: "
                        "pip install 'jaxsearch[llama_cpp]'") from error
    self.library, self.running, self.slots, self.length = xllamacpp, None, slots, length
    super().__init__('http://127.0.0.1', protocol, timeout)

  def take(self, folder: pathlib.Path, label: str) -> None:
    self.running = None  # frees the old weights
    params = self.library.CommonParams()
    params.model.path, params.port = str(folder / 'model.gguf'), 0
    params.n_parallel, params.n_ctx = self.slots, self.slots * self.length
    params.verbosity, params.cpuparams.n_threads = -1, int(os.environ.get('NPROC', -1))  # as XLA reads it
    self.running = self.library.Server(params)
    self.reach(self.running.listening_address)


def tellers(everywhere: Sequence[Sequence[Any]], process: int) -> list[int]:
  """Returns for each server of a process the process that tells it of new weights, one of those that have it.

  `everywhere` has the names of the servers of each process.
  """
  having = ([number for number, names in enumerate(everywhere) if name in names]
            for name in everywhere[process])
  return [processes[number % len(processes)] for number, processes in enumerate(having)]


class RemoteEngine:
  """Stands in for an `engine.Engine`, with the policy on servers.

  Args:
    kind: of the servers, a name of protocols.PROTOCOLS.
    urls: their addresses, separated by commas; '' with 'llama_cpp' starts one in this process.
    folder: where new weights are written, on a disk that all servers see under the same path.
    slots: requests in flight of this process.
    timeout: seconds for a reply, and until the run ends if no server gives one.
  Raises ValueError for a server that does not give token ids or log-probabilities.
  """

  def __init__(self, kind: str, config: DecoderConfig, tokenizer: Tokenizer, *, urls: str,
               folder: pathlib.Path, slots: int, length: int, timeout: float,
               episode_deadline: float | None = None):
    self.kind, self.protocol, self.config, self.tokenizer = kind, PROTOCOLS[kind], config, tokenizer
    self.slots, self.episodes, self.length, self.timeout = slots, EPISODES * slots, length, timeout
    self.episode_deadline = math.inf if episode_deadline is None else episode_deadline
    self.temporary = None if urls else tempfile.TemporaryDirectory(prefix='jaxsearch-')
    self.folder = pathlib.Path(self.temporary.name if self.temporary else folder).absolute()
    self.servers = [Server(url, self.protocol, timeout) for url in urls.split(',') if url]
    everywhere = transfer.gather_objects([server.name for server in self.servers])
    for server, process in zip(self.servers, tellers(everywhere, jax.process_index())):
      server.told = process == jax.process_index()
    self.run = transfer.broadcast(uuid.uuid4().hex[:8])  # a server may still have weights of another run
    if jax.process_index() == 0:
      weakref.finalize(self, _remove, self.folder, self.run)
    self.version, self.label = 0, None
    self.homes: dict[str | None, int] = {}  # of each question, the number of its server
    self._sharing = threading.Lock()
    # Seconds that the newest weights took to reach the servers; since the start, requests that another server
    # had to take, and servers that had lost their weights.
    self.figures = {'seconds_weights': 0.0, 'requests_failed': 0, 'servers_reloaded': 0}
    pieces = tokenizer.pieces(config.vocab_size)
    self._automaton = functools.lru_cache(64)(lambda stop: stops.automaton(pieces, stop, tokenizer.eos_ids))
    self._on_each(self._check, self.servers)
    self.servers = self.servers or [OwnLlama(self.protocol, timeout, slots, length)]

  def _check(self, server: Server) -> None:
    """Asks for a token and for its log-probability as part of a prompt: ValueError if they do not agree."""
    ids, protocol = self.tokenizer.encode('The')[:1], self.protocol
    try:
      body = protocol.generate(ids, 1, Sampling(), 0, (), self.tokenizer.eos_ids)
      reply = self._ask([server], body, self._read)
      scored = self._score_on([server], ids, reply.tokens)[0]
    except ServerError as error:
      raise self._explained(error) from error
    if not np.abs(np.subtract(reply.logprobs, scored)).max(initial=0) < GAP:
      raise ValueError(f'sampler.engine={self.kind!r}: {server.url} says {reply.logprobs} of a token that it '
                       f'sampled and {scored} of the same token in a prompt; needs {protocol.needs}')

  def _explained(self, error: ServerError) -> Exception:
    """Returns the error if it may pass, else a ValueError that says which servers can do what is asked."""
    mistake = f'sampler.engine={self.kind!r}: {error}; needs {self.protocol.needs}'
    return error if error.fault in MAY_PASS else ValueError(mistake)

  # As an `engine.Engine`.

  programs = lambda self: []  # they and their memory are the servers'
  compile_all = unload = lambda self, **_: None

  def load(self, params: dict) -> None:
    """Writes the parameters in the compute dtype, and has all servers take them; all processes call it.

    A server that does not answer takes them when it is back.
    """
    start, old = time.monotonic(), self.label and self.folder / self.label
    version = self.version + 1
    label = f'{self.run}-{version}'
    model, new = Decoder(self.config, params=params), self.folder / label
    if self.temporary:
      hub.save_gguf(model, new / 'model.gguf', self.tokenizer)
    elif jax.process_index() == 0:
      hub.save(model, new, self.tokenizer, dtype=self.config.dtype)
    transfer.broadcast(None)  # it is written: before, a late request might have a server read half of it
    self.version, self.label = version, label
    self._on_each(self._update, [server for server in self.servers if server.told])
    for server in self.servers:
      if not server.told:
        server.label = self.label  # another process has seen to it
    transfer.broadcast(None)
    if old and (jax.process_index() == 0 or self.temporary):
      shutil.rmtree(old, ignore_errors=True)
    self.homes.clear()
    self.figures['seconds_weights'] = time.monotonic() - start

  def _on_each(self, do: Callable[[Server], None], servers: Sequence[Server]) -> None:
    with ThreadPoolExecutor(max(len(servers), 1)) as pool:
      list(pool.map(do, servers))

  def _update(self, server: Server) -> None:
    if server.rest > 1:
      return  # it has not answered since it failed: requests try it again
    try:
      server.has(self.folder / self.label, self.label)
    except ServerError as error:
      if error.fault not in MAY_PASS:
        raise self._explained(error) from error
      server.failed()

  def decoding(self, key: jax.Array, sampling: Sampling, schedule: Schedule) -> ServedDecoding:
    """Returns the policy of one rollout."""
    return ServedDecoding(self, key, sampling, schedule)

  # Requests, each on a thread.

  def generate(self, request: Generate, most: int, sampling: Sampling, seed: int) -> Span:
    """Returns the span after `request.node`; it ends where our engine ends it, by the same automaton."""
    path, servers, ends = request.node.path_tokens(), self._servers(request), list(self.tokenizer.eos_ids)
    automaton, state = self._automaton(request.stop), 0
    sent = self.protocol.stops
    tokens, logprobs, cached, prefilled = [], [], 0, 0
    while state >= 0 and len(tokens) < most:
      block = min(most - len(tokens), most if sent else BLOCK)
      body = self.protocol.generate([*path, *tokens], block, sampling, (seed + len(tokens)) % 2**31,
                                    list(request.stop) if sent else [], ends)
      reply = self._whole(servers, [*path, *tokens], self._ask(servers, body, self._read))
      cached, prefilled = cached + reply.cached, prefilled + len(path) + len(tokens) - reply.cached
      for token, logprob in zip(reply.tokens, reply.logprobs):
        if state >= 0 and len(tokens) < most:
          state = int(automaton[state, token])
          tokens.append(token)
          logprobs.append(logprob)
    names = {stops.ENDED: END} | {stops.ENDED - 1 - i: stop for i, stop in enumerate(request.stop)}
    return Span(tokens, names.get(state, LENGTH), logprobs, cached, prefilled, self.version)

  def score(self, request: Score, temperature: float) -> tuple[list[list[float] | None], int, int]:
    """Returns (log-probabilities of each continuation, cached tokens, prefilled tokens)."""
    if temperature != 1:
      raise ValueError(f'log-probabilities at temperature {temperature:g}: servers give those at 1')
    encode = self.tokenizer.encode
    path = request.node.path_tokens() + (encode(request.cue) if request.cue else [])
    replies, cached, prefilled = [], 0, 0
    for given in request.continuations:
      target = encode(given) if isinstance(given, str) else list(given)
      if len(path) + len(target) > self.length:
        replies.append(None)
        continue
      logprobs, reused = self._score_on(self._servers(request), path, target)
      replies.append(logprobs)
      cached, prefilled = cached + reused, prefilled + len(path) + len(target) - reused
    return replies, cached, prefilled

  def _score_on(self, servers: Sequence[Server], path: Sequence[int],
                target: Sequence[int]) -> tuple[list[float], int]:
    """Returns (log-probabilities of `target` after `path`, cached tokens); one at a time where it must."""
    logprobs, cached, step = [], 0, max(len(target), 1) if self.protocol.stops else 1
    for start in range(0, len(target), step):
      ids, part = [*path, *target[:start]], target[start:start + step]
      reply = self._ask(servers, self.protocol.score(ids, part),
                        functools.partial(self.protocol.read_scores, target=part))
      reply = self._whole(servers, ids, reply)
      logprobs, cached = logprobs + reply.logprobs, cached or reply.cached
    return logprobs, cached

  def _whole(self, servers: Sequence[Server], ids: Sequence[int], reply: Reply) -> Reply:
    """Returns a reply to `ids` with the log-probabilities that the server left out."""
    for place, token in enumerate(reply.tokens):
      if reply.logprobs[place] is None:
        end = (*self.tokenizer.eos_ids, self.tokenizer.pad_id)[0]
        body = self.protocol.score_all([*ids, *reply.tokens[:place]], end)
        asked = self._ask(servers, body, functools.partial(self.protocol.read_all, token=token))
        reply.logprobs[place], = asked.logprobs
    return reply

  def _servers(self, request: Generate | Score) -> list[Server]:
    """Returns all servers, that of the request's question first."""
    question = request.node.tree.question
    with self._sharing:  # or two questions may get one number
      number = (len(self.homes) + jax.process_index()) % len(self.servers)
      home = self.homes.setdefault(question and question.id, number)
    return self.servers[home:] + self.servers[:home]

  def _read(self, reply: Any) -> Reply:
    """Reads a reply. Raises ValueError unless each token has a log-probability, and there is one."""
    read = self.protocol.read(reply)
    if not read.tokens or len(read.tokens) != len(read.logprobs):
      raise ValueError(f'{len(read.tokens)} tokens with {len(read.logprobs)} log-probabilities')
    return read

  def _ask(self, servers: Sequence[Server], body: dict, read: Callable[[Any], Reply]) -> Reply:
    """Returns what the first of `servers` that answers, with the newest weights, replies to `body`.

    Raises ServerError for a request that is refused, or once all have failed and `timeout` seconds passed.
    """
    give_up, failed, reloads = time.monotonic() + self.timeout, set(), 0
    for server in itertools.cycle(servers):
      try:
        rests = server.rests_until > time.monotonic()
        if rests or (self.label and not server.has(self.folder / self.label, self.label)):
          time.sleep(0.1 if server is servers[-1] else 0)
          continue
        reply = server.post(self.protocol.path, body, read)
      except ServerError as error:
        server.failed()
        failed.add(server)
        self.figures['requests_failed'] += 1
        if error.fault not in MAY_PASS or (len(failed) == len(servers) and time.monotonic() > give_up):
          raise
        continue
      server.rest = 1.0
      if None in (self.label, reply.label) or reply.label == self.label:
        return reply
      self.figures['servers_reloaded'] += 1
      server.label = None  # it was started anew
      reloads += 1
      if reloads > 3 * len(servers) and time.monotonic() > give_up:
        raise ServerError(server.url, f'has the weights {reply.label!r} again and again, not {self.label!r}: '
                          'does another run use it, or are there several behind it?', 'malformed')


def _remove(folder: pathlib.Path, run: str) -> None:
  """Removes the weights of a run, those that are half written too."""
  for written in folder.glob(f'{run}-*'):
    shutil.rmtree(written, ignore_errors=True)
