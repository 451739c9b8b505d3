"""Mesh sizes, layouts of parameters, and two real processes that train as one."""

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxsearch.models.architecture import PRESETS, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes, transfer
from tests.processes import as_processes, free_port


@pytest.mark.parametrize('sizes, expected', [((1, -1, 1), (1, 8, 1)), ((2, -1, 2), (2, 2, 2)), ((8, 1, 1), (8, 1, 1)),
                                             ((-1, 2, 1), (4, 2, 1))])
def test_one_size_takes_what_the_others_leave(sizes, expected):
  mesh = meshes.make_mesh(*sizes)
  assert tuple(mesh.shape.values()) == expected
  assert meshes.batch_size(mesh) == expected[0] * expected[1]


@pytest.mark.parametrize('sizes', [(3, 1, 1), (2, 2, 1), (-1, -1, 1), (0, 1, 1), (-2, 1, 1), (-1, 3, 1)])
def test_sizes_that_do_not_fit_are_named(sizes):
  with pytest.raises(ValueError, match=re.escape(f'data={sizes[0]}, fsdp={sizes[1]}')):
    meshes.make_mesh(*sizes)


def test_layouts_follow_the_table_and_fall_back_to_whole():
  config = PRESETS['qwen2.5-0.5b']  # 14 heads, 2 key/value heads
  placed = lambda *sizes: meshes.shardings(
    parameter_axes(config), parameter_shapes(config), meshes.make_mesh(*sizes))
  wide = placed(1, 2, 4)['layers']
  assert wide['q'].spec == P(None, 'fsdp', None, None)  # 14 heads do not split in 4
  assert wide['k'].spec == P(None, 'fsdp', None, None)  # nor 2
  assert wide['down'].spec == P(None, 'tensor', 'fsdp')
  narrow = placed(1, 4, 2)
  assert narrow['layers']['q'].spec == P(None, 'fsdp', 'tensor', None)
  assert narrow['layers']['k'].spec == P(None, 'fsdp', 'tensor', None)
  assert narrow['layers']['q_bias'].spec == P(None, 'tensor', None)
  assert narrow['layers']['attn_norm'].spec == P(None, None)
  assert narrow['embedding'].spec == P('tensor', 'fsdp')


def test_place_splits_rows_and_keeps_values():
  mesh = meshes.make_mesh(2, 4, 1)
  values = np.arange(3 * 16 * 5).reshape(3, 16, 5)
  array = transfer.place(values, transfer.split_over_batch(mesh, 1))
  assert {shard.data.shape for shard in array.addressable_shards} == {(3, 2, 5)}
  np.testing.assert_array_equal(array, values)


def test_what_processes_send_each_other_is_data_that_runs_no_code(tmp_path):
  class Attack:
    def __reduce__(self):
      return pathlib.Path.touch, (tmp_path / 'ran',)

  with pytest.raises(ValueError, match='codec|JSON|Expecting'):
    transfer._unpacked(zlib.compress(pickle.dumps(Attack())))
  with pytest.raises(ValueError, match='OBJECT'):
    transfer._unpacked(zlib.compress(json.dumps({transfer._ARRAY: ['O', [1], 'AAAAAAAAAAA=']}).encode()))
  assert not (tmp_path / 'ran').exists()
  with pytest.raises(TypeError, match='neither JSON nor an array'):
    transfer._packed(Attack(), 1)


def test_arrays_arrive_as_they_were():
  sent = {'rows': [np.arange(6, dtype=np.int32).reshape(2, 3).T, np.zeros((0, 2), bool)], 'x': (np.float32(0.1), math.nan, None)}
  found = transfer._unpacked(transfer._packed(sent, 1))
  for one, other in zip(found['rows'], sent['rows'], strict=True):
    assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
  assert found['x'][0] == float(np.float32(0.1)) and math.isnan(found['x'][1]) and found['x'][2] is None


CHILD = pathlib.Path(__file__).with_name('two_processes.py')
ROOT = pathlib.Path(__file__).parents[2]


def start_two(*arguments: str, **variables: str) -> list[subprocess.Popen]:
  """Starts two processes of two devices each, which talk over gloo."""
  port = str(free_port())
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT),
                              'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'} | variables
  return [subprocess.Popen([sys.executable, str(CHILD), port, str(process), '2', *arguments], text=True,
                           env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
          for process in range(2)]


def two_processes(*arguments: str, **variables: str) -> list[str]:
  """Returns what both print."""
  printed = []
  for child in start_two(*arguments, **variables):
    output, errors = child.communicate(timeout=240)
    assert child.returncode == 0, errors[-3000:]
    printed.append(output.splitlines()[-1])
  return printed


def test_two_processes_train_as_one():
  """They reach the losses and parameters of one process with four devices."""
  spec = importlib.util.spec_from_file_location('two_processes', CHILD)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  jax.config.update('jax_disable_most_optimizations', True)  # as the two
  expected = module.figures(jax.devices()[:4])
  assert expected[0] != expected[1]
  for line in two_processes():
    np.testing.assert_allclose([float(word) for word in line.split()[1:]], expected, rtol=1e-5)


def test_a_job_that_starts_again_compiles_nothing(tmp_path):
  variables = {'JAX_COMPILATION_CACHE_DIR': str(tmp_path), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  first, again = (two_processes('compile', **variables) for _ in range(2))
  assert all(int(line.split()[1]) >= 2 for line in first)
  assert again == ['compiled 0', 'compiled 0']


def test_all_processes_pass_over_a_checkpoint_that_one_cannot_read(tmp_path):
  assert two_processes(f'restore={tmp_path}') == ['resumed 1 8.0 1 8.0'] * 2


def test_a_process_that_others_wait_for_in_vain_is_named():
  assert two_processes('wait') == [', '.join(['nothing came from process 1 within 1 seconds'] * 2), '']


def test_a_process_that_fails_alone_is_gone_at_once_with_its_own_status():
  """JAX would keep it until the other ends too."""
  first, second = start_two('fail')
  try:
    assert any(line.startswith("jaxsearch: no command 'nonsense'") for line in second.stderr)
    assert second.wait(timeout=20) == 2
  finally:
    first.kill()
    second.kill()


def test_processes_that_do_not_find_each_other_say_so():
  """In a process of its own, since JAX can be initialised once."""
  code = ("from jaxsearch.parallel.mesh import start_distributed\n"
          "start_distributed(True)")
  child = subprocess.run([sys.executable, '-c', code], text=True, capture_output=True,
                         env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)})
  assert 'multi-host start-up with' in child.stderr and child.returncode == 1


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
@pytest.mark.parametrize('tensor', [1, 2])
def test_copies_for_processes_are_made_without_whole_arrays(tensor):
  mesh = meshes.make_mesh(1, -1, tensor)
  shape = (4, 256, 1024)
  struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(None, 'fsdp', 'tensor')))
  devices = np.array(jax.devices()).reshape(2, -1, tensor)  # as if there were two processes
  placed = meshes.copy_shardings({'gate': struct}, devices)
  compiled = jax.jit(lambda tree: tree, out_shardings=placed).lower({'gate': struct}).compile()
  whole = 4 * np.prod(shape)
  assert compiled.memory_analysis().temp_size_in_bytes < whole / 2
  values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  copies = jax.device_put(jax.device_put(values, struct.sharding), placed['gate'])
  np.testing.assert_array_equal(copies, values)
  assert {shard.data.size for shard in copies.addressable_shards} == {values.size // 4}


def test_a_dimension_that_is_not_divided_is_an_error_with_the_nearest_sizes():
  axes, shapes = {'up': ('embed', 'mlp'), 'k': ('embed', 'kv_heads', 'head_dim')}, {'up': (20, 64), 'k': (20, 2, 8)}
  with pytest.raises(ValueError, match="mesh.fsdp=8 does not divide the 20 of 'embed'"):
    meshes.shardings(axes, shapes, meshes.make_mesh(1, 8, 1))
  placed = meshes.shardings(axes, shapes, meshes.make_mesh(2, 1, 4))
  assert placed['k'].spec == P('fsdp', None, None) and placed['up'].spec == P('fsdp', 'tensor')


@dataclasses.dataclass(frozen=True)
class Device:
  """What a device reports of itself."""
  id: int
  process_index: int
  slice_index: int
  platform: str
  device_kind: str
  coords: tuple[int, ...] = ()
  core_on_chip: int = 0


@pytest.mark.parametrize(('hosts', 'sizes'), [(2, (1, -1, 1)), (8, (1, -1, 1)), (8, (2, -1, 8)), (2, (2, 4, 2))])
def test_hosts_of_gpus_are_no_slices(hosts, sizes):
  """XLA numbers the hosts of GPUs as slices, and may list the devices in any order."""
  kind = 'gpu', 'NVIDIA H100 80GB HBM3'
  devices = [Device(8 * host + i, host, host, *kind) for host in range(hosts) for i in range(8)]
  mesh = meshes.make_mesh(*sizes, devices=devices[::-1])
  assert list(mesh.devices.flat) == devices
  assert tuple(mesh.shape.values()) == tuple(len(devices) // (sizes[0] * sizes[2]) if size < 0 else size
                                             for size in sizes)


@pytest.mark.parametrize('slices', [1, 2])
@pytest.mark.parametrize('tensor', [2, 4])
def test_an_axis_may_take_half_of_a_dimension_of_a_slice_but_hosts_share_no_part_of_a_batch(slices, tensor):
  """JAX would lay 4 along a row of chips, of two hosts."""
  devices = [Device(16 * part + 4 * y + x, 2 * (y // 2 * 2 + x // 2) + part, part, 'tpu', 'TPU v6 lite', (x, y, 0))
             for part in range(slices) for y in range(4) for x in range(4)]
  grid = meshes.make_mesh(slices, -1, tensor, devices=devices).devices
  assert grid.shape == (slices, 16 // tensor, tensor) and set(grid.flat) == set(devices)
  assert all({device.slice_index for device in copy.flat} == {part} for part, copy in enumerate(grid))
  assert all(len({device.process_index for device in part}) == 1 for part in grid.reshape(-1, tensor))


def test_between_slices_of_tpus_only_data_is_split():
  """Two slices v6e-8 of 2 x 4 chips, four chips a host."""
  devices = [Device(8 * part + 4 * y + 2 * z + x, 2 * part + y, part, 'tpu', 'TPU v6 lite', (x, 2 * y + z, 0))
             for part in range(2) for y in range(2) for z in range(2) for x in range(2)]
  grid = meshes.make_mesh(4, 2, -1, devices=devices).devices
  assert grid.shape == (4, 2, 2)
  for i, copy in enumerate(grid):
    assert {device.slice_index for device in copy.flat} == {i // 2}
  with pytest.raises(ValueError, match='mesh.data=1 must be a multiple of the 2 slices'):
    meshes.make_mesh(1, 8, 2, devices=devices)
  assert meshes.make_mesh(1, 8, 1, devices=devices[:8]).devices.shape == (1, 8, 1)


def test_moments_are_those_of_all_values(monkeypatch):
  parts = [np.array([1.0, 2.0, 4.0]), np.array([]), np.array([-3.0])]
  found = as_processes(3, monkeypatch, lambda: transfer.moments(parts[jax.process_index()]))
  values = np.concatenate(parts)
  for count, mean, variance in found:
    assert count == 4 and (mean, variance) == (pytest.approx(values.mean()), pytest.approx(values.var()))
  assert as_processes(2, monkeypatch, lambda: transfer.moments(np.zeros(0))) == [(0, 0.0, 0.0)] * 2


def test_items_move_between_processes_in_the_order_of_the_plan(monkeypatch):
  moves, own = [(0, 2), (0, 1), (2, 1)], {0: ['a', 'b'], 1: [], 2: ['c']}
  assert as_processes(3, monkeypatch, lambda: transfer.pass_on(own[jax.process_index()], moves)) == [[], ['b', 'c'], ['a']]
