"""Alarms from rows, and what follows from them."""

import math
import pathlib
import sys

import pytest

from configs import base
from jaxsearch.data.questions import Question
from jaxsearch.training import loop, monitors, row_files, runs
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


def watched(config, changes):
  """(rows, lines said, why it stopped) of a run with such rows; every checkpoint in `saved` is there once its step is."""
  told, said, stop = [], [], None
  found = rows(*changes)
  for row in found:
    stop = monitors.watch(told, row, config, said.append)
    if stop:
      break
  assert told == [monitors.remember(row) for row in found[:len(told)]]  # so a resumed run has the same history
  return found, said, stop


BAD = dict(stop_malformed_share=0.9, reward=0.1)


def test_an_alarm_is_said_once_when_it_begins_and_once_when_it_ends():
  found, said, stop = watched(get_config({}), [{}] * 3 + [BAD] * 5 + [{}] * 3)
  assert [row.get('alarms') for row in found] == [None] * 4 + ['malformed'] * 5 + [None] * 2
  assert said == ['step 5: malformed 0.633 > monitor.malformed=0.5, the mean of 3 steps', 'step 10: malformed no longer alarms']
  assert stop is None


def test_a_run_stops_after_an_alarm_that_lasts():
  changes = [{}] * 3 + [BAD] * 2 + [{}] * 2 + [BAD] * 4  # an alarm of two steps, and one of three
  _, said, stop = watched(get_config(dict(action='stop', patience=3)), changes)
  assert len(said) == 3 and stop.startswith('step 11: malformed 0.9 > monitor.malformed=0.5 for 3 steps (monitor.action=')
  assert watched(get_config(dict(action='stop', patience=3)), changes[:-1])[2] is None


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


def rows_of(config):
  return list(map(comparable, row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')))


def test_a_run_that_was_stopped_goes_on_with_other_limits(toy):
  config = toy('run', action='stop', patience=3)
  config.steps = 4
  with pytest.raises(runs.RunStopped, match='^step 3: entropy_high 8.* > monitor.entropy_high=0.1 for 3 steps'):
    loop.train(config)
  assert [row['alarms'] for row in rows_of(config)] == ['entropy_high'] * 3
  config.monitor.update(action='warn', entropy_high=9.0)
  loop.train(config)
  assert [(row['step'], row.get('alarms')) for row in rows_of(config)][2:] == [(3, None), (4, None)]
