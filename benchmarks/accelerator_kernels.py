"""Attention kernels beside the dense path, timed: what benchmarks/accelerator.py measures of a device."""

import collections
import functools
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.models.attention import attend_to_pages, dense_attention
from jaxsearch.models.kernels import paged_attention, tree_attention
from jaxsearch.sampler.pages import PAGE

LIMIT = 0.02     # of a kernel's difference: five roundings to bfloat16
REPEATS = 5
STEPS = 20       # of decode attention in one program, which is too short to be timed alone
SIBLINGS = 5


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
  parts = [normal(3 + i, K, slots * pages + 1, PAGE, h) for i in range(2)]
  cache = paged_attention.arranged(kernel or 'gpu', *parts)
  table = 1 + np.random.default_rng(0).permutation(slots * pages).reshape(slots, -1).astype(np.int32)
  lengths = np.linspace(0, length - 1, slots).astype(np.int32)

  @jax.jit
  def dense(*arrays):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    with jax.default_matmul_precision('highest'):
      return attend_to_pages(*wide, lengths, table)[0]

  expected = dense(q, keys, values, parts)
  found, after = jax.jit(attend)(q, keys, values, cache, lengths, table)
  there = np.take_along_axis(table, lengths[:, None] // PAGE, axis=1)[:, 0], lengths % PAGE
  new = jnp.moveaxis(after[0][:, *there, :, :h] if len(after) == 1 else after[0][:, *there, :h], 0, 1)
  new = new.reshape(slots, 1, -1, h)[:, :, ::2 // len(after)][:, :, :K]  # in one array values follow keys
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
