"""Services that show figures: what a stand-in with wandb's functions is told by a run, and by the same run resumed."""

import os
import sys
import types

import pytest

from configs import base
from jaxsearch import config_check
from jaxsearch.training import run_folder

ROW = {'loss': 0.5, 'reward': float('nan'), 'searches': 1.5, 'last_failure': 'down', 'skipped_in_a_row': 0,
       'tokens_per_second': 9.0}


@pytest.fixture
def told(monkeypatch):
  """What was told to the stand-ins, in order."""
  told = []

  def init(**settings):
    told.append(('init', settings))
    return types.SimpleNamespace(log=lambda figures, step: told.append((step, figures)), finish=lambda: told.append('finish'))

  for name in ('wandb', 'trackio'):
    module = types.ModuleType(name)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
  return told


def run(config, *steps):
  config_check.check(config)
  with run_folder.RunFolder(config, shown=()) as folder:
    folder.start()
    for step in steps:
      folder.write_evaluation([{'step': step, 'temperature': 0.0, 'em': 0.25, 'samples': []}])
      folder.finish_step(step, ROW, None, dict)


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_a_service_is_told_what_tensorboard_is_told(told, tmp_path, name):
  config = base.get_config().unlock()
  config.out, config.steps, config.log = str(tmp_path / 'mine'), 9, (name,)
  run(config, 1, 2)
  (_, settings), *figures, last = told
  label = settings.pop('name')
  assert label.startswith('mine-') and settings.pop('config')['method'] == 'search_r1' and last == 'finish'
  assert settings == {'project': 'jaxsearch', 'resume': 'allow'} | ({'id': label} if name == 'wandb' else {})
  assert figures[0] == (1, {'held_out/em_greedy': 0.25}) and [step for step, _ in figures] == [1, 1, 2, 2]
  assert figures[1][1]['loss/loss'] == 0.5 and figures[1][1]['sampler/searches'] == 1.5
  assert not {'reward/reward', 'method/last_failure', 'method/step'} & set(figures[1][1])  # neither NaN nor text
  before = len(told)
  run(config)
  assert told[before][1]['name'] == label  # the same run for the service


def test_neither_services_nor_run_folders_are_told_secrets(told, tmp_path):
  config = base.get_config().unlock()
  config.out, config.log, config.search.url = str(tmp_path / 'mine'), ('wandb',), 'http://me:p4ss@host/?api_key=k3y'
  run(config, 1)
  assert 'http://***@host/?api_key=***' in str(told) and 'http://***@host' in (tmp_path / 'mine/config.json').read_text()
  for written in [str(told).encode(), *(file.read_bytes() for file in tmp_path.rglob('*') if file.is_file())]:
    assert b'p4ss' not in written and b'k3y' not in written
  assert os.environ['WANDB__DISABLE_META'] == 'true'  # else wandb keeps the command line
