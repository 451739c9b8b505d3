"""Named tensors in files: safetensors folders in and out, and the checks that every checkpoint goes through.

`Tensors` is all that hub.py and encoder.py know of a checkpoint, so that a GGUF file can take a folder's
place. Reading is by slice: of a memory-mapped file only the part that a device needs is touched.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import safetensors
import safetensors.numpy

_INDEX = 'model.safetensors.index.json'
_WEIGHTS = re.compile(r'model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?')
_FLOATS = {'F64', 'F32', 'F16', 'BF16'}


@dataclasses.dataclass(frozen=True)
class Tensors:
  """What a checkpoint holds.

  Attributes:
    where: the file that lists them all, for error messages.
    shapes: name -> shape.
    files: name -> the file it is in, for error messages.
    read: (name, index) -> the part of the tensor under `index`, a tuple with a slice for each axis, in the
      file's dtype.
  """
  where: pathlib.Path
  shapes: Mapping[str, tuple[int, ...]]
  files: Mapping[str, pathlib.Path]
  read: Callable[[str, tuple[slice, ...]], np.ndarray]


def open_folder(folder: str | pathlib.Path) -> Tensors:
  """The tensors of a folder: those of model.safetensors, or of the files that its index names."""
  folder = pathlib.Path(folder)
  where = folder / 'model.safetensors'
  if where.is_file():
    handle = _open_safetensors(where)
    handles = dict.fromkeys(handle.keys(), handle)
    files = dict.fromkeys(handles, where)
  elif (folder / _INDEX).is_file():
    where = folder / _INDEX
    files = _read_index(folder)
    opened = {file: _open_safetensors(file) for file in set(files.values())}
    held = {file: set(handle.keys()) for file, handle in opened.items()}
    for name, file in files.items():
      if name not in held[file]:
        raise ValueError(f'{file}: tensor {name} is missing, though {_INDEX} says that it is here')
    handles = {name: opened[file] for name, file in files.items()}
  else:
    raise FileNotFoundError(f'{folder}: neither model.safetensors nor {_INDEX} is here')
  shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in handles.items()}

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    part = handles[name].get_slice(name)
    if part.get_dtype() not in _FLOATS:
      raise ValueError(f'{files[name]}: tensor {name} has the unsupported dtype {part.get_dtype()}')
    return part[index] if index else handles[name].get_tensor(name)

  return Tensors(where, shapes, files, read)


def _open_safetensors(path: pathlib.Path):
  try:
    return safetensors.safe_open(str(path), framework='np')
  except safetensors.SafetensorError as error:
    raise ValueError(f'{path}: not a whole safetensors file ({error})') from error


def _read_index(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  weight_map = json.loads((folder / _INDEX).read_text(encoding='utf-8')).get('weight_map')
  if not isinstance(weight_map, dict):
    raise ValueError(f'{folder / _INDEX}: the key weight_map is missing')
  files = {name: folder / file for name, file in weight_map.items()}
  for file in sorted(set(files.values())):
    if not file.is_file():
      raise FileNotFoundError(f'{file}: missing, though {_INDEX} names it')
  return files


def check(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], harmless: Iterable[str] = ()) -> None:
  """Raises ValueError unless `tensors` are exactly `expected`, but for extra ones that match `harmless`."""
  missing = [name for name in expected if name not in tensors.shapes]
  if missing:
    raise ValueError(f'{tensors.where}: {_count(missing, "missing tensor")}')
  known = re.compile('|'.join(f'(?:{pattern})' for pattern in harmless) or '(?!)')
  extra = [name for name in tensors.shapes if name not in expected and not known.fullmatch(name)]
  if extra:
    raise ValueError(f'{tensors.files[extra[0]]}: {_count(extra, "unexpected tensor")}')
  for name, shape in expected.items():
    if tensors.shapes[name] != shape:
      raise ValueError(
        f'{tensors.files[name]}: tensor {name} has the shape {list(tensors.shapes[name])}, not {list(shape)}')


def _count(names: list[str], what: str) -> str:
  shown = ', '.join(names[:5]) + (', …' if len(names) > 5 else '')
  return f'{len(names)} {what}{"s" if len(names) > 1 else ""}: {shown}'


def save_folder(folder: pathlib.Path, shapes: Mapping[str, tuple[int, ...]],
                read: Callable[[str], np.ndarray], dtype: np.dtype, shard_bytes: int) -> None:
  """Writes the tensors `read(name)` as safetensors: one file, or several of `shard_bytes` and an index.

  One file's tensors are in memory at a time. Weights that stood in the folder before are removed first: a
  reader would prefer an old model.safetensors to a new index.
  """
  for old in folder.iterdir():
    if _WEIGHTS.fullmatch(old.name):
      old.unlink()
  shards = [[]]
  filled = 0
  for name, shape in shapes.items():
    size = int(np.prod(shape)) * dtype.itemsize
    if shards[-1] and filled + size > shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(name)
    filled += size
  weight_map = {}
  for i, names in enumerate(shards, start=1):
    file = 'model.safetensors' if len(shards) == 1 else f'model-{i:05d}-of-{len(shards):05d}.safetensors'
    # contiguous: the library writes the buffer as it lies in memory
    arrays = {name: np.ascontiguousarray(read(name), dtype) for name in names}
    safetensors.numpy.save_file(arrays, str(folder / file), metadata={'format': 'pt'})
    weight_map |= dict.fromkeys(names, file)
  if len(shards) > 1:
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + '\n', encoding='utf-8')
