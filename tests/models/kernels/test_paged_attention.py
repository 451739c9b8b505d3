"""The kernels by interpretation against the dense path; by their real compilers in slow tests. None was run."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxsearch.models.attention import attend_to_pages
from jaxsearch.models.kernels import paged_attention as kernels
from jaxsearch.parallel import mesh as meshes
from jaxsearch.parallel import targets
from jaxsearch.sampler import segment
from jaxsearch.sampler.pages import PAGE

PLATFORMS = 'tpu', 'gpu'
EDGES = (0, 1, 31, 32, 33, 511, 512, 1022)  # of pages, blocks and the table


def case(platform, S, K, G, h, P, lengths, dtype='float32'):
  """Arguments of `attend`; what is behind a sequence's length is large."""
  rng = np.random.default_rng(0)
  table = 1 + rng.permutation(S * P).reshape(S, P).astype(np.int32)
  pool = rng.normal(size=(2, K, 1 + S * P, PAGE, h))
  for row, length in zip(table, lengths):
    behind = np.arange(P * PAGE).reshape(P, PAGE) >= length
    pool[:, :, row] = np.where(behind[..., None], 1e4, pool[:, :, row])
  pool = np.pad(pool, [(0, 0)] * 4 + [(0, kernels.padded(platform, h) - h)])
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  return (normal(S, 1, K * G, h), normal(S, 1, K, h), normal(S, 1, K, h), tuple(jnp.asarray(pool, dtype)),
          jnp.asarray(lengths, jnp.int32), jnp.asarray(table))


def interpreted(platform, monkeypatch):
  """A context for kernels of a platform, in which that for TPUs keeps float32: it reads pages in bfloat16."""
  if platform == 'gpu':
    return contextlib.nullcontext()
  monkeypatch.setattr(paged_attention_kernel.MultiPageAsyncCopyDescriptor._maybe_dequantize, '__defaults__',
                      (jnp.float32,))
  return pltpu.force_tpu_interpret_mode()


def check(monkeypatch, platform, arguments, tolerance=1e-5, **settings):
  """Outputs and pages are those of the dense path in float32."""
  whole = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arguments)
  expected, pool = jax.jit(attend_to_pages)(*whole)
  attend = jax.jit(functools.partial(kernels.attend, platform=platform, interpret=True, **settings))
  with interpreted(platform, monkeypatch):
    found, written = attend(*arguments)
  assert found.dtype == arguments[0].dtype
  np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=tolerance)
  for part, other in zip(written, pool):
    np.testing.assert_array_equal(np.asarray(part, np.float32)[:, 1:], np.asarray(other)[:, 1:])


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('head_dim', [32, 128])
def test_lengths_at_every_edge(monkeypatch, platform, head_dim):
  check(monkeypatch, platform, case(platform, 8, 2, 3, head_dim, 32, EDGES))


@pytest.mark.parametrize('platform', PLATFORMS)
def test_bfloat16_is_summed_in_float32(monkeypatch, platform):
  """Only queries, weights and results are rounded."""
  check(monkeypatch, platform, case(platform, 4, 2, 8, 128, 16, (3, 255, 200, 128), 'bfloat16'), tolerance=2**-6)


@pytest.mark.parametrize('platform', PLATFORMS)
def test_heads_split_over_devices(monkeypatch, platform):
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), meshes.MESH_AXES)
  check(monkeypatch, platform, case(platform, 4, 2, 2, 16, 16, (0, 127, 64, 3)), mesh=mesh)


# Qwen 3B, 32B, 7B, SmolLM2
SIZES = [(64, 2, 8, 128, 128), (64, 8, 5, 128, 128), (9, 4, 7, 128, 304), (8, 3, 3, 64, 64)]


@pytest.mark.slow
@pytest.mark.parametrize('target', ['tpu:v5e:2x2', 'tpu:v5p:2x2x1', 'tpu:v6e:2x2', 'cuda:h100:1x4', 'cuda:a100:1x4',
                                    'cuda:b200:1x4'])
def test_compiles_in_place(target):
  """For real targets: the pool is aliased and never copied, temporaries are small."""
  if not targets.installed(target.split(':')[0]):
    pytest.skip("its compiler is not installed: pip install '.[plan]'")
  device = targets.parse(target).devices()[0]
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
  platform = kernels.KERNELS[device.platform]
  for S, K, G, h, P in SIZES:
    for dtype in (jnp.bfloat16, jnp.float32):
      part = struct(K, S * P // 2, PAGE, kernels.padded(platform, h), dtype=dtype)
      attend = functools.partial(kernels.attend, platform=platform)
      with meshes.ambient(meshes.make_mesh(1, 1, 1, devices=[device])):  # which says what kind of GPU it is
        compiled = jax.jit(attend, donate_argnums=3).lower(
          struct(S, 1, K * G, h, dtype=dtype), *[struct(S, 1, K, h, dtype=dtype)] * 2, (part, part),
          struct(S, dtype=jnp.int32), struct(S, P, dtype=jnp.int32)).compile()
      memory, size = compiled.memory_analysis(), 2 * part.size * part.dtype.itemsize
      assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size / 8, (S, K, G, h, P)


@pytest.mark.slow
@pytest.mark.parametrize('split', [1, 2, 4])
@pytest.mark.parametrize('target', ['tpu:v5p:2x2x1', 'cuda:h100:1x4'])
def test_compiles_in_lanes_with_split_heads(target, split):
  """As the sampler calls it: in a program that is split over lanes by hand and over heads by the compiler."""
  if not targets.installed(target.split(':')[0]):
    pytest.skip("its compiler is not installed: pip install '.[plan]'")
  mesh = Mesh(np.array(targets.parse(target).devices()).reshape(-1, 1, split), meshes.MESH_AXES)
  platform = kernels.KERNELS[mesh.devices.flat[0].platform]
  put = lambda spec, *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
  heads = PartitionSpec('data', None, 'tensor')
  program = lambda *arguments: kernels.attend(*arguments, platform=platform, mesh=mesh)
  given = (segment.SLOT,) * 3 + (segment.POOL, segment.SLOT, segment.SLOT)
  lanes = lambda *arguments: segment.in_lanes(mesh, program, given, (segment.SLOT, segment.POOL), *arguments)
  part, number = put(PartitionSpec('tensor', 'data'), 4, 8 * 128, PAGE, 128), functools.partial(put, dtype=jnp.int32)
  compiled = jax.jit(lanes, donate_argnums=3).lower(
    put(heads, 32, 1, 16, 128), *[put(heads, 32, 1, 4, 128)] * 2, (part, part), number(segment.SLOT, 32),
    number(segment.SLOT, 32, 64)).compile()
  assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 8 * 128 * PAGE * 128 * 2
  assert 'all-gather' not in compiled.as_text()
