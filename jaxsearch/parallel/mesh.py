"""The device mesh, the one table from logical axis names to mesh axes, and multi-host start-up.

The mesh has three axes: `data` (copies of the parameters), `fsdp` (parameters and optimizer split, gathered
layer by layer) and `tensor` (heads, feed-forward and vocabulary split). A batch is split over `data` and
`fsdp` together. Models name the axes of their parameters (`parameter_axes`) and know nothing of meshes;
changing the parallel layout means editing `AXIS_TO_MESH`. transfer.py moves arrays and values.
"""

import functools
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax._src import compilation_cache, compiler, distributed  # no public names
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = ('data', 'fsdp')
HEARTBEAT = 30  # seconds without a sign of life until a process counts as lost, which ends all the others

AXIS_TO_MESH = dict(
  layers=None, norm=None, head_dim=None, rank=None,
  embed='fsdp',
  heads='tensor', kv_heads='tensor', mlp='tensor', vocab='tensor',
)  # fmt: skip


def start_distributed(enabled: bool, coordinator: str = '', num_processes: int = -1,
                      process_id: int = -1) -> None:
  """Joins this process to the others, if `enabled`; call it before anything touches a device.

  Args:
    coordinator: 'host:port' of process 0, which listens there alone unless JAX_COORDINATOR_BIND_ADDRESS names
      another place; '' lets JAX find it (TPU pods, SLURM, GKE, Open MPI).
    num_processes, process_id: -1 lets JAX find them.
  Raises:
    ConnectionError: the processes did not find each other, with what was tried.
    ValueError: JAX does not know where to look.
  """
  if not enabled:
    return
  given = dict(coordinator_address=coordinator, num_processes=num_processes, process_id=process_id)
  given = {name: value for name, value in given.items() if value not in ('', -1)}
  address = os.environ.get('JAX_COORDINATOR_BIND_ADDRESS') or coordinator or None
  try:
    jax.distributed.initialize(**given, heartbeat_timeout_seconds=HEARTBEAT, coordinator_bind_address=address)
  except (RuntimeError, ValueError) as error:
    tried = ', '.join(f'{name}={value!r}' for name, value in given.items()) or 'what the environment says'
    kind = ValueError if isinstance(error, ValueError) else ConnectionError
    raise kind(f'distributed.enabled=True: multi-host start-up with {tried} failed; process 0 listens '
               'at the coordinator or on JAX_COORDINATOR_BIND_ADDRESS; one process alone takes '
               f'distributed.enabled=False: {error}') from error
  compiler._compile_and_write_cache = functools.partial(_compile_and_write, compiler._compile_and_write_cache)


def _compile_and_write(compile_program, backend, computation, devices, options, callbacks, name, key):
  """Writes programs that only this process compiles to the compilation cache; JAX lets just process 0 write.

  Keys include the devices, except on GPUs, and on CPUs the process too. Without this, processes other than 0
  would compile the sampler again whenever the job starts.
  """
  start = time.monotonic()
  executable = compile_program(backend, computation, devices, options, callbacks, name, key)
  seconds = time.monotonic() - start
  unique = {'gpu': False, 'cpu': True}.get(backend.platform, devices.is_fully_addressable)
  if jax.process_index() and unique and seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:
    try:
      compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # as JAX does: a full disk costs a compilation, not the run
      warnings.warn(f'{name} is not in the compilation cache: {error}', stacklevel=2)
  return executable


def end_alone(status: int) -> None:
  """Ends this process, which has failed, at once, unless all of the job fail within five seconds.

  JAX would keep it for five minutes, with signs of life, until the others end too.
  """
  if jax.distributed.is_initialized():
    try:
      distributed.global_state.client.wait_at_barrier('jaxsearch/failed', 5000)
    except jax.errors.JaxRuntimeError:
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(status)


def notices_preemption() -> bool:
  """Tells whether JAX waits for SIGTERM here, for `multihost_utils.reached_preemption_sync_point`."""
  return jax.distributed.is_initialized() and jax.config.jax_enable_preemption_service


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, accelerator: bool = False, *,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes a mesh over all devices (or `devices`); one size may be -1 and takes what the others leave.

  Raises ValueError where sizes do not fit the devices, or there is no `accelerator` but there should be.
  """
  if accelerator and devices is None and jax.default_backend() == 'cpu':
    raise ValueError('mesh.accelerator=True, but JAX finds no GPU or TPU here. What it needs is installed by '
                     'the extras tpu, cuda13 (driver 580 or newer) and cuda12; see docs/pods.md')
  devices = jax.devices() if devices is None else devices
  sizes = dict(data=data, fsdp=fsdp, tensor=tensor)
  shown = ', '.join(f'{name}={size}' for name, size in sizes.items())
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
    raise ValueError(f'mesh sizes are positive, at most one of them -1: got {shown}')
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(devices) % fixed or (not free and fixed != len(devices)):
    raise ValueError(f'a mesh of {shown} does not fit {len(devices)} devices')
  if free:
    sizes[free[0]] = len(devices) // fixed
  return Mesh(arranged(devices, *sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def of_host() -> Mesh:
  """Makes a mesh over the devices of this host, for policies that only answer: as much is split as can be."""
  return make_mesh(fsdp=1, tensor=-1, devices=jax.local_devices())


def arranged(devices: Sequence[jax.Device], data: int, fsdp: int, tensor: int) -> np.ndarray:
  """Returns the devices [data, fsdp, tensor] so that those that talk most are nearest to each other.

  GPUs are ordered by host: XLA numbers their hosts as slices, but `fsdp` may span hosts. Slices of TPUs are
  split by `data` only; within a slice JAX follows the links, unless hosts would share parts of a batch: then
  TPUs are ordered by host too. Raises ValueError where `data` is not a multiple of the slices.
  """
  if devices[0].platform != 'tpu':
    return by_host(devices).reshape(data, fsdp, tensor)
  slices = len({getattr(device, 'slice_index', 0) for device in devices})
  if data % slices:
    raise ValueError(f'mesh.data={data} must be a multiple of the {slices} slices: only `data` goes across '
                     'them')
  within, options = (data // slices, fsdp, tensor), {'allow_split_physical_axes': True}
  if slices == 1:
    grid = mesh_utils.create_device_mesh(within, devices, **options)
  else:
    grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, **options)
  if all(len({device.process_index for device in part}) == 1 for part in grid.reshape(-1, tensor)):
    return grid
  ordered = sorted(by_host(devices), key=lambda device: getattr(device, 'slice_index', 0))
  return np.array(ordered).reshape(grid.shape)


def by_host(devices: Iterable[jax.Device]) -> np.ndarray:
  """Returns [number] devices in the order of their hosts, and of their numbers in each."""
  return np.array(sorted(devices, key=lambda device: (device.process_index, device.id)))


def _split_where_divided(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
  """Splits each dimension along its mesh axis, or leaves it whole where that does not divide it.

  2 key/value heads on tensor=4 are whole on every device, as every query head needs one of them anyway.
  """
  split = (axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
           for axis, size in zip(axes, shape))
  return NamedSharding(mesh, PartitionSpec(*split))


def shardings(axes: dict, shapes: dict, mesh: Mesh) -> dict:
  """Returns NamedShardings, nested as a model's `parameter_axes` and `parameter_shapes` are.

  Raises ValueError where `fsdp` does not divide a dimension: every device would hold all of it.
  """
  parts = mesh.shape['fsdp']

  def sharding(names, shape):
    for name, size in zip(names, shape):
      if AXIS_TO_MESH[name] == 'fsdp' and size % parts:
        raise ValueError(f'mesh.fsdp={parts} does not divide the {size} of {name!r} in this model')
    return _split_where_divided(mesh, [AXIS_TO_MESH[name] for name in names], shape)

  return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def batch_size(mesh: Mesh) -> int:
  """Returns how many parts a batch is split into: its rows must be a multiple of this."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def ambient(mesh: Mesh):
  """Opens a context in which programs are traced for `mesh`; `keep_batch_split` and others ask for it."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def ambient_platform() -> str | None:
  """Returns 'cpu', 'gpu' or 'tpu', the devices that the program is traced for; None outside `ambient`."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device and device.platform


def keep_batch_split(x):
  """Pins the first dimension of an activation to `data` and `fsdp`, all others whole or as `tensor` has it.

  Without it the compiler may split activations the way the weights are split over `fsdp`, and gather whole
  batches where it should gather a layer's weights. Returns `x` as it is outside `ambient`, in a program that
  is split by hand, or where the dimension does not divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or AxisType.Manual in mesh.axis_types or x.shape[0] % batch_size(mesh):
    return x
  rest = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
  return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES, *rest))


def local_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh of programs that a process runs by itself: its own devices."""
  if jax.process_count() == 1:
    return mesh
  return Mesh(by_process(mesh)[jax.process_index()][None], MESH_AXES)


def copy_shardings(params: dict, devices: np.ndarray) -> dict:
  """Returns the layout of one copy for each of `devices` [copies, fsdp, tensor].

  Dimensions that are split now are split: for others the compiler would first gather whole arrays.
  """
  mesh = Mesh(devices, ('copies', *MESH_AXES[1:]))
  return jax.tree.map(lambda x: _split_where_divided(mesh, x.sharding.spec, x.shape), params)


def by_process(mesh: Mesh) -> np.ndarray:
  """Returns [processes, fsdp, tensor] devices, as many along `tensor` as in `mesh` if a process has them."""
  tensor = math.gcd(mesh.size // jax.process_count(), mesh.shape['tensor'])
  return by_host(mesh.devices.flat).reshape(jax.process_count(), -1, tensor)
