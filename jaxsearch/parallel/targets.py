"""Describes devices to compile for: memory, rates and topology as published.

`parse('tpu:v5p:4x4x4')` is a `Target`; its `devices()` go into a mesh as real ones do. Programs for that mesh
are compiled by the target's own compiler (`jit(f).lower(shapes).compile()`), and cannot run. The compilers
come with the extra `plan`.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Device:
  """Describes a device as its maker publishes it. Rates are per second and device."""
  memory: int       # bytes that a program may use, as the compiler says it
  bandwidth: float  # bytes from and to that memory
  flops: float      # dense bfloat16
  links: float      # bytes received from neighbours (ICI: all links, NVLink: the switch), in one direction
  network: float    # bytes received from other hosts, where that is another network; else 0
  source: str


# The memory of TPUs is that of libtpu's messages ('of 95.74G hbm'), a little off the published one.
DEVICES = {
  'tpu:v5e': Device(int(15.75 * 2**30), 819e9, 197e12, 200e9, 0.0, 'https://cloud.google.com/tpu/docs/v5e'),
  'tpu:v5p': Device(int(95.74 * 2**30), 2765e9, 459e12, 600e9, 0.0, 'https://cloud.google.com/tpu/docs/v5p'),
  'tpu:v6e': Device(int(31.25 * 2**30), 1600e9, 918e12, 400e9, 0.0, 'https://cloud.google.com/tpu/docs/v6e'),
  'cuda:h100': Device(84942979072, 3352e9, 989e12, 450e9, 50e9,
                      'https://www.nvidia.com/en-us/data-center/h100/'),
  'cuda:a100': Device(85100068864, 2039e9, 312e12, 300e9, 25e9,
                      'https://www.nvidia.com/en-us/data-center/a100/'),
  'cuda:h200': Device(151397597184, 4800e9, 989e12, 450e9, 50e9,
                      'https://www.nvidia.com/en-us/data-center/h200/'),
  'cuda:b200': Device(191514411008, 8000e9, 2250e12, 900e9, 50e9,
                      'https://www.nvidia.com/en-us/data-center/dgx-b200/'),
}
# Multiprocessors, FPUs of one, its shared memory, L2 cache, GHz, compute capability, what JAX calls it; as in
# the descriptions of these devices that come with XLA.
GPUS = {
  'cuda:h100': (132, 128, 233472, 52428800, 1.98, 9, 'NVIDIA H100 80GB HBM3'),
  'cuda:a100': (108, 64, 167936, 41943040, 1.41, 8, 'NVIDIA A100-SXM4-80GB'),
  'cuda:h200': (132, 128, 233472, 52428800, 1.98, 9, 'NVIDIA H200'),
  'cuda:b200': (148, 128, 233472, 132644864, 1.965, 10, 'NVIDIA B200'),
}
KINDS = {  # what JAX calls these devices
  'TPU v5 lite': 'tpu:v5e', 'TPU v5': 'tpu:v5p', 'TPU v6 lite': 'tpu:v6e'} | {
  name: kind for kind, (*_, name) in GPUS.items()}
EXAMPLES = 'such as tpu:v5p:4x4x4, tpu:v6e:4x4 (the shape of the slice) or cuda:h100:2x8 (hosts x devices)'
# Read when a compiler is loaded: libtpu shall neither look for a TPU here nor lock others out.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1', 'TPU_ACCELERATOR_TYPE': 'v5p-8', 'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true', 'TPU_STDERR_LOG_LEVEL': '3', 'TPU_MIN_LOG_LEVEL': '3',
  'TF_CPP_MIN_LOG_LEVEL': '3'}
@dataclasses.dataclass(frozen=True)
class Target:
  """A slice or cluster of one kind of device."""
  kind: str                # key of DEVICES
  shape: tuple[int, ...]   # of a TPU slice in chips; of a GPU cluster (hosts, devices of a host)

  @property
  def device(self) -> Device:
    return DEVICES[self.kind]

  def devices(self) -> list[jax.Device]:
    """Returns descriptions of the devices, by host.

    Raises ValueError without the compiler, or for a shape that it does not know.
    """
    platform, name = self.kind.split(':')
    shape = 'x'.join(map(str, self.shape))
    if not installed(platform):
      raise ValueError(f'--target={self.kind}:{shape} needs the compiler of that device: '
                       "pip install 'jaxsearch[plan]'")
    os.environ |= _ENVIRONMENT
    try:
      if platform == 'tpu':
        return list(topologies.get_topology_desc(platform='tpu', topology_name=f'{name}:{shape}').devices)
      return list(topologies.get_topology_desc(platform='cuda', topology_name='any', topology=f'1x{shape}',
                                               target_config=gpu_config(self.kind)).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
      raise ValueError(f'--target={self.kind}:{shape}: {str(error).splitlines()[0]}') from error


def one_host(devices: Sequence[jax.Device]) -> list[jax.Device]:
  """Returns the devices of the first host; of several TPU hosts, as a slice of four of its own.

  The compiler for v6e refuses sums over four devices that are part of a larger slice (JAX 0.10.2).
  """
  host = [device for device in devices if device.process_index == devices[0].process_index]
  if len(host) == len(devices) or host[0].platform != 'tpu':
    return host
  kind = KINDS[host[0].device_kind]
  return Target(kind, (2, 2, 1) if kind == 'tpu:v5p' else (2, 2)).devices()


def parse(text: str) -> Target:
  """Reads a target such as 'tpu:v5p:4x4x4'; ValueError says what is wrong with it."""
  kind, _, shape = text.rpartition(':')
  if kind not in DEVICES:
    raise ValueError(f'--target={text}: {kind or text} is none of {", ".join(DEVICES)}; {EXAMPLES}')
  numbers = shape.split('x')
  wanted = 3 if kind == 'tpu:v5p' else 2
  if len(numbers) != wanted or not all(re.fullmatch(r'[1-9]\d*', number) for number in numbers):
    raise ValueError(f'--target={text}: {shape!r} is no shape of {kind}; {EXAMPLES}')
  return Target(kind, tuple(map(int, numbers)))


def gpu_config(kind: str) -> str:
  """Returns the description of a GPU by which XLA compiles for it, a text proto."""
  cores, units, shared, cache, clock, capability, name = GPUS[kind]
  device = DEVICES[kind]
  return f"""
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth:
  {device.bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {device.memory}
  shared_memory_per_block_optin: {shared - 1024} cuda_compute_capability {{ major: {capability} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


def installed(platform: str) -> bool:
  """Tells whether the compiler of a platform, 'tpu' or 'cuda', is installed."""
  return importlib.util.find_spec({'tpu': 'libtpu', 'cuda': 'jax_cuda13_plugin'}[platform]) is not None


def network_seconds(target: Target, hosts: int, sent: float) -> float:
  """Returns the least seconds in which every device receives arrays of `sent` bytes, all but its own share.

  Hosts of GPUs receive what others hold through all their network cards at once, then share it over NVLink.
  """
  device, count = target.device, math.prod(target.shape)
  seconds = sent * (count - 1) / count / device.links
  if device.network and hosts > 1:
    seconds = max(seconds, sent * (hosts - 1) / hosts / (device.network * count / hosts))
  return seconds
