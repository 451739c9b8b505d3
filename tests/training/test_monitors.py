"""Alarms from rows, and what follows from them."""

import math
import pathlib

import pytest

from configs import base
from jaxsearch.training import loop, monitors, row_files, run_folder

HEALTHY = dict(reward=0.5, logprob=-0.4, logprob_gap=1e-3, entropy=0.4, kl=0.05, tokens_generated=400, trees=10,
               stop_malformed_share=0.1, stop_budget_share=0.1, stop_context_full_share=0.0,
               groups_alike_wrong=0.5, grad_norm=1.0)


def get_config(**monitor):
  config = base.get_config().unlock()
  config.monitor.update(window=3, patience=2, entropy_low=0.01, grad_norm=20.0)
  config.monitor.update(monitor)
  return config


def alarms(changes, **limits):
  """The alarms at the end of a run whose steps have these figures."""
  rows = [monitors.remember(HEALTHY | {'step': step} | change) for step, change in enumerate(changes, start=1)]
  return monitors.find_alarms(rows, get_config(**limits).monitor)


@pytest.mark.parametrize('name, change', [
  ('logprob_fall', dict(logprob=-1.5)),
  ('logprob_gap', dict(logprob_gap=0.2)),
  ('entropy_low', dict(entropy=0.001)),
  ('entropy_high', dict(entropy=4.0)),
  ('kl', dict(kl=2.0)),
  ('length_fall', dict(tokens_generated=70)),
  ('length_growth', dict(tokens_generated=2100)),
  ('cut', dict(stop_budget_share=0.6)),
  ('malformed', dict(stop_malformed_share=0.6)),
  ('groups_alike_wrong', dict(groups_alike_wrong=1.0)),
  ('grad_norm', dict(grad_norm=30.0)),
])
def test_each_figure_alarms_by_its_mean_over_the_window(name, change):
  healthy = [{}] * 4
  found = alarms([*healthy, *[change] * 3])
  assert list(found) == [name] and f'monitor.{name}=' in found[name]
  assert not alarms([*healthy, change])  # one step alone
  assert not alarms([*healthy, *[change] * 3], **{name: None})


def test_what_a_run_that_learns_goes_through_is_no_alarm():
  """First, middle and last steps of Search-R1 on the embedded world that went from EM 0.13 to 0.97."""
  learning = [
    dict(logprob=-0.39, entropy=0.39, kl=0.0, tokens_generated=208, logprob_gap=3e-7),
    dict(logprob=-0.15, entropy=0.15, kl=0.07, tokens_generated=630, stop_budget_share=0.19),
    dict(logprob=-0.01, entropy=0.004, kl=0.02, tokens_generated=310, groups_alike_wrong=0.0, grad_norm=2e-7)]
  steps, defaults = [change for change in learning for _ in range(6)], base.get_config().monitor
  assert not any(alarms(steps[:step], **defaults) for step in range(1, len(steps) + 1))


def test_figures_that_are_missing_or_not_finite_do_not_count():
  healthy = [{}] * 3
  assert list(alarms([*healthy, *(dict(kl=value, entropy=None) for value in (5.0, math.nan, None))])) == ['kl']
  assert not alarms([*healthy, *[dict(kl=math.inf, entropy=None)] * 3])
  assert not alarms([*healthy, *[dict.fromkeys(HEALTHY, math.nan)] * 3])


def watched(config, changes):
  """(rows, lines said, why it stopped) of a run with such rows."""
  told, said, stop = [], [], None
  rows = [HEALTHY | {'step': step} | change for step, change in enumerate(changes, start=1)]
  for row in rows:
    stop = monitors.watch(told, row, config, said.append)
    if stop:
      break
  assert told == [monitors.remember(row) for row in rows[:len(told)]]  # so a resumed run has the same history
  return rows, said, stop


BAD = dict(stop_malformed_share=0.9, reward=0.1)


def test_an_alarm_is_said_once_when_it_begins_and_once_when_it_ends():
  rows, said, stop = watched(get_config(), [{}] * 3 + [BAD] * 5 + [{}] * 3)
  assert [row.get('alarms') for row in rows] == [None] * 4 + ['malformed'] * 5 + [None] * 2
  assert said == ['step 5: malformed 0.633 > monitor.malformed=0.5, the mean of 3 steps',
                  'step 10: malformed no longer alarms']
  assert stop is None


def test_a_run_stops_after_an_alarm_that_lasts():
  changes = [{}] * 3 + [BAD] * 2 + [{}] * 2 + [BAD] * 4  # an alarm of two steps, and one of three
  _, said, stop = watched(get_config(action='stop', patience=3), changes)
  assert len(said) == 3
  assert stop.startswith('step 11: malformed 0.9 > monitor.malformed=0.5 for 3 steps (monitor.action=')
  assert watched(get_config(action='stop', patience=3), changes[:-1])[2] is None


def test_a_run_that_was_stopped_resumes_with_other_limits(config):
  config.steps, config.critic.enabled, config.loss.kl_coef = 3, False, 0.0
  config.monitor.update(window=1, entropy_high=0.1, action='stop', patience=2)
  with pytest.raises(run_folder.RunStopped, match='^step 2: entropy_high 8.* > monitor.entropy_high=0.1 for 2 steps'):
    loop.train(config)
  config.monitor.update(action='warn', entropy_high=9.0)
  loop.train(config)
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row.get('alarms') for row in rows] == ['entropy_high'] * 2 + [None]
