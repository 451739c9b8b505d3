"""Named tensors in files: safetensors folders in and out, and the checks that every checkpoint goes through.

`Tensors` is all that hub.py and encoder.py know of a checkpoint, so a GGUF file can take a folder's place.
Reading is by slice: of a memory-mapped file only the part that a device needs is touched.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from jaxsearch.files import read_json, write_json, write_whole

_INDEX = 'model.safetensors.index.json'
_FLOATS = {'F64', 'F32', 'F16', 'BF16'}


@dataclasses.dataclass(frozen=True)
class Tensors:
  """The tensors of a checkpoint; `read(name, slices)` is a part of one, in the dtype of its file."""
  where: pathlib.Path  # the file that lists them all, for error messages
  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str, tuple[slice, ...]], np.ndarray]


class InFile(NamedTuple):
  """The tensor of a parameter in a file; {} in its name is the layer: each has a tensor of its own.

  Of a matrix our leading axes are its inputs, the others its outputs; files have [outputs, inputs].
  """
  name: str
  inputs: int | None = None  # how many axes; 0: outputs alone; None: the axes of the file are ours

  def axes(self, values: Sequence) -> list[Sequence]:
    """Groups `values`, one per axis of ours (without the layers'), by the axis of the file that they form."""
    if self.inputs is None:
      return [values[i:i + 1] for i in range(len(values))]
    return [part for part in (values[self.inputs:], values[:self.inputs]) if part]

  def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(math.prod, self.axes(ours)))

  def read(self, tensors: Tensors, shape: tuple[int, ...], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    """Reads the part of a parameter of this `shape` between `bounds`, (start, stop) for each axis.

    Of axes that are one in the file only the first may be cut: no layout splits a head.
    """
    cuts = []
    for sizes, (first, *_) in zip(self.axes(shape), self.axes(bounds)):
      width = math.prod(sizes[1:])
      cuts.append(slice(first[0] * width, first[1] * width))
    values = tensors.read(self.name, tuple(cuts))
    return (values.T if self.inputs else values).reshape([stop - start for start, stop in bounds])

  def write(self, value: np.ndarray) -> np.ndarray:
    """Returns a parameter as it stands in the file."""
    shape = self.shape(value.shape)
    return value.reshape(shape[::-1]).T if self.inputs else value.reshape(shape)


def layout(files: Mapping[str, InFile],
           shapes: Mapping[str, Any]) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
  """Maps the tensors of a checkpoint to (parameter, layer or None, shape in a file).

  `shapes` are those of the parameters; those in 'layers' begin with the number of layers.
  """
  result = {files[name].name: (name, None, files[name].shape(shape))
            for name, shape in shapes.items() if name != 'layers'}
  for name, (number, *shape) in shapes['layers'].items():
    for layer in range(number):
      result[files[name].name.format(layer)] = name, layer, files[name].shape(shape)
  return result


@contextlib.contextmanager
def reading(path: object) -> Iterator[None]:
  """Turns what code raises over a file of an unexpected shape into a ValueError that names the file."""
  try:
    yield
  except (ImportError, MemoryError, OSError, ValueError):
    raise
  except Exception as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error


def open_folder(folder: str | pathlib.Path) -> Tensors:
  """Opens the tensors of a folder: those of model.safetensors, or of the files that its index lists."""
  folder = pathlib.Path(folder)
  where = folder / 'model.safetensors'
  if where.is_file():
    files = [where]
  elif (folder / _INDEX).is_file():
    where = folder / _INDEX
    with reading(where):
      files = [folder / file for file in sorted(set(read_json(where)['weight_map'].values()))]
  else:
    raise FileNotFoundError(f'{folder}: neither model.safetensors nor {_INDEX} is here')
  parts = {}
  for file in files:
    try:
      opened = safetensors.safe_open(str(file), framework='np')
    except safetensors.SafetensorError as error:
      raise ValueError(f'{file}: not a whole safetensors file') from error
    parts |= {name: opened.get_slice(name) for name in opened.keys()}

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    if parts[name].get_dtype() not in _FLOATS:
      raise ValueError(f'{where}: tensor {name} has the unsupported dtype {parts[name].get_dtype()}')
    return parts[name][index]

  return Tensors(where, {name: tuple(part.get_shape()) for name, part in parts.items()}, read)


def check(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], harmless: Iterable[str] = ()) -> None:
  """Raises ValueError unless `tensors` are exactly `expected`, apart from extra ones that are `harmless`."""
  pattern = re.compile('|'.join(harmless))
  missing = [name for name in expected if name not in tensors.shapes]
  extra = [name for name in tensors.shapes if name not in expected and not pattern.fullmatch(name)]
  for kind, names in (('missing', missing), ('unexpected', extra)):
    if names:
      shown = ', '.join(names[:5]) + (', …' if len(names) > 5 else '')
      raise ValueError(f'{tensors.where}: {len(names)} {kind} tensor{"s" * (len(names) > 1)}: {shown}')
  for name, shape in expected.items():
    if (has := tensors.shapes[name]) != shape:
      raise ValueError(f'{tensors.where}: tensor {name} has the shape {list(has)}, not {list(shape)}')


def save_folder(folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]],
                read: Callable[[str], np.ndarray], dtype: np.dtype, shard_bytes: int) -> None:
  """Writes the tensors `read(name)` as safetensors: one file, or several of `shard_bytes` and an index.

  Only one file's tensors are in memory at a time. Weights that are in the folder are removed first: a reader
  would prefer an old model.safetensors to a new index.
  """
  from huggingface_hub import split_state_dict_into_shards_factory
  size = lambda shape: int(np.prod(shape)) * dtype.itemsize
  split = split_state_dict_into_shards_factory(
    dict(shapes), get_storage_size=size, max_shard_size=shard_bytes,
    filename_pattern='model{suffix}.safetensors')
  for old in folder.glob('model*.safetensors*'):
    old.unlink()
  for file, names in split.filename_to_tensors.items():
    # contiguous: the library writes the buffer as it lies in memory
    arrays = {name: np.ascontiguousarray(read(name), dtype) for name in names}
    write_whole(folder / file, safetensors.numpy.save(arrays, metadata={'format': 'pt'}))
  if split.is_sharded:
    write_json(folder / _INDEX, {'metadata': split.metadata, 'weight_map': split.tensor_to_filename})
