"""Settings every test needs: CPU with eight simulated devices, and the compilation cache that the environment
names."""

import functools
import gc
import os

import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from jaxsearch.parallel import mesh as meshes

# Tests spend most of their time compiling small programs; the older code generator of loops takes a third of
# the time. JAX 0.11 is without it, and there a flag that XLA does not know ends the process.
if jax.__version_info__ < (0, 11):
  os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_use_fusion_emitters=false'
jax.config.update('jax_num_cpu_devices', 8)
if os.environ.get('JAX_COMPILATION_CACHE_DIR'):
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)

# What only answers takes all devices of a host; here one, or its programs would be compiled for eight.
meshes.of_host = functools.wraps(meshes.of_host)(lambda: meshes.make_mesh(devices=jax.devices()[:1]))


@pytest.fixture(scope='module', autouse=True)
def young_garbage():
  """Lets no collection look through the imports and the earlier files, which takes a second by the end: saves collect."""
  gc.collect()
  gc.freeze()


def pytest_runtest_setup(item):
  """Compiles with few optimisations where programs are many and run for moments: that halves the time of tests."""
  few = item.path.relative_to(item.config.rootpath / 'tests').parts[0] in ('models', 'sampler', 'training')
  jax.config.update('jax_disable_most_optimizations', few and not item.get_closest_marker('slow'))
