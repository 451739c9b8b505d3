"""Kernels beside the dense path, timed: what benchmarks/accelerator.py measures of a device."""

import collections
import concurrent.futures
import functools
import itertools
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.models.attention import attend_to_pages, dense_attention
from jaxsearch.models.kernels import flash_attention, paged_attention, tree_attention
from jaxsearch.models.sampling_weights import quantise
from jaxsearch.sampler.pages import PAGE

LIMIT = 0.02     # of a kernel's difference: five roundings to bfloat16
REPEATS = 5
STEPS = 20       # of decode attention in one program, which is too short to be timed alone
SIBLINGS = 5
# Of decode attention on GPUs: pages of a block, of a part; warps, stages.
SETTINGS = [*itertools.product((1, 2, 4), (8, 16), (2, 4, 8), (1, 2))]
# For references: with autotuning, an H100 took 89 s to compile the unrolled blocks of one.
UNTUNED = {'compiler_options': {'xla_gpu_autotune_level': 0}}


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


def with_gradients(attention):
  """Returns a function of (q, k, v, gradient of the result, ...) that returns the result and gradients."""
  def run(q, k, v, gradient, *rest):
    result, backward = jax.vjp(lambda *given: attention(*given, *rest), q, k, v)
    return result, *backward(gradient)
  return run


DENSE = jax.jit(with_gradients(dense_attention))  # both are compiled once for all rows of a shape
REFERENCE = jax.jit(with_gradients(dense_attention), **UNTUNED)


def rows_kernel(config, length: int, tflops: float, attention: str = 'auto') -> dict:
  """Attention over a chain and over siblings that share a prompt, or with 'flash' are chains of their own:
  results, gradients, times."""
  platform, H, K, h = jax.default_backend(), config.num_heads, config.num_kv_heads, config.head_dim
  interpret = platform not in tree_attention.KERNELS
  platform = 'gpu' if interpret else platform
  shared = length // 4
  rest = length - shared
  ends = shared + (np.arange(rest) * SIBLINGS // rest + 1) * rest // SIBLINGS
  until = np.stack([np.full(length, length), np.r_[np.full(shared, length), ends]]).astype(np.int32)
  until[1] = np.maximum(until[1], np.arange(length) + 1)
  until[1, :shared] = shared if attention == 'flash' else length
  q, k, v, gradient = (normal(i, 2, length, heads, h) for i, heads in enumerate((H, K, K, H)))

  def by_kernel(q, k, v):
    if attention == 'flash':
      return flash_attention.over_rows(until, platform, interpret)(q, k, v)
    return tree_attention.over_rows(until, H // K, 2 * h, platform, interpret)(q, k, v)

  with jax.default_matmul_precision('highest'):
    expected = REFERENCE(*(x.astype(jnp.float32) for x in (q, k, v, gradient)), until)
  names, kernel = ('result', 'q', 'k', 'v'), jax.jit(with_gradients(by_kernel))
  plain = lambda *given: DENSE(*given, until)
  error = lambda found: differences(**{name: pair for name, *pair in zip(names, found, expected)})
  forward = jax.jit(by_kernel)
  times = {'forward': timed(lambda: forward(q, k, v)), 'both': timed(lambda: kernel(q, k, v, gradient))}
  needed = 4 * H * h * float(np.sum(until - np.arange(length)))
  return {'errors': within(error(kernel(q, k, v, gradient))), 'errors_dense': error(plain(q, k, v, gradient)),
          **times, 'dense_both': timed(lambda: plain(q, k, v, gradient)),
          'forward_share': needed / times['forward']['ms_least'] / 1e9 / tflops,
          'both_share': 3.5 * needed / times['both']['ms_least'] / 1e9 / tflops}


def scattered_table(slots: int, length: int) -> np.ndarray:
  """Returns a shuffled page table for slots of `length` tokens; page 0 belongs to no slot."""
  multiple = PAGE * paged_attention.MULTIPLE
  pages = -(-length // multiple) * paged_attention.MULTIPLE
  return 1 + np.random.default_rng(0).permutation(slots * pages).reshape(slots, -1).astype(np.int32)


def paged_kernel(config, slots: int, length: int, gbytes: float, n: int = 1) -> dict:
  """Attention of n tokens a slot over slots of all lengths, and the tokens that it writes."""
  H, K, h, platform = config.num_heads, config.num_kv_heads, config.head_dim, jax.default_backend()
  kernel = paged_attention.KERNELS.get(platform)
  attend = functools.partial(paged_attention.attend, platform=kernel or 'gpu', interpret=not kernel)
  q, keys, values = normal(0, slots, n, H, h), normal(1, slots, n, K, h), normal(2, slots, n, K, h)
  table = scattered_table(slots, length)
  parts = [normal(3 + i, K, table.size + 1, PAGE, h) for i in range(2)]
  cache = paged_attention.arranged(kernel or 'gpu', *parts)
  lengths = np.linspace(0, length - n, slots).astype(np.int32)

  @functools.partial(jax.jit, **UNTUNED)
  def dense(*arrays):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    with jax.default_matmul_precision('highest'):
      return attend_to_pages(*wide, lengths, table)[0]

  expected = dense(q, keys, values, parts)
  found, after = jax.jit(attend)(q, keys, values, cache, lengths, table)
  places = lengths[:, None] + np.arange(n)
  there = np.take_along_axis(table, places // PAGE, axis=1), places % PAGE
  new = jnp.moveaxis(after[0][:, *there, :, :h] if len(after) == 1 else after[0][:, *there, :h], 0, 2)
  new = new.reshape(slots, n, -1, h)[:, :, ::2 // len(after)][:, :, :K]  # in one array values follow keys
  errors = within(differences(result=(found, expected), written=(new, keys)))

  times = max(STEPS // n, 1)

  @functools.partial(jax.jit, donate_argnums=0)
  def steps(cache):
    turn = lambda _, carry: attend(carry[0], keys, values, carry[1], lengths, table)
    return jax.lax.fori_loop(0, times, turn, (q, cache))

  def run():
    nonlocal cache
    result, cache = steps(cache)
    return result

  moved, spent = float(lengths.sum()) * K * 2 * h * 2, timed(run, per=times)
  return {'errors': errors, **spent, 'bandwidth_share': moved / spent['ms_least'] / 1e6 / gbytes}


def decoding_settings(config, slots: int, length: int, full: int) -> dict[str, float]:
  """Milliseconds of decode attention with `full` tokens a slot, by its settings: the fastest, then ours."""
  H, K, h = config.num_heads, config.num_kv_heads, config.head_dim
  table = scattered_table(slots, length)
  arrays = [normal(i, *shape) for i, shape in enumerate([(slots, H, h)] + [(K, table.size + 1, PAGE, h)] * 2)]
  arrays += [table, np.full(slots, full, np.int32)]  # arguments: as constants they take a minute to compile

  def compiled(settings):
    attend = functools.partial(paged_attention.for_gpu.paged_attention, **settings,
                               interpret=jax.default_backend() == 'cpu')
    steps = lambda q, *cache: jax.lax.fori_loop(0, STEPS, lambda _, q: attend(q, *cache).astype(q.dtype), q)
    return jax.jit(steps).lower(*arrays).compile()

  names, pages = ('pages_per_compute_block', 'k_splits', 'num_warps', 'num_stages'), table.shape[1]
  tried = [dict(zip(names, (block, pages // part, *rest))) for block, part, *rest in SETTINGS]
  ours = {'k_splits': pages // paged_attention.MULTIPLE} | paged_attention.DECODING
  with concurrent.futures.ThreadPoolExecutor() as pool:
    *programs, ours = pool.map(compiled, [*tried, ours])
  ms = lambda steps: timed(lambda: steps(*arrays), per=STEPS)['ms_least']
  spent = {str(settings): ms(steps) for settings, steps in zip(tried, programs)}
  return {name: spent[name] for name in sorted(spent, key=spent.get)[:3]} | {'ours': ms(ours)}


def quantised_product(config, kind: str) -> dict:
  """The product of 64 tokens with an 8-bit matrix, beside that with the matrix it was made from."""
  x, w = normal(0, 64, config.hidden_size), normal(1, config.hidden_size, config.intermediate_size)
  matrix, product = quantise({'gate': w}, kind)['gate'], jax.jit(lambda x, w: w.multiply(x))
  with jax.default_matmul_precision('highest'):
    expected = x.astype(jnp.float32) @ (matrix.values.astype(jnp.float32) * matrix.scale)
  return {'errors': within(differences(result=(product(x, matrix), expected))),
          **timed(lambda: product(x, matrix)), 'bfloat16': timed(lambda: jnp.dot(x, w))}
