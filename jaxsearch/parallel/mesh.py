"""The device mesh, the one table from logical axis names to mesh axes, and multi-host start-up.

The mesh has three axes: `data` (copies of the parameters), `fsdp` (parameters and optimizer split, gathered layer by
layer) and `tensor` (heads, feed-forward and vocabulary split). A batch is split over `data` and `fsdp` together. Models
name the axes of their parameters (`models.decoder.parameter_axes`) and know nothing of meshes; changing the parallel
layout means editing `AXIS_TO_MESH`. Order of use: `start_distributed`, `make_mesh`, then the sharding functions.
"""

import base64
import collections
import contextlib
import json
import math
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # its client has no public name
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = ('data', 'fsdp')
HEARTBEAT = 30  # seconds without a sign of life until a process counts as lost, which ends all the others
PATIENCE = 86400  # seconds until what another process sends must have come; a lost process ends all long before

AXIS_TO_MESH = dict(
  layers=None, norm=None, head_dim=None, rank=None,
  embed='fsdp',
  heads='tensor', kv_heads='tensor', mlp='tensor', vocab='tensor',
)  # fmt: skip


def start_distributed(enabled: bool, coordinator: str = '', num_processes: int = -1, process_id: int = -1) -> None:
  """Joins this process to the others, if `enabled`; call it before anything touches a device.

  Args:
    coordinator: 'host:port' of process 0, which listens there alone unless JAX_COORDINATOR_BIND_ADDRESS names another place; ''
      lets JAX find it (TPU pods, SLURM, GKE, Open MPI).
    num_processes, process_id: -1 lets JAX find them.
  Raises:
    ValueError: the processes did not find each other, with what was tried.
  """
  if not enabled:
    return
  known = dict(coordinator_address=coordinator or None, num_processes=None if num_processes < 0 else num_processes,
               process_id=None if process_id < 0 else process_id)
  try:
    jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT,
                               coordinator_bind_address=os.environ.get('JAX_COORDINATOR_BIND_ADDRESS') or coordinator or None)
  except (RuntimeError, ValueError) as error:
    shown = ', '.join(f'{name}={"" if value is None else value}' for name, value in known.items())
    raise ValueError(f'distributed.enabled=True: multi-host start-up with {shown} failed; process 0 listens there alone, or on '
                     f'JAX_COORDINATOR_BIND_ADDRESS: {error}') from error


def notices_preemption() -> bool:
  """Whether JAX waits for SIGTERM in this process, and tells the others: `multihost_utils.reached_preemption_sync_point`."""
  return jax.distributed.is_initialized() and jax.config.jax_enable_preemption_service


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, *,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes a mesh over all devices (or `devices`); one size may be -1 and takes what the others leave.

  Raises ValueError where sizes do not fit the devices.
  """
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
    raise ValueError(f'mesh.data={data} must be a multiple of the {slices} slices: only `data` goes across them')
  options = dict(allow_split_physical_axes=devices[0].device_kind in ('TPU v5 lite', 'TPU v5e'))  # as JAX does
  if slices == 1:
    return mesh_utils.create_device_mesh((data, fsdp, tensor), devices, **options)
  return mesh_utils.create_hybrid_device_mesh((data // slices, fsdp, tensor), (slices, 1, 1), devices, **options)


def by_host(devices: Iterable[jax.Device]) -> np.ndarray:
  """Returns [number] devices in the order of their hosts, and of their numbers in each."""
  return np.array(sorted(devices, key=lambda device: (device.process_index, device.id)))


def _split_where_divided(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
  """The layout of one array, each dimension along its mesh axis, or replicated where that does not divide it.

  2 key/value heads on tensor=4 are whole on every device, as every query head needs one of them anyway.
  """
  return PartitionSpec(*(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
                         for axis, size in zip(axes, shape)))


def shardings(axes: dict, shapes: dict, mesh: Mesh) -> dict:
  """NamedShardings, nested as `axes` and `shapes` are (a model's `parameter_axes` and `parameter_shapes`).

  Raises ValueError where `fsdp` does not divide a dimension, with the nearest sizes that do: every device would hold all of it.
  """
  def sharding(names, shape):
    for name, size in zip(names, shape):
      if AXIS_TO_MESH[name] == 'fsdp' and size % (parts := mesh.shape['fsdp']):
        divisors = [number for number in range(1, size + 1) if size % number == 0]
        nearest = [number for number in divisors if number < parts][-1:] + [number for number in divisors if number > parts][:1]
        raise ValueError(f'mesh.fsdp={parts} does not divide the {size} of {name!r} in this model; the nearest sizes that do are '
                         f'{" and ".join(map(str, nearest))}')
    return NamedSharding(mesh, _split_where_divided([AXIS_TO_MESH[name] for name in names], shape, mesh))

  return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_size(mesh: Mesh) -> int:
  """How many parts a batch is split into: its rows must be a multiple of this."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def split_over_batch(mesh: Mesh, dimension: int) -> NamedSharding:
  """Dimension number `dimension` split over `data` and `fsdp`, all others whole."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * dimension, BATCH_AXES))


def ambient(mesh: Mesh):
  """A context in which programs are traced for `mesh`: there `keep_batch_split` and `ambient_platform` mean something."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def ambient_platform() -> str | None:
  """'cpu', 'gpu' or 'tpu': the devices that the program is traced for; None outside `ambient`."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device and device.platform


def in_groups(mesh: AbstractMesh, size: int) -> AbstractMesh:
  """The mesh with its axis `fsdp` cut in `groups` of `size` neighbours, which are the new axis `fsdp`."""
  sizes = mesh.shape['data'], mesh.shape['fsdp'] // size, size, mesh.shape['tensor']
  return AbstractMesh(sizes, ('data', 'groups', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 4)


def keep_batch_split(x):
  """Pins the first dimension of an activation to `data` and `fsdp`, all others whole or as `tensor` has it.

  Without it the compiler may split activations the way the weights are split over `fsdp`, and gather whole batches where
  it should gather a layer's weights. Returns `x` as it is outside `ambient`, in a program that is split by hand, or where the
  dimension does not divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or AxisType.Manual in mesh.axis_types or x.shape[0] % batch_size(mesh):
    return x
  rest = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
  return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES, *rest))


def place(value, sharding: NamedSharding):
  """A host array, the same on every process, as a global array; each process copies only its own shards."""
  value = np.asarray(value)
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def local_mesh(mesh: Mesh) -> Mesh:
  """The mesh of programs that a process runs by itself: `mesh`, or where there are several processes its own devices."""
  return mesh if jax.process_count() == 1 else Mesh(_by_process(mesh)[jax.process_index()][None], MESH_AXES)


def local(params: dict) -> dict:
  """The parameters on `local_mesh`: as they are where there is one process.

  Several processes each get a copy that is split over their own devices, so that none ever holds all of it.
  """
  if jax.process_count() == 1:
    return params
  mesh = jax.tree.leaves(params)[0].sharding.mesh
  own = local_mesh(mesh)

  def take(x):
    sharding = NamedSharding(own, x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard.data for shard in x.addressable_shards])

  return jax.tree.map(take, jax.device_put(params, copy_shardings(params, _by_process(mesh))))


def copy_shardings(params: dict, devices: np.ndarray) -> dict:
  """The layout of one copy for each of `devices` [copies, fsdp, tensor], split along the dimensions that are split now.

  To split others the compiler would first gather whole arrays on every device.
  """
  mesh = Mesh(devices, ('copies', *MESH_AXES[1:]))
  return jax.tree.map(lambda x: NamedSharding(mesh, _split_where_divided(x.sharding.spec, x.shape, mesh)), params)


def _by_process(mesh: Mesh) -> np.ndarray:
  """Returns [processes, fsdp, tensor] devices, as many along `tensor` as in `mesh` if a process has them."""
  tensor = math.gcd(mesh.size // jax.process_count(), mesh.shape['tensor'])
  return by_host(mesh.devices.flat).reshape(jax.process_count(), -1, tensor)


_issuing = threading.RLock()


def issuing() -> contextlib.AbstractContextManager:
  """Held while a program is handed to several devices.

  Two threads do so where rollouts are one step ahead. All devices must get the programs in the same order, or a collective of one
  waits on one device for that of the other, which waits on another device, for ever. Across processes nothing can: programs of
  one thread are of this process alone.
  """
  return _issuing if jax.local_device_count() > 1 else contextlib.nullcontext()


def own_rows(array: jax.Array) -> np.ndarray:
  """Returns [n, R of this process, …] of an array that is split along axis 1, the inverse of `place_own`."""
  if jax.process_count() == 1 or isinstance(array, np.ndarray):
    return jax.device_get(array)
  shards = {shard.index[1].start or 0: shard.data for shard in array.addressable_shards}
  return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis=1)


def place_own(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """[n, R, …] of all processes, split along axis 1, from the [n, R / processes, …] that this process has."""
  if jax.process_count() == 1:
    return place(values, sharding)
  n, own, *rest = np.shape(values)
  return jax.make_array_from_process_local_data(sharding, np.asarray(values), (n, own * jax.process_count(), *rest))


def own_part() -> slice:
  """Which items of a batch this process has: every n-th from its number on."""
  return slice(jax.process_index(), None, jax.process_count())


def gather_items(own: Sequence[Any]) -> tuple[list[Any], list[int]]:
  """The items of all processes, in the order of a batch of which each has its `own_part`; and the places of this process's."""
  everywhere = gather_objects(list(own))
  order = sorted((index, process) for process, items in enumerate(everywhere) for index in range(len(items)))
  return [everywhere[process][index] for index, process in order], [
    place for place, (_, process) in enumerate(order) if process == jax.process_index()]


def of_first(own: Any) -> Any:
  """Broadcasts the first process's value to all."""
  return gather_objects(own if jax.process_index() == 0 else None)[0]


def whole(array: jax.Array) -> np.ndarray:
  """All of an array on the host of every process, each of which has parts of it; all processes must call it."""
  return np.asarray(array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True))


exchanged = {'bytes': 0}  # that this process has sent since it started, once for each process that they went to


def gather_objects(own: Any) -> list[Any]:
  """Gathers JSON values (tuples become lists) or arrays from all processes, in process order.

  Threads of one name gather with each other. No device takes part, so others may use them meanwhile.
  """
  if jax.process_count() == 1:
    return [own]
  thread = threading.current_thread().name
  _turns[thread] ^= 1  # all have read what was written two turns ago
  place = f'jaxsearch/{thread}/{_turns[thread]}/'
  store().key_value_set_bytes(f'{place}{jax.process_index():08}', _packed(own, jax.process_count() - 1), allow_overwrite=True)
  store().wait_at_barrier(f'jaxsearch/{thread}', PATIENCE * 1000)
  return [_unpacked(data) for _, data in sorted(store().key_value_dir_get_bytes(place))]


_turns = collections.Counter()  # of each thread, 0 or 1


def _packed(own: Any, receivers: int) -> bytes:
  """JSON, as a pickle could run code of whoever reaches the coordinator's port."""
  data = zlib.compress(json.dumps(own, default=_plain).encode(), level=1)
  exchanged['bytes'] += len(data) * receivers
  return data


def _plain(value: Any) -> Any:
  value = np.asarray(value)
  if value.dtype.kind not in 'biuf':
    raise TypeError(f'{value!r} is neither JSON nor an array of numbers')
  return {_ARRAY: [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]} if value.ndim else value.item()


def _unpacked(data: bytes) -> Any:
  return json.loads(zlib.decompress(data), object_hook=lambda found: _array(*found[_ARRAY]) if _ARRAY in found else found)


_ARRAY = 'jaxsearch.array'


def _array(dtype: str, shape: Sequence[int], data: str) -> np.ndarray:
  return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)


def store() -> Any:
  """The key-value store of `jax.distributed`, for what processes send each other."""
  return distributed.global_state.client


def moments(own: np.ndarray) -> tuple[int, float, float]:
  """How many values [N] all processes passed, their mean and their variance; (0, 0.0, 0.0) where there are none."""
  own = np.asarray(own, np.float64)
  counts, sums, squares = np.array(gather_objects(
    (len(own), own.sum(), np.square(own - own.mean()).sum()) if len(own) else (0, 0.0, 0.0))).T
  number = max(counts.sum(), 1)
  mean = sums.sum() / number
  variance = (squares + counts * np.square(sums / np.maximum(counts, 1) - mean)).sum() / number
  return int(counts.sum()), float(mean), float(variance)


def pass_on(own: Iterable[Any], moves: Sequence[tuple[int, int]]) -> list[Any]:
  """Moves items between processes, each from a source to a target; no other process gets them.

  Args:
    own: those of which this process is the source, in the order of `moves`.
    moves: (source, target) of every item; the same on all processes, which have gathered something since the last call.
  Returns:
    The items of which this process is the target, in the order of `moves`.
  """
  own, process = iter(own), jax.process_index()
  for place, (source, _) in enumerate(moves):
    if source == process:
      store().key_value_set_bytes(f'jaxsearch/moved/{place}', _packed(next(own), 1))
  arrived = []
  for place, (_, target) in enumerate(moves):
    if target == process:
      arrived.append(_unpacked(store().blocking_key_value_get_bytes(f'jaxsearch/moved/{place}', PATIENCE * 1000)))
      store().key_value_delete(f'jaxsearch/moved/{place}')
  return arrived
