"""The kernels by interpretation against the dense path; by their real compilers in slow tests. None was run."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxsearch.models.attention import cached_attention, get_windows, put_windows
from jaxsearch.models.kernels import decode_attention as kernels
from jaxsearch.parallel import mesh as meshes
from jaxsearch.parallel import targets
from jaxsearch.sampler import segment

PLATFORMS = 'tpu', 'gpu'
EDGES = (0, 1, 15, 16, 127, 128, 129, 383)  # of tiles, pages, blocks and the row


def case(S, K, G, h, T, lengths, dtype='float32', seed=0, spare=2):
  """Arguments of `decode_attention`; what is behind a slot's length is large."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  rows = rng.permutation(S + spare)[:S].astype(np.int32)
  cache = rng.normal(size=(S + spare, K, T, 2 * h))
  for row, length in zip(rows, lengths):
    cache[row, :, length:] = 1e4
  return (normal(S, K * G, h), normal(S, K, h), normal(S, K, h), jnp.asarray(cache, dtype), jnp.asarray(rows),
          jnp.asarray(lengths, jnp.int32))


@jax.jit
def dense(q, keys, values, cache, rows, lengths):
  """The path of CPUs, with keys and values apart and keys transposed."""
  h = q.shape[-1]
  apart = jnp.swapaxes(cache[..., :h], 2, 3), cache[..., h:]
  written = put_windows(apart, (keys[..., None], values[:, :, None]), lengths, rows)
  seen = get_windows(written, jnp.zeros_like(lengths), rows, cache.shape[2])
  return cached_attention(q[:, None], seen, lengths[:, None])[:, 0], jnp.concatenate(
    [jnp.swapaxes(written[0], 2, 3), written[1]], axis=-1)


@functools.cache
def jitted(platform, **settings):
  return jax.jit(functools.partial(kernels.decode_attention, platform=platform, **{'interpret': True} | settings))


def check(arguments, platform, tolerance=1e-5, **settings):
  """The outputs, and every entry of the cache that somebody may read, are those of the dense path."""
  expected, cache = dense(*arguments)
  found, written = jitted(platform, **settings)(*arguments)
  assert found.dtype == expected.dtype
  np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=tolerance)
  kept = np.ones(cache.shape[:3], bool)
  for row, length in zip(np.asarray(arguments[4]), np.asarray(arguments[5])):
    kept[row, :, length + 1:] = False
  np.testing.assert_array_equal(np.asarray(written)[kept], np.asarray(cache)[kept])


@pytest.mark.parametrize('platform', PLATFORMS)
def test_lengths_at_every_edge(platform):
  check(case(8, 2, 3, 32, 384, EDGES), platform)


@pytest.mark.parametrize('platform', PLATFORMS)
def test_a_row_that_no_block_divides_and_many_blocks(platform):
  """Blocks of 16, and slots without any lie between others."""
  check(case(6, 1, 2, 16, 208, (0, 207, 0, 0, 63, 130)), platform)


@pytest.mark.parametrize('slots', [1, 3])
def test_few_slots_and_one_core(slots):
  check(case(slots, 1, 8, 16, 128, (5, 127, 64)[:slots]), 'tpu')


@pytest.mark.parametrize('platform', PLATFORMS)
def test_bfloat16_is_summed_in_float32(platform):
  """Against float32 on the same rounded numbers: only the weights, of at most 1, and the result are rounded."""
  arguments = case(4, 2, 4, 64, 256, (3, 255, 200, 128), 'bfloat16')
  whole = [jnp.asarray(x, jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments]
  expected, _ = dense(*whole)
  found, _ = jitted(platform)(*arguments)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=2**-7)


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(st.data())
@pytest.mark.parametrize('platform', PLATFORMS)
def test_any_slots(platform, data):
  lengths = data.draw(st.lists(st.integers(0, 127) | st.integers(0, 383), min_size=8, max_size=8))
  check(case(8, 2, 3, 32, 384, lengths, seed=data.draw(st.integers(0, 9))), platform)


def test_memory_that_was_never_written_and_copies_under_way_change_nothing():
  """Memory begins as NaN, copies land when they are waited for, races are found."""
  for on_wait in ('on_wait', 'eager'):
    params = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True, dma_execution_mode=on_wait)
    check(case(4, 2, 2, 16, 384, (130, 0, 383, 7)), 'tpu', interpret=params)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize('platform', PLATFORMS)
def test_heads_split_over_devices(platform):
  arguments = case(4, 2, 2, 16, 128, (0, 127, 64, 3))
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), meshes.MESH_AXES)
  check(arguments, platform, mesh=mesh)


def test_a_row_that_no_tile_divides_is_refused():
  for platform in PLATFORMS:
    with pytest.raises(ValueError, match='72 tokens a row: the kernel needs a multiple of 16'):
      kernels.decode_attention(*case(2, 1, 2, 16, 72, (3, 4)), platform=platform)


def test_kernels_are_for_the_heads_that_their_tiles_take():
  assert [kernels.platform_of('tpu', h) for h in (32, 64, 96, 128, 192, 256)] == [None, 'tpu', None, 'tpu', None, 'tpu']
  assert [kernels.platform_of('gpu', h) for h in (8, 32, 64, 80, 128)] == [None, 'gpu', 'gpu', None, 'gpu']
  assert kernels.platform_of('cpu', 128) is None


@pytest.mark.parametrize('platform', PLATFORMS)
def test_what_is_not_counted_is_not_read(platform):
  """NaN in rows of others and behind a slot's last block (GPU: token) changes nothing, even at a weight of 0."""
  arguments = q, keys, values, cache, rows, lengths = case(8, 2, 3, 32, 384, EDGES)
  page = 128 if platform == 'tpu' else 1
  poisoned = np.full(cache.shape, np.nan, np.float32)
  for row, length in zip(np.asarray(rows), EDGES):
    end = -(-length // page) * page
    poisoned[row, :, :end] = cache[row, :, :end]
  found, _ = jitted(platform)(q, keys, values, jnp.asarray(poisoned), rows, lengths)
  np.testing.assert_array_equal(found, jitted(platform)(*arguments)[0])


# Qwen 3B, 32B, 7B, SmolLM2
SIZES = [(64, 2, 8, 128, 4096), (64, 8, 5, 128, 4096), (9, 4, 7, 128, 9600), (8, 3, 3, 64, 2048)]


@pytest.mark.slow
@pytest.mark.parametrize('target', ['tpu:v5e:2x2', 'tpu:v5p:2x2x1', 'tpu:v6e:2x2', 'cuda:h100:1x4', 'cuda:a100:1x4',
                                    'cuda:b200:1x4'])
def test_compiles_in_place(target):
  """For real targets: the cache is aliased and never copied, temporaries are small."""
  if not targets.installed(target.split(':')[0]):
    pytest.skip("its compiler is not installed: pip install '.[plan]'")
  device = targets.parse(target).devices()[0]
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
  for S, K, G, h, T in SIZES:
    for dtype in (jnp.bfloat16, jnp.float32):
      cache = struct(S + 1, K, T, 2 * h, dtype=dtype)
      attend = functools.partial(kernels.decode_attention, platform=kernels.platform_of(device.platform, h))
      with meshes.ambient(meshes.make_mesh(1, 1, 1, devices=[device])):  # which says what kind of GPU it is
        compiled = jax.jit(attend, donate_argnums=3).lower(
          struct(S, K * G, h, dtype=dtype), *[struct(S, K, h, dtype=dtype)] * 2, cache,
          *[struct(S, dtype=jnp.int32)] * 2).compile()
      memory, size = compiled.memory_analysis(), cache.size * cache.dtype.itemsize
      assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < 16 * 2**20, (S, K, G, h, T)


@pytest.mark.slow
@pytest.mark.parametrize('split', [1, 2, 4])
@pytest.mark.parametrize('target', ['tpu:v5p:2x2x1', 'cuda:h100:1x4'])
def test_compiles_in_lanes_with_split_heads(target, split):
  """As the sampler calls it: in a program that is split over lanes by hand and over heads by the compiler."""
  if not targets.installed(target.split(':')[0]):
    pytest.skip("its compiler is not installed: pip install '.[plan]'")
  mesh = Mesh(np.array(targets.parse(target).devices()).reshape(-1, 1, split), meshes.MESH_AXES)
  platform = kernels.platform_of(mesh.devices.flat[0].platform, 128)
  put = lambda spec, *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
  heads = PartitionSpec('data', 'tensor')

  def program(*arguments):
    return kernels.decode_attention(*arguments, platform=platform, mesh=mesh)

  lanes = lambda *arguments: segment.in_lanes(mesh, program, (), arguments)
  slots = put(PartitionSpec('data'), 32, dtype=jnp.int32)
  compiled = jax.jit(lanes, donate_argnums=3).lower(
    put(heads, 32, 16, 128), *[put(heads, 32, 4, 128)] * 2, put(heads, 68, 4, 2048, 256), slots, slots).compile()
  assert compiled.memory_analysis().alias_size_in_bytes >= 17 * 4 * 2048 * 256 * 2
  assert 'all-gather' not in compiled.as_text()
