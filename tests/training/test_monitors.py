"""Alarms from rows, what follows from them, and runs that go back to a checkpoint."""

import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import base
from jaxsearch.data.questions import Question
from jaxsearch.training import checkpoint, loop, monitors, runs
from jaxsearch.trees.tree import Role, Tree
from tests.training.test_run import comparable

ROOT = pathlib.Path(__file__).parents[2]
HEALTHY = dict(reward=0.5, logprob=-0.4, logprob_gap=1e-3, entropy=0.4, kl=0.05, tokens_generated=400, trees=10,
               stop_malformed_share=0.1, stop_budget_share=0.1, stop_context_full_share=0.0,
               groups_alike_wrong=0.5, grad_norm=1.0)


def limits(**changes):
  return get_config(monitor=changes).monitor


def get_config(monitor, **changes):
  config = base.get_config()
  config.unlock()
  config.update(changes)
  config.monitor.update(window=3, patience=2, entropy_low=0.01, grad_norm=20.0)
  config.monitor.update(monitor)
  return config


def rows(*changes):
  return [HEALTHY | {'step': step} | change for step, change in enumerate(changes, start=1)]


def history(*changes):
  return [monitors.remember(row) for row in rows(*changes)]


@pytest.mark.parametrize('name, change', [
  ('logprob_fall', dict(logprob=-1.5)),
  ('logprob_gap', dict(logprob_gap=0.2)),
  ('entropy_low', dict(entropy=0.001)),
  ('entropy_high', dict(entropy=4.0)),
  ('kl', dict(kl=2.0)),
  ('length_fall', dict(tokens_generated=70)),
  ('length_growth', dict(tokens_generated=2100)),
  ('cut', dict(stop_budget_share=0.6)),
  ('cut', dict(stop_budget_share=0.0, stop_context_full_share=0.6)),
  ('malformed', dict(stop_malformed_share=0.6)),
  ('groups_alike_wrong', dict(groups_alike_wrong=1.0)),
  ('grad_norm', dict(grad_norm=30.0)),
])
def test_each_figure_alarms_by_its_mean_over_the_window(name, change):
  found = monitors.find_alarms(history({}, {}, {}, {}, *[change] * 3), limits())
  assert list(found) == [name] and f'monitor.{name}=' in found[name]
  assert not monitors.find_alarms(history({}, {}, {}, {}, change), limits())  # one step alone
  assert not monitors.find_alarms(history({}, {}, {}, {}, *[change] * 3), limits(**{name: None}))


def test_what_a_run_that_learns_goes_through_is_no_alarm():
  """First, middle and last steps of Search-R1 on the embedded world that went from EM 0.13 to 0.97."""
  learning = [dict(logprob=-0.39, entropy=0.39, kl=0.0, tokens_generated=208, groups_alike_wrong=0.5, logprob_gap=3e-7),
              dict(logprob=-0.15, entropy=0.15, kl=0.07, tokens_generated=630, groups_alike_wrong=0.5, stop_budget_share=0.19),
              dict(logprob=-0.01, entropy=0.004, kl=0.02, tokens_generated=310, groups_alike_wrong=0.0, grad_norm=2e-7)]
  told = history(*[change for change in learning for _ in range(6)])
  defaults = base.get_config().monitor
  for step in range(1, len(told) + 1):
    assert not monitors.find_alarms(told[:step], defaults)


def test_figures_that_are_missing_or_not_finite_do_not_count():
  found = monitors.find_alarms(history({}, {}, {}, *[dict(kl=value, entropy=None) for value in (5.0, math.nan, None)]), limits())
  assert list(found) == ['kl']
  assert not monitors.find_alarms(history({}, {}, {}, *[dict(kl=math.inf, entropy=None)] * 3), limits())
  assert not monitors.find_alarms([monitors.remember({'step': step, 'reward': 0.0}) for step in range(9)], limits())


def test_the_likelihood_of_a_step_and_its_groups_without_signal():
  def group(answers, rewards):
    trees = [Tree(None, Question('1', 'Which?', ('red',))) for _ in answers]
    for tree, tree.answer, tree.reward in zip(trees, answers, rewards):
      tree.root.append([1], Role.PROMPT).append([2, 3], Role.POLICY, logprobs=[-1.0, -2.0 - tree.reward])
    return trees

  groups = [group(*one) for one in (('bb', [0, 0]), (['red'] * 2, [1, 1]), ('bc', [0, 1]), ('b', [0]))]
  row = loop.summary(groups, [])
  assert row['logprob'] == pytest.approx(-1.5 - 3 / 14) and row['groups_alike_wrong'] == pytest.approx(1 / 3)
  assert row['groups_alike'] == 0.75 and row['em'] == pytest.approx(2 / 7)


def watched(config, changes, saved=()):
  """(rows, lines said, why it stopped) of a run with such rows; every checkpoint in `saved` is there once its step is."""
  told, said, stop = [], [], None
  found = rows(*changes)
  for row in found:
    stop = monitors.watch(told, row, config, [step for step in saved if step < row['step']], said.append)
    if stop:
      break
  assert told == [monitors.remember(row) for row in found[:len(told)]]  # so a resumed run has the same history
  return found, said, stop


BAD = dict(stop_malformed_share=0.9, reward=0.1)


def test_an_alarm_is_said_once_when_it_begins_and_once_when_it_ends():
  found, said, stop = watched(get_config({}), [{}] * 3 + [BAD] * 5 + [{}] * 3)
  assert [row.get('alarms') for row in found] == [None] * 4 + ['malformed'] * 5 + [None] * 2
  assert said == ['step 5: malformed 0.633 > monitor.malformed=0.5, the mean of 3 steps', 'step 10: malformed no longer alarms']
  assert stop is None and 'rollbacks' not in found[-1]


def test_a_run_stops_after_an_alarm_that_lasts():
  changes = [{}] * 3 + [BAD] * 2 + [{}] * 2 + [BAD] * 4  # an alarm of two steps, and one of three
  _, said, stop = watched(get_config(dict(action='stop', patience=3)), changes)
  assert len(said) == 3 and stop.startswith('step 11: malformed 0.9 > monitor.malformed=0.5 for 3 steps (monitor.action=')
  assert watched(get_config(dict(action='stop', patience=3)), changes[:-1])[2] is None


def test_a_checkpoint_is_rated_by_the_steps_after_it():
  config = get_config(dict(action='rollback'), checkpoint_every=2)
  told = history(*[dict(reward=reward) for reward in (.9, .9, .1, .2, .3, .4, .5, .5)])
  assert monitors.rate(told, config) == {2: pytest.approx(.2), 4: pytest.approx(.4), 6: math.inf, 8: math.inf}
  assert monitors.best(told, config, saved=[2, 4, 6, 8]) == 4 and monitors.best(told, config, saved=[2, 7]) == 2
  assert monitors.worth_keeping(told, config, saved=[2, 4, 6, 8]) == {4, 6, 8}
  config.monitor.action = 'stop'
  assert monitors.worth_keeping(told, config, saved=[2, 4, 6, 8]) == set()


def test_a_checkpoint_that_a_rollback_followed_too_soon_is_not_rated():
  told = history(*[{}] * 4, dict(rolled_back_to=2), *[{}] * 4)
  assert sorted(monitors.rate(told, get_config({}, checkpoint_every=1))) == [1, 2, 5, 6, 7, 8, 9]


def test_a_rollback_goes_to_the_best_checkpoint_and_begins_a_new_window():
  config = get_config(dict(action='rollback', max_rollbacks=1), checkpoint_every=1)
  changes = [*[dict(reward=reward) for reward in (.2, .4, .6, .6, .6)], *[BAD] * 3, *[{}] * 2, *[BAD] * 6]
  found, said, stop = watched(config, changes, saved=range(1, 20))
  back = {row['step']: row['rolled_back_to'] for row in found if 'rolled_back_to' in row}
  assert back == {8: 2}  # steps 3, 4 and 5 were the best, so their parameters are those of checkpoint 2
  assert [row['rollbacks'] for row in found[:13]] == [0] * 7 + [1] * 6
  assert said[1].startswith('step 8: malformed 0.9 > ') and said[1].endswith(' of step 2, rollback 1 of 1')
  assert stop.startswith('step 13: malformed 0.9') and 'after monitor.max_rollbacks=1;' in stop


def test_without_a_rated_checkpoint_the_run_stops():
  _, _, stop = watched(get_config(dict(action='rollback')), [BAD] * 9, saved=())
  assert stop.startswith('step 4: ') and 'no checkpoint to go back to' in stop


@pytest.fixture
def method(child, monkeypatch):
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  return sys.modules['jaxsearch.methods.toy']


@pytest.fixture
def toy(child, method, tmp_path):
  """toy(out, **monitor) -> the config of a tiny run whose entropy alarms at every step."""
  child.make_inputs(tmp_path)

  def toy(out, **monitor):
    config = child.get_config(tmp_path, str(tmp_path / out))
    config.mesh.update(data=1, fsdp=8, tensor=1)
    config.train.update(micro_rows=8, mini_batch=0, epochs=1)
    config.critic.enabled = False
    config.monitor.update(window=1, entropy_high=0.1)
    config.monitor.update(monitor)
    return config

  return toy


def arrays(config, step):
  """Every array of a checkpoint."""
  with checkpoint.open_checkpoints(config.out) as manager:
    found = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(), rest=ocp.args.StandardRestore()))
  return jax.tree.leaves((found.params, found.rest))


def rows_of(config):
  return list(map(comparable, runs.read(pathlib.Path(config.out) / 'metrics.jsonl')))


@pytest.mark.parametrize('ahead', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_with_rollbacks_that_is_killed_ends_alike_to_the_bit(toy, method, monkeypatch, capsys, ahead):
  changes = dict(action='rollback', patience=4, max_rollbacks=2)
  whole, broken = toy('whole', **changes), toy('broken', **changes)
  whole.train.async_steps = broken.train.async_steps = ahead
  whole.steps = broken.steps = 10
  whole.keep_checkpoints, broken.keep_checkpoints = 9, 1
  loop.train(whole)
  said, found = capsys.readouterr().err, rows_of(whole)
  back = {row['step']: row['rolled_back_to'] for row in found if 'rolled_back_to' in row}
  assert list(back) == [4, 8] and back[4] == 2 and [row['rollbacks'] for row in found] == [0] * 3 + [1] * 4 + [2] * 3
  assert said.count('entropy_high 8.') == 5 and 'step 2, rollback 1 of 2' in said  # it begins again after each rollback
  for step, target in back.items():  # parameters and optimizer go back, the rest goes on
    jax.tree.map(np.testing.assert_array_equal, arrays(whole, step), arrays(whole, target))
  assert any((a != b).any() for a, b in zip(arrays(whole, 6), arrays(whole, 4), strict=True))
  assert found[2]['logprob'] != found[4]['logprob']  # of the same parameters, on other questions

  credit, deaths = method.credit, [5, 8]

  def killed(groups, context, **arguments):
    if [context.step] == deaths[:1]:
      raise KeyboardInterrupt(deaths.pop(0))
    credit(groups, context, **arguments)

  monkeypatch.setattr(method, 'credit', killed)
  for _ in range(2):
    with pytest.raises(KeyboardInterrupt):
      loop.train(broken)
  loop.train(broken)
  assert rows_of(broken) == found
  jax.tree.map(np.testing.assert_array_equal, arrays(broken, 10), arrays(whole, 10))
  kept = monitors.worth_keeping([monitors.remember(row) for row in found], whole, saved=range(2, 11, 2))
  assert {int(path.name) for path in pathlib.Path(broken.out, 'checkpoints').iterdir()} == kept | {10}


def test_a_run_that_was_stopped_goes_on_with_other_limits(toy):
  config = toy('run', action='stop', patience=3)
  config.steps = 4
  with pytest.raises(runs.RunStopped, match='^step 3: entropy_high 8.* > monitor.entropy_high=0.1 for 3 steps'):
    loop.train(config)
  assert [row['alarms'] for row in rows_of(config)] == ['entropy_high'] * 3
  config.monitor.update(action='warn', entropy_high=9.0)
  loop.train(config)
  assert [(row['step'], row.get('alarms')) for row in rows_of(config)][2:] == [(3, None), (4, None)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_policy_that_its_learning_rate_breaks_is_taken_back(tmp_path):
  """Search-R1 on the embedded world at 30 times the usual rate: half of the answers are soon right, and then none."""
  def train(action):
    fields = {'out': tmp_path / action, 'optim.learning_rate': 3e-3, 'questions_per_step': 4, 'sampler.slots': 32, 'steps': 16,
              'eval.every': 0, 'checkpoint_every': 2, 'monitor.action': action, 'monitor.window': 3, 'monitor.patience': 2}
    command = [sys.executable, '-m', 'jaxsearch.cli', 'train', '--config=quickstart']
    process = subprocess.run([*command, *(f'--config.{name}={value}' for name, value in fields.items())],
                             env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True)
    return process, runs.read(tmp_path / action / 'metrics.jsonl')

  process, found = train('stop')
  rewards = [row['reward'] for row in found]
  assert max(rewards) > 0.5 and np.mean(rewards[-2:]) < 0.1
  assert process.returncode and f'step {len(found)}: ' in process.stderr and "(monitor.action='stop')" in process.stderr
  process, more = train('rollback')
  assert process.returncode == 0, process.stderr[-3000:]
  assert more[len(found) - 1]['rolled_back_to'] and [row['reward'] for row in more[:len(found)]] == rewards
  assert np.mean([row['reward'] for row in more[len(found):len(found) + 3]]) > 0.15  # until the same rate breaks it again
