"""A run that is killed again and again ends where an uninterrupted one does, to the bit. Real processes, real signals."""

import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import checkpoint, runs

CHILD = pathlib.Path(__file__).with_name('child.py')
ROOT = pathlib.Path(__file__).parents[2]
TIMES = ('seconds', 'tokens_per_second', 'compilations', 'resident_mib')  # what may differ between runs
# What it took to grow the trees of a step: less, where it was killed when they were in the journal.
COSTS = ('trees_journaled', 'segments', 'steps', 'idle_share', 'tokens_prefilled', 'tokens_reused', 'tokens_forked',
         'rows_evicted')


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  spec = importlib.util.spec_from_file_location('child', CHILD)
  child = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(child)
  folder = tmp_path_factory.mktemp('inputs')
  child.make_inputs(folder)
  return folder


@pytest.fixture(scope='module')
def start(inputs):
  """start(command, out, *changes) -> the process; programs are shared through a compilation cache."""
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(inputs / 'cache')
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'JAX_COMPILATION_CACHE_DIR': cache,
                              'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}

  def start(command, out, *changes, devices=1):
    return subprocess.Popen([sys.executable, str(CHILD), command, str(inputs), str(out), *changes],
                            env=environment | {'CHILD_DEVICES': str(devices)}, stderr=subprocess.PIPE, text=True)

  return start


def wait_for(condition, process):
  """Polls until `condition()`; the process must not end before."""
  deadline = time.monotonic() + 300
  while not condition():
    assert process.poll() is None, process.stderr.read()[-3000:]
    assert time.monotonic() < deadline, 'the run does not get there'
    time.sleep(0.002)


def finish(process, seconds=300):
  _, errors = process.communicate(timeout=seconds)
  return process.returncode, errors


def saved_arrays(out, step):
  """Every array of a checkpoint by its path, read without jaxsearch."""
  return {
    f'{item} {path}': np.asarray(value)
    for item in ('params', 'rest')
    for path, value in ocp.tree.to_flat_dict(
      ocp.StandardCheckpointer().restore(out / 'checkpoints' / str(step) / item), sep='/').items()
  }  # fmt: skip


def comparable(row):
  return {name: value for name, value in row.items() if not name.startswith('seconds_') and name not in TIMES + COSTS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize('ahead', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kills_at_any_point_change_nothing(start, tmp_path, ahead):
  whole, broken, change = tmp_path / 'whole', tmp_path / 'broken', f'train.async_steps={ahead}'
  reference = start('train', whole, change)

  rows = lambda: len(runs.read(broken / 'metrics.jsonl'))
  process = start('train', broken, change)
  wait_for(lambda: rows() == 3, process)  # in step 4; the checkpoint is that of step 2
  process.kill()
  finish(process)

  process = start('train', broken, change)
  wait_for(lambda: list(broken.glob('checkpoints/4*tmp*')), process)  # in the middle of a save
  process.kill()
  finish(process)
  assert not (broken / 'checkpoints' / '4').exists()

  process = start('train', broken, change)
  wait_for(lambda: rows() in (3, 5), process)  # there were four; those after step 2 are made again
  process.send_signal(signal.SIGTERM)
  code, errors = finish(process)
  assert code == 128 + signal.SIGTERM, errors[-3000:]
  stopped = max(int(path.name) for path in broken.glob('checkpoints/*'))
  assert errors.splitlines() == ['jaxsearch: resuming at step 3',
                                 f'jaxsearch: stopped after step {stopped}; rerun the same command to resume']
  assert stopped == rows() >= 3  # saved where it stopped, on a step that no interval asks for or on the last

  code, errors = finish(start('train', broken, change))
  assert code == 0, errors[-3000:]
  assert finish(reference)[0] == 0

  expected, found = saved_arrays(whole, 6), saved_arrays(broken, 6)
  assert expected.keys() == found.keys() and len(expected) > 30
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  a, b = runs.read(whole / 'metrics.jsonl'), runs.read(broken / 'metrics.jsonl')
  assert [row['step'] for row in b] == [1, 2, 3, 4, 5, 6]
  for row, other in zip(a, b, strict=True):
    assert comparable(row) == comparable(other)
  assert len({row['loss'] for row in a}) == 6  # the steps are not all alike
  assert sorted(path.name for path in whole.glob('checkpoints/*')) == ['4', '6']  # keep_checkpoints=2

  code, errors = finish(start('train', broken, change, 'loss.kl_coef=0.2', 'steps=8'))
  assert code == 1 and 'loss.kl_coef was 0.1, now it is 0.2' in errors
  assert json.loads((broken / 'config.json').read_text())['steps'] == 6


@pytest.mark.timeout(600)
def test_supervised_runs_go_on_too(start, tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  reference = start('sft', whole, 'steps=40')
  process = start('sft', broken, 'steps=40')
  wait_for(lambda: (broken / 'checkpoints' / '2').exists(), process)
  process.kill()
  finish(process)
  assert finish(start('sft', broken, 'steps=40'))[0] == 0
  assert finish(reference)[0] == 0
  expected, found = saved_arrays(whole, 40), saved_arrays(broken, 40)
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  losses = [row['loss'] for row in runs.read(broken / 'metrics.jsonl')]
  assert len(losses) == 40 and losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(('critic', 'ahead'), [(False, 0), (True, 0), (True, 1)])
def test_two_processes_train_as_one(start, tmp_path, critic, ahead):
  """Tokens, what generators draw, and parameters; a mesh of two devices in one process and in two, five questions a step."""
  changes = ['steps=2', 'questions_per_step=5', 'mesh.fsdp=2', f'critic.enabled={str(critic).lower()}', 'checkpoint_every=2',
             'eval.every=2', f'train.async_steps={ahead}']
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'"localhost:{probe.getsockname()[1]}"'
  one = start('train', tmp_path / 'one', *changes, devices=2)
  two = [start('train', tmp_path / 'two', *changes, 'distributed.enabled=true', f'distributed.coordinator={address}',
               'distributed.num_processes=2', f'distributed.process_id={process}') for process in range(2)]
  for process in (one, *two):
    code, errors = finish(process)
    assert code == 0, errors[-3000:]
  rows, others = (runs.read(tmp_path / name / 'metrics.jsonl') for name in ('one', 'two'))
  assert [row['n'] for row in runs.read(tmp_path / 'two/evaluations.jsonl')] == [6] * 4
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  params, others_params = (checkpoint.load_trained(str(tmp_path / name), mesh)[1] for name in ('one', 'two'))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), params, others_params)
  for row, other in zip(rows, others, strict=True):
    for name in ('reward', 'em', 'trees', 'drawn_per_tree', 'tokens_generated', 'tokens_on_paths'):
      assert row[name] == pytest.approx(other[name], rel=1e-12), name
    for name in ('loss', 'logprob', 'entropy', 'grad_norm'):
      assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
