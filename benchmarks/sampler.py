"""How fast the sampler grows multi-turn rollouts, as a share of the machine's limit and beside its peers.

    python benchmarks/sampler.py --turns 4
    python benchmarks/sampler.py --turns 8 --peer transformers --peer loop --peer tunix --peer-python VENV_WITH_TUNIX/bin/python
    python benchmarks/sampler.py --preset smollm2-135m --shape 16 3 200 64 120 --peer transformers --peer llama_cpp --gguf F.gguf
    python benchmarks/sampler.py --preset qwen2.5-3b --dtype bfloat16
    python benchmarks/sampler.py --ragged --search-ms 200
    python benchmarks/sampler.py --text --slots 64 --tokenizer SmolLM2.gguf

Lockstep (default): 16 rollouts, a prompt of 64 tokens, then T turns of 32 generated and 96 observation tokens (or --shape), a
Qwen2.5 of 8 layers and width 512 in float32 (or --preset and --dtype) with random weights. Sampling at temperature 1 with stop
strings and log-probabilities on, and without an end token. Each peer does the same rollouts in its own process
(sampler_peers.py), one after the other.
Ragged: 64 rollouts of 1 to 6 turns of 8 to 64 tokens on 16 slots, with continuous batching and, for comparison, in batches of
16 that wait for their slowest rollout at every turn.
Text: rollouts on N slots with a real tokenizer (tokenizer.json, GGUF file or folder) and its whole vocabulary. The policy says
thoughts, queries and answers word by word as the world's do (its weights are a table of which token follows which; the layers
compute as always, and add 0), so that stop strings come as often as in a rollout, spelled in the tokenizer's tokens.

The last line is one JSON object.
  share_of_limit     the least time of the rollouts over the time they took: their arithmetic and memory traffic at the rates of a
                     large matrix product and of a memory copy, measured in the same run
  share_of_products  the same with the time of nothing but the matrix products, each in the shape that the sampler needs
  host_share         of the run, in which the host neither waits for the device nor for a search
  steps_per_segment  of text without a stop, on full slots, where 32 is the most; ragged_steps_per_segment is that of the run
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import hadamard

from benchmarks.train_step import best_seconds
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_corpus, load_questions
from jaxsearch.models.architecture import DecoderConfig, initial_params, preset
from jaxsearch.models.decoder import logits, product
from jaxsearch.models.sampling_weights import Transposed
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Generate, Sampling, Search, Tools
from jaxsearch.trees.tree import Role

CONFIG = DecoderConfig(vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=2,
                       head_dim=64, rope_theta=1e6, qkv_bias=True, tie_embeddings=True)
SLOTS, PROMPT, GENERATED, OBSERVED = 16, 64, 32, 96
STOP = ('</search>', '</answer>')
IDS = 4096  # of the random tokens, which every vocabulary has
NEVER = ('</research>', '</answers>')  # no text has these, and most of their tokens are those of STOP


class Words:
  """The least tokenizer that the sampler accepts."""
  eos_ids, pad_id, special_tokens, vocab_size = (), 0, (), CONFIG.vocab_size  # no end, so that every span gets its full length

  def check_fits(self, size):
    pass

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
  node = tree.root.append(rng.integers(1, IDS, PROMPT).tolist(), Role.PROMPT)
  for turn, length in enumerate(lengths):
    node = yield Generate(node, stop=STOP, max_tokens=int(length))
    if turn + 1 < len(lengths):
      if search:
        yield Search(node, 'query')
      node = node.append(rng.integers(1, IDS, OBSERVED).tolist(), Role.OBSERVATION)


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
  n, size = (2048, 64 << 20) if jax.default_backend() == 'cpu' else (8192, 512 << 20)
  a, square = jax.random.normal(jax.random.key(0), (n, n), CONFIG.dtype), jax.jit(lambda a: a @ a)
  held, add = jnp.zeros(size), jax.jit(lambda a: a + 1, donate_argnums=0)

  def copy():
    nonlocal held
    held = jax.block_until_ready(add(held))

  product = best_seconds(lambda: square(a).block_until_ready(), 5)
  return 2 * n**3 / product, 2 * 4 * size / best_seconds(copy, 5)


def least_seconds(turns, flops_rate, byte_rate):
  """Time for the rollouts if each step were bound by its arithmetic or its memory traffic alone, whichever is longer."""
  width, size = CONFIG.num_heads * CONFIG.head_dim, jnp.dtype(CONFIG.dtype).itemsize
  weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: initial_params(CONFIG, jax.random.key(0)))))
  weights -= 0 if CONFIG.tie_embeddings else CONFIG.vocab_size * CONFIG.hidden_size  # looked up, not multiplied
  body = weights - CONFIG.vocab_size * CONFIG.hidden_size

  def step(tokens, context, projected):
    attention = 4 * CONFIG.num_layers * width * context * SLOTS * tokens
    flops = 2 * SLOTS * (body * tokens + CONFIG.vocab_size * CONFIG.hidden_size * projected) + attention
    cached = 2 * size * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * context * SLOTS
    return max(flops / flops_rate, (size * weights + cached) / byte_rate)

  total, context = 0.0, PROMPT
  total += step(PROMPT, PROMPT / 2, 0)
  for turn in range(turns):
    total += sum(step(1, context + i, 1) for i in range(GENERATED))
    context += GENERATED
    if turn + 1 < turns:
      total += step(OBSERVED, context + OBSERVED / 2, 0)
      context += OBSERVED
  return total


def products_seconds(params, chunks, length, context, projected, repeats=3):
  """Seconds of the matrix products of one forward pass over chunks of `length` tokens that attend to `context` tokens each.

  Projections, feed-forward and attention, one after the other; with `projected` the logits too. Everything is 0: products of
  floats take as long whatever they are.
  """
  D, K, h, width = CONFIG.hidden_size, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.num_heads * CONFIG.head_dim
  rows = chunks * length
  steps = max(1, 512 // rows)

  @jax.jit
  def run(params, cache, x):
    on_cpu = isinstance(params['layers'][0]['down'], Transposed)
    table = Transposed(params['embedding']) if on_cpu else params['embedding']

    def step(_, x):
      for w, (keys, values) in zip(params['layers'], cache):
        q = product(x, w['qkv'])[:, :width].reshape(chunks, K, -1, h)
        scores = jnp.einsum('ckqh,ckht->ckqt', q, keys)
        x = product(jnp.einsum('ckqt,ckth->ckqh', scores, values).reshape(rows, width), w['o'])
        x = product(product(x, w['gate_up'])[:, :CONFIG.intermediate_size], w['down'])
      return logits({'embedding': table}, x)[:, :D] if projected else x

    return jax.lax.fori_loop(0, steps, step, x)

  zeros = functools.partial(jnp.zeros, dtype=params['embedding'].dtype)
  cache = [(zeros((chunks, K, h, context)), zeros((chunks, K, context, h))) for _ in range(CONFIG.num_layers)]
  x = zeros((rows, D))
  return best_seconds(lambda: jax.block_until_ready(run(params, cache, x)), repeats) / steps


def make_engine(params, length, **settings):
  engine = Engine(CONFIG, Words(), slots=SLOTS, length=length, prefill_lengths=(32, OBSERVED), **settings)
  engine.load(params)
  return engine


def lockstep(args, params):
  lengths = [[GENERATED] * args.turns] * SLOTS
  engine = make_engine(params, PROMPT + args.turns * (GENERATED + OBSERVED))
  tokens = SLOTS * args.turns * GENERATED
  grow(engine, lengths)  # compiles
  seconds, metrics = min((grow(engine, lengths) for _ in range(args.repeats)), key=lambda run: run[0])
  flops_rate, byte_rate = rates()
  chunks, at_once = SLOTS * (PROMPT + (args.turns - 1) * OBSERVED) / OBSERVED, max(engine._counts[OBSERVED])
  context = PROMPT + (args.turns - 1) * (GENERATED + OBSERVED) // 2  # on average
  products = (args.turns * GENERATED * products_seconds(engine._params, SLOTS, 1, context, projected=True) +
              chunks / at_once * products_seconds(engine._params, at_once, OBSERVED, context, projected=False))
  result = {
    'tokens_per_second': tokens / seconds, 'share_of_limit': least_seconds(args.turns, flops_rate, byte_rate) / seconds,
    'share_of_products': products / seconds, 'host_share': metrics['seconds_host'] / metrics['seconds'],
    'turns': args.turns, 'gflops_limit': flops_rate / 1e9, 'gbytes_limit': byte_rate / 1e9,
  }  # fmt: skip
  for kind in args.weights:
    other = make_engine(params, engine.length, weights=kind)
    grow(other, lengths)
    others = min(grow(other, lengths)[0] for _ in range(args.repeats))
    result |= {f'{kind}_tokens_per_second': tokens / others, f'times_{kind}': others / seconds}
  model = dataclasses.asdict(CONFIG)
  for peer in args.peer:
    script = pathlib.Path(__file__).with_name('sampler_peers.py')
    python = args.peer_python if peer == 'tunix' and args.peer_python else sys.executable
    sizes = dict(model=model, turns=args.turns, repeats=args.repeats, rows=SLOTS, prompt=PROMPT, generated=GENERATED,
                 observed=OBSERVED)
    sizes |= {'gguf': args.gguf} if peer == 'llama_cpp' else {'dtype': args.dtype} if peer == 'transformers' else {}
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
  in_batches = make_engine(params, longest, enough=SLOTS)
  batches = [lengths[start:start + SLOTS] for start in range(0, len(lengths), SLOTS)]
  engine.compile_all(), in_batches.compile_all()
  seconds, metrics = grow(engine, lengths, args.search_ms / 1000)
  waiting = sum(grow(in_batches, batch, args.search_ms / 1000)[0] for batch in batches)
  print(json.dumps(metrics), file=sys.stderr)
  return {'tokens_per_second': tokens / seconds, 'in_batches_tokens_per_second': tokens / waiting,
          'times_in_batches': waiting / seconds, 'search_ms': args.search_ms, 'idle_share': metrics['idle_share']}


def read_tokenizer(path):
  """A tokenizer.json, a GGUF file, or a folder of one."""
  path = pathlib.Path(path)
  return Tokenizer.load(path.parent if path.name == 'tokenizer.json' else path)


def episodes(tokenizer, most):
  """Questions, each with the texts of a rollout, as long as what the policy writes has at most `most` different tokens."""
  result, seen = [], set()
  for question in load_questions('world:rl'):
    asked, answer = question.question, question.golden_answers[0]
    spans = [f'<think> {asked} First I look for what is asked about: a name -> a fact. </think>\n<search> {asked} </search>',
             f'<think> The documents say {answer}, if I read them well. </think>\n<answer> {answer} </answer>']
    seen |= {token for span in spans for token in tokenizer.encode(BEGIN + span)}
    if len(seen) > most:
      return result
    result.append((question, spans))
  return result


BEGIN = '\n'  # ends what stands before a span
INSTRUCTION = ('Answer the question. Think between <think> and </think>, search with <search> query </search>, read what is '
               'found between <information> and </information>, and reply with <answer> answer </answer>.\nQuestion: ')


def speaker(tokenizer, texts, vocab_size):
  """(config, parameters) of a bigram policy with the next-token frequencies of `texts`.

  The tokens of the texts have orthogonal embeddings, so that a row of the output matrix holds the log-probabilities after each.
  """
  config = dataclasses.replace(CONFIG, vocab_size=vocab_size, tie_embeddings=False)
  params = initial_params(config, jax.random.key(0))
  layers = params['layers'] | {name: jnp.zeros_like(params['layers'][name]) for name in ('o', 'down')}  # add 0
  following = collections.defaultdict(collections.Counter)
  for text in texts:
    for now, then in itertools.pairwise(tokenizer.encode(text)):
      following[now][then] += 1
  D = config.hidden_size
  codes = dict(zip({token for known in following.values() for token in known} | set(following), hadamard(D)))
  embedding, unembedding = np.zeros((2, vocab_size, D), np.float32)
  for now, code in codes.items():
    embedding[now] = code
    for then, count in following[now].items():
      unembedding[then] += code / D * (30 + np.log(count / following[now].total()))
  return config, params | {'layers': layers, 'embedding': jnp.asarray(embedding), 'unembedding': jnp.asarray(unembedding)}


def converse(tree, documents, turns, stop, tokens):
  """A rollout: spans until there is an answer, with documents after each search."""
  node = tree.root.append(INSTRUCTION + tree.question.question + BEGIN, Role.PROMPT)
  for turn in range(turns):
    node = yield Generate(node, stop=stop, max_tokens=tokens)
    if node.stop != '</search>' or turn + 1 == turns:
      break
    found = yield Search(node, tree.question.question)
    node = node.append(f'<information>{documents[turn]}{len(found)}</information>{BEGIN}', Role.OBSERVATION)


def text(args, _):
  """Rollouts of text, twice as many as slots, in groups of four; then spans in which no stop string comes."""
  tokenizer = read_tokenizer(args.tokenizer)
  known = episodes(tokenizer, CONFIG.hidden_size - 8)
  config, params = speaker(tokenizer, [BEGIN + span for _, spans in known for span in spans], -(-tokenizer.vocab_size // 64) * 64)
  passages = {question.id: [document.text[:360] for document in load_corpus('world')[4 * i:4 * i + 4]]
              for i, (question, _) in enumerate(known)}
  engine = Engine(config, tokenizer, slots=args.slots, length=1024)
  engine.load(params)
  start = time.perf_counter()
  engine.first_state(STOP)
  automaton_seconds = time.perf_counter() - start

  def run(count, stop, tokens, turns):
    asked = [known[i // 4 % len(known)][0] for i in range(count)]
    agent = Agent(engine, lambda question, tree: converse(tree, passages[question.id], turns, stop, tokens),
                  Tools(Sleeper(args.search_ms / 1000), topk=1), Sampling())
    rollout(agent, asked, jax.random.key(0))  # compiles
    return rollout(agent, asked, jax.random.key(0))

  trees, metrics = run(2 * args.slots, STOP, tokens=128, turns=4)
  spans = [node for tree in trees for node in tree.nodes(Role.POLICY)]
  print(''.join(node.text for node in trees[0].walk()), file=sys.stderr)
  _, unstopped = run(args.slots, NEVER, tokens=96, turns=1)
  print(json.dumps(metrics), file=sys.stderr)
  return {
    'tokens_per_second': metrics['tokens_decoded'] / metrics['seconds'],
    'steps_per_segment': unstopped['steps'] / unstopped['segments'], 'host_share': metrics['seconds_host'] / metrics['seconds'],
    'ragged_steps_per_segment': metrics['steps'] / metrics['segments'], 'idle_share': metrics['idle_share'],
    'tokens_per_span': metrics['tokens_decoded'] / len(spans), 'stopped_share': np.mean([span.stop in STOP for span in spans]),
    'slots': args.slots, 'vocabulary': config.vocab_size, 'automaton_seconds': automaton_seconds,
    'table_mbytes': engine._following.nbytes / 1e6,
  }  # fmt: skip


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--turns', type=int, default=4)
  parser.add_argument('--shape', type=int, nargs=5, metavar=('ROWS', 'TURNS', 'PROMPT', 'GENERATED', 'OBSERVED'),
                      help='of lockstep: rollouts, turns and tokens')
  parser.add_argument('--repeats', type=int, default=3, help='the fastest counts')
  parser.add_argument('--preset', help='of lockstep and --ragged: a model of jaxsearch/models/architecture.py')
  parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
  parser.add_argument('--ragged', action='store_true')
  parser.add_argument('--text', action='store_true')
  parser.add_argument('--slots', type=int, default=64, help='with --text')
  parser.add_argument('--tokenizer', help='with --text: tokenizer.json, GGUF file or folder')
  parser.add_argument('--search-ms', type=float, default=0, help='with --ragged and --text')
  parser.add_argument('--weights', action='append', choices=('int8', 'fp8'), default=[], help='of lockstep, beside the full ones')
  parser.add_argument('--peer', action='append', choices=('tunix', 'transformers', 'loop', 'llama_cpp'), default=[],
                      help='of lockstep')
  parser.add_argument('--gguf', help="llama_cpp's weights, of the same architecture")
  parser.add_argument('--peer-python', help='interpreter that has google-tunix')
  args = parser.parse_args()
  if args.text and not args.tokenizer:
    parser.error('--text needs --tokenizer')
  if args.preset and (args.text or 'tunix' in args.peer):
    parser.error('--preset is for lockstep and --ragged, without tunix')
  if 'llama_cpp' in args.peer and not args.gguf:
    parser.error('llama_cpp needs --gguf')
  global CONFIG, SLOTS, PROMPT, GENERATED, OBSERVED
  if args.shape:
    SLOTS, args.turns, PROMPT, GENERATED, OBSERVED = args.shape
  CONFIG = dataclasses.replace(preset(args.preset) if args.preset else CONFIG, dtype=args.dtype)
  measure = text if args.text else ragged if args.ragged else lockstep
  params = None if args.text else jax.jit(lambda key: initial_params(CONFIG, key, CONFIG.dtype))(jax.random.key(0))
  result = measure(args, params)
  print(json.dumps({name: round(float(value), 4) for name, value in result.items()}))


if __name__ == '__main__':
  main()
