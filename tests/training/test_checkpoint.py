"""Checkpoints across meshes, and what a run refuses to go on with."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from configs import base
from jaxsearch.models.decoder import DecoderConfig, RopeScaling
from jaxsearch.models.presets import PRESETS
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import checkpoint
from jaxsearch.training.batch import make_batch, place
from jaxsearch.trees.layout import lay_out


def host_of(tiny, step):
  return {'step': step, 'decoder': dataclasses.asdict(tiny.decoder), 'config': base.get_config().to_dict()}


def test_a_state_moves_to_another_mesh_and_goes_on_alike(tiny, tmp_path):
  rows = lay_out(tiny.random_forest(0, trees=8), 48, pad_id=0)
  one, many = tiny.setup(), tiny.setup(mesh=meshes.make_mesh(2, 2, 2), seed=5)
  state, _ = one.train_step(one.state, place(make_batch(rows, 4), one.mesh))
  with checkpoint.open_checkpoints(tmp_path, keep=1) as manager:
    checkpoint.save(manager, 1, state, host_of(tiny, 1))
    moved = checkpoint.restore(manager, 1, many.state)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), jax.device_get(state))
  layouts = [jax.tree.map(lambda x: x.sharding, tree) for tree in (moved, many.state)]
  assert layouts[0] == layouts[1]
  _, expected = one.train_step(state, place(make_batch(rows, 4), one.mesh))
  _, found = many.train_step(moved, place(make_batch(rows, 4), many.mesh))
  np.testing.assert_allclose(found['loss'], expected['loss'], rtol=1e-4)
  np.testing.assert_allclose(found['grad_norm'], expected['grad_norm'], rtol=1e-4)


def test_parameters_alone_by_run_folder_or_step(tiny, tmp_path):
  states = [tiny.setup(seed=seed).state for seed in (0, 1)]
  with checkpoint.open_checkpoints(tmp_path, keep=2) as manager:
    for step, state in enumerate(states, start=1):
      checkpoint.save(manager, step, state, host_of(tiny, step))
  for path, step in ((tmp_path, 2), (tmp_path / 'checkpoints', 2), (tmp_path / 'checkpoints' / '1', 1)):
    assert checkpoint.is_run(path)
    model_config, params, host = checkpoint.load_params(path)
    assert model_config == tiny.decoder and host['step'] == step
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(states[step - 1].params))
  model_config, params, _ = checkpoint.load_params(tmp_path, meshes.make_mesh(1, 4, 2))
  assert params['layers']['gate'].sharding.shard_shape((2, 24, 32)) == (2, 6, 16)


def test_what_is_no_checkpoint_is_named(tiny, tmp_path):
  assert not checkpoint.is_run(tmp_path)
  with pytest.raises(FileNotFoundError, match='no checkpoints here'):
    checkpoint.load_params(tmp_path)
  with checkpoint.open_checkpoints(tmp_path, keep=2) as manager:
    checkpoint.save(manager, 3, tiny.setup().state, host_of(tiny, 3))
  with pytest.raises(FileNotFoundError, match='no checkpoint 7'):
    checkpoint.load_params(tmp_path / 'checkpoints' / '7')


def test_decoder_numbers_survive_json():
  for model_config in (PRESETS['llama3.2-1b'], PRESETS['qwen2.5-0.5b'],
                  dataclasses.replace(PRESETS['qwen3-0.6b'], dtype='bfloat16', remat='full')):
    found = checkpoint.decoder_from_json(json.loads(json.dumps(dataclasses.asdict(model_config))))
    assert found == model_config and isinstance(found, DecoderConfig)
    assert found.rope_scaling is None or isinstance(found.rope_scaling, RopeScaling)


def changed(**changes):
  config = base.get_config()
  config.unlock()
  for name, value in changes.items():
    group, _, field = name.replace('__', '.').rpartition('.')
    (config[group] if group else config)[field] = value
  return config


@pytest.mark.parametrize('changes', [dict(steps=7), dict(out='elsewhere'), dict(checkpoint_every=3),
                                     dict(mesh__fsdp=4), dict(train__micro_rows=2), dict(eval__every=5)])
def test_what_may_change_between_start_and_resume(changes):
  saved = base.get_config().to_dict()
  assert checkpoint.check_same_run(saved, changed(**changes)) is None


@pytest.mark.parametrize('changes, words', [
  (dict(seed=3), 'seed was 0, now it is 3'),
  (dict(loss__clip_high=0.4), 'loss.clip_high was 0.2, now it is 0.4'),
  (dict(optim__schedule='cosine'), "optim.schedule was 'constant', now it is 'cosine'"),
  (dict(train__row_length=1024, group_size=4), 'group_size was 8, now it is 4; train.row_length was 768'),
])
def test_what_may_not_is_named(changes, words):
  with pytest.raises(ValueError, match=words):
    checkpoint.check_same_run(base.get_config().to_dict(), changed(**changes))


def test_the_end_of_a_cosine_may_not_change():
  saved = changed(optim__schedule='cosine').to_dict()
  with pytest.raises(ValueError, match='steps was'):
    checkpoint.check_same_run(saved, changed(optim__schedule='cosine', steps=7))
