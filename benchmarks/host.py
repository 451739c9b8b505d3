"""Milliseconds that the host works for a policy span: rollouts of Search-R1 without a device.

    python benchmarks/host.py --tokenizer SmolLM2.gguf
    python -m cProfile -s tottime benchmarks/host.py --tokenizer SmolLM2.gguf

Driver, method, grammar, tokenizer and the tables for the device are the real ones, in the layout of GPUs
(without a front), over `--lanes` CPU devices. In place of the compiled programs stands a playback of texts:
what it takes is not counted, nor is what JAX needs to call a program. Trees are groups of five with a prompt
of the method's template, up to two searches of some 100 tokens and an answer; a search finds three passages
of `--words` words at once.

The last line is one JSON object: host_ms_a_span, processor time of all threads; main_ms_a_span, that of the
driver's thread; spans, segments, and the means tokens_per_span, tokens_prompt and tokens_observed.
"""

import argparse
import collections
import functools
import json
import time

import jax
import numpy as np

from benchmarks.sampler import read_tokenizer
from jaxsearch.data.sources import load_corpus, load_questions
from jaxsearch.methods import search_r1
from jaxsearch.models.architecture import DecoderConfig, initial_params
from jaxsearch.models.kernels import paged_attention
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.sampler import segment
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.engine import Engine, defaults
from jaxsearch.sampler.requests import Sampling, Tools
from jaxsearch.training.rollout_file import note_call
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Role


class Playback:
  """Stands in for the programs of the sampler: "samples" the tokens of `scripts[episode][request]`.

  Attributes:
    scripts: of each tree, for each span its tokens and the state of the automaton that it ends in.
    seconds: of processor time that it took.
  """

  def __init__(self, scripts):
    self.scripts, self.seconds, self.starts = scripts, 0.0, {}
    segment.prefill = lambda config, params, pool, *arrays, **_: (pool, None)
    segment.copy = lambda pool, *arrays, mesh: pool
    segment.draws = lambda key, episodes, requests, lengths, steps: np.zeros((len(lengths), steps))
    segment.decode = self.decode

  def decode(self, config, params, pool, front, slots, table, tables, uniforms, enough, limit, **_):
    start = time.thread_time()
    slots, steps = jax.device_get(slots), uniforms.shape[1]
    tokens, states = np.zeros(uniforms.shape, np.int32), slots.states.copy()
    left = np.full(len(uniforms), 1 << 20)
    spans = {}
    for seat in np.flatnonzero(slots.remaining).tolist():
      name = int(slots.episodes[seat]), int(slots.requests[seat]) - 1
      script, end = self.scripts[name[0]][name[1]]
      done = slots.lengths[seat] - self.starts.setdefault(name, slots.lengths[seat])
      spans[seat], left[seat] = (script[done:], end), len(script) - done
    for seat, (span, end) in spans.items():
      tokens[seat, :len(span[:steps])] = span[:steps]
      states[seat] = end if left[seat] <= steps else 0
    counts = np.where(slots.remaining > 0, np.minimum(steps, left), 0).astype(np.int32)
    results = jax.device_put((tokens, np.full(uniforms.shape, -0.5, np.float32), counts, states))
    self.seconds += time.thread_time() - start
    return pool, front, *results


class Shelf:
  """Finds the next three passages."""

  def __init__(self, passages):
    self.passages, self.place = passages, 0

  def search(self, queries, topk=3):
    self.place = (self.place + topk) % (len(self.passages) - topk)
    return [self.passages[self.place:self.place + topk] for _ in queries]


def script(tokenizer, rng, passages, question):
  """The spans of a tree: one or two searches, or none, and an answer."""
  def span(state, action):
    words = ' '.join(passages[i].text for i in rng.integers(0, len(passages), 3)).split()
    thought = ' '.join(words[:rng.integers(30, 60)])
    return np.array(tokenizer.encode(f'<think> {thought} </think>\n{action}'), np.int32), state

  searches = [span(-2, f'<search> {question.question} </search>') for _ in range(rng.integers(0, 3))]
  return [*searches, span(-3, f'<answer> {question.golden_answers[0]} </answer>')]


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--tokenizer', required=True, help='tokenizer.json, GGUF file or folder')
  parser.add_argument('--trees', type=int, default=1280)
  parser.add_argument('--slots', type=int, default=512)
  parser.add_argument('--lanes', type=int, default=1)
  parser.add_argument('--words', type=int, default=25, help='of a passage')
  parser.add_argument('--clock', action='store_true', help='the schedule follows the clock, as on pods')
  args = parser.parse_args()
  jax.config.update('jax_num_cpu_devices', args.lanes)
  paged_attention.KERNELS['cpu'] = 'gpu'
  tokenizer, rng = read_tokenizer(args.tokenizer), np.random.default_rng(0)
  passages, questions = load_corpus('world'), load_questions('world:rl')[:-(-args.trees // 5)]
  playback = Playback([script(tokenizer, rng, passages, questions[i // 5]) for i in range(args.trees)])
  config = DecoderConfig(vocab_size=-(-tokenizer.vocab_size // 64) * 64, hidden_size=8, intermediate_size=8,
                         num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4,
                         tie_embeddings=True)
  mesh = meshes.make_mesh(data=args.lanes) if args.lanes > 1 else None
  engine = Engine(config, tokenizer, slots=args.slots, length=4096, deterministic=not args.clock, mesh=mesh,
                  **defaults(args.slots, 'gpu'))
  params = initial_params(config, jax.random.key(0))
  engine.load(jax.device_put(params, transfer.replicated(mesh)) if mesh else params)
  longer = f'An example: {passages[0].text}\nQuestion:'  # some 200 tokens
  template = templates.find('search_r1', 'policy').replace('Question:', longer)
  agent = Agent(engine, functools.partial(search_r1.grow, template=template),
                Tools(Shelf(passages), topk=3, words=args.words, workers=128, max_observation=500),
                Sampling())
  asked = [questions[i // 5] for i in range(args.trees)]
  for _ in range(2):  # the second counts
    playback.starts.clear()
    before, playback.seconds = np.array([time.process_time(), time.thread_time()]), 0.0
    trees, metrics = rollout(agent, asked, jax.random.key(0), observer=note_call)
    seconds = np.array([time.process_time(), time.thread_time()]) - before - playback.seconds
  nodes = {role: [len(node.tokens) for tree in trees for node in tree.nodes(role)] for role in Role}
  mean, spans = lambda role: round(float(np.mean(nodes[role])), 1), len(nodes[Role.POLICY])
  print(collections.Counter(tree.stop for tree in trees), json.dumps(metrics, default=str))
  every, main_thread = (1e3 * seconds / spans).round(3).tolist()
  print(json.dumps({
    'host_ms_a_span': every, 'main_ms_a_span': main_thread, 'spans': spans, 'segments': metrics['segments'],
    'tokens_per_span': mean(Role.POLICY), 'tokens_prompt': mean(Role.PROMPT),
    'tokens_observed': mean(Role.OBSERVATION), 'tokens_prefilled': metrics['tokens_prefilled'],
    'trees': args.trees, 'slots': args.slots, 'lanes': args.lanes, 'deterministic': not args.clock}))


if __name__ == '__main__':
  main()
