"""The kernels by interpretation against the dense path; by their real compilers in slow tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxsearch.models.attention import attend_to_pages
from jaxsearch.models.kernels import paged_attention as kernels
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import segment
from jaxsearch.sampler.pages import PAGE
from tests.parallel.compilers import devices_of

PLATFORMS = 'tpu', 'gpu'
EDGES = (0, 1, 31, 32, 33, 511, 512, 1022)  # of pages, blocks and the table


def case(S, K, G, h, P, lengths, dtype='float32', n=1):
  """Arguments of `attend`, with the pool as dense attention has it; what is behind a sequence's length is large."""
  rng = np.random.default_rng(0)
  table = 1 + rng.permutation(S * P).reshape(S, P).astype(np.int32)
  pool = rng.normal(size=(2, K, 1 + S * P, PAGE, h))
  for row, length in zip(table, lengths):
    behind = np.arange(P * PAGE).reshape(P, PAGE) >= length
    pool[:, :, row] = np.where(behind[..., None], 1e4, pool[:, :, row])
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  return (normal(S, n, K * G, h), normal(S, n, K, h), normal(S, n, K, h), tuple(jnp.asarray(pool, dtype)),
          jnp.asarray(lengths, jnp.int32), jnp.asarray(table))


def interpret(monkeypatch):
  """Has kernels of TPUs interpreted: this one takes no such argument, and no interpreter knows its masked stores."""
  def store(ref, value, *, mask):
    ref[...] = jnp.where(mask, value, ref[...])

  monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))
  monkeypatch.setattr(pltpu, 'store', store)


def check(monkeypatch, platform, arguments, tolerance=1e-5, split=1, **settings):
  """Outputs and pages are those of the dense path in float32."""
  whole = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arguments)
  expected, pool = jax.jit(attend_to_pages)(*whole)
  attend = jax.jit(functools.partial(kernels.attend, platform=platform, interpret=True, **settings))
  *new, parts, starts, table = arguments
  if platform == 'tpu':
    interpret(monkeypatch)
  found, written = attend(*new, kernels.arranged(platform, *parts, split), starts, table)
  assert found.dtype == arguments[0].dtype
  np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=tolerance)
  for part, other in zip(written, kernels.arranged(platform, *pool, split)):
    np.testing.assert_array_equal(np.asarray(part, np.float32)[:, 1:], np.asarray(other)[:, 1:])


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('head_dim', [32, 128])
def test_lengths_at_every_edge(monkeypatch, platform, head_dim):
  check(monkeypatch, platform, case(8, 2, 3, head_dim, 32, EDGES))


@pytest.mark.parametrize('platform', PLATFORMS)
def test_bfloat16_is_summed_in_float32(monkeypatch, platform):
  """Only queries, weights and results are rounded."""
  check(monkeypatch, platform, case(4, 2, 8, 128, 16, (3, 255, 200, 128), 'bfloat16'), tolerance=2**-6)


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('K, G, n', [(2, 4, 40), (3, 1, 40), (1, 8, 4)])
def test_several_tokens(monkeypatch, platform, K, G, n):
  """Of a prefill, chunks that cross pages and blocks of queries, or are short; two go on in one sequence."""
  arguments = list(case(4, K, G, 64, 16, (0, 37, 96, 400), n=n))
  arguments[4] = arguments[4].at[1].set(n)
  arguments[5] = arguments[5].at[1].set(arguments[5][0])
  check(monkeypatch, platform, arguments)


@pytest.mark.parametrize('platform', PLATFORMS)
def test_heads_split_over_devices(monkeypatch, platform):
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), meshes.MESH_AXES)
  check(monkeypatch, platform, case(4, 2, 2, 16, 16, (0, 127, 64, 3)), mesh=mesh, split=2)


# Qwen 3B, 32B, 7B, SmolLM2
SIZES = [(64, 2, 8, 128, 128), (64, 8, 5, 128, 128), (9, 4, 7, 128, 304), (8, 3, 3, 64, 64)]


@pytest.mark.slow
@pytest.mark.parametrize('target', ['tpu:v5e:2x2', 'tpu:v5p:2x2x1', 'tpu:v6e:2x2', 'cuda:h100:1x4', 'cuda:a100:1x4',
                                    'cuda:b200:1x4'])
def test_compiles_in_place(target):
  """For real targets: the pool is aliased and never copied, temporaries are small."""
  device = devices_of(target)[0]
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
  platform = kernels.KERNELS[device.platform]
  least = {1: 8, 64: 1 if platform == 'tpu' else 0.46}  # on GPUs a prefill gathers all pages, here twice the pool
  for S, K, G, h, P in SIZES:
    for dtype in (jnp.bfloat16, jnp.float32):
      pool = tuple(struct(*shape, dtype=dtype) for shape in kernels.pool_shapes(platform, K, S * P // 2, PAGE, h))
      for n in (1, 64):
        attend = functools.partial(kernels.attend, platform=platform)
        with meshes.ambient(meshes.make_mesh(1, 1, 1, devices=[device])):  # which says what kind of device it is
          compiled = jax.jit(attend, donate_argnums=3).lower(
            struct(S, n, K * G, h, dtype=dtype), *[struct(S, n, K, h, dtype=dtype)] * 2, pool,
            struct(S, dtype=jnp.int32), struct(S, P, dtype=jnp.int32)).compile()
        memory, size = compiled.memory_analysis(), sum(part.size * part.dtype.itemsize for part in pool)
        assert memory.alias_size_in_bytes >= size, (S, n, K, G, h, P)
        assert memory.temp_size_in_bytes < size / least[n], (S, n, K, G, h, P)


@pytest.mark.slow
@pytest.mark.parametrize('split', [1, 2, 4])
@pytest.mark.parametrize('target', ['tpu:v5p:2x2x1', 'cuda:h100:1x4'])
def test_compiles_in_lanes_with_split_heads(target, split):
  """As the sampler calls it: in a program that is split over lanes by hand and over heads by the compiler."""
  mesh = Mesh(np.array(devices_of(target)).reshape(-1, 1, split), meshes.MESH_AXES)
  platform = kernels.KERNELS[mesh.devices.flat[0].platform]
  put = lambda spec, *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
  heads = PartitionSpec('data', None, 'tensor')
  program = lambda *arguments: kernels.attend(*arguments, platform=platform, mesh=mesh)
  given = (segment.SLOT,) * 3 + (segment.POOL, segment.SLOT, segment.SLOT)
  lanes = lambda *arguments: segment.in_lanes(mesh, program, given, (segment.SLOT, segment.POOL), *arguments)
  pool = tuple(put(PartitionSpec('tensor', 'data'), *shape)
               for shape in kernels.pool_shapes(platform, 4, 8 * 128, PAGE, 128, split))
  number = functools.partial(put, dtype=jnp.int32)
  compiled = jax.jit(lanes, donate_argnums=3).lower(
    put(heads, 32, 1, 16, 128), *[put(heads, 32, 1, 4, 128)] * 2, pool, number(segment.SLOT, 32),
    number(segment.SLOT, 32, 64)).compile()
  assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 8 * 128 * PAGE * 128 * 2
  assert 'all-gather' not in compiled.as_text()
