"""Named tensors in files: safetensors folders in and out, and the checks that every checkpoint goes through.

`Tensors` is all that hub.py and encoder.py know of a checkpoint, so a GGUF file can take a folder's place.
Reading is by slice: of a memory-mapped file only the part that a device needs is touched.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jaxsearch.files import write_whole

_INDEX = 'model.safetensors.index.json'
_WEIGHTS = re.compile(r'model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?')
_FLOATS = {'F64', 'F32', 'F16', 'BF16'}


@dataclasses.dataclass(frozen=True)
class Tensors:
  """The tensors of a checkpoint; `read(name, slices)` is a part of one, in the dtype of its file."""
  where: pathlib.Path  # the file that lists them all, for error messages
  shapes: Mapping[str, tuple[int, ...]]
  files: Mapping[str, pathlib.Path]  # for error messages
  read: Callable[[str, tuple[slice, ...]], np.ndarray]


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object from `path`; errors name the file."""
  if not path.is_file():
    raise FileNotFoundError(f'{path}: missing')
  try:
    value = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not valid JSON ({error})') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: not a JSON object')
  return value


@contextlib.contextmanager
def reading(path: object) -> Iterator[None]:
  """Turns what code raises over a file of an unexpected shape into a ValueError that names the file."""
  try:
    yield
  except (ImportError, MemoryError, OSError, ValueError):
    raise
  except Exception as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  write_whole(path, json.dumps(value, indent=2) + '\n')


def open_folder(folder: str | pathlib.Path) -> Tensors:
  """Opens the tensors of a folder: those of model.safetensors, or of the files that its index lists."""
  folder = pathlib.Path(folder)
  where = folder / 'model.safetensors'
  if where.is_file():
    files = dict.fromkeys(_open_safetensors(where).keys(), where)
  elif (folder / _INDEX).is_file():
    where = folder / _INDEX
    weight_map = read_json(where).get('weight_map')
    if not isinstance(weight_map, dict):
      raise ValueError(f'{where}: the key weight_map is missing')
    files = {name: folder / file for name, file in weight_map.items()}
  else:
    raise FileNotFoundError(f'{folder}: neither model.safetensors nor {_INDEX} is here')
  opened = {file: _open_safetensors(file) for file in sorted(set(files.values()))}
  for name, file in files.items():
    if name not in opened[file].keys():
      raise ValueError(f'{file}: tensor {name} is missing, though {_INDEX} says that it is here')
  slices = {name: opened[file].get_slice(name) for name, file in files.items()}

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    if slices[name].get_dtype() not in _FLOATS:
      raise ValueError(f'{files[name]}: tensor {name} has the unsupported dtype {slices[name].get_dtype()}')
    return slices[name][index]

  return Tensors(where, {name: tuple(part.get_shape()) for name, part in slices.items()}, files, read)


def _open_safetensors(path: pathlib.Path):
  if not path.is_file():
    raise FileNotFoundError(f'{path}: missing, though {_INDEX} lists it')
  try:
    return safetensors.safe_open(str(path), framework='np')
  except safetensors.SafetensorError as error:
    raise ValueError(f'{path}: not a whole safetensors file') from error


def check(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], harmless: Iterable[str] = ()) -> None:
  """Raises ValueError unless `tensors` are exactly `expected`, apart from extra ones that are `harmless`."""
  if missing := [name for name in expected if name not in tensors.shapes]:
    raise ValueError(f'{tensors.where}: {_count(missing, "missing tensor")}')
  pattern = re.compile('|'.join(harmless))
  if extra := [name for name in tensors.shapes if name not in expected and not pattern.fullmatch(name)]:
    raise ValueError(f'{tensors.files[extra[0]]}: {_count(extra, "unexpected tensor")}')
  for name, shape in expected.items():
    if (has := tensors.shapes[name]) != shape:
      raise ValueError(f'{tensors.files[name]}: tensor {name} has the shape {list(has)}, not {list(shape)}')


def _count(names: list[str], what: str) -> str:
  shown = ', '.join(names[:5]) + (', …' if len(names) > 5 else '')
  return f'{len(names)} {what}{"s" if len(names) > 1 else ""}: {shown}'


def save_folder(folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]],
                read: Callable[[str], np.ndarray], dtype: np.dtype, shard_bytes: int) -> None:
  """Writes the tensors `read(name)` as safetensors: one file, or several of `shard_bytes` and an index.

  Only one file's tensors are in memory at a time. Old weights in the folder are removed, a reader would
  prefer an old model.safetensors to a new index; but not before all new ones are on disk.
  """
  from huggingface_hub import split_state_dict_into_shards_factory
  size = lambda shape: int(np.prod(shape)) * dtype.itemsize
  split = split_state_dict_into_shards_factory(
    dict(shapes), get_storage_size=size, max_shard_size=shard_bytes,
    filename_pattern='model{suffix}.safetensors')
  parts = {file: folder / f'{file}.part' for file in split.filename_to_tensors}
  try:
    for file, names in split.filename_to_tensors.items():
      parts[file].unlink(missing_ok=True)
      parts[file].touch(exist_ok=False)  # follows no link
      mode = parts[file].stat().st_mode  # as the umask has it; the library's own is 0600
      # contiguous: the library writes the buffer as it lies in memory
      arrays = {name: np.ascontiguousarray(read(name), dtype) for name in names}
      try:
        safetensors.numpy.save_file(arrays, str(parts[file]), metadata={'format': 'pt'})
      except safetensors.SafetensorError as error:  # a full disk, say
        raise OSError(f'{folder / file} could not be written: {error}') from error
      parts[file].chmod(mode)
    for old in folder.iterdir():
      if _WEIGHTS.fullmatch(old.name):
        old.unlink()
    for file, part in parts.items():
      part.replace(folder / file)
  finally:
    for part in parts.values():
      part.unlink(missing_ok=True)
  if split.is_sharded:
    write_json(folder / _INDEX, {'metadata': split.metadata, 'weight_map': split.tensor_to_filename})
