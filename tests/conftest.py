"""Settings every test needs: CPU with eight simulated devices, and the compilation cache that the environment names."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tests spend most of their time compiling small programs; the older code generator of loops takes a third of the time.
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_use_fusion_emitters=false'

import jax

jax.config.update('jax_num_cpu_devices', 8)
if os.environ.get('JAX_COMPILATION_CACHE_DIR'):
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
