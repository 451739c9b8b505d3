"""The grid and its processes: with a stand-in for the training, and once for real."""

import json
import os
import pathlib
import signal
import textwrap
import threading
import time

import ml_collections
import psutil
import pytest

from jaxsearch import cli
from jaxsearch.evaluation import sweep
from jaxsearch.training import row_files

ROOT = pathlib.Path(__file__).parents[2]

# Takes the flags of `jaxsearch train`, writes what a run writes, and resumes from the rows that it finds.
# Slow ones wait for SIGTERM after their first step; others fail after it.
TRAIN = """
import json, os, pathlib, signal, sys, time
flag = dict(argument.removeprefix('--config.').split('=', 1) for argument in sys.argv[2:])
out, steps, kind = pathlib.Path(flag['out']), int(flag['steps']), flag.get('model')
(out / 'checkpoints').mkdir(exist_ok=True)
with (out / 'starts').open('a') as file:
  print(os.environ.get('CUDA_VISIBLE_DEVICES'), file=file)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
rows = out / 'metrics.jsonl'
done = len(rows.read_text().splitlines()) if rows.exists() else 0
for step in range(done + 1, steps + 1):
  with rows.open('a') as file:
    print(json.dumps({'step': step}), file=file)
  if kind == 'fail':
    print('it went wrong')
    sys.exit(1)
  if kind == 'away' and step < 3:  # a server
    sys.exit(75)
  if kind == 'slow' and step == 1:
    time.sleep(60)
(out / 'checkpoints' / str(steps)).mkdir()
if kind != 'mute':
  with (out / 'evaluations.jsonl').open('w') as file:
    [print(json.dumps({'step': steps, 'temperature': t}), file=file) for t in (1.0, 0.0)]
"""


def sweep_config(out, **changes):
  config = ml_collections.ConfigDict(convert_dict=False)
  config.title, config.base, config.baseline = 'A title', 'configs/base.py', 'Plain (one)'
  config.common = {'steps': 3, 'eval': {'every': 3}}
  config.variants = {'Plain (one)': {}, 'Other': {'loss.kl_coef': 0.5}}
  config.seeds, config.out, config.parallel = (0, 1), str(out), 2
  config.update(changes)
  return config.lock()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
  """Runs are made by TRAIN, which passes for `python -m jaxsearch.cli`, and looked at often."""
  (tmp_path / 'jaxsearch').mkdir()
  (tmp_path / 'jaxsearch' / '__init__.py').touch()  # a package proper, before the installed one
  (tmp_path / 'jaxsearch' / 'cli.py').write_text(TRAIN)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sweep, 'POLL_SECONDS', 0.01)
  monkeypatch.setattr(sweep, 'check_finished', lambda run: None)


def test_the_grid(tmp_path):
  runs = sweep.plan(sweep_config(tmp_path, variants={
    'Plain (one)': {},
    'SDGA-Auto': {'loss.kl_coef': 0.5, 'steps': 7, 'config': 'configs/quickstart.py', 'data': {'hops': (1,)}}}))
  assert [(run.variant, run.seed) for run in runs] == [
    ('Plain (one)', 0), ('SDGA-Auto', 0), ('Plain (one)', 1), ('SDGA-Auto', 1)]
  shown = [(run.config.steps, run.config.eval.every, run.config.loss.kl_coef, run.config.seed,
            run.config.data.arithmetic) for run in (runs[0], runs[3])]
  assert shown == [(3, 3, 0.001, 0, True), (7, 3, 0.5, 1, False)]  # the last each from its own file
  assert runs[3].out == tmp_path / 'sdga-auto' / '1' and runs[3].config.data.hops == (1,)


def test_what_decides_runs_first(tmp_path):
  variants = {name: {} for name in ('One', 'Two', 'Three')}
  runs = sweep.plan(sweep_config(tmp_path, variants=variants, baseline='Three', primary=('Two',)))
  assert [(run.variant, run.seed) for run in runs] == [
    ('Two', 0), ('Three', 0), ('Two', 1), ('Three', 1), ('One', 0), ('One', 1)]


def starts(runs):
  files = [run.out / 'starts' for run in runs]
  return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


def test_finished_runs_are_kept_and_others_resume(tmp_path, stand_in, capfd):
  runs = sweep.plan(sweep_config(tmp_path / 'out'))
  assert sweep.train_all(runs[:2], 2) == [] and starts(runs) == [1, 1, 0, 0]
  (runs[1].out / 'checkpoints' / '3').rmdir()  # killed before its last checkpoint, with its rows there
  assert sweep.train_all(runs, 2) == [] and starts(runs) == [1, 2, 1, 1]
  assert all(map(sweep.finished, runs))
  assert (runs[0].out / 'log.txt').read_text().startswith('$ jaxsearch train --config=configs/base.py')
  said = capfd.readouterr().err.splitlines()
  assert len(said) == 5 and said[-1].endswith(': finished; 0 runs left')


def test_a_failed_run_is_reported_and_others_go_on(tmp_path, stand_in, capfd):
  kinds = {'Plain (one)': {'model': 'fail'}, 'Mute': {'model': 'mute'}, 'Fine': {}, 'Away': {'model': 'away'}}
  runs = sweep.plan(sweep_config(tmp_path / 'out', variants=kinds, seeds=(0,)))
  assert set(sweep.train_all(runs, 1)) == set(runs[:2])
  reported = capfd.readouterr().err
  assert 'Plain (one), seed 0: exit status 1; the end of' in reported and '\n  it went wrong\n' in reported
  assert 'Mute, seed 0: it ended, but step 3 is not logged, evaluated and saved' in reported
  assert reported.count('Away, seed 0: exit status 75; it is tried again\n') == 2 and starts(runs) == [1, 1, 1, 3]
  assert [sweep.finished(run) for run in runs] == [False, False, True, True]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_runs_and_the_same_command_resumes(tmp_path, stand_in, number, capfd):
  runs = sweep.plan(sweep_config(tmp_path / 'out', common={'steps': 3, 'eval.every': 3, 'model': 'slow'}))

  def stop():
    while not all(row_files.read(run.out / 'metrics.jsonl') for run in runs[:2]):
      time.sleep(0.005)
    os.kill(os.getpid(), number)

  before, children = signal.getsignal(number), psutil.Process().children  # other tests may have some
  there = set(children())
  thread = threading.Thread(target=stop)
  thread.start()
  with pytest.raises((SystemExit, KeyboardInterrupt)):
    sweep.train_all(runs, 2)
  thread.join()
  assert starts(runs) == [1, 1, 0, 0] and signal.getsignal(number) == before
  assert set(children()) <= there
  assert capfd.readouterr().err == 'stopped with 0 of 4 runs finished; rerun the same command to resume\n'
  assert sweep.train_all(runs[:2], 2) == [] and starts(runs) == [2, 2, 0, 0]


def test_finished_runs_of_another_config_are_refused(tmp_path):
  (run, *_) = sweep.plan(sweep_config(tmp_path))
  run.out.mkdir(parents=True)
  write = lambda config: (run.out / 'config.json').write_text(json.dumps(config.to_dict()))
  write(run.config)
  sweep.check_finished(run)
  other = ml_collections.ConfigDict(run.config.to_dict())
  other.eval.number = 7
  write(other)
  with pytest.raises(ValueError, match="evaluated with other settings: .*'number': 7"):
    sweep.check_finished(run)
  other.loss.kl_coef = 0.7
  write(other)
  with pytest.raises(ValueError, match=r'loss.kl_coef was 0.7, now it is 0.001'):
    sweep.check_finished(run)


def test_each_run_has_a_gpu_of_its_own(tmp_path, stand_in, monkeypatch):
  monkeypatch.setattr(sweep, 'DEVICES', tmp_path / 'dev')
  monkeypatch.setattr(os, 'cpu_count', lambda: 8)
  assert sweep.environments(0) == sweep.environments(1) == [{}]
  assert sweep.environments(3) == [{'NPROC': '2'}] * 3 and sweep.environments(9) == [{'NPROC': '1'}] * 9
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  (tmp_path / 'dev').mkdir()
  for name in ('nvidia0', 'nvidia1', 'nvidiactl'):
    (tmp_path / 'dev' / name).touch()
  assert sweep.environments(0) == [{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '1'}]
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
  assert sweep.environments(2) == [{'NPROC': '4'}] * 2  # they are hidden
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '5,7,8')
  assert sweep.environments(2) == [{'CUDA_VISIBLE_DEVICES': '5'}, {'CUDA_VISIBLE_DEVICES': '7'}]
  runs = sweep.plan(sweep_config(tmp_path / 'out', seeds=(0,)))
  assert sweep.train_all(runs, 2) == []
  assert {(run.out / 'starts').read_text() for run in runs} == {'5\n', '7\n'}


def test_a_real_sweep(tmp_path, monkeypatch, capfd):
  (tmp_path / 'claim.py').write_text(textwrap.dedent(f"""
    import ml_collections
    def get_config():
      config = ml_collections.ConfigDict(convert_dict=False)
      config.title, config.base, config.out = 'Tiny', 'configs/base.py', {str(tmp_path / 'out')!r}
      config.common = {{
        'steps': 1, 'questions_per_step': 2, 'group_size': 2, 'eval.every': 1, 'eval.number': 2,
        'eval.temperatures': (0.0,), 'grow.max_turns': 1, 'grow.max_tokens': 4, 'sampler.slots': 4,
        'sampler.length': 128, 'train.row_length': 128, 'train.micro_rows': 1, 'train.chunk': 64}}
      config.variants, config.baseline = {{'Without KL': {{'loss.kl_coef': 0.0}}}}, 'Without KL'
      config.seeds, config.parallel = (0, 1), 0
      return config.lock()"""))
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
  command = ['sweep', '--config', str(tmp_path / 'claim.py'), '--config.seeds=0']
  assert cli.main(command) == 0, capfd.readouterr().err
  out, run = tmp_path / 'out', tmp_path / 'out/without-kl/0'
  assert capfd.readouterr().out == f'table: {out / "table.md"}\n'
  assert [row['step'] for row in row_files.read(run / 'metrics.jsonl')] == [1]
  assert len(row_files.read(run / 'evaluations.jsonl')) == 2 and (run / 'report.html').exists()
  assert json.loads((run / 'config.json').read_text())['loss']['kl_coef'] == 0.0
  assert json.loads((out / 'table.json').read_text())['variants']['Without KL']['seeds'] == [0]
  log = (run / 'log.txt').read_text()
  (out / 'table.md').unlink()
  assert cli.main(command) == 0 and (out / 'table.md').exists()  # nothing left to train
  assert log == (run / 'log.txt').read_text()
