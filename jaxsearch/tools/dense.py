"""Exact nearest vectors: float16 or int8 on disk, split over the devices of a process, searched chunk by
chunk.

No score of more than one chunk exists at a time: each device keeps the best so far (`best_of`). Every process
searches on its own devices, so that a host's searches never wait for another host.

Letters: N passages, D width, B queries, k results, C passages of a chunk.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsearch.files import appended
from jaxsearch.parallel.mesh import issuing

CHUNK = 2**12     # passages that a device scores at a time; larger ones leave the cache of a CPU
MOST_QUERIES = 64  # of a batch
PRECISIONS = ('float16', 'int8')


def quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (int8 [N,D], scales [N] float32): the vectors but for rounding, a scale for each."""
  scales = np.maximum(np.abs(vectors).max(axis=1), 1e-12) / 127
  return np.round(vectors / scales[:, None]).astype(np.int8), scales.astype(np.float32)


def write_vectors(folder: pathlib.Path, first: int, vectors: np.ndarray, precision: str) -> None:
  """Writes float32 vectors [n,D] behind the `first` ones in the files of a folder.

  Raises OSError if the disk is full.
  """
  scales = np.ones(len(vectors), np.float32)
  if precision == 'int8':
    vectors, scales = quantized(vectors)
  vectors = vectors.astype(precision)
  for name, part in (f'vectors.{precision}', vectors), ('scales.float32', scales):
    with appended(folder / name, first * part[0].nbytes) as file:
      file.write(part.tobytes())


class Vectors:
  """The vectors in a folder, [N,D], mapped into memory."""

  def __init__(self, folder: pathlib.Path, width: int, precision: str):
    self._vectors = np.memmap(folder / f'vectors.{precision}', precision, 'r').reshape(-1, width)
    self._scales, self.shape = np.memmap(folder / 'scales.float32', np.float32, 'r'), self._vectors.shape

  def __len__(self) -> int:
    return len(self._vectors)

  def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (vectors [n,D] as they are stored, scales [n] float32) from `first` to `last`, zeros past N."""
    missing = last - max(first, min(last, len(self._vectors)))
    vectors, scales = self._vectors[first:last], self._scales[first:last]
    return np.pad(vectors, ((0, missing), (0, 0))), np.pad(scales, (0, missing))

  def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
    """Returns the vectors of some passages, float32."""
    return self._vectors[numbers].astype(np.float32) * self._scales[numbers][..., None]


class Dense:
  """Exact search among vectors; `search` may be called from several threads.

  Args:
    vectors: read here, onto the devices.
    devices: those of this process if not given; each holds an equal share.
    chunk: passages scored at a time on a device.
  """

  def __init__(self, vectors: Vectors, devices=None, chunk: int = CHUNK):
    devices = jax.local_devices() if devices is None else devices
    self._mesh, (self.size, width) = Mesh(np.array(devices), ('passages',)), vectors.shape
    each = -(-self.size // len(devices))  # passages of a device
    chunk = min(chunk, each)
    chunks = -(-each // chunk) * len(devices)
    split = NamedSharding(self._mesh, PartitionSpec('passages'))

    def placed(part: int, *shape: int) -> jax.Array:
      def read(index):
        first, last, _ = index[0].indices(chunks)
        return vectors.read(first * chunk, last * chunk)[part].reshape(-1, *shape)
      return jax.make_array_from_callback((chunks, *shape), split, read)

    self._vectors, self._scales = placed(0, chunk, width), placed(1, chunk)

  def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (numbers [B,k] int64, scores [B,k] float32) of the k = min(topk, N) vectors nearest to queries
    [B,D].

    The best come first, ties go to the lower number.
    """
    topk, found = min(topk, self.size), []
    padded = 2 ** (topk - 1).bit_length()  # few programs, whatever is asked for
    for start in range(0, len(queries), MOST_QUERIES):
      part = queries[start:start + MOST_QUERIES]
      batch = np.zeros((2 ** (len(part) - 1).bit_length(), queries.shape[1]), np.float32)
      batch[:len(part)] = part
      with issuing():
        result = best_of(self._mesh, padded, self.size, self._vectors, self._scales, batch)
      found.append([np.asarray(values)[:len(part), :topk] for values in result])
    scores, numbers = map(np.concatenate, zip(*found))
    return numbers.astype(np.int64), scores


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def best_of(mesh: Mesh, topk: int, size: int, vectors, scales, queries):
  """Returns (scores, numbers), each [B,topk], of the nearest of `size` vectors; -inf where there are fewer.

  Args:
    vectors: [chunks,C,D], split over `mesh`; past the `size`-th there is padding.
    scales: [chunks,C], split likewise.
    queries: [B,D].
  """
  def merged(scores, numbers):  # the best of several lists: ties go to the earlier
    scores, at = jax.lax.top_k(scores, topk)
    return scores, jnp.take_along_axis(numbers, at, axis=1)

  def local(vectors, scales, queries):
    chunks, chunk = scales.shape
    first = jax.lax.axis_index('passages') * chunks * chunk

    def step(best, part):
      number, rows, scale = part
      numbers = first + number * chunk + jnp.arange(chunk)
      found = jnp.dot(queries, rows.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST) * scale
      found = jnp.where(numbers < size, found, -jnp.inf)
      if chunk > topk:
        found, at = jax.lax.top_k(found, topk)
        numbers = numbers[at]
      else:
        numbers = jnp.broadcast_to(numbers, found.shape)
      return merged(jnp.concatenate([best[0], found], 1), jnp.concatenate([best[1], numbers], 1)), None

    empty = jnp.full((len(queries), topk), -jnp.inf), jnp.full((len(queries), topk), size)
    empty = jax.lax.pcast(empty, 'passages', to='varying')
    best, _ = jax.lax.scan(step, empty, (jnp.arange(chunks), vectors, scales))
    return jax.tree.map(lambda x: x[:, None], best)  # [B, 1, topk]: joined over devices below

  split = PartitionSpec('passages')
  found = jax.shard_map(local, mesh=mesh, in_specs=(split, split, PartitionSpec()),
                        out_specs=PartitionSpec(None, 'passages'))(vectors, scales, queries)
  return merged(*(values.reshape(len(queries), -1) for values in found))
