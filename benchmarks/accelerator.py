"""Where a device stands: its kernels are right, and how near decoding and updates come to its limits.

    python benchmarks/accelerator.py check
    python benchmarks/accelerator.py decode --preset qwen2.5-3b --slots 128 --lengths 512 2048 4096
    python benchmarks/accelerator.py update --preset qwen2.5-1.5b

For one device; each is meant to take less than ten minutes on an H100. What is measured is printed as soon as
it is known, the last line is one JSON object of all of it. What fails is in `failed`, the rest goes on, and
the exit status is 1. Weights are random. Times are in milliseconds, the median and the least of several calls
that each wait for their results; shares are of the limits that the same call measured.

  check   rates of a copy and of a bfloat16 product; every kernel of attention against the dense path in
          float32, as the largest difference over the largest value, beside the difference of the dense path
          in bfloat16; an update with attention=auto beside one with attention=dense
  decode  a token of all slots at each length, a prefill, the host's share of a span
  update  MFU (operations that are needed, over the rate of a product), peak memory beside that of the plan;
          then three steps of configs/search_r1_grpo_qwen2_5_3b.py with random weights on the embedded world

A bare machine with Python 3.12 and JAX 0.11 needs a checkout in PYTHONPATH, and wheels of what is imported:
absl-py, etils, filelock, flax, grain, httpx, jinja2, ml_collections, numpy, optax, orbax-checkpoint, psutil,
pydantic, pydantic-monty, rank_bm25, rich, safetensors, scipy, tensorboardX, tokenizers,
transformers, and what these need.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import sampler, train_step
from configs import search_r1_grpo_qwen2_5_3b
from jaxsearch.models.architecture import initial_params, preset
from jaxsearch.models.attention import attend_to_pages, dense_attention
from jaxsearch.models.kernels import paged_attention, tree_attention
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.planning import plan, programs
from jaxsearch.sampler import segment
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.pages import PAGE, Chunk, Path
from jaxsearch.training import loop, metrics, row_files
from jaxsearch.training import step as training

LIMIT = 0.02     # of a kernel's difference: five roundings to bfloat16
REPEATS = 5
STEPS = 20       # of decode attention in one program, which is too short to be timed alone
SIBLINGS = 5
DEFAULTS = {
  'check': {'presets': ['qwen2.5-0.5b', 'qwen2.5-3b', 'llama3.1-8b'], 'slots': 128, 'length': 2048},
  'decode': {'preset': 'qwen2.5-3b', 'slots': 128, 'lengths': [512, 2048, 4096]},
  'update': {'preset': 'qwen2.5-1.5b', 'length': 4096, 'rows': 4, 'rollouts': 96,
             'run': 'qwen2.5-0.5b', 'questions': 32, 'tokens': 500}}  # the last three of the run
COMPILED: list[float] = []  # seconds of every program

jax.monitoring.register_event_duration_secs_listener(
  lambda event, seconds, **_: COMPILED.append(seconds) if event == metrics.COMPILATION else None)


class Results(dict):
  """What was measured, told at once; what fails is noted in `failed`."""

  def measure(self, name: str, function, *args) -> None:
    try:
      self[name] = function(*args)
      print(f'{name}: {line(self[name])}', file=sys.stderr, flush=True)
    except Exception as error:  # the next may still work
      self.fail(name, error)

  def fail(self, name: str, error: Exception) -> None:
    traceback.print_exception(error)
    self.setdefault('failed', {})[name] = f'{type(error).__name__}: {error}'.splitlines()[0][:300]


def line(results) -> str:
  """Returns JSON with four digits of every float."""
  return json.dumps(json.loads(json.dumps(results), parse_float=lambda text: float(f'{float(text):.4g}')))


def timed(function, repeats: int = REPEATS, per: int = 1) -> dict[str, float]:
  """Returns median and least milliseconds of calls, after one that compiles, each divided by `per`."""
  jax.block_until_ready(function())
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(function())
    seconds.append(time.perf_counter() - start)
  return {'ms': 1e3 * statistics.median(seconds) / per, 'ms_least': 1e3 * min(seconds) / per}


def normal(seed: int, *shape, dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def device() -> dict:
  """Returns what JAX finds."""
  found = jax.devices()[0]
  return {'platform': found.platform, 'kind': found.device_kind, 'devices': jax.device_count(),
          'pool_gib': (found.memory_stats() or {}).get('bytes_limit', 0) / 2**30 or None,
          'jax': jax.__version__, 'backend': found.client.platform_version.replace('\n', ' ')}


def limits(size: int) -> dict[str, float]:
  """Returns the rates of a pass over `size` bytes in place, and of the fastest of a few bfloat16 products."""
  held = jnp.zeros(size // 2, jnp.bfloat16)
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def copy():
    nonlocal held
    held = add(held)
    return held

  bytes_per_second = 2e3 * size / timed(copy)['ms_least']
  held, flops = None, 0.0
  for n in (1024, 4096, 8192) if size >= 2**30 else (256, 512):
    a, product = normal(0, n, n), jax.jit(jnp.dot)  # random: of equal numbers products are faster on GPUs
    flops = max(flops, 2e3 * n**3 / timed(lambda: product(a, a))['ms_least'])
  return {'gbytes_per_second': bytes_per_second / 1e9, 'tflops': flops / 1e12}


def kernels(function, most: int = 12) -> dict[str, float]:
  """Returns launches and milliseconds of a call, then the kernels that take longest, from a trace."""
  spent, launches = collections.Counter(), 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(function())
    [file] = pathlib.Path(folder).rglob('*.xplane.pb')
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
      on_cpu = plane.name == '/host:CPU'
      rows = 'tf_XLA' if on_cpu else ('XLA Ops', 'Stream')  # of a CPU; of TPUs, of GPUs
      events = [each for row in plane.lines if row.name.startswith(rows) for each in row.events]
      for event in events if on_cpu or plane.name.startswith('/device:') else ():
        whole = event.name.startswith(('while', 'conditional', 'call'))  # of kernels that are counted
        if not whole and (not on_cpu or 'hlo_op' in dict(event.stats)):
          spent[event.name[:60]] += event.duration_ns / 1e6
          launches += 1
  return {'launches': launches, 'ms': spent.total()} | dict(spent.most_common(most))


def differences(**pairs) -> dict[str, float]:
  """Returns for each (found, expected) the largest difference over the largest value."""
  arrays = {name: [np.asarray(x, np.float32) for x in pair] for name, pair in pairs.items()}
  return {name: float(np.abs(x - y).max() / np.abs(y).max()) for name, (x, y) in arrays.items()}


def within(errors: dict[str, float], limit: float = LIMIT) -> dict[str, float]:
  """Returns errors; ArithmeticError where one is above the limit or no number."""
  if not all(error <= limit for error in errors.values()):
    raise ArithmeticError(f'differs from the dense path by {errors}, {limit} are allowed')
  return errors


def rows_kernel(config, length: int, tflops: float) -> dict:
  """Attention over a chain and over siblings that share a prompt: results, gradients, times."""
  platform, H, K, h = jax.default_backend(), config.num_heads, config.num_kv_heads, config.head_dim
  interpret = platform not in tree_attention.KERNELS
  platform = 'gpu' if interpret else platform
  shared = length // 4
  rest = length - shared
  ends = shared + (np.arange(rest) * SIBLINGS // rest + 1) * rest // SIBLINGS
  until = np.stack([np.full(length, length), np.r_[np.full(shared, length), ends]]).astype(np.int32)
  until[1] = np.maximum(until[1], np.arange(length) + 1)
  q, k, v, gradient = (normal(i, 2, length, heads, h) for i, heads in enumerate((H, K, K, H)))

  def by_kernel(q, k, v):
    return tree_attention.over_rows(until, H // K, 2 * h, platform, interpret)(q, k, v)

  dense = functools.partial(dense_attention, visible_until=jnp.asarray(until))

  def both(attention):
    def run(q, k, v, gradient):
      result, backward = jax.vjp(attention, q, k, v)
      return result, *backward(gradient)
    return jax.jit(run)

  with jax.default_matmul_precision('highest'):
    expected = both(dense)(*(x.astype(jnp.float32) for x in (q, k, v, gradient)))
  names, kernel, plain = ('result', 'q', 'k', 'v'), both(by_kernel), both(dense)
  error = lambda found: differences(**{name: pair for name, *pair in zip(names, found, expected)})
  forward = jax.jit(by_kernel)
  times = {'forward': timed(lambda: forward(q, k, v)), 'both': timed(lambda: kernel(q, k, v, gradient))}
  needed = 4 * H * h * float(np.sum(until - np.arange(length)))
  return {'errors': within(error(kernel(q, k, v, gradient))), 'errors_dense': error(plain(q, k, v, gradient)),
          **times, 'dense_both': timed(lambda: plain(q, k, v, gradient)),
          'forward_share': needed / times['forward']['ms_least'] / 1e9 / tflops,
          'both_share': 3.5 * needed / times['both']['ms_least'] / 1e9 / tflops}


def decode_kernel(config, slots: int, length: int, gbytes: float) -> dict:
  """Attention of one token a slot over slots of all lengths, and the token that it writes."""
  H, K, h, platform = config.num_heads, config.num_kv_heads, config.head_dim, jax.default_backend()
  kernel = paged_attention.KERNELS.get(platform)
  attend = functools.partial(paged_attention.attend, platform=kernel or 'gpu', interpret=not kernel)
  q, keys, values = normal(0, slots, 1, H, h), normal(1, slots, 1, K, h), normal(2, slots, 1, K, h)
  multiple = PAGE * paged_attention.MULTIPLE
  pages = -(-length // multiple) * paged_attention.MULTIPLE
  width = paged_attention.padded(kernel or 'gpu', h)
  cache = tuple(jnp.pad(normal(3 + i, K, slots * pages + 1, PAGE, h), [(0, 0)] * 3 + [(0, width - h)])
                for i in range(2))
  table = 1 + np.random.default_rng(0).permutation(slots * pages).reshape(slots, -1).astype(np.int32)
  lengths = np.linspace(0, length - 1, slots).astype(np.int32)

  @jax.jit
  def dense(q, keys, values, cache):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (q, keys, values, cache))
    with jax.default_matmul_precision('highest'):
      return attend_to_pages(*wide, lengths, table)[0]

  expected = dense(q, keys, values, cache)
  found, after = jax.jit(attend)(q, keys, values, cache, lengths, table)
  there = np.take_along_axis(table, lengths[:, None] // PAGE, axis=1)[:, 0], lengths % PAGE
  new = jnp.moveaxis(after[0][:, *there, :h], 0, 1)[:, None]
  errors = within(differences(result=(found, expected), written=(new, keys)))

  @functools.partial(jax.jit, donate_argnums=0)
  def steps(cache):
    turn = lambda _, carry: attend(carry[0], keys, values, carry[1], lengths, table)
    return jax.lax.fori_loop(0, STEPS, turn, (q, cache))

  def run():
    nonlocal cache
    result, cache = steps(cache)
    return result

  moved, times = float(lengths.sum()) * K * 2 * h * 2, timed(run, per=STEPS)
  return {'errors': errors, **times, 'bandwidth_share': moved / times['ms_least'] / 1e6 / gbytes}


def auto_and_dense(config, length: int) -> dict:
  """Loss, gradient norm and log-probabilities of one update by the kernels and by the dense path."""
  number = min(6, (length - 64) // 128)  # the last has as many turns of 128 tokens
  data, found = train_step.rollouts(number, config.vocab_size), {}
  for attention in ('auto', 'dense'):
    model = dataclasses.replace(config, attention=attention)
    update, state, batch, _ = train_step.open_update(data, model, length)
    score = training.make_score_step(
      model, mesh=meshes.make_mesh(devices=jax.devices()[:1]), temperature=1.0, chunk=1024)
    logprobs = np.asarray(score(state.params, batch))
    figures = update(state, batch)[1]
    found[attention] = [float(figures[name]) for name in ('loss', 'grad_norm')], logprobs
  ((loss, norm), logprobs), ((loss_dense, norm_dense), dense) = found.values()
  gap = np.abs(logprobs - dense)[np.asarray(batch.targets) >= 0]
  # On CPUs both paths are the dense one; elsewhere the noise of bfloat16, or TF32, adds up over layers.
  limit = 0.0 if jax.default_backend() == 'cpu' else 0.05
  errors = within({'grad_norm': abs(norm / norm_dense - 1), 'logprob_gap': float(gap.mean())}, limit)
  return errors | {'loss': loss, 'loss_dense': loss_dense, 'logprob_gap_max': float(gap.max())}


def check(args, results: Results) -> None:
  best = results['limits']
  for name in args.presets:
    config = preset(name)
    results.measure(f'rows_{name}', rows_kernel, config, args.length, best['tflops'])
    results.measure(
      f'decode_{name}', decode_kernel, config, args.slots, args.length, best['gbytes_per_second'])
  config = dataclasses.replace(preset(args.presets[0]), dtype=args.dtype, remat='full')
  results.measure('auto_and_dense', auto_and_dense, config, args.length)


def decode(args, results: Results) -> None:
  config, best = dataclasses.replace(preset(args.preset), dtype=args.dtype), results['limits']
  spans = [sampler.GENERATED] * 2  # of a rollout
  least = sampler.PROMPT + len(spans) * (sampler.GENERATED + sampler.OBSERVED)
  engine = Engine(config, sampler.Words(), slots=args.slots, length=max(least, *args.lengths),
                  pages=args.slots * (max(least, *args.lengths) // PAGE + 4))
  engine.load(jax.jit(lambda key: initial_params(config, key, args.dtype))(jax.random.key(0)))
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  weights = size(engine._params) - ('unembedding' in engine._params and engine._params['embedding'].nbytes)
  entry = size(engine._cache) / (engine._cache[0][0].shape[1] * PAGE)

  def placed(length):
    engine.forget()
    paths = [Path(np.full(length + 1, i, np.int32), length + 1 + 2 * engine.segment_steps, i)
             for i in range(engine.slots)]
    return [path for path in paths if engine.pools[0].place(path)]

  share = lambda moved, times: moved / times['ms_least'] / 1e6 / best['gbytes_per_second']
  results |= {'weights_gb': weights / 1e9, 'cache_gb': size(engine._cache) / 1e9, 'kernel': engine._kernel}

  def token(length):
    paths = placed(length)
    slots = segment.idle_slots(len(paths))
    slots.lengths[:], slots.temperature[:], slots.remaining[:] = length, 1.0, 2 * engine.segment_steps
    key, steps = engine.put(jax.random.key(0)), engine.segment_steps
    decode = lambda: engine.decode(paths, slots, key, engine.slots, steps)
    assert (decode()[2] == engine.segment_steps).all()
    times = timed(decode, per=engine.segment_steps)
    moved = weights + len(paths) * (length + engine.segment_steps / 2) * entry
    launches = kernels(decode)['launches'] / engine.segment_steps
    return times | {'bandwidth_share': share(moved, times), 'launches_a_token': launches}

  def prefill():
    n, counts = list(engine._counts.items())[-1]
    paths = placed(n)[:counts[-1]]
    at_once = len(paths)
    chunks = lambda: [Chunk(path, 0, np.ones(n, np.int32)) for path in paths]
    times = timed(lambda: (engine.prefill(chunks()), engine._cache)[1])
    layers = sum(x.size for x in jax.tree.leaves(engine._params['layers']))
    flops = 2 * layers * at_once * n
    return times | {'tokens': at_once * n,
                    'products_share': flops / times['ms_least'] / 1e9 / best['tflops']}

  def host():
    lengths = [spans] * engine.slots
    sampler.grow(engine, lengths)  # compiles
    seconds, row = min((sampler.grow(engine, lengths) for _ in range(3)), key=lambda run: run[0])
    return {'ms_a_span': 1e3 * row['seconds_host'] / (len(spans) * engine.slots),
            'host_share': row['seconds_host'] / row['seconds'],
            'tokens_per_second': sum(map(sum, lengths)) / seconds}

  for length in args.lengths:
    results.measure(f'token_at_{length}', token, length)
  results.measure('prefill', prefill)
  results.measure('host', host)


def policy_update(args, results: Results) -> dict:
  """MFU and memory of an update on rows of whole rollouts."""
  config = dataclasses.replace(preset(args.preset), dtype=args.dtype, remat='full')
  data = train_step.rollouts(args.rollouts, config.vocab_size)
  update, state, batch, padded = train_step.open_update(data, config, args.length, args.rows)
  update, arguments = programs.Program(update, (state, batch)).lower().compile(), programs.on_device(
    (state, batch))
  planned = arguments + plan.needs(update, arguments)

  def step():
    nonlocal state
    state, figures = update(state, batch)
    return figures

  times, peak = timed(step), jax.devices()[0].memory_stats()
  times['kernels'] = kernels(step)
  needed = train_step.needed_flops(data, dataclasses.asdict(config)) / times['ms_least'] / 1e9
  return times | {
    'tokens': sum(len(ids) for ids, _ in data), 'padded_share': padded,
    'mfu': needed / results['limits']['tflops'],
    'planned_gib': planned / 2**30, 'peak_gib': peak['peak_bytes_in_use'] / 2**30 if peak else None}


def real_run(args) -> dict:
  """Three steps of a pod's config on this device: the rows of metrics, and what must hold of them."""
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.model, config.dtype, config.steps, config.rollouts = f'random:{args.run}', args.dtype, 3, 0
  config.questions_per_step = args.questions
  config.data.questions, config.search.backend = 'world:rl', 'bm25'
  config.distributed.enabled = False
  config.mesh.accelerator = jax.default_backend() != 'cpu'
  config.grow.max_tokens = config.sampler.max_observation = args.tokens
  chains = args.questions * config.group_size
  config.sampler.update(slots=min(config.sampler.slots, chains), length=args.length)
  config.train.update(row_length=args.length, micro_rows=args.rows * jax.device_count(), mini_batch=0)
  with tempfile.TemporaryDirectory() as folder:
    config.out = f'{folder}/run'
    loop.train(config)
    rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  last = rows[-1]
  kept = ('compilations', 'logprob_gap', 'logprob_gap_max', 'goodput', 'mfu', 'device_peak_gib',
          'tokens_generated', 'tokens_per_second_rollout', 'tokens_per_second_update')
  return {name: value for name, value in last.items() if name in kept or name.startswith('seconds')} | {
    'compilations_of_steps': [row['compilations'] for row in rows]}


def update(args, results: Results) -> None:
  results.measure('update', policy_update, args, results)
  results.measure('run', real_run, args)
  for name, limit in (('compilations', 0), ('logprob_gap', 0.05)):
    if results.get('run', {}).get(name, 0) > limit:  # of the last step
      results.fail(name, ArithmeticError(f'{results["run"][name]} in step 3, {limit} are allowed'))


def main(argv: list[str] | None = None) -> int:
  os.environ.setdefault('XLA_CLIENT_MEM_FRACTION', str(memory.POOL))  # as `jaxsearch train`
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parts = parser.add_subparsers(required=True)
  for part, fields in DEFAULTS.items():
    own = parts.add_parser(part, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    own.set_defaults(function=globals()[part])
    for name, value in (fields | {'dtype': 'bfloat16', 'gib': 4.0}).items():  # of the models; that are copied
      several = isinstance(value, list)
      own.add_argument(f'--{name}', type=type(value[0] if several else value), default=value,
                       nargs='+' if several else None, help=' ')
  args, results = parser.parse_args(argv), Results()
  COMPILED.clear()
  results.measure('device', device)
  results.measure('limits', limits, int(args.gib * 2**30))
  try:
    args.function(args, results)
  except Exception as error:
    results.fail('preparation', error)
  results |= {'programs': len(COMPILED), 'compile_seconds': sum(COMPILED)}
  print(line(results))
  return int('failed' in results)


if __name__ == '__main__':
  sys.exit(main())
