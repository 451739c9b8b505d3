"""A run that is killed again and again ends where an uninterrupted one does, to the bit. Real processes, real signals."""

import functools
import importlib
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxsearch.methods import find_method, known_methods
from jaxsearch.methods.cusearch import STRATEGIES
from jaxsearch.training import row_files
from tests.tools.serving import server

CHILD = pathlib.Path(__file__).with_name('child.py')
ROOT = pathlib.Path(__file__).parents[2]
TIMES = ('seconds', 'tokens_per_second', 'compilations', 'resident_mib')  # what may differ between runs
# What it took to grow the trees of a step.
COSTS = ('segments', 'steps', 'idle_share', 'tokens_prefilled', 'tokens_reused', 'tokens_forked',
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
  """start(command, out, *changes, **variables of the environment) -> the process; a compilation cache shares programs."""
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(inputs / 'cache')
  path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path, 'JAX_COMPILATION_CACHE_DIR': cache,
                              'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}

  def start(command, out, *changes, devices=1, **variables):
    return subprocess.Popen([sys.executable, str(CHILD), command, str(inputs), str(out), *changes],
                            env=environment | {'CHILD_DEVICES': str(devices)} | variables, stderr=subprocess.PIPE, text=True)

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
  """Every array of a checkpoint by its path, read without jaxsearch, whichever devices it was saved from."""
  found, reader = {}, ocp.PyTreeCheckpointer()
  for item in ('params', 'rest'):
    path = out / 'checkpoints' / str(step) / item
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).item_metadata.tree)
    arrays = ocp.tree.to_flat_dict(reader.restore(path, restore_args=wanted), sep='/')
    found |= {f'{item} {name}': value for name, value in arrays.items()}
  return found


def comparable(row):
  return {name: value for name, value in row.items() if not name.startswith('seconds_') and name not in TIMES + COSTS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize('ahead', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kills_at_any_point_change_nothing(start, tmp_path, ahead):
  whole, broken, change = tmp_path / 'whole', tmp_path / 'broken', f'train.async_steps={ahead}'
  reference = start('train', whole, change)

  rows = lambda: len(row_files.read(broken / 'metrics.jsonl'))
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
  a, b = row_files.read(whole / 'metrics.jsonl'), row_files.read(broken / 'metrics.jsonl')
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
  losses = [row['loss'] for row in row_files.read(broken / 'metrics.jsonl')]
  assert len(losses) == 40 and losses[-1] < 0.6 * losses[0]


def start_processes(start, number, command, out, *changes, machines=None):
  """A run in several processes of one device each; `machines` are variables of the environment of each."""
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'"localhost:{probe.getsockname()[1]}"'
  return [start(command, out, *changes, 'distributed.enabled=true', f'distributed.coordinator={address}',
                f'distributed.num_processes={number}', f'distributed.process_id={process}', **own)
          for process, own in enumerate(machines or [{}] * number)]


def finish_all(processes):
  for process in processes:
    code, errors = finish(process, 3600)
    assert code == 0, errors[-3000:]


def run_as_one_and_two(start, command, folder, *changes):
  """The same run on two devices of one process, in FOLDER/one, and on those of two, in FOLDER/two."""
  finish_all([start(command, folder / 'one', *changes, devices=2), *start_processes(start, 2, command, folder / 'two', *changes)])


def assert_alike(folder, other, step):
  """Two runs have the same trees, the same rows but for what is timed and how rows are cut, and the same arrays."""
  rows, others = (row_files.read(one / 'metrics.jsonl') for one in (folder, other))
  assert len(rows) == len(others) == step
  for row, own in zip(rows, others, strict=True):
    assert row.keys() == own.keys()
    for name in ('reward', 'em', 'trees', 'searches', 'drawn_per_tree', 'tokens_generated', 'tokens_on_paths', 'reward_retained'):
      assert name not in row or row[name] == pytest.approx(own[name], rel=1e-12), name
    for name in ('loss', 'logprob', 'entropy', 'grad_norm', 'critic_loss'):
      assert name not in row or row[name] == pytest.approx(own[name], rel=1e-3, abs=1e-6), name
  expected, found = saved_arrays(folder, step), saved_arrays(other, step)
  assert expected.keys() == found.keys()
  gaps = {name: float(np.abs(value.astype(np.float64) - found[name]).max(initial=0)) for name, value in expected.items()}
  print('largest gap of a parameter', max(gap for name, gap in gaps.items() if name.startswith('params')))
  for name, value in expected.items():
    if name.startswith('params'):
      np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(('critic', 'ahead'), [(False, 0), (True, 0), (True, 1)])
def test_two_processes_train_as_one(start, tmp_path, critic, ahead):
  """Tokens, what generators draw, and parameters; a mesh of two devices in one process and in two, five questions a step."""
  changes = ['steps=2', 'questions_per_step=5', 'mesh.fsdp=2', f'critic.enabled={str(critic).lower()}', 'checkpoint_every=2',
             'eval.every=2', f'train.async_steps={ahead}']
  run_as_one_and_two(start, 'train', tmp_path, *changes)
  assert [row['n'] for row in row_files.read(tmp_path / 'two/evaluations.jsonl')] == [6] * 4
  assert_alike(tmp_path / 'one', tmp_path / 'two', 2)


METHODS = (
  ('cusearch', 'credit.strategy="auto"', 'sizes.adaptive=true'), ('search_r1_ppo',), ('carl',), ('slate',), ('search_r2',),
  ('r_search_ppo',), ('r_search',), ('search_r1_grpo',), ('step_search',), ('research',), ('r1',), ('zerosearch',),
  *(('cusearch', f'credit.strategy="{strategy}"') for strategy in STRATEGIES), ('cusearch', 'credit.drop_alike=true'),
)


def test_every_method_that_trains_is_compared():
  trained = {name for name in known_methods() if hasattr(find_method(name), 'credit')}
  assert {importlib.import_module(f'configs.{config}').get_config().method for config, *_ in METHODS} == trained


@pytest.fixture(scope='module')
def trained_alike(start, tmp_path_factory):
  """trained_alike(methods, processes): folders of the runs of these in one process and in several, in the order of `methods`."""
  def train(methods, processes):
    folder, changes = tmp_path_factory.mktemp('methods'), [*map(json.dumps, methods), f'mesh.fsdp={processes}']
    finish_all([start('configs', folder / 'one', *changes, devices=processes),
                *start_processes(start, processes, 'configs', folder / 'several', *changes)])
    return folder / 'one', folder / 'several'

  return functools.cache(train)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize('number', range(len(METHODS)), ids=['-'.join(one) for one in METHODS])
@pytest.mark.parametrize('processes', [2, 4])
def test_several_processes_train_every_method_as_one(trained_alike, processes, number):
  one, several = trained_alike(METHODS, processes)
  assert_alike(one / str(number), several / str(number), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('shared', [False, True])
def test_two_processes_warm_a_critic_up_as_one(start, tmp_path, shared):
  changes = ['mesh.fsdp=2', f'critic.shared={str(shared).lower()}', f'train.aggregate="{"step" if shared else "token"}-mean"']
  run_as_one_and_two(start, 'critic-warmup', tmp_path, *changes)
  for name in ('closed_book', 'tiers', 'rollouts', 'answers_0', 'answers_4') if shared else ('closed_book', 'tiers', 'rollouts'):
    one, two = (row_files.read(tmp_path / f'{folder}/{name}.jsonl') for folder in ('one', 'two'))
    for node in (node for row in (*one, *two) for node in row.get('nodes', ())):
      del node['logprobs']  # their last bits depend on what shares the device
    assert one == two, name
  rows, others = (row_files.read(tmp_path / name / 'metrics.jsonl') for name in ('one', 'two'))
  assert len(rows) == len(others) == 4
  for row, other in zip(rows, others):
    for name in ('loss', 'grad_norm', *(key for key in row if key.startswith('gate_') and row[key] is not None)):
      assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
  expected, found = saved_arrays(tmp_path / 'one', 4), saved_arrays(tmp_path / 'two', 4)
  for name, value in expected.items():
    if name.startswith('params'):
      np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_for_one_process_stops_all_after_the_same_step(start, tmp_path):
  out = tmp_path / 'run'
  processes = start_processes(start, 2, 'train', out, 'steps=500', 'checkpoint_every=500', 'mesh.fsdp=2')
  wait_for(lambda: row_files.read(out / 'metrics.jsonl'), processes[0])
  processes[1].send_signal(signal.SIGTERM)
  found = [finish(process) for process in processes]
  stopped = len(row_files.read(out / 'metrics.jsonl'))
  assert [code for code, _ in found] == [143, 143], found[1][1][-3000:]
  assert f'jaxsearch: stopped after step {stopped}; rerun the same command to resume' in found[0][1].splitlines()
  assert [path.name for path in (out / 'checkpoints').iterdir()] == [str(stopped)]
  changes = [f'steps={stopped + 1}', 'mesh.fsdp=2']
  finish_all([start('train', out, *changes, devices=2)])  # in one process
  assert [row['step'] for row in row_files.read(out / 'metrics.jsonl')] == list(range(1, stopped + 2))


def retrieval(handler):
  """What a retrieval server says of any query."""
  hits = [{'document': {'id': '1', 'contents': '"red"\nThe red.'}, 'score': 1.0}]
  body = json.dumps({'result': [hits] * len(json.loads(handler.body)['queries'])}).encode()
  handler.send_response(200)
  handler.send_header('content-length', str(len(body)))
  handler.end_headers()
  handler.wfile.write(body)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_server_of_one_machine_that_never_answers_holds_up_that_machine_alone(start, tmp_path):
  """Until `search.timeout`, and once for a while; the run says it, counts it and goes on, as most searches work."""
  released = threading.Event()
  with server(retrieval) as (works, _), server(lambda handler: released.wait(60)) as (hangs, asked):
    first, second = start_processes(start, 2, 'train', tmp_path / 'run', 'mesh.fsdp=2', 'steps=3',
                                    machines=[{'CHILD_SEARCH': works}, {'CHILD_SEARCH': hangs}])
    (code, errors), (other_code, other_errors) = finish(first), finish(second)
    released.set()
  assert (code, other_code) == (0, 0), errors[-2000:] + other_errors[-2000:]
  rows = row_files.read(tmp_path / 'run' / 'metrics.jsonl')
  assert [(row['searches_asked'], row['searches_failed'], row['failed_steps_in_a_row']) for row in rows] == [(10, 4, 0)] * 3
  assert asked and 'step 1: 4 of 4 searches failed; the last: SearchError' in errors
  assert all(row['seconds_rollout'] < 10 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_in_the_rollouts_of_a_warm_up_in_two_processes(start, tmp_path):
  """What is grown stays: the same command goes on, to where a warm-up that was never stopped ends."""
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  finish_all(start_processes(start, 2, 'critic-warmup', whole, 'mesh.fsdp=2'))
  processes = start_processes(start, 2, 'critic-warmup', broken, 'mesh.fsdp=2')
  wait_for(lambda: row_files.read(broken / 'rollouts.jsonl'), processes[0])
  for process in processes:  # as a cluster does
    process.send_signal(signal.SIGTERM)
  found = [finish(process) for process in processes]
  assert [code for code, _ in found] == [143, 143], found[0][1][-3000:]
  kept = len(row_files.read(broken / 'rollouts.jsonl'))
  assert kept and 'rerun the same command' in found[0][1]
  finish_all(start_processes(start, 2, 'critic-warmup', broken, 'mesh.fsdp=2'))
  assert row_files.read(broken / 'rollouts.jsonl') == row_files.read(whole / 'rollouts.jsonl')
  expected, found = saved_arrays(whole, 4), saved_arrays(broken, 4)
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
