"""The kernels by interpretation against the dense path, what they visit, and their compilation for devices."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import SingleDeviceSharding

from jaxsearch.models.architecture import DecoderConfig, parameter_shapes
from jaxsearch.models.attention import dense_attention
from jaxsearch.models.decoder import hidden_states
from jaxsearch.models.kernels import tree_attention
from jaxsearch.models.kernels.tree_attention import Sizes, attend, visible_blocks, visits
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.planning import costs
from tests.parallel.compilers import devices_of


def random_row(rng, length, leave, padding):
  """`visible_until` [length] of random trees: a token leaves each open subtree with chance `leave`."""
  until, path = np.arange(length) + 1, []
  for token in range(length - padding):
    while path and rng.random() < leave:
      until[path.pop()] = token
    path.append(token)
  until[path] = length - padding
  return until


def random_rows(seed, rows, length, leave=None):
  """[rows, length]: trees, from chains to stars; the last row is padding alone."""
  rng = np.random.default_rng(seed)
  chances = rng.uniform(0, 0.7, rows) ** 2 if leave is None else np.full(rows, leave)
  return np.stack([random_row(rng, length, chance, length if row == rows - 1 else rng.integers(0, length // 3))
                   for row, chance in enumerate(chances)]).astype(np.int32)


def packed_row(length, *trees):
  """`visible_until` [length] of chains of the given lengths, and padding."""
  ends = np.cumsum(trees)
  return np.concatenate([np.repeat(ends, trees), np.arange(ends[-1], length) + 1]).astype(np.int32)


def arrays(seed, B, T, H, K, h, dtype=jnp.float32):
  """q, k, v and the gradient of the result."""
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(B, T, heads, h)), dtype) for heads in (H, K, K, H))


def with_gradients(attention, q, k, v, gradient):
  result, backward = jax.vjp(attention, q, k, v)
  return result, *backward(gradient.astype(result.dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def by_kernel(platform, sizes, until, *given):
  return with_gradients(lambda q, k, v: attend(platform, sizes, True, q, k, v, visits(until, sizes)), *given)


@jax.jit
def by_dense(until, *given):
  return with_gradients(lambda q, k, v: dense_attention(q, k, v, until), *given)


def check(found, expected, forward=1e-5, backward=1e-4):
  for name, x, y, limit in zip(('result', 'q', 'k', 'v'), found, expected, (forward, *[backward] * 3)):
    np.testing.assert_allclose(x, y, rtol=0, atol=limit, err_msg=name)


# Query blocks larger and smaller than those of keys, lengths that blocks divide or not, heads in groups or not.
@pytest.mark.parametrize('platform, sizes, T, H, K, h', [
  ('tpu', Sizes(8, 16), 75, 4, 2, 8), ('tpu', Sizes(16, 16), 64, 2, 1, 8),
  ('gpu', Sizes(32, 16), 75, 4, 2, 24), ('gpu', Sizes(16, 16), 64, 2, 1, 8), ('gpu', Sizes(16, 32), 41, 2, 2, 16)])
def test_equals_the_dense_path(platform, sizes, T, H, K, h):
  @settings(max_examples=10, deadline=None)
  @given(seed=st.integers(0, 2**32 - 1), values=st.integers(0, 2**32 - 1))
  def equal(seed, values):
    until, given = random_rows(seed, 3, T), arrays(values, 3, T, H, K, h)
    check(by_kernel(platform, sizes, until, *given), by_dense(until, *given))

  equal()


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_what_is_not_visible_is_not_read(platform):
  """Two trees that end where blocks end: NaN in one reaches neither results nor gradients of the other."""
  until, (q, k, v, gradient) = np.tile(packed_row(64, 32, 32), (3, 1)), arrays(0, 3, 64, 2, 1, 8)
  clean = by_kernel(platform, Sizes(16, 16), until, q, k, v, gradient)
  poisoned = by_kernel(platform, Sizes(16, 16), until, *(x.at[:, :32].set(np.nan) for x in (q, k, v, gradient)))
  for x, y in zip(poisoned, clean):
    assert np.isnan(x[:, :32]).all()
    np.testing.assert_array_equal(x[:, 32:], y[:, 32:])
  nothing = by_kernel(platform, Sizes(16, 16), np.zeros_like(until), q, k, v, gradient)  # no token sees even itself
  assert all(np.isfinite(x).all() for x in nothing)


# --- what is visited ---


def needed_blocks(until, sizes):
  """[n,m] bool: blocks of the mask in which something is visible, by looking at all of it."""
  length = sizes.padded(len(until))
  until, index = np.concatenate([until, np.arange(len(until), length) + 1]), np.arange(length)
  mask = (index <= index[:, None]) & (index[:, None] < until)
  return mask.reshape(length // sizes.q, sizes.q, length // sizes.k, sizes.k).any(axis=(1, 3))


@pytest.mark.parametrize('sizes, T', [(Sizes(8, 8), 50), (Sizes(4, 16), 64), (Sizes(16, 4), 90)])
def test_the_blocks_visited_are_those_needed(sizes, T):
  """All of them, in order, and none but them: 1.0 times, where 1.1 are allowed."""
  listed = jax.jit(visits, static_argnums=1)

  @settings(max_examples=20, deadline=None)
  @given(seed=st.integers(0, 2**32 - 1))
  def needed(seed):
    rows = random_rows(seed, 2, T)
    found = jax.device_get(listed(rows, sizes))
    for row, until in enumerate(rows):
      blocks = needed_blocks(until, sizes)
      check_list(*(x[row] for x in found.by_query), blocks)
      check_list(*(x[row] for x in found.by_key), blocks.T)

  needed()


def check_list(pairs, starts, needed):
  expected = np.argwhere(needed)
  np.testing.assert_array_equal(np.stack([pairs >> 16, pairs & 0xFFFF], axis=1)[:len(expected)], expected)
  assert (pairs[len(expected):] == pairs[len(expected) - 1]).all()
  np.testing.assert_array_equal(starts, np.searchsorted(expected[:, 0], np.arange(len(needed) + 1)))


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_a_row_of_six_trees_costs_six_trees(platform):
  """In blocks of the size that devices get: of a causal row a sixth, and what sticks out of the trees."""
  length, trees = 16384, [2730] * 6
  sizes = tree_attention.block_sizes(platform, length, 8, 256)
  count = lambda until: int(np.sum(visible_blocks(jnp.asarray(until)[None], sizes)))
  assert count(packed_row(length, length)) == sizes.most(length)
  alone = sum(count(packed_row(sizes.padded(tree), tree)) for tree in trees)
  assert count(packed_row(length, *trees)) <= 1.25 * alone < sizes.most(length) / 4
  print(f'{platform}: {count(packed_row(length, *trees)) / sizes.most(length):.3f} of a causal row')
  assert count(np.arange(length) + 1) == length // min(sizes.q, sizes.k)  # padding: the diagonal


# --- in the decoder ---

SMALL = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize('platform, sizes', [('tpu', (2, 2, 2)), ('gpu', (1, 2, 4))])
def test_devices_share_rows_and_heads(platform, sizes, monkeypatch):
  """Rows over data and fsdp, query heads over tensor; with tensor=4 two devices share a key/value head."""
  monkeypatch.setattr(tree_attention, 'block_sizes', lambda *_: Sizes(32, 16))
  mesh, until, given = meshes.make_mesh(*sizes), random_rows(0, 8, 70), arrays(0, 8, 70, 8, 2, 8)

  @jax.jit
  def run(until, *given):
    with meshes.ambient(mesh):
      return with_gradients(tree_attention.over_rows(until, 4, 32, platform, interpret=True), *given)

  placed = jax.device_put((until, *given), transfer.split_over_batch(mesh, 0))
  check(run(*placed), by_dense(until, *given))


def loss_and_gradient(config, mesh=None):
  """A jitted function of parameters, tokens and `visible_until`, traced for a mesh."""
  def loss(params, tokens, until):
    return jnp.sum(hidden_states(config, params, tokens, visible_until=until)[..., :3] ** 2)

  def run(*args):
    with meshes.ambient(mesh) if mesh else contextlib.nullcontext():
      return jax.value_and_grad(loss)(*args)

  return jax.jit(run)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_plans_count_the_kernels(platform):
  """A causal row in whole blocks: 2 products forward, 3 for dQ and 4 for dK and dV."""
  B, T, H, K, h = 2, 1024, 8, 2, 64
  sizes = tree_attention.block_sizes(platform, T, H // K, 2 * h)
  attention = lambda until, *given: with_gradients(tree_attention.over_rows(until, H // K, 2 * h, platform), *given)
  shapes = [jax.ShapeDtypeStruct((B, T), jnp.int32)] + [jax.ShapeDtypeStruct((B, T, n, h), jnp.bfloat16) for n in (H, K, K, H)]
  (flops, moved, _), _ = costs.count(jax.jit(attention).trace(*shapes).jaxpr.jaxpr)
  assert flops == (2 + 3 + 4) * 2 * h * B * H * sizes.most(T) * sizes.q * sizes.k
  assert T * T / 2 < sizes.most(T) * sizes.q * sizes.k < 0.8 * T * T
  if platform == 'tpu':  # at least keys and values twice, queries once, for every visited block
    assert moved > 2 * B * H * sizes.most(T) * h * (2 * 2 * sizes.k / (H // K) + 2 * sizes.q)


# --- compiled for devices that are not here ---

TARGETS = ('tpu:v5e:2x2', 'tpu:v5p:2x2x1', 'tpu:v6e:2x2', 'cuda:h100:1x4', 'cuda:a100:1x4', 'cuda:b200:1x4')


def on_targets(shapes, *others):
  """(target, *shape): every shape where there is least memory beside the arithmetic, the first one elsewhere."""
  return [(name, *shape) for name in (*TARGETS, *others)
          for shape in (shapes if name in ('tpu:v5p:2x2x1', 'cuda:a100:1x4') else shapes[:1])]


def compiled(attention, device, B, T, H, K, h, dtype=jnp.bfloat16):
  """The program of `attention(visible_until)(q, k, v)` and its gradients for one device."""
  place = SingleDeviceSharding(device)
  shapes = [jax.ShapeDtypeStruct((B, T, n, h), dtype, sharding=place) for n in (H, K, K, H)]
  until = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=place)
  with meshes.ambient(meshes.make_mesh(1, 1, 1, devices=[device])):  # which says what kind of GPU it is
    return jax.jit(lambda until, *given: with_gradients(attention(until), *given)).lower(until, *shapes).compile()


@pytest.mark.slow
@pytest.mark.parametrize('name, B, T, H, K, h, dtype', on_targets([
  (2, 4096, 28, 4, 128, 'bfloat16'), (2, 3000, 14, 2, 64, 'bfloat16'), (1, 2048, 9, 3, 64, 'bfloat16'),
  (1, 2048, 4, 4, 128, 'bfloat16'), (1, 128, 4, 2, 32, 'float32'), (1, 1024, 8, 2, 128, 'float32'),
  (4, 32768, 40, 8, 128, 'bfloat16')]))
def test_every_shape_of_heads_compiles(name, B, T, H, K, h, dtype):
  platform = 'tpu' if name.startswith('tpu') else 'gpu'
  width = h * jnp.dtype(dtype).itemsize
  text = compiled(lambda until: tree_attention.over_rows(until, H // K, width, platform), devices_of(name)[0], B, T, H, K, h,
                  jnp.dtype(dtype)).as_text()
  assert all(f'tree_attention_{part}' in text for part in ('forward', 'by_query', 'by_key'))


def split_decoder(name, config):
  """The program of loss and gradient with rows over two devices of a target, and heads over two."""
  mesh = meshes.make_mesh(1, 2, 2, devices=devices_of(name))
  params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=transfer.replicated(mesh)),
                        parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
  rows = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=transfer.split_over_batch(mesh, 0))
  return loss_and_gradient(config, mesh).lower(params, rows, rows).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['tpu:v5p:2x2x1', 'cuda:h100:1x4'])
def test_a_split_decoder_has_the_kernels(name):
  """Every device has its own part of rows and heads."""
  config = DecoderConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8, num_kv_heads=2,
                         head_dim=64, dtype='bfloat16', remat='full')
  text = split_decoder(name, config)
  assert all(f'tree_attention_{part}' in text for part in ('forward', 'by_query', 'by_key'))
  calls = [line for line in text.splitlines() if 'custom-call(' in line and 'tree_attention_by_query' in line]
  queries = 'bf16[1,1,4,1024,64]' if name.startswith('tpu') else 'bf16[1,1024,4,64]'
  assert calls and all(queries in line for line in calls), calls
