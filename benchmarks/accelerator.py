"""Checks a device: whether its kernels are right, and how near decoding and updates come to its limits.

    python benchmarks/accelerator.py check
    python benchmarks/accelerator.py decode --preset qwen2.5-3b --slots 128 --lengths 512 2048 4096
    python benchmarks/accelerator.py update --preset qwen2.5-1.5b

Each is meant to take less than ten minutes on an H100. What is measured is printed as soon as it is known,
the last line is one JSON object of all of it. What fails is in `failed`, the rest goes on, and the exit
status is 1. Weights are random. Times are in milliseconds, the median and the least of several calls that
each wait for their results; shares are of the limits that the same call measured.

  check   what JAX finds: a device where /dev has one, a mesh of all of them with their hosts and slices, a
          pool as large as plans take it to be; rates of a copy and of a bfloat16 product; every kernel of
          attention (to rows; to pages by tokens that are decoded or prefilled) against the dense path in
          float32, as the largest difference over the largest value, beside the difference of the dense path
          in bfloat16; products with matrices of 8 bits; an update with attention=auto beside one with
          attention=dense; an update compiled, then read from the compilation cache as by a process that
          starts again, and whether both give the same bits (--deterministic=1: as with
          config.xla_deterministic); at last the settings with which GPUs decode fastest
  decode  a token of all slots at each length and what its kernels take, a prefill, the host's share of a span
  update  MFU (operations that are needed, over the rate of a product), peak memory beside that of the plan;
          then three steps of configs/search_r1_grpo_qwen2_5_3b.py with random weights on the embedded
          world, the third of which compiles nothing (--ahead=1: with rollouts one step ahead, on several
          devices)

Without Monty's runtime MONTY_BIN must be set, to any path: no program is run.
A bare machine with Python 3.12, and JAX 0.11 with its plugin and what JAX needs (numpy, scipy, …), needs a
checkout in PYTHONPATH and 55 wheels, 58 MiB in all for Linux on x86-64, installed with `pip install
--no-deps` at the versions of launch/constraints.txt; their MiB:
  tensorstore 20.8, transformers 12.7, pydantic_monty_client 4.2 (without its runtime of 14), array_record
  3.7, tokenizers 3.2, pydantic_core 2.2, orbax-checkpoint 1.4, pygments 1.2, huggingface_hub 0.8, regex
  0.8, pyyaml 0.8, grain 0.6, flax 0.5, msgpack 0.5, pydantic 0.5, safetensors 0.5, optax 0.4, protobuf 0.3,
  rich 0.3; and 3 together: absl-py, annotated-types, anyio, certifi, click, cloudpickle, etils, filelock,
  fsspec, h11, httpcore, httpcore2, httpx, httpx2, humanize, idna, jinja2, markdown-it-py, markupsafe,
  mdurl, ml_collections, packaging, portpicker, prometheus_client, psutil, pydantic_monty, rank_bm25,
  simplejson, tensorboardX, tqdm, treescope, truststore, typer, typing_extensions, typing_inspection, zipp
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from benchmarks import sampler, train_step
from benchmarks.accelerator_kernels import (
  decoding_settings,
  kernels,
  paged_kernel,
  quantised_product,
  rows_kernel,
  timed,
  within,
)
from configs import search_r1_grpo_qwen2_5_3b
from jaxsearch.cli import ACCELERATORS
from jaxsearch.models.architecture import initial_params, preset
from jaxsearch.models.sampling_weights import KINDS
from jaxsearch.parallel import memory, mesh as meshes, targets
from jaxsearch.planning import plan, programs
from jaxsearch.sampler import segment
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.pages import PAGE, Chunk, Path
from jaxsearch.training import loop, metrics, row_files, step as training

DEFAULTS = {
  'check': {'presets': ['qwen2.5-0.5b', 'qwen2.5-3b', 'llama3.1-8b'], 'slots': 128, 'length': 2048,
            'deterministic': 0},
  'decode': {'preset': 'qwen2.5-3b', 'slots': 128, 'lengths': [512, 2048, 4096]},
  'update': {'preset': 'qwen2.5-1.5b', 'length': 4096, 'rows': 4, 'rollouts': 96,
             'run': 'qwen2.5-0.5b', 'questions': 16, 'tokens': 200, 'ahead': 0}}  # the last four of the run
SECONDS = {metrics.COMPILATION: [], metrics.READ: []}  # of every program, of every read from the cache

jax.monitoring.register_event_duration_secs_listener(
  lambda event, seconds, **_: SECONDS.get(event, []).append(seconds))


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


def device() -> dict:
  """Returns what JAX finds; OSError where it misses an accelerator, or its pool is not what plans take."""
  found = jax.devices()[0]
  there = any(any(pathlib.Path('/dev').glob(name)) for name in ACCELERATORS)
  if found.platform == 'cpu' and there and os.environ.get('JAX_PLATFORMS') != 'cpu':
    raise OSError('/dev has an accelerator, JAX finds none: is its plugin there, of the driver\'s version?')
  pool, kind = (found.memory_stats() or {}).get('bytes_limit', 0), targets.KINDS.get(found.device_kind)
  share = pool / targets.DEVICES[kind].memory if kind else None
  if found.platform == 'gpu' and share and abs(share - memory.POOL) > 0.03:
    raise OSError(f'the pool is {share:.2f} of the memory, plans take {memory.POOL}')
  return {'platform': found.platform, 'kind': found.device_kind, 'devices': jax.device_count(),
          'hosts': jax.process_count(),
          'slices': [getattr(one, 'slice_index', None) for one in jax.devices()],
          'mesh': dict(meshes.make_mesh().shape), 'pool_gib': pool / 2**30 or None, 'pool_share': share,
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
  held = None
  flops = train_step.machine_flops('bfloat16', (1024, 4096, 8192) if size >= 2**30 else (256, 512))
  return {'gbytes_per_second': bytes_per_second / 1e9, 'tflops': flops / 1e12}


def auto_and_dense(config, length: int) -> dict:
  """Loss, gradient norm and log-probabilities of one update by the kernels and by the dense path."""
  number = min(6, (length - 64) // 128)  # the longest has as many turns of 128 tokens
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


@contextlib.contextmanager
def compilation_cache_in(folder: str):
  """Opens a context with a compilation cache of its own, which takes every program."""
  fields = {'jax_compilation_cache_dir': folder, 'jax_persistent_cache_min_compile_time_secs': 0.0}
  before = {name: getattr(jax.config, name) for name in fields}
  use = lambda fields: (compilation_cache.reset_cache(), [*map(jax.config.update, *zip(*fields.items()))])
  use(fields)
  try:
    yield
  finally:
    use(before)


def started_again(config, length: int, deterministic: bool) -> dict:
  """An update that is compiled, then read from the cache; whether both end with the same parameters."""
  data, seconds, ends = train_step.rollouts(1, config.vocab_size), [], []
  with tempfile.TemporaryDirectory() as folder, compilation_cache_in(folder):
    for _ in range(2):
      jax.clear_caches()
      update, state, batch, _ = train_step.open_update(data, config, length)
      lowered = programs.Program(update, (state, batch)).lower()
      reads, start = len(SECONDS[metrics.READ]), time.perf_counter()
      update = lowered.compile()
      seconds.append(time.perf_counter() - start)
      ends.append(jax.device_get(update(state, batch)[0].params))
    read = len(SECONDS[metrics.READ]) > reads
  largest = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, ends)))
  if not read or (largest and (deterministic or jax.default_backend() != 'gpu')):
    raise ArithmeticError(f'read from the cache: {read}; parameters differ by {largest}')
  return {'compile_seconds': seconds[0], 'read_seconds': seconds[1], 'parameters_differ_by': largest}


def check(args, results: Results) -> None:
  best = results['limits']
  for name in args.presets:
    config = preset(name)
    results.measure(f'rows_{name}', rows_kernel, config, args.length, best['tflops'])
    results.measure(f'flash_{name}', rows_kernel, config, args.length, best['tflops'], 'flash')
    for kind, slots, tokens in (('decode', args.slots, 1),
                                ('prefill', min(args.slots, 8), min(512, args.length // 3))):
      results.measure(
        f'{kind}_{name}', paged_kernel, config, slots, args.length, best['gbytes_per_second'], tokens)
    for kind in KINDS:
      results.measure(f'{kind}_{name}', quantised_product, config, kind)
  config = dataclasses.replace(preset(args.presets[0]), dtype=args.dtype, remat='full')
  results.measure('auto_and_dense', auto_and_dense, config, args.length)
  results.measure('started_again', started_again, config, args.length, bool(args.deterministic))
  for name in args.presets if jax.default_backend() == 'gpu' else ():
    for full in (args.length // 4, args.length):
      results.measure(f'settings_{name}_{full}', decoding_settings, preset(name), args.slots, args.length, full)


def decode(args, results: Results) -> None:
  config, best = dataclasses.replace(preset(args.preset), dtype=args.dtype), results['limits']
  spans = [sampler.GENERATED] * 2  # of a rollout
  least = sampler.PROMPT + len(spans) * (sampler.GENERATED + sampler.OBSERVED)
  engine = Engine(config, sampler.Words(), slots=args.slots, length=max(least, *args.lengths),
                  pages=args.slots * (max(least, *args.lengths) // PAGE + 4))
  engine.load(jax.jit(lambda key: initial_params(config, key, args.dtype))(jax.random.key(0)))
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  weights = size(engine._params) - ('unembedding' in engine._params and engine._params['embedding'].nbytes)
  engine.allocate()
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
    print(f'token: {line(times)}', file=sys.stderr, flush=True)  # before a trace, which some machines refuse
    spent = {name: value / engine.segment_steps for name, value in kernels(decode).items()}
    return times | {'bandwidth_share': share(moved, times), 'launches_a_token': spent.pop('launches'),
                    'kernels_a_token': spent}

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
  print(f'update: {line(times)}', file=sys.stderr, flush=True)  # before a trace, which some machines refuse
  times['kernels'] = kernels(step)
  needed = train_step.needed_flops(data, dataclasses.asdict(config)) / times['ms_least'] / 1e9
  return times | {
    'tokens': sum(len(ids) for ids, _ in data), 'padded_share': padded,
    'mfu': needed / results['limits']['tflops'],
    'planned_gib': planned / 2**30, 'peak_gib': peak['peak_bytes_in_use'] / 2**30 if peak else None}


def real_run(args) -> dict:
  """Runs three steps of a pod's config here; returns metrics of the last, and compilations of each."""
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.model, config.dtype, config.steps, config.rollouts = f'random:{args.run}', args.dtype, 3, 0
  config.questions_per_step = args.questions
  config.data.questions, config.search.backend = 'world:rl', 'bm25'
  config.distributed.enabled = False
  config.mesh.accelerator = jax.default_backend() != 'cpu'
  config.grow.max_tokens = config.sampler.max_observation = args.tokens
  chains = args.questions * config.group_size
  config.sampler.update(slots=min(config.sampler.slots, chains), length=args.length)
  config.train.update(row_length=args.length, micro_rows=args.rows * jax.device_count(), mini_batch=0,
                      async_steps=args.ahead)
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
    for name, value in (fields | {'dtype': 'bfloat16', 'gib': 4.0}).items():  # the models' dtype; GiB to copy
      several = isinstance(value, list)
      own.add_argument(f'--{name}', type=type(value[0] if several else value), default=value,
                       nargs='+' if several else None, help=' ')
  args, results = parser.parse_args(argv), Results()
  if vars(args).get('deterministic'):  # as config.xla_deterministic
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_gpu_exclude_nondeterministic_ops=true'
  SECONDS[metrics.COMPILATION].clear()
  results.measure('device', device)
  results.measure('limits', limits, int(args.gib * 2**30))
  try:
    args.function(args, results)
  except Exception as error:
    results.fail('preparation', error)
  compiled = SECONDS[metrics.COMPILATION]
  results |= {'programs': len(compiled), 'compile_seconds': sum(compiled)}
  print(line(results))
  return int('failed' in results)


if __name__ == '__main__':
  sys.exit(main())
