"""The loop itself, in this process, on a mesh of eight devices; and the errors it gives before anything starts."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

from configs import base
from jaxsearch.training import checkpoint, loop, metrics

CHILD = pathlib.Path(__file__).with_name('child.py')
REQUIRED = ('step reward em searches loss kl entropy tokens_generated tokens_trained seconds_generate seconds_tools '
            'seconds_train seconds_score seconds_save idle_share clip_fraction ratio ratio_max grad_norm logprob_gap '
            'logprob_gap_max learning_rate padded_share policy_loss skipped compilations').split()


@pytest.fixture(scope='module')
def child():
  spec = importlib.util.spec_from_file_location('child', CHILD)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def config(child, tmp_path, monkeypatch):
  child.make_inputs(tmp_path)
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  return child.get_config(tmp_path, str(tmp_path / 'run'))


def test_a_run_on_eight_devices(config):
  config.steps = 3
  config.mesh.update(data=2, fsdp=2, tensor=2)
  config.train.update(micro_rows=4, mini_batches=1, epochs=1)
  config.eval.update(every=2, number=4, questions=config.data.questions)
  last = loop.train(config)
  rows = metrics.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2, 3]
  for row in rows:
    assert not [name for name in REQUIRED if row.get(name) is None]
    assert row['logprob_gap_max'] < 1e-4 and row['ratio_max'] == pytest.approx(1, abs=1e-4)
    assert row['searches'] == 1 and row['tokens_generated'] == row['tokens_trained'] == 100
  assert rows[0]['kl'] == pytest.approx(0, abs=1e-6) and rows[2]['kl'] > rows[0]['kl']
  assert last['loss'] == pytest.approx(rows[2]['loss'])
  evaluations = metrics.read(pathlib.Path(config.out) / 'evaluations.jsonl')
  assert [(row['step'], row['temperature'], row['n']) for row in evaluations] == [
    (step, temperature, 4) for step in (0, 2, 3) for temperature in (1.0, 0.0)]
  numbers, params, host = checkpoint.load_params(config.out)
  assert host['step'] == 3 and host['config']['method'] == 'toy'
  assert np.isfinite(np.asarray(params['embedding'])).all()


def test_another_model_under_the_same_name_is_refused(config, child):
  import jax

  from jaxsearch.models import hub
  from jaxsearch.models.decoder import Decoder, initial_params
  config.steps = config.checkpoint_every = 1
  config.mesh.update(data=1, fsdp=8, tensor=1)
  config.train.update(micro_rows=8, old_logprobs='recompute')
  loop.train(config)
  hub.save(Decoder(child.NUMBERS, params=initial_params(child.NUMBERS, jax.random.key(7))), config.model)
  config.steps = 2
  with pytest.raises(ValueError, match='has changed since this run began'):
    loop.train(config)


def test_updates_that_are_never_finite_stop_the_run(config, monkeypatch):
  config.mesh.update(data=1, fsdp=8, tensor=1)
  config.train.update(micro_rows=8, mini_batches=1, epochs=1)
  config.optim.max_skipped = 2
  monkeypatch.setattr(sys.modules['jaxsearch.methods.toy'], 'reward', lambda tree: float('inf'))
  from jaxsearch.training.run import RunStopped
  with pytest.raises(RunStopped, match='step 2: .* not finite in 2 updates in a row'):
    loop.train(config)
  assert [row['loss'] for row in metrics.read(pathlib.Path(config.out) / 'metrics.jsonl')] == [None, None]


@pytest.mark.parametrize('changes, words', [
  (dict(group_size=1), 'group_size=1'),
  (dict(method='no_such'), 'there is no jaxsearch/methods/no_such.py'),
  ({'train.old_logprobs': 'both'}, "train.old_logprobs='both'"),
  ({'sampler.length': 4096}, 'sampler.length=4096 is more than train.row_length'),
])
def test_values_that_do_not_fit_are_named_before_anything_is_written(tmp_path, changes, words):
  config = base.get_config()
  config.unlock()
  config.out = str(tmp_path / 'run')
  for name, value in changes.items():
    group, _, field = name.rpartition('.')
    (config[group] if group else config)[field] = value
  with pytest.raises(ValueError, match=words):
    loop.train(config)
  assert not (tmp_path / 'run').exists()
