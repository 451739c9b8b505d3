"""Moves data while a run goes on: arrays onto the mesh and home, JSON and arrays from process to process.

What is saved or loaded passes `check_finite`.

Processes talk through the key-value store of `jax.distributed`: no device takes part, so others may use them
meanwhile.
"""

import base64
import collections
import contextlib
import json
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # no public name
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsearch.parallel.mesh import BATCH_AXES, by_process, copy_shardings, local_mesh

PATIENCE = 86400  # seconds until what another process sends must have come; a lost one ends all long before


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the layout of an array that is whole on every device."""
  return NamedSharding(mesh, PartitionSpec())


def split_over_batch(mesh: Mesh, dimension: int) -> NamedSharding:
  """Returns the layout with dimension number `dimension` split over `data` and `fsdp`, all others whole."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * dimension, BATCH_AXES))


def place(value, sharding: NamedSharding):
  """Places a host array, the same on every process; each process copies only its own shards."""
  value = np.asarray(value)
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def local(params: dict) -> dict:
  """Returns the parameters on `local_mesh`: as they are where there is one process.

  Several processes each get a copy that is split over their own devices, so that none ever holds all of it.
  """
  if jax.process_count() == 1:
    return params
  mesh = jax.tree.leaves(params)[0].sharding.mesh

  def take(x):
    shards = [shard.data for shard in x.addressable_shards]
    here = NamedSharding(local_mesh(mesh), x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, here, shards)

  return jax.tree.map(take, jax.device_put(params, copy_shardings(params, by_process(mesh))))


_issuing = threading.RLock()


def issuing() -> contextlib.AbstractContextManager:
  """Returns the lock that is held while a program is handed to several devices.

  Two threads do so where rollouts are one step ahead. All devices must get the programs in the same order,
  or two collectives wait for ever, each on a device that the other occupies. A rollout's programs run within
  one process, so nothing can wait across processes.
  """
  return _issuing if jax.local_device_count() > 1 else contextlib.nullcontext()


def local_rows(array: jax.Array) -> np.ndarray:
  """Returns [n, R of this process, …] of an array split along axis 1, as `training.batch.place` placed it."""
  if jax.process_count() == 1 or isinstance(array, np.ndarray):
    return jax.device_get(array)
  shards = {shard.index[1].start or 0: shard.data for shard in array.addressable_shards}
  return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis=1)


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
_ARRAY = 'jaxsearch.array'  # the key of an array's type, shape and content


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
  sums = len(values), values.sum(), np.square(values).sum()
  number, total, squares = np.sum(gather_objects(sums), axis=0)
  mean = total / max(number, 1)
  return int(number), float(mean), float(squares / max(number, 1) - mean**2)


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


class NotFinite(ValueError):
  """Parameters with values that are not finite; the message names the first."""


def check_finite(params: Any, name: object) -> None:
  """Raises NotFinite where `params`, those of `name`, have values that are not; all processes call it."""
  with issuing():
    found = _finite(params)
  for path, finite in jax.tree.leaves_with_path(jax.device_get(found)):
    if not finite:
      where = jax.tree_util.keystr(path, simple=True, separator='/')
      raise NotFinite(f'{name}: {where} has values that are not finite')


_finite = jax.jit(lambda params: jax.tree.map(lambda x: jnp.isfinite(x).all(), params))
