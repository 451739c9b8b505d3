"""How fast the sampler grows multi-turn rollouts, as a share of the machine's limit and beside its peers.

    python benchmarks/sampler.py --turns 4
    python benchmarks/sampler.py --turns 8 --peer transformers --peer tunix --peer-python VENV_WITH_TUNIX/bin/python
    python benchmarks/sampler.py --ragged --search-ms 200

Lockstep (default): 16 rollouts, a prompt of 64 tokens, then T turns of 32 generated and 96 observation tokens, a Qwen2.5 of 8
layers and width 512 in float32 with random weights. Sampling at temperature 1 with stop strings, forbidden tokens and
log-probabilities on. Each peer does the same rollouts in its own process (sampler_peers.py), one after the other.
Ragged: 64 rollouts of 1 to 6 turns of 8 to 64 tokens on 16 slots, with continuous batching and, for comparison, in batches of
16 that wait for their slowest rollout at every turn.

The last line is one JSON object. `share_of_limit` is the least time of the rollouts over the time they took: their arithmetic
and memory traffic at the rates of a large matrix product and of a memory copy, measured in the same run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.models.decoder import DecoderConfig, initial_params
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Generate, Sampling, Search, Tools
from jaxsearch.sampler.rollout import Agent, rollout
from jaxsearch.trees.tree import Role

CONFIG = DecoderConfig(vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=2,
                       head_dim=64, rope_theta=1e6, qkv_bias=True, tie_embeddings=True)
SLOTS, PROMPT, GENERATED, OBSERVED = 16, 64, 32, 96
END = 0  # forbidden, so that every span gets its full length
STOP = ('</search>', '</answer>')


class Words:
  """The least tokenizer that the sampler accepts: every 64th token could end a stop string and makes the host check."""
  eos_ids, pad_id, special_tokens, vocab_size = (END,), END, (), CONFIG.vocab_size

  def pieces(self, size):
    return [b'>' if i % 64 == 63 else b' word%d' % i for i in range(size)]

  def encode(self, text):
    return list(text.encode())

  def decode(self, ids):
    return ''.join(f' word{i}' for i in ids)


class Sleeper:
  """A search that takes `seconds` and finds one document."""

  def __init__(self, seconds):
    self.seconds = seconds

  def search(self, queries, topk=1):
    time.sleep(self.seconds)
    return [[Document('0', 'title', 'text')] for _ in queries]


def chain(tree, rng, lengths, search):
  """Spans of the given lengths with observations of random tokens between them."""
  node = tree.root.append(rng.integers(1, CONFIG.vocab_size, PROMPT).tolist(), Role.PROMPT)
  for turn, length in enumerate(lengths):
    node = yield Generate(node, stop=STOP, max_tokens=int(length), forbid=(END,))
    if turn + 1 < len(lengths):
      if search:
        yield Search(node, 'query')
      node = node.append(rng.integers(1, CONFIG.vocab_size, OBSERVED).tolist(), Role.OBSERVATION)


def grow(engine, lengths, search_seconds=None, seed=0):
  """Grows one rollout for each list of span lengths; returns (seconds, metrics)."""
  agent = Agent(engine, lambda question, tree: chain(tree, np.random.default_rng([seed, int(question.id)]),
                                                     lengths[int(question.id)], search_seconds is not None),
                Tools(Sleeper(search_seconds or 0.0), topk=1), Sampling())
  questions, key = [Question(str(i), '', ()) for i in range(len(lengths))], jax.random.key(seed)
  start = time.perf_counter()
  trees, metrics = rollout(agent, questions, key)
  seconds = time.perf_counter() - start
  assert [[len(node.tokens) for node in tree.nodes(Role.POLICY)] for tree in trees] == [list(spans) for spans in lengths]
  return seconds, metrics


def rates():
  """(floating-point operations, bytes) per second of a large matrix product and of a pass over memory in place."""
  def best(function, value, repeats=5):
    seconds = []
    for _ in range(repeats):
      start = time.perf_counter()
      value = jax.block_until_ready(function(value))
      seconds.append(time.perf_counter() - start)
    return min(seconds)

  n, size = 2048, 64 << 20
  product = best(jax.jit(lambda a: a @ a * (1 / n)), jnp.ones((n, n)))
  copy = best(jax.jit(lambda a: a + 1, donate_argnums=0), jnp.zeros(size))
  return 2 * n**3 / product, 2 * 4 * size / copy


def least_seconds(turns, flops_rate, byte_rate):
  """Time for the rollouts if each step were bound by its arithmetic or its memory traffic alone, whichever is longer."""
  weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: initial_params(CONFIG, jax.random.key(0)))))
  body = weights - CONFIG.vocab_size * CONFIG.hidden_size
  width = CONFIG.num_heads * CONFIG.head_dim

  def step(tokens, context, projected):
    attention = 4 * CONFIG.num_layers * width * context * SLOTS * tokens
    flops = 2 * SLOTS * (body * tokens + CONFIG.vocab_size * CONFIG.hidden_size * projected) + attention
    cached = 2 * 4 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * context * SLOTS
    return max(flops / flops_rate, (4 * weights + cached) / byte_rate)

  total, context = 0.0, PROMPT
  total += step(PROMPT, PROMPT / 2, 0)
  for turn in range(turns):
    total += sum(step(1, context + i, 1) for i in range(GENERATED))
    context += GENERATED
    if turn + 1 < turns:
      total += step(OBSERVED, context + OBSERVED / 2, 0)
      context += OBSERVED
  return total


def make_engine(params, length, **settings):
  engine = Engine(CONFIG, Words(), slots=SLOTS, length=length, prefill_lengths=(32, OBSERVED), **settings)
  engine.load(params)
  return engine


def lockstep(args, params):
  lengths = [[GENERATED] * args.turns] * SLOTS
  engine = make_engine(params, PROMPT + args.turns * (GENERATED + OBSERVED), spare=1)
  tokens = SLOTS * args.turns * GENERATED
  grow(engine, lengths)  # compiles
  seconds = min(grow(engine, lengths)[0] for _ in range(args.repeats))
  flops_rate, byte_rate = rates()
  result = {
    'tokens_per_second': tokens / seconds, 'share_of_limit': least_seconds(args.turns, flops_rate, byte_rate) / seconds,
    'turns': args.turns, 'gflops_limit': flops_rate / 1e9, 'gbytes_limit': byte_rate / 1e9,
  }  # fmt: skip
  for peer in args.peer:
    script = pathlib.Path(__file__).with_name('sampler_peers.py')
    python = args.peer_python if peer == 'tunix' and args.peer_python else sys.executable
    sizes = dict(turns=args.turns, repeats=args.repeats, rows=SLOTS, prompt=PROMPT, generated=GENERATED, observed=OBSERVED)
    out = subprocess.run([python, script, peer, json.dumps(sizes)], stdout=subprocess.PIPE, check=True, text=True).stdout
    peer_seconds = json.loads(out.splitlines()[-1])['seconds']
    result |= {f'{peer}_tokens_per_second': tokens / peer_seconds, f'times_{peer}': peer_seconds / seconds}
    print(f'{peer}: {tokens / peer_seconds:.0f} tokens/s', file=sys.stderr)
  return result


def ragged(args, params):
  rng = np.random.default_rng(1)
  lengths = [rng.integers(8, 65, rng.integers(1, 7)).tolist() for _ in range(4 * SLOTS)]
  tokens = sum(map(sum, lengths))
  longest = PROMPT + 6 * (64 + OBSERVED)
  engine = make_engine(params, longest)
  in_batches = make_engine(params, longest, spare=1, enough=SLOTS, tool_patience=0)
  batches = [lengths[start:start + SLOTS] for start in range(0, len(lengths), SLOTS)]
  engine.compile_all(), in_batches.compile_all()
  seconds, metrics = grow(engine, lengths, args.search_ms / 1000)
  waiting = sum(grow(in_batches, batch, args.search_ms / 1000)[0] for batch in batches)
  print(json.dumps(metrics), file=sys.stderr)
  return {'tokens_per_second': tokens / seconds, 'in_batches_tokens_per_second': tokens / waiting,
          'times_in_batches': waiting / seconds, 'search_ms': args.search_ms, 'idle_share': metrics['idle_share']}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--turns', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=3, help='the fastest counts')
  parser.add_argument('--ragged', action='store_true')
  parser.add_argument('--search-ms', type=float, default=0, help='with --ragged')
  parser.add_argument('--peer', action='append', choices=('tunix', 'transformers'), default=[])
  parser.add_argument('--peer-python', help='interpreter that has google-tunix')
  args = parser.parse_args()
  params = initial_params(CONFIG, jax.random.key(0))
  print(json.dumps({name: round(value, 4) for name, value in (ragged if args.ragged else lockstep)(args, params).items()}))


if __name__ == '__main__':
  main()
