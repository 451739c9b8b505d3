"""Checkpoints across meshes, and what a run refuses to go on with."""

import dataclasses
import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, zerosearch
from jaxsearch import cli
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.training import checkpoint, run_folder, saved_policies
from jaxsearch.training.batch import make_batch, place
from jaxsearch.trees.layout import lay_out
from tests.training import conftest


def host_of(step):
  return {'step': step, 'decoder': dataclasses.asdict(conftest.DECODER), 'config': base.get_config().to_dict()}


def test_a_state_moves_to_another_mesh_and_goes_on_alike(tiny, tmp_path):
  rows = lay_out(tiny.random_forest(0, trees=8), 48, pad_id=0)
  one, many = tiny.setup(), tiny.setup(mesh=meshes.make_mesh(2, 2, 2), seed=5)
  state, _ = one.train_step(one.state, place(make_batch(rows, 4), one.mesh))
  with checkpoint.open_checkpoints(tmp_path, keep=1) as manager:
    checkpoint.save(manager, 1, state, host_of(1))
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
      checkpoint.save(manager, step, state, host_of(step))
  for path, step in ((tmp_path, 2), (tmp_path / 'checkpoints', 2), (tmp_path / 'checkpoints' / '1', 1)):
    assert saved_policies.is_run(path)
    model_config, params, host = saved_policies.load_params(path)
    assert model_config == tiny.decoder and host['step'] == step
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(states[step - 1].params))
  model_config, params, _ = saved_policies.load_params(tmp_path, meshes.make_mesh(1, 4, 2))
  assert params['layers']['gate'].sharding.shard_shape((2, 24, 32)) == (2, 6, 16)
  _, params, _ = saved_policies.load_params(tmp_path, dtype='bfloat16')
  rounded = jax.tree.map(lambda x: x.astype('bfloat16'), states[1].params)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(rounded))


def changed(**changes):
  config = base.get_config().unlock()
  for name, value in changes.items():
    group, _, field = name.replace('__', '.').rpartition('.')
    (config[group] if group else config)[field] = value
  return config


def test_what_may_change_between_start_and_resume():
  config = changed(steps=7, out='elsewhere', checkpoint_every=3, mesh__fsdp=4, train__micro_rows=2, eval__every=5,
                   judge__slots=4)
  assert run_folder.check_same_run(base.get_config().to_dict(), config) is None


@pytest.mark.parametrize('changes, words', [
  (dict(loss__clip_high=0.4), 'loss.clip_high was 0.2, now it is 0.4'),
  (dict(train__row_length=1024, group_size=4), 'group_size was 8, now it is 4; train.row_length was 768'),
  (dict(optim__schedule='cosine', steps=7), 'steps was'),  # where a cosine ends
])
def test_what_may_not_is_named(changes, words):
  saved = changed(optim__schedule=changes.get('optim__schedule', 'constant')).to_dict()
  with pytest.raises(ValueError, match=words):
    run_folder.check_same_run(saved, changed(**changes))


def test_steps_may_not_change_where_the_noise_of_a_simulated_search_grows_with_them():
  config = zerosearch.get_config().unlock()
  saved = config.to_dict()
  config.steps += 1
  with pytest.raises(ValueError, match='steps was'):
    run_folder.check_same_run(saved, config)
  config.search.noise_start = config.search.noise_end
  assert run_folder.check_same_run(saved | {'search': config.search.to_dict()}, config) is None


def cut(path, share=0.5):
  """Leaves of every file that share; 0 empties it."""
  for file in [path] if path.is_file() else filter(type(path).is_file, sorted(path.rglob('*'))):
    file.write_bytes(file.read_bytes()[:int(share * file.stat().st_size)])


def largest(path):
  return max(filter(type(path).is_file, path.rglob('*')), key=lambda file: file.stat().st_size)


DAMAGE = {
  'all files half': cut, 'no host': lambda path: shutil.rmtree(path / 'host'),
  'half of the largest file': lambda path: cut(largest(path)), 'half of rest': lambda path: cut(path / 'rest'),
}  # fmt: skip


@pytest.fixture(scope='module')
def two_checkpoints(tmp_path_factory):
  """(run folder with the checkpoints of steps 1 and 2, their states)."""
  run, states = tmp_path_factory.mktemp('saved') / 'run', [conftest.setup(seed=seed).state for seed in (0, 1)]
  with checkpoint.open_checkpoints(run, keep=2) as manager:
    for step, state in enumerate(states, start=1):
      checkpoint.save(manager, step, state, host_of(step))
  return run, states


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_newest_checkpoint_that_is_damaged_is_passed_over_and_made_again(two_checkpoints, tmp_path, capsys, damage):
  run, broken, (saved, (first, second)) = tmp_path / 'run', tmp_path / 'run' / 'checkpoints' / '2', two_checkpoints
  shutil.copytree(saved, run)
  DAMAGE[damage](broken)
  if damage != 'half of rest':  # the parameters can still be read
    _, params, host = saved_policies.load_params(run)
    warning, = capsys.readouterr().err.splitlines()
    assert host['step'] == 1 and warning.startswith(f'jaxsearch: {broken} cannot be read (')
    assert warning.endswith('); using that of step 1')
    jax.tree.map(np.testing.assert_array_equal, params, first.params)
    with pytest.raises(ValueError, match='checkpoints/2 cannot be read'):
      saved_policies.load_params(broken)
  assert broken.exists()  # reading leaves it where it is

  with run_folder.RunFolder(changed(out=str(run), checkpoint_every=1, progress=False), shown=()) as folder:
    state, host = folder.restore(again := jax.tree.map(jnp.copy, second))
    jax.tree.map(np.testing.assert_array_equal, state, first)
    assert all(x.is_deleted() for x in jax.tree.leaves(again))
    folder.start()
    folder.finish_step(2, {'skipped_in_a_row': 0}, second, lambda: {'decoder': host['decoder']})
  *_, resuming = errors = capsys.readouterr().err.splitlines()
  assert resuming == 'jaxsearch: resuming at step 2' and len(errors) == 3 and 'cannot be read' in errors[0]
  assert (run / 'broken' / '2').exists()
  assert saved_policies.load_params(run)[2]['step'] == 2 and not capsys.readouterr().err


@pytest.mark.parametrize('error', [
  OSError(errno.ESTALE, 'Stale file handle'), OSError(errno.EIO, 'Input/output error'), TimeoutError(),
  ValueError('UNAVAILABLE: GCS is away')])
def test_where_a_network_fails_it_is_tried_again_and_nothing_is_broken(two_checkpoints, monkeypatch, capsys, error):
  monkeypatch.setattr(checkpoint, 'WAITS', (0, 0))
  with checkpoint.open_checkpoints(two_checkpoints[0]) as manager:
    restore, tries = manager.restore, []

    def flaky(step, args):
      tries.append(step)
      if len(tries) < most:
        raise error
      return restore(step, args=args)

    monkeypatch.setattr(manager, 'restore', flaky)
    most = 3
    assert checkpoint.newest(manager, lambda step: checkpoint.restore_host(manager, step))['step'] == 2
    assert tries == [2] * 3 and capsys.readouterr().err.count('; trying again in 0 seconds\n') == 2
    most = 9
    broken = getattr(error, 'errno', None) == errno.EIO
    kind = checkpoint.BrokenCheckpoint if broken else ConnectionError
    with pytest.raises(kind, match='checkpoints/2 cannot be read') as raised:
      checkpoint.restore_host(manager, 2)
  assert cli.explain(raised.value)[0] == (2 if broken else 75)


def test_with_no_checkpoint_left_there_is_one_line(two_checkpoints, tmp_path, capsys):
  run = tmp_path / 'run'
  shutil.copytree(two_checkpoints[0], run)
  cut(run)
  named = r'checkpoints/2 cannot be read .*checkpoints/1 cannot be read .*; there is no other checkpoint$'
  with pytest.raises(ValueError, match=named), run_folder.RunFolder(changed(out=str(run)), shown=()) as folder:
    folder.restore(jax.tree.map(jnp.copy, two_checkpoints[1][0]))
  for command in (['export', '--out', str(tmp_path / 'out')], ['eval', '--limit=1']):
    assert cli.main([*command, f'--checkpoint={run}']) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith('jaxsearch: ') and 'cannot be read' in line
  assert sorted(path.name for path in (run / 'checkpoints').iterdir()) == ['1', '2']
  assert not (tmp_path / 'out').exists()


def test_parameters_that_are_not_finite_are_not_loaded(tiny, tmp_path, monkeypatch, capsys):
  state = tiny.setup().state
  norm = state.params['final_norm'].at[1].set(jnp.nan)
  state = dataclasses.replace(state, params=state.params | {'final_norm': norm})
  with checkpoint.open_checkpoints(tmp_path, keep=2) as manager:
    with pytest.raises(ValueError, match='1: params/final_norm has values that are not finite'):
      checkpoint.save(manager, 1, state, host_of(1))
    assert not checkpoint.all_steps(manager)
    monkeypatch.setattr(transfer, 'check_finite', lambda *_: None)
    checkpoint.save(manager, 1, state, host_of(1))  # by a version that did not look
    monkeypatch.undo()
  assert cli.main(['export', f'--out={tmp_path / "out"}', f'--checkpoint={tmp_path}']) == 2
  named = f'{tmp_path}/checkpoints/1: final_norm has values that are not finite'
  assert capsys.readouterr().err == f'jaxsearch: {named}\n' and not (tmp_path / 'out').exists()
