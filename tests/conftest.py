"""Settings every test needs: CPU with eight simulated devices, and the compilation cache that the environment names."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

jax.config.update('jax_num_cpu_devices', 8)
if os.environ.get('JAX_COMPILATION_CACHE_DIR'):
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)  # tests compile many small programs
