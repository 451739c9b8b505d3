"""The folder of a run: its lock, what it says, how it stops, what a full disk and a damaged checkpoint do to it."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from etils.epath import register
from tensorboardX.proto import event_pb2

from configs import base
from jaxsearch import cli
from jaxsearch.training import RunStopped, critic_warmup, loop, metrics, row_files, run_folder, saved_policies
from tests.processes import free_port, small_files

ROOT = pathlib.Path(__file__).parents[2]
ROW = {'loss': 0.5, 'reward': 0.25, 'searches': 1.5, 'skipped_in_a_row': 0, 'tokens_per_second': 10.0}


@pytest.fixture
def config(tmp_path):
  config = base.get_config().unlock()
  config.out, config.steps, config.checkpoint_every, config.keep_checkpoints = str(tmp_path / 'run'), 5, 1, 3
  return config


@pytest.fixture
def state(tiny):
  return tiny.setup().state


def take_steps(config, state, *steps, row=ROW, before=lambda run: None):
  """Opens the run, resumes it, and finishes steps; returns (the state that it began with, the step before it)."""
  with run_folder.RunFolder(config, shown=('reward', 'loss')) as run:
    state, _ = run.restore(jax.tree.map(jnp.copy, state))  # which frees what it is given
    run.start()
    before(run)
    for step in steps:
      run.finish_step(step, row, state, lambda: {'decoder': {}})
    return state, run.last_step


def test_the_second_process_in_a_folder_is_refused_until_the_first_is_gone(config):
  out = pathlib.Path(config.out)
  code = ('import pathlib, sys, time; from jaxsearch.training import run_folder\n'
          'with run_folder.locked(pathlib.Path(sys.argv[1])): print("held", flush=True); time.sleep(300)')
  environment = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  out.mkdir()
  with subprocess.Popen([sys.executable, '-c', code, str(out)], env=environment, stdout=subprocess.PIPE,
                        text=True) as first:
    try:
      assert first.stdout.readline() == 'held\n'
      named = re.escape(f'{out}: process {first.pid} on {socket.gethostname()} since ') + r'20\d\d-.* trains here'
      with pytest.raises(ValueError, match=named), run_folder.RunFolder(config, shown=()):
        pass
      assert sorted(path.name for path in out.iterdir()) == ['lock', 'locked_by']  # nothing else was written
    finally:
      first.kill()
  with run_folder.locked(out):  # it was killed, so the folder is free
    assert f'process {os.getpid()} ' in (out / 'locked_by').read_text()


def test_the_lock_of_a_host_that_may_be_gone_is_waited_for(tmp_path):
  with run_folder.locked(tmp_path):
    (tmp_path / 'locked_by').write_text(f'process 7 on {socket.gethostname()} since 2026-11-30 01:02:03\nanother boot\n')
    named = rf'process 7 on .* since 2026-11-30 01:02:03 trains here; .*is gone for good, delete {tmp_path}/lock$'
    with pytest.raises(ConnectionError, match=named) as error, run_folder.locked(tmp_path):
      pass
  assert cli.explain(error.value)[0] == 75


def test_processes_that_do_not_share_the_folder_are_named(tmp_path):
  code = ('import functools, pathlib, sys\n'
          'from jaxsearch.parallel import mesh\nfrom jaxsearch.training import run_folder\n'
          'mesh.start_distributed(True, sys.argv[1], 2, int(sys.argv[2]))\n'
          'without = run_folder._processes_without\n'
          'run_folder._processes_without = functools.partial(without, seconds=1)\n'
          'out = pathlib.Path(sys.argv[3])\n'
          'with run_folder.locked(out, shared=False): pass\n'
          'with run_folder.locked(out): print("shared")')
  address, environment = f'localhost:{free_port()}', os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}

  def end(*folders):
    for folder in folders:
      folder.mkdir(exist_ok=True)
    jobs = [subprocess.Popen([sys.executable, '-c', code, address, str(number), str(folder)], env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for number, folder in enumerate(folders)]
    return [job.communicate(timeout=100) for job in jobs]

  assert [printed for printed, _ in end(tmp_path / 'a', tmp_path / 'a')] == ['shared\n'] * 2
  for printed, errors in end(tmp_path / 'a', tmp_path / 'b'):
    assert not printed and 'is not the same folder in process 0 and in 1: name one on a disk' in errors


def test_a_record_without_checkpoints_is_not_emptied(config, state):
  config.checkpoint_every = 1
  take_steps(config, state, 1, 2, 3)
  shutil.rmtree(f'{config.out}/checkpoints')
  with pytest.raises(ValueError, match='has the record of 3 steps, but no checkpoint: use another out folder'):
    take_steps(config, state, 1)
  assert len(row_files.read(f'{config.out}/metrics.jsonl')) == 3


def test_each_step_is_a_line_and_so_is_the_resumption(config, state, capfd):
  take_steps(config, state, 1, 2, row=ROW | {'loss': None, 'searches_failed': 3})
  first, second = capfd.readouterr().err.splitlines()
  assert first == 'jaxsearch: step 1/5, reward 0.25, 3 searches failed'
  assert re.match(r'jaxsearch: step 2/5, \d+ s left, ', second)
  take_steps(config, state, 3, row=ROW)
  first, second = capfd.readouterr().err.splitlines()
  assert first == 'jaxsearch: resuming at step 3'
  assert second == 'jaxsearch: step 3/5, reward 0.25, loss 0.5'
  config.progress = False
  take_steps(config, state, 4, 5)
  take_steps(config, state)
  assert capfd.readouterr().err.splitlines() == ['jaxsearch: resuming at step 4', 'jaxsearch: step 5 of 5 is done']


def test_the_time_left_is_that_of_the_last_steps(monkeypatch):
  said, now = [], iter([100, 150, *range(153, 300, 3)])
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: next(now))
  show = metrics.step_lines(40, (), said.append)
  for step in range(1, 21):
    show({'step': step})
  assert said[:2] == ['step 1/40', f'step 2/40, {38 * 50} s left']
  assert said[-1] == 'step 20/40, 60 s left'


def test_ctrl_c_stops_after_the_step_and_says_how_to_resume(config, state, capfd):
  config.checkpoint_every = 100
  with pytest.raises(SystemExit) as stopped:
    take_steps(config, state, 1, 2, before=lambda run: os.kill(os.getpid(), signal.SIGINT))
  assert stopped.value.code == 130
  last = capfd.readouterr().err.splitlines()[-1]
  assert last == 'jaxsearch: stopped after step 1; rerun the same command to resume'
  assert take_steps(config, state, 2)[1] == 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason='pathlib of Python 3.12 takes paths out of the stand-in')
def test_a_run_in_a_bucket_goes_on_from_another_machine(config, state, monkeypatch, tmp_path):
  """A folder plays the bucket; a server that speaks its protocol is in test_bucket.py."""
  as_folder = lambda url: epath.Path(tmp_path / 'cloud' / url.removeprefix('gs://'))
  monkeypatch.setitem(register._URI_PREFIXES_TO_CLS, 'gs://', as_folder)
  config.out, run = 'gs://bucket/run', tmp_path / 'cloud/bucket/run'
  for machine, begins, steps in (('one', 0, (1, 2)), ('two', 2, (3,)), ('one', 3, (4,))):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / machine))
    found, last = take_steps(config, state, *steps)
    assert last == begins
    jax.tree.map(np.testing.assert_array_equal, found, state)
  assert [row['step'] for row in row_files.read(run / 'metrics.jsonl')] == [1, 2, 3, 4]
  config.steps, config.profile = 1, (1,)
  with run_folder.RunFolder(config, shown=()) as traced:
    for _ in traced.steps():
      jax.block_until_ready(jnp.ones(3) + 1)
  assert list((run / 'profile').rglob('*.xplane.pb'))
  assert list((run / 'tensorboard').iterdir()) and (run / 'config.json').exists() and not (run / 'lock').exists()
  assert saved_policies.is_run('gs://bucket/run') and saved_policies.read_saved('gs://bucket/run')['step'] == 4


def test_a_run_that_stops_is_one_line_and_status_1_and_has_a_report(monkeypatch, capsys, tmp_path):
  def train(*_):
    row_files.write(tmp_path / 'metrics.jsonl', [{'step': 3, 'alarms': 'kl'}])
    raise RunStopped('step 3: enough')
  monkeypatch.setattr(loop, 'train', train)
  assert cli.main(['train', f'--config.out={tmp_path}']) == 1
  assert capsys.readouterr().err == 'jaxsearch: step 3: enough\n'
  assert 'raised the alarm kl at step 3' in (tmp_path / 'report.html').read_text()
  assert cli.main(['train', f'--config.out={tmp_path}', '--traceback']) == 1
  assert 'RunStopped: step 3: enough' in capsys.readouterr().err
  assert issubclass(critic_warmup.GateFailed, RunStopped)


def test_what_is_not_finite_is_never_saved(config, state):
  said = (r'checkpoints/2: opt_state/.*/mu/final_norm has values that are not finite, so it was not saved; '
          'the last checkpoint is that of step 1')
  with pytest.raises(RunStopped, match=said), run_folder.RunFolder(config, shown=()) as run:
    run.start()
    run.finish_step(1, ROW, state, lambda: {'decoder': {}})
    spoiled = jax.tree.map_with_path(
      lambda path, x: x.at[0].set(jnp.inf) if 'final_norm' in str(path[-1]) else x, state.opt_state)
    run.finish_step(2, ROW, dataclasses.replace(state, opt_state=spoiled), lambda: {'decoder': {}})
  assert take_steps(config, state)[1] == 1


def test_updates_that_are_never_finite_stop_the_run(config, state):
  config.optim.max_skipped = 2
  said = 'step 2: .* not finite in 2 updates in a row .*; the last checkpoint is that of step 1'
  with pytest.raises(RunStopped, match=said), run_folder.RunFolder(config, shown=()) as run:
    run.start()
    for step in (1, 2, 3):
      run.finish_step(step, ROW | {'skipped_in_a_row': step}, state, lambda: {'decoder': {}})


def wait_until_quiet(folder):
  """Until the threads of a save that failed write no more; a real run takes them along when it ends."""
  before, now = None, sorted(folder.rglob('*'))
  while now != before:
    time.sleep(0.5)
    before, now = now, sorted(folder.rglob('*'))


def test_a_checkpoint_that_the_disk_has_no_room_for_stops_the_run_which_resumes(config, state, capfd):
  take_steps(config, state, 1)
  said = ('checkpoints/2 could not be saved: File too large; the last checkpoint is that of step 1; once that is '
          'mended, rerun the same command to resume')
  with pytest.raises(RunStopped, match=said) as stopped, contextlib.ExitStack() as stack:
    take_steps(config, state, 2, before=lambda run: stack.enter_context(small_files()))
  assert cli.explain(stopped.value)[0] == 1
  assert 'Traceback' not in capfd.readouterr().err
  wait_until_quiet(pathlib.Path(config.out))
  assert take_steps(config, state, 2, 3)[1] == 1
  assert [row['step'] for row in row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')] == [1, 2, 3]
  steps = sorted(path.name for path in pathlib.Path(config.out, 'checkpoints').iterdir())
  assert steps == ['1', '2', '3']  # nothing half done


@pytest.mark.parametrize('fault, status', [
  (OSError(errno.ESTALE, 'Stale file handle', 'x'), 75), (ConnectionResetError('reset'), 75),
  (OSError(errno.ENOSPC, 'No space left on device', 'x'), 1)])
def test_a_fault_that_may_pass_ends_in_another_status(config, monkeypatch, fault, status):
  def fail(*_):
    raise fault

  monkeypatch.setattr(run_folder.bucket, 'publish', fail)
  with pytest.raises(RunStopped, match='; the checkpoints cannot be read now; once') as stopped:
    with run_folder.RunFolder(config, shown=()) as run:
      run.start()
      monkeypatch.setattr(run_folder.checkpoint, 'all_steps', fail)
  assert cli.explain(stopped.value)[0] == status


def test_a_trace_is_kept_of_the_steps_that_are_asked_for(config, state):
  config.profile, config.steps = (2,), 2
  with run_folder.RunFolder(config, shown=()) as run:
    run.start()
    traced = []
    for _ in run.steps():
      jax.block_until_ready(jnp.ones(3) + 1)
      traced.append(list(run.out.glob('profile/**/*.xplane.pb')))
  assert traced == [[], []] and list(run.out.glob('profile/**/*.xplane.pb'))


def events_of(folder):
  """The events of TensorBoard files: records of length, checksum, data, checksum."""
  for path in sorted(pathlib.Path(folder).iterdir()):
    data = path.read_bytes()
    while data:
      size, = struct.unpack('Q', data[:8])
      yield event_pb2.Event.FromString(data[12:12 + size])
      data = data[16 + size:]


def test_tensorboard_has_groups_and_held_out_evaluations(config, state):
  row = ROW | {'seconds_generate': 2.0, 'kl': float('nan'), 'gate_auc': 0.7, 'stop_room': 0.0, 'phase': 3,
               'last_failure': 'HTTP 500'}
  evaluations = [{'step': 1, 'temperature': temperature, 'em': em, 'samples': [{'em': 1}]}
                 for temperature, em in ((1.0, 0.25), (0.0, 0.75))]
  take_steps(config, state, 1, row=row, before=lambda run: run.write_evaluation(evaluations))
  board = pathlib.Path(config.out) / 'tensorboard'
  values = {(value.tag, event.step): value.simple_value for event in events_of(board) for value in event.summary.value}
  assert values == pytest.approx({(tag, 1): value for tag, value in {
    'reward/reward': 0.25, 'loss/loss': 0.5, 'loss/skipped_in_a_row': 0, 'time/seconds_generate': 2.0,
    'time/seconds_save': 0.0, 'time/tokens_per_second': 10.0, 'sampler/searches': 1.5, 'sampler/stop_room': 0.0,
    'gate/gate_auc': 0.7, 'method/phase': 3, 'held_out/em_at_1': 0.25, 'held_out/em_greedy': 0.75}.items()})
  take_steps(config, state, 2)
  starts = [event.step for event in events_of(board) if event.HasField('session_log')]
  assert starts[-1] == 2  # TensorBoard hides what came after step 1


@pytest.fixture
def told(monkeypatch):
  """The calls of the stand-ins, in order."""
  told = []

  def init(**settings):
    told.append(('init', settings))
    return types.SimpleNamespace(log=lambda figures, step: told.append((step, figures)), finish=lambda: told.append('finish'))

  for name in ('wandb', 'trackio'):
    module = types.ModuleType(name)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
  return told


def test_a_new_run_where_another_was_is_another_for_the_service(told, config):
  config.log = ('wandb',)
  for _ in range(2):
    with run_folder.RunFolder(config, shown=()) as run:
      run.start()
    shutil.rmtree(config.out)
  first, second = (call[1]['id'] for call in told if call[0] == 'init')
  assert first != second


def test_a_service_without_its_key_is_a_mistake_of_the_user(told, config, monkeypatch):
  def init(**settings):
    raise type('UsageError', (Exception,), {})('no API key')

  monkeypatch.setattr('wandb.init', init)
  config.log = ('wandb',)
  with pytest.raises(ValueError, match="log='wandb': no API key"), run_folder.RunFolder(config, shown=()) as run:
    run.start()


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_a_service_is_told_what_tensorboard_is_told_but_no_secrets(told, config, tmp_path, name):
  config.checkpoint_every, config.log, config.search.url = 100, (name,), 'http://me:p4ss@host/?api_key=k3y'
  row = ROW | {'reward': float('nan'), 'last_failure': 'down'}
  for steps in ((1, 2), ()):
    with run_folder.RunFolder(config, shown=()) as run:
      run.start()
      for step in steps:
        run.write_evaluation([{'step': step, 'temperature': 0.0, 'em': 0.25, 'samples': []}])
        run.finish_step(step, row, None, dict)
  (_, settings), *figures, last, (_, again), _ = told
  label = settings['name']
  assert label.startswith('run-') and again['name'] == label  # the same run for the service
  assert settings['config']['method'] == 'search_r1' and last == 'finish'
  assert settings.get('id') == (label if name == 'wandb' else None) and settings['resume'] == 'allow'
  assert figures[0] == (1, {'held_out/em_greedy': 0.25}) and [step for step, _ in figures] == [1, 1, 2, 2]
  assert figures[1][1]['loss/loss'] == 0.5 and figures[1][1]['sampler/searches'] == 1.5
  assert not {'reward/reward', 'method/last_failure', 'method/step'} & set(figures[1][1])  # neither NaN nor text
  assert 'http://***@host/?api_key=***' in str(told)
  files = [file.read_bytes() for file in tmp_path.rglob('*') if file.is_file()]
  assert not any(secret in written for written in [str(told).encode(), *files] for secret in (b'p4ss', b'k3y'))
  assert os.environ['WANDB__DISABLE_META'] == 'true'  # else wandb keeps the command line
