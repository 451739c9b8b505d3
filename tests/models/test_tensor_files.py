import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxsearch.models import tensor_files

ARRAYS = {f't{i}': np.arange(6 * i, dtype=np.float32).reshape(i, 6) for i in range(1, 6)}
SHAPES = {name: value.shape for name, value in ARRAYS.items()}
WHOLE = (slice(None), slice(None))


def save(folder, shard_bytes):
  tensor_files.save_folder(folder, SHAPES, ARRAYS.__getitem__, np.dtype('float32'), shard_bytes)


@pytest.mark.parametrize('shard_bytes, count', [(10**6, 1), (24 * 6, 3), (1, 5)])
def test_round_trip(shard_bytes, count, tmp_path):
  save(tmp_path, shard_bytes)
  files = sorted(tmp_path.glob('*.safetensors'))
  assert len(files) == count
  assert count == 5 or all(sum(v.nbytes for v in load_file(file).values()) <= shard_bytes for file in files)
  tensors = tensor_files.open_folder(tmp_path)
  assert tensors.shapes == SHAPES
  for name, value in ARRAYS.items():
    np.testing.assert_array_equal(tensors.read(name, WHOLE), value)
    np.testing.assert_array_equal(tensors.read(name, (slice(0, 1), slice(2, 5))), value[:1, 2:5])


def test_a_transposed_array_is_saved_as_it_reads(tmp_path):
  value = np.arange(6, dtype=np.float32).reshape(2, 3).T
  tensor_files.save_folder(tmp_path, {'x': (3, 2)}, lambda name: value, np.dtype('float32'), 10**6)
  np.testing.assert_array_equal(load_file(tmp_path / 'model.safetensors')['x'], value)


@pytest.mark.parametrize('first, second', [(1, 10**6), (10**6, 1), (1, 24 * 6)])
def test_nothing_is_left_of_an_earlier_checkpoint(first, second, tmp_path):
  save(tmp_path, first)
  (tmp_path / 'notes.txt').write_text('mine')
  save(tmp_path, second)
  fresh = tmp_path / 'fresh'
  fresh.mkdir()
  save(fresh, second)
  left = {file.name for file in tmp_path.iterdir()} - {'fresh', 'notes.txt'}
  assert left == {file.name for file in fresh.iterdir()}
  assert (tmp_path / 'notes.txt').exists()


def test_check(tmp_path):
  save(tmp_path, 10**6)
  tensors = tensor_files.open_folder(tmp_path)
  tensor_files.check(tensors, SHAPES)
  fewer = {name: shape for name, shape in SHAPES.items() if name != 't4'}
  tensor_files.check(tensors, fewer, [r't\d'])
  with pytest.raises(ValueError, match=r'safetensors: 1 unexpected tensor: t4$'):
    tensor_files.check(tensors, fewer, ['4', 't'])
  with pytest.raises(ValueError, match=r'safetensors: 2 missing tensors: u, v$'):
    tensor_files.check(tensors, SHAPES | {'u': (1,), 'v': (1,)})
  with pytest.raises(ValueError, match=r'safetensors: tensor t2 has the shape \[2, 6\], not \[6, 2\]'):
    tensor_files.check(tensors, SHAPES | {'t2': (6, 2)})
