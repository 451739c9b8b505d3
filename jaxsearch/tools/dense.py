"""Exact nearest vectors: float16 or int8 on disk (tensorstore), split over the devices of a process, searched chunk by chunk.

No score of more than one chunk exists at a time: each device keeps the best so far (`best_of`). Every process searches by itself
on its own devices, so that a host's searches never wait for another host.

Letters: N passages, D width, B queries, k results, C passages of a chunk.
"""

import functools
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BLOCK = 2**12     # passages of a block on disk
CHUNK = 2**12     # passages that a device scores at a time; larger ones leave the cache of a CPU
MOST_QUERIES = 64  # of a batch
PRECISIONS = ('float16', 'int8')


def quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(int8 [N,D], scales [N] float32): the vectors but for rounding, a scale for each."""
  scales = np.maximum(np.abs(vectors).max(axis=1), 1e-12) / 127
  return np.round(vectors / scales[:, None]).astype(np.int8), scales.astype(np.float32)


class Vectors:
  """The vectors of an index on disk, [N,D]; written in blocks of BLOCK, so that a block is there or not.

  Raises ValueError if they cannot be opened, OSError if the disk is full.
  """

  def __init__(self, folder: pathlib.Path, size: int, width: int, precision: str, create: bool = False):
    self.shape, self.precision, self._folder = (size, width), precision, folder
    def opened(name, dtype, shape):
      spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(folder / name)}}
      return tensorstore.open(spec, dtype=dtype, shape=shape, create=create, open=True,
                              chunk_layout=tensorstore.ChunkLayout(chunk_shape=(BLOCK, *shape[1:]))).result()
    self._vectors = opened('vectors', getattr(tensorstore, precision), self.shape)
    self._scales = opened('scales', tensorstore.float32, self.shape[:1]) if precision == 'int8' else None

  def write(self, first: int, vectors: np.ndarray) -> None:
    """Writes float32 vectors [n,D] as those of passages `first`, `first` + 1, …"""
    part = slice(first, first + len(vectors))
    try:
      if self._scales is not None:
        vectors, scales = quantized(vectors)
        self._scales[part].write(scales).result()
      self._vectors[part].write(vectors.astype(self.precision)).result()
    except ValueError as error:  # tensorstore has no other
      if number := re.search(r"os_error_code='(\d+)'", str(error)):
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(self._folder / 'vectors')) from error
      raise

  def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """(vectors [n,D] as they are stored, scales [n] float32) of some passages, zeros past the last."""
    size = min(last, self.shape[0]) - first
    vectors, scales = np.zeros((last - first, self.shape[1]), self.precision), np.ones(last - first, np.float32)
    if size > 0:
      vectors[:size] = self._vectors[first:first + size].read().result()
      if self._scales is not None:
        scales[:size] = self._scales[first:first + size].read().result()
    return vectors, scales

  def read_float(self, first: int, last: int) -> np.ndarray:
    """[n,D] float32: the vectors of some passages."""
    vectors, scales = self.read(first, last)
    return vectors.astype(np.float32) * scales[:, None]


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
    bounds = lambda index: tuple(bound * chunk for bound in index[0].indices(chunks)[:2])
    self._vectors = jax.make_array_from_callback(
      (chunks, chunk, width), split, lambda index: vectors.read(*bounds(index))[0].reshape(-1, chunk, width))
    self._scales = jax.make_array_from_callback(
      (chunks, chunk), split, lambda index: vectors.read(*bounds(index))[1].reshape(-1, chunk))

  def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers [B,k] int64, scores [B,k] float32) of the k = min(topk, N) vectors nearest to queries [B,D], best first.

    Ties go to the lower number.
    """
    topk, found = min(topk, self.size), []
    padded = 2 ** (topk - 1).bit_length()  # few programs, whatever is asked for
    for start in range(0, len(queries), MOST_QUERIES):
      part = queries[start:start + MOST_QUERIES]
      batch = np.zeros((2 ** (len(part) - 1).bit_length(), queries.shape[1]), np.float32)
      batch[:len(part)] = part
      result = best_of(self._mesh, padded, self.size, self._vectors, self._scales, batch)
      found.append([np.asarray(one)[:len(part), :topk] for one in result])
    scores, numbers = map(np.concatenate, zip(*found))
    return numbers.astype(np.int64), scores

  def scores(self, queries: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[B,n] float32: the scores of passages [B,n], some for each of queries [B,D]."""
    found = []
    for start in range(0, len(queries), MOST_QUERIES):
      part = slice(start, start + MOST_QUERIES)
      size = len(queries[part])
      rows = 2 ** (size - 1).bit_length()
      padded = [np.concatenate([one[part], np.zeros((rows - size, *one.shape[1:]), one.dtype)]) for one in (queries, numbers)]
      found.append(np.asarray(scores_of(self._mesh, self._vectors, self._scales, *padded))[:size])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)
def scores_of(mesh: Mesh, vectors, scales, queries, numbers):
  """vectors: [chunks,C,D], scales: [chunks,C], both split over `mesh`; queries: [B,D]; numbers: [B,n] -> [B,n]."""
  def local(vectors, scales, queries, numbers):
    size = scales.size
    at = numbers - jax.lax.axis_index('passages') * size
    here, at = (at >= 0) & (at < size), jnp.clip(at, 0, size - 1)
    rows = vectors.reshape(size, -1)[at].astype(jnp.float32)
    found = jnp.einsum('bd,bnd->bn', queries, rows, precision=jax.lax.Precision.HIGHEST) * scales.reshape(size)[at]
    return jax.lax.psum(jnp.where(here, found, 0.0), 'passages')

  split = PartitionSpec('passages')
  return jax.shard_map(local, mesh=mesh, in_specs=(split, split, PartitionSpec(), PartitionSpec()),
                       out_specs=PartitionSpec())(vectors, scales, queries, numbers)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def best_of(mesh: Mesh, topk: int, size: int, vectors, scales, queries):
  """vectors: [chunks,C,D], scales: [chunks,C], both split over `mesh`; queries: [B,D] -> (scores, numbers), each [B,topk].

  Past the `size`-th vector there is padding. Where there are fewer than `topk` vectors, the last scores are -inf.
  """
  def merged(scores, numbers):  # of several lists, the best: ties go to the earlier
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
  return merged(*(one.reshape(len(queries), -1) for one in found))
