"""Stand-ins for the servers of vLLM 0.32 and SGLang 0.5.23, written from their sources: what they take, what
they send, where they stop, and how they get weights. The model behind them continues a text that it is given.

As a program it is vLLM, by its command line; it prints the labels of the weights that it takes.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time

from tests.tools.serving import send, server


class StandIn:
  """One server. `script(text, seed) -> str` is what the model writes after a text, for a request of this seed;
  `fault` is 'hang', 'die' or None.

  Attributes:
    seen: (path, body) of all requests.
    label: of its weights; 'default' for those that it began with.
  """

  def __init__(self, tokenizer, script):
    self.tokenizer, self.script, self.fault = tokenizer, script, None
    self.seen, self.label, self.cache, self.lock = [], 'default', [], threading.Lock()

  def next(self, ids, seed):
    """The token after `ids`, which may end in the middle of what the model writes."""
    script = [*self.tokenizer.encode(self.script(self.tokenizer.decode(ids), seed)), *self.tokenizer.eos_ids[:1]]
    written = next(k for k in range(min(len(ids), len(script)), -1, -1) if ids[len(ids) - k:] == script[:k])
    return script[min(written, len(script) - 1)]

  def logprob(self, ids, token):
    return -((sum(ids[-3:]) + token) % 97) / 100

  def generate(self, ids, most, stop, ends, seed=0):
    """(tokens, their log-probabilities, cached tokens of the prompt): up to the first stop string or end."""
    tokens, logprobs = [], []
    while len(tokens) < most and not (tokens and (
        tokens[-1] in ends or any(each in self.tokenizer.decode(tokens) for each in stop))):
      tokens.append(self.next(ids + tokens, seed))
      logprobs.append(self.logprob(ids + tokens[:-1], tokens[-1]))
    shared = lambda other: next((i for i, (a, b) in enumerate(zip(ids, other)) if a != b), min(len(ids), len(other)))
    with self.lock:
      cached = max(map(shared, self.cache), default=0)
      self.cache.append(ids + tokens)
    return tokens, logprobs, min(cached, len(ids) - 1)

  def scores(self, ids):
    return [None, *(self.logprob(ids[:i], ids[i]) for i in range(1, len(ids)))]

  def serve(self, path, body):
    """(status, reply); subclasses know the paths."""
    raise NotImplementedError


class Vllm(StandIn):
  def serve(self, path, body):
    if path == '/inference/v1/generate':
      wanted = body['sampling_params']
      assert not wanted.get('stop') or (wanted.get('detokenize', True) and not wanted.get('skip_special_tokens', True))
      tokens, logprobs, cached = self.generate(
        body['token_ids'], wanted['max_tokens'], wanted.get('stop', []), wanted.get('stop_token_ids', []),
        wanted.get('seed', 0))
      content = [{'token_id': token, 'logprob': logprob, 'rank': 1, 'top_logprobs': []}
                 for token, logprob in zip(tokens, logprobs)]
      prompt = [None if scored is None else {str(token): {'logprob': scored, 'rank': 1, 'decoded_token': None}}
                for token, scored in zip(body['token_ids'], self.scores(body['token_ids']))]
      return 200, {
        'request_id': 'r', 'model': 'm', 'usage': {'prompt_tokens': len(body['token_ids']),
                                                   'prompt_tokens_details': {'cached_tokens': cached}},
        'prompt_logprobs': prompt if 'prompt_logprobs' in wanted else None,
        'choices': [{'index': 0, 'token_ids': tokens, 'finish_reason': 'stop', 'stop_reason': None,
                     'logprobs': {'content': content} if 'logprobs' in wanted else None,
                     'weight_versions': [{'version': self.label, 'start': 0, 'end': len(tokens)}]}]}
    if path == '/collective_rpc' and body['method'] == 'reload_weights':
      self.loading = body['kwargs']['weights_path']
      return 200, {'results': [None]}
    if path == '/reset_prefix_cache':
      self.cache = []
      return 200, {'success': True}
    if path == '/update_weight_version':
      self.label = body['new_version']
      return 200, {'success': True, 'new_version': self.label}
    return 404, {'detail': 'Not Found'}


class Sglang(StandIn):
  def serve(self, path, body):
    if path == '/generate':
      wanted = body['sampling_params']
      tokens, logprobs, cached = self.generate(
        body['input_ids'], wanted['max_new_tokens'], wanted.get('stop') or [], wanted.get('stop_token_ids', []),
        wanted.get('sampling_seed', 0))
      about = {'id': 'r', 'finish_reason': {'type': 'stop'}, 'prompt_tokens': len(body['input_ids']),
               'weight_version': self.label, 'cached_tokens': cached}
      if body.get('return_logprob'):
        about['output_token_logprobs'] = [[logprob, token, None] for token, logprob in zip(tokens, logprobs)]
        start = body.get('logprob_start_len', -1)
        entries = list(zip(self.scores(body['input_ids']), body['input_ids'], [None] * len(body['input_ids'])))
        about['input_token_logprobs'] = ([(None, *entries[start][1:]), *entries[start + 1:]] if start >= 0 else [])
      ended = tokens and tokens[-1] in wanted.get('stop_token_ids', [])
      return 200, {'text': self.tokenizer.decode(tokens), 'output_ids': tokens[:-1] if ended else tokens,
                   'meta_info': about}
    if path == '/update_weights_from_disk':
      self.loading, self.label, self.cache = body['model_path'], body['weight_version'], []
      return 200, {'success': True, 'message': 'Succeeded to update model weights.', 'num_paused_requests': 0}
    return 404, {'detail': 'Not Found'}


@contextlib.contextmanager
def serving(stand_in, port=0):
  """Yields the address of a stand-in."""
  def serve(handler):
    if handler.command == 'GET':
      return send(handler, b'', 200 if handler.path == '/health' else 404)
    body = json.loads(handler.body or b'null')
    stand_in.seen.append((handler.path, body))
    if stand_in.fault == 'hang':
      time.sleep(6)  # longer than the tests wait
    if not stand_in.fault:  # else no answer at all
      status, reply = stand_in.serve(handler.path, body)
      send(handler, json.dumps(reply).encode(), status)

  with server(serve, port=port) as (url, _):
    yield url


class Printing(Vllm):
  def serve(self, path, body):
    status, reply = super().serve(path, body)
    if path == '/update_weight_version':
      print(f'the server {self.port} has {self.label}', flush=True)
    return status, reply


def main(arguments):
  from jaxsearch.models.tokenizer import Tokenizer
  given = dict(itertools.pairwise(arguments))
  assert '--enable-scale-out' in arguments and os.environ['VLLM_SERVER_DEV_MODE'] == '1'
  stand_in = Printing(Tokenizer.load(given['serve']), lambda text, seed: '<think>So.</think><answer> Oslo </answer>')
  stand_in.port = int(given['--port'])
  with serving(stand_in, stand_in.port):
    signal.sigwait({signal.SIGTERM})


if __name__ == '__main__':
  signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # by all threads; `main` waits for it
  main(sys.argv)
