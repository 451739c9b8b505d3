"""The device mesh, the one table from logical axis names to mesh axes, and what processes send each other.

The mesh has three axes: `data` (copies of the parameters), `fsdp` (parameters and optimizer split, gathered
layer by layer) and `tensor` (heads, feed-forward and vocabulary split). A batch is split over `data` and
`fsdp` together. Models name the axes of their parameters (`models.decoder.parameter_axes`) and know nothing
of meshes; changing the parallel layout means editing `AXIS_TO_MESH`. Order of use: `start_distributed`,
`make_mesh`, then the sharding functions.

Processes exchange JSON and arrays of numbers through the key-value store of `jax.distributed`: no device
takes part, so others may use them meanwhile.
"""

import base64
import collections
import contextlib
import functools
import json
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler, distributed  # no public names
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = ('data', 'fsdp')
HEARTBEAT = 30  # seconds without a sign of life until a process counts as lost, which ends all the others
PATIENCE = 86400  # seconds until what another process sends must have come; a lost one ends all long before

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
    ValueError: the processes did not find each other, with what was tried.
  """
  if not enabled:
    return
  known = dict(coordinator_address=coordinator or None,
               num_processes=None if num_processes < 0 else num_processes,
               process_id=None if process_id < 0 else process_id)
  address = os.environ.get('JAX_COORDINATOR_BIND_ADDRESS') or coordinator or None
  try:
    jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT, coordinator_bind_address=address)
  except (RuntimeError, ValueError) as error:
    shown = ', '.join(f'{name}={"" if value is None else value}' for name, value in known.items())
    raise ValueError(f'distributed.enabled=True: multi-host start-up with {shown} failed; process 0 listens '
                     f'there alone, or on JAX_COORDINATOR_BIND_ADDRESS: {error}') from error
  compiler._compile_and_write_cache = functools.partial(_compile_and_write, compiler._compile_and_write_cache)


def _compile_and_write(compile_program, backend, computation, devices, options, callbacks, name, key):
  """Writes what no other process has to the compilation cache; JAX leaves writing to process 0.

  A key names the devices, except on GPUs; on CPUs also the process. Without this, others than process 0 would
  compile the sampler again whenever the job starts.
  """
  start = time.monotonic()
  executable = compile_program(backend, computation, devices, options, callbacks, name, key)
  seconds = time.monotonic() - start
  unique = {'gpu': False, 'cpu': True}.get(backend.platform, devices.is_fully_addressable)
  if jax.process_index() and unique and seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:
    compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
  return executable


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


def arranged(devices: Sequence[jax.Device], data: int, fsdp: int, tensor: int) -> np.ndarray:
  """Returns the devices [data, fsdp, tensor] so that those that talk most are nearest to each other.

  GPUs go by host: XLA numbers their hosts as slices, but `fsdp` may go across them. Between slices of TPUs
  only `data` is split; within one JAX follows the links. Raises ValueError where `data` is not as many.
  """
  if devices[0].platform != 'tpu':
    return by_host(devices).reshape(data, fsdp, tensor)
  slices = len({getattr(device, 'slice_index', 0) for device in devices})
  if data % slices:
    raise ValueError(f'mesh.data={data} must be a multiple of the {slices} slices: only `data` goes across '
                     'them')
  make, of_slices = mesh_utils.create_device_mesh, ()
  if slices > 1:
    make, of_slices = mesh_utils.create_hybrid_device_mesh, ((slices, 1, 1),)
  # An axis may take half of a dimension of the torus where none fits as it is.
  return make((data // slices, fsdp, tensor), *of_slices, devices, allow_split_physical_axes=True)


def by_host(devices: Iterable[jax.Device]) -> np.ndarray:
  """Returns [number] devices in the order of their hosts, and of their numbers in each."""
  return np.array(sorted(devices, key=lambda device: (device.process_index, device.id)))


def _split_where_divided(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
  """Returns the layout of an array, each dimension along its mesh axis, or whole where that does not divide
  it.

  2 key/value heads on tensor=4 are whole on every device, as every query head needs one of them anyway.
  """
  return PartitionSpec(*(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
                         for axis, size in zip(axes, shape)))


def shardings(axes: dict, shapes: dict, mesh: Mesh) -> dict:
  """Returns NamedShardings, nested as a model's `parameter_axes` and `parameter_shapes` are.

  Raises ValueError where `fsdp` does not divide a dimension: every device would hold all of it.
  """
  parts = mesh.shape['fsdp']

  def sharding(names, shape):
    for name, size in zip(names, shape):
      if AXIS_TO_MESH[name] == 'fsdp' and size % parts:
        divisors = [number for number in range(1, size + 1) if size % number == 0]
        below, above = ([n for n in divisors if n < parts], [n for n in divisors if n > parts])
        nearest = ' and '.join(map(str, below[-1:] + above[:1]))
        raise ValueError(f'mesh.fsdp={parts} does not divide the {size} of {name!r} in this model; the '
                         f'nearest sizes that do are {nearest}')
    return NamedSharding(mesh, _split_where_divided([AXIS_TO_MESH[name] for name in names], shape, mesh))

  return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the layout of an array that is whole on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_size(mesh: Mesh) -> int:
  """Returns how many parts a batch is split into: its rows must be a multiple of this."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def split_over_batch(mesh: Mesh, dimension: int) -> NamedSharding:
  """Returns the layout with dimension number `dimension` split over `data` and `fsdp`, all others whole."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * dimension, BATCH_AXES))


def ambient(mesh: Mesh):
  """Opens a context in which programs are traced for `mesh`; `keep_batch_split` and others ask for it."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def ambient_platform() -> str | None:
  """Returns 'cpu', 'gpu' or 'tpu', the devices that the program is traced for; None outside `ambient`."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device and device.platform


def in_groups(mesh: AbstractMesh, size: int) -> AbstractMesh:
  """Cuts the axis `fsdp` of a mesh into `groups` of `size` neighbours, which are the new axis `fsdp`."""
  sizes = mesh.shape['data'], mesh.shape['fsdp'] // size, size, mesh.shape['tensor']
  return AbstractMesh(sizes, ('data', 'groups', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 4)


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


def place(value, sharding: NamedSharding):
  """Places a host array, the same on every process; each process copies only its own shards."""
  value = np.asarray(value)
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def local_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh of programs that a process runs by itself: its own devices."""
  if jax.process_count() == 1:
    return mesh
  return Mesh(_by_process(mesh)[jax.process_index()][None], MESH_AXES)


def local(params: dict) -> dict:
  """Returns the parameters on `local_mesh`: as they are where there is one process.

  Several processes each get a copy that is split over their own devices, so that none ever holds all of it.
  """
  if jax.process_count() == 1:
    return params
  mesh = jax.tree.leaves(params)[0].sharding.mesh
  here = local_mesh(mesh)

  def take(x):
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(here, x.sharding.spec), shards)

  return jax.tree.map(take, jax.device_put(params, copy_shardings(params, _by_process(mesh))))


def copy_shardings(params: dict, devices: np.ndarray) -> dict:
  """Returns the layout of one copy for each of `devices` [copies, fsdp, tensor].

  Dimensions that are split now are split: for others the compiler would first gather whole arrays.
  """
  mesh = Mesh(devices, ('copies', *MESH_AXES[1:]))
  split = lambda x: NamedSharding(mesh, _split_where_divided(x.sharding.spec, x.shape, mesh))
  return jax.tree.map(split, params)


def _by_process(mesh: Mesh) -> np.ndarray:
  """Returns [processes, fsdp, tensor] devices, as many along `tensor` as in `mesh` if a process has them."""
  tensor = math.gcd(mesh.size // jax.process_count(), mesh.shape['tensor'])
  return by_host(mesh.devices.flat).reshape(jax.process_count(), -1, tensor)


_issuing = threading.RLock()


def issuing() -> contextlib.AbstractContextManager:
  """Returns the lock that is held while a program is handed to several devices.

  Two threads do so where rollouts are one step ahead. All devices must get the programs in the same order, or
  a collective of one waits on one device for that of the other, which waits on another device, for ever. A
  rollout's programs run within one process, so nothing can wait across processes.
  """
  return _issuing if jax.local_device_count() > 1 else contextlib.nullcontext()


def local_rows(array: jax.Array) -> np.ndarray:
  """Returns [n, R of this process, …] of an array split along axis 1, the inverse of `place_local`."""
  if jax.process_count() == 1 or isinstance(array, np.ndarray):
    return jax.device_get(array)
  shards = {shard.index[1].start or 0: shard.data for shard in array.addressable_shards}
  return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis=1)


def place_local(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Places [n, R, …], split along axis 1, from the [n, R / processes, …] that each process has."""
  if jax.process_count() == 1:
    return place(values, sharding)
  n, rows, *rest = np.shape(values)
  shape = n, rows * jax.process_count(), *rest
  return jax.make_array_from_process_local_data(sharding, np.asarray(values), shape)


def whole(array: jax.Array) -> np.ndarray:
  """Gathers an array on the host of every process, each of which has parts of it; all must call it."""
  if not array.is_fully_addressable:
    array = multihost_utils.process_allgather(array, tiled=True)
  return np.asarray(array)


def local_part() -> slice:
  """Returns which items of a batch this process has: every n-th from its number on."""
  return slice(jax.process_index(), None, jax.process_count())


def gather_items(items: Sequence[Any]) -> tuple[list[Any], list[int]]:
  """Gathers a batch of which each process has its `local_part`; returns the places of this process's too."""
  everywhere = gather_objects(list(items))
  order = sorted((i, process) for process, part in enumerate(everywhere) for i in range(len(part)))
  places = [place for place, (_, process) in enumerate(order) if process == jax.process_index()]
  return [everywhere[process][i] for i, process in order], places


def broadcast(value: Any) -> Any:
  """Returns the first process's value on all."""
  return gather_objects(value if jax.process_index() == 0 else None)[0]


exchanged = {'bytes': 0}  # that this process has sent since it started, once for each receiver
_turns = collections.Counter()  # of each thread, 0 or 1


def gather_objects(value: Any) -> list[Any]:
  """Gathers JSON values (tuples become lists) or arrays from all processes, in process order.

  Threads of one name gather with each other.
  """
  if jax.process_count() == 1:
    return [value]
  thread = threading.current_thread().name
  _turns[thread] ^= 1  # all have read what was written two turns ago
  place, data = f'jaxsearch/{thread}/{_turns[thread]}/', _packed(value, jax.process_count() - 1)
  store().key_value_set_bytes(f'{place}{jax.process_index():08}', data, allow_overwrite=True)
  with _waiting():
    store().wait_at_barrier(f'jaxsearch/{thread}', PATIENCE * 1000)
  return [_unpacked(data) for _, data in sorted(store().key_value_dir_get_bytes(place))]


@contextlib.contextmanager
def _waiting(source: int | str = '') -> Iterator[None]:
  """Turns JAX's error where others take too long into a TimeoutError that names them, or the `source`."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'DEADLINE_EXCEEDED' not in str(error):
      raise
    missing = ', '.join(sorted(re.findall(r'^\d+$', str(error), re.MULTILINE), key=int)) or source
    raise TimeoutError(f'nothing came from process {missing} within {PATIENCE} seconds; its log may tell why'
                       ) from error


_ARRAY = 'jaxsearch.array'


def _packed(value: Any, receivers: int) -> bytes:
  """Writes JSON: a pickle could run code of whoever reaches the coordinator's port."""
  data = zlib.compress(json.dumps(value, default=_plain).encode(), level=1)
  exchanged['bytes'] += len(data) * receivers
  return data


def _plain(value: Any) -> Any:
  value = np.asarray(value)
  if value.dtype.kind not in 'biuf':
    raise TypeError(f'{value!r} is neither JSON nor an array of numbers')
  if not value.ndim:
    return value.item()
  return {_ARRAY: [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}


def _unpacked(data: bytes) -> Any:
  def read(value: dict) -> Any:
    if _ARRAY not in value:
      return value
    dtype, shape, content = value[_ARRAY]
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)

  return json.loads(zlib.decompress(data), object_hook=read)


def store() -> Any:
  """Returns the key-value store of `jax.distributed`."""
  return distributed.global_state.client


def moments(values: np.ndarray) -> tuple[int, float, float]:
  """Returns the number of values [N] that all processes passed, their mean and variance."""
  values = np.asarray(values, np.float64)
  squares = np.square(values - values.mean()).sum() if len(values) else 0.0
  counts, sums, squares = np.array(gather_objects((len(values), values.sum(), squares))).T
  number = max(counts.sum(), 1)
  mean = sums.sum() / number
  variance = (squares + counts * np.square(sums / np.maximum(counts, 1) - mean)).sum() / number
  return int(counts.sum()), float(mean), float(variance)


def pass_on(items: Iterable[Any], moves: Sequence[tuple[int, int]]) -> list[Any]:
  """Moves items between processes, each from a source to a target; no other process gets them.

  Args:
    items: those of which this process is the source, in the order of `moves`.
    moves: (source, target) of every item; the same on all processes, which have gathered something since the
      last call.
  Returns:
    The items of which this process is the target, in the order of `moves`.
  """
  items, process = iter(items), jax.process_index()
  for place, (source, _) in enumerate(moves):
    if source == process:
      store().key_value_set_bytes(f'jaxsearch/moved/{place}', _packed(next(items), 1))
  arrived = []
  for place, (source, target) in enumerate(moves):
    if target == process:
      name = f'jaxsearch/moved/{place}'
      with _waiting(source):
        arrived.append(_unpacked(store().blocking_key_value_get_bytes(name, PATIENCE * 1000)))
      store().key_value_delete(name)
  return arrived
