"""Exact nearest vectors: float16 or int8 on disk, split over the devices of a process, searched by chunks.

Each device keeps its best so far, and no program runs on more than one, so that a search never waits for
another program. Letters: N passages, D width, B queries, k results, C passages of a chunk.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch.files import appended

CHUNK = 2**12  # passages that a device scores at a time; larger ones leave the cache of a CPU
PRECISIONS = ('float16', 'int8')


def quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (int8 [N,D], scales [N] float32): the vectors but for rounding, a scale for each."""
  scales = np.maximum(np.abs(vectors).max(axis=1), 1e-12) / 127
  return np.round(vectors / scales[:, None]).astype(np.int8), scales.astype(np.float32)


def write_vectors(folder: pathlib.Path, first: int, vectors: np.ndarray, precision: str) -> None:
  """Writes float32 vectors [n,D] after the first `first` ones in the files of a folder, the scales last.

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
    if not missing:  # no copy
      return vectors, scales
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
    self.size = len(vectors)
    each = -(-self.size // len(devices))  # passages of a device
    chunk = min(chunk, each)
    chunks = -(-each // chunk)
    self._shares = []  # (the first passage, vectors [chunks,C,D], scales [chunks,C]) of each device
    for first, device in zip(range(0, self.size, chunks * chunk), devices):
      rows, scales = vectors.read(first, first + chunks * chunk)
      share = rows.reshape(chunks, chunk, -1), scales.reshape(chunks, chunk)
      self._shares.append((first, *jax.device_put(share, device)))

  def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (numbers [B,k] int64, scores [B,k] float32) of the k = min(topk, N) vectors nearest to queries
    [B,D].

    The best come first, ties go to the lower number.
    """
    topk = min(topk, self.size)
    padded, width = 2 ** (topk - 1).bit_length(), queries.shape[1]  # few programs, whatever is asked for
    batch = np.zeros((2 ** (len(queries) - 1).bit_length(), width), np.float32)
    batch[:len(queries)] = queries
    nearest = [nearest_of(padded, self.size - first, *share, batch) for first, *share in self._shares]
    scores, numbers = [], []
    for (first, *_), (of_share, within) in zip(self._shares, nearest):  # all devices are at work by now
      scores.append(np.asarray(of_share)[:len(queries)])
      numbers.append(np.asarray(within, np.int64)[:len(queries)] + first)
    scores, numbers = np.concatenate(scores, axis=1), np.concatenate(numbers, axis=1)
    best = np.argsort(-scores, axis=1, kind='stable')[:, :topk]
    return np.take_along_axis(numbers, best, 1), np.take_along_axis(scores, best, 1)


@functools.partial(jax.jit, static_argnums=0)
def nearest_of(topk: int, size: int, vectors: jax.Array, scales: jax.Array, queries: jax.Array):
  """Returns (scores, numbers), each [B,topk], of the nearest of a device's vectors; -inf for none.

  Args:
    size: vectors; those past it are padding.
    vectors, scales, queries: [chunks,C,D], [chunks,C], [B,D].
  """
  chunk = scales.shape[1]

  def step(best, part):
    number, rows, scale = part
    scores = jnp.dot(queries, rows.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST) * scale
    numbers = number * chunk + jnp.arange(chunk)
    scores = jnp.concatenate([best[0], jnp.where(numbers < size, scores, -jnp.inf)], axis=1)
    numbers = jnp.concatenate([best[1], jnp.broadcast_to(numbers, (len(queries), chunk))], axis=1)
    scores, at = jax.lax.top_k(scores, topk)
    return (scores, jnp.take_along_axis(numbers, at, axis=1)), None

  empty = jnp.full((len(queries), topk), -jnp.inf), jnp.zeros((len(queries), topk), jnp.int32)
  return jax.lax.scan(step, empty, (jnp.arange(len(scales)), vectors, scales))[0]
