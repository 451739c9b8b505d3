"""What a row says of trees, updates and time, on disk too; alarms."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from jaxsearch.data.questions import Question
from jaxsearch.training import metrics, row_files
from jaxsearch.trees.tree import Role, Stop, Tree

CONFIG = base.get_config()


def test_a_resumed_log_has_every_step_once(tmp_path):
  with metrics.open_log(tmp_path, 0, CONFIG) as write:
    for step in (1, 2, 3):
      write('metrics.jsonl', [{'step': step, 'loss': step / 2}])
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 4, "lo')  # killed while writing
  with (tmp_path / 'metrics.jsonl').open('ab') as file:
    file.write('é'.encode()[:1])  # within a character
  with metrics.open_log(tmp_path, 2, CONFIG) as write:
    write('metrics.jsonl', [{'step': 3, 'loss': float('nan')}])
  assert row_files.read(tmp_path / 'metrics.jsonl') == [
    {'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 1.0}, {'step': 3, 'loss': None}]
  assert list((tmp_path / 'tensorboard').iterdir())



def test_a_broken_line_is_named(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r'metrics.jsonl:2: not JSON'):
    row_files.read(tmp_path / 'metrics.jsonl')


def test_updates_of_a_step_become_one_row():
  updates = [
    {'loss': 1.0, 'tokens_trained': 10, 'ratio_max': 1.5, 'skipped': 0, 'logprob_gap_max': 0.1},
    {'loss': 3.0, 'tokens_trained': 30, 'ratio_max': 1.2, 'skipped': 1, 'logprob_gap_max': 0.7},
  ]
  assert metrics.mean_of(updates) == {
    'loss': 2.0, 'tokens_trained': 40, 'ratio_max': 1.5, 'skipped': 1, 'logprob_gap_max': 0.1}
  row = metrics.to_row({'loss': jnp.float32(0.5), 'count': jnp.int32(3), 'plain': 2})
  assert json.dumps(row) == '{"loss": 0.5, "count": 3, "plain": 2}'


def test_the_clock_counts_seconds_and_programs():
  clock = metrics.Clock()
  with clock('train'):
    jax.jit(lambda x: x * 3 + 1)(np.arange(17.0)).block_until_ready()
  with clock('train'):
    pass
  row = clock.row(tokens=100)
  assert row['compilations'] >= 1 and 0 < row['seconds_train'] <= row['seconds']
  assert row['tokens_per_second'] == pytest.approx(100 / row['seconds'])
  assert metrics.Clock().row(1)['compilations'] == 0


def test_compilations_are_told_and_awaited_ones_counted(capsys):
  metrics.await_programs(['prefill', 'decode', 'prefill'])
  for name, seconds, read in [('prefill', 0.5, False), ('decode', 41.4, False), ('prefill', 12, True),
                              ('prefill', 9, False), ('decode', 31, False)]:
    if read:
      jax.monitoring.record_event_duration_secs(metrics.READ, seconds)
    jax.monitoring.record_event_duration_secs(metrics.COMPILATION, seconds, fun_name=f'jit({name})')
  assert capsys.readouterr().err.splitlines() == [
    'jaxsearch: compiling 2 of 3: decode, 41 s', 'jaxsearch: compiled decode, 31 s']


def test_goodput_is_the_share_of_all_time_since_the_row_before(monkeypatch):
  now = iter([10, 11, 11, 13, 14, 17, 17, 18])  # a row; 2 seconds as in a save; 3 of training
  monkeypatch.setattr(metrics, 'time', types.SimpleNamespace(perf_counter=lambda: next(now)))
  monkeypatch.setattr(metrics.Clock, '_row_before', None)
  metrics.Clock().row(1)
  clock = metrics.Clock()
  with clock('train'):
    pass
  row = clock.row(1)
  assert row['goodput'] == pytest.approx(3 / 7) and row['seconds_train'] / row['seconds'] == 3 / 4


def test_figures_of_a_device(monkeypatch):
  """300 TFLOP of an update a second on eight of 197."""
  device = types.SimpleNamespace(device_kind='TPU v5 lite', memory_stats=lambda: {'peak_bytes_in_use': 3 * 2**29})
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  row = {'seconds_train': 2.0, 'seconds_rollout': 5.0, 'tokens_generated': 100}
  assert metrics.device_figures(row, 10**6, 10**8) == {
    'tokens_per_second_rollout': 20.0, 'tokens_per_second_update': 5e5, 'device_peak_gib': 1.5,
    'mfu': pytest.approx(300 / (8 * 197))}
  device.device_kind, device.memory_stats = 'cpu', lambda: None
  assert set(metrics.device_figures(row, 1000, 10**8)) == {
    'tokens_per_second_rollout', 'tokens_per_second_update'}


def test_what_a_row_says_of_the_trees():
  question = Question('1', 'Which?', ('red',))
  tree = Tree(None, question)
  node = tree.root.append([1, 2, 3], Role.PROMPT)
  for tokens in ([4, 5], [6]):
    node.append(tokens, Role.POLICY)
  tree.reward = 0.5
  row = metrics.summary([[tree]], [[tree]], {})
  assert row['tokens_on_paths'] == 9 and row['tokens_per_tree'] == 6  # a shared prefix counts for each path
  assert row['policy_tokens_per_tree'] == 3
  without = Tree(None, question)  # its method sets no reward
  assert metrics.summary([[tree, without]], [[tree, without]], {})['reward_retained'] == 0.5

  node.append([7] * 8 + [8, 9], Role.POLICY, sampler_logprobs=[-12.0] + [-9.0] * 9)
  row = metrics.summary([[tree]], [[tree]], {})
  assert row['repetition'] == 4 / 7 and row['gibberish'] == 0.1  # of 4-grams, and of tokens

  def group(answers, rewards):
    trees = [Tree(None, question) for _ in answers]
    for tree, tree.answer, tree.reward in zip(trees, answers, rewards):
      tree.root.append([1], Role.PROMPT).append([2, 3], Role.POLICY, sampler_logprobs=[-1.0, -2.0 - tree.reward])
      tree.metrics.update(searches=4 * tree.reward, revised=2)
    return trees

  groups = [group(*one) for one in (('bb', [0, 0]), (['red'] * 2, [1, 1]), ('bc', [0, 1]), ('b', [0]))]
  groups[0][0].stop = Stop.DEADLINE
  row = metrics.summary(groups, [], {})
  assert row['logprob'] == pytest.approx(-1.5 - 3 / 14) and row['em'] == pytest.approx(2 / 7)
  assert row['groups_alike'] == 0.75 and row['groups_alike_wrong'] == pytest.approx(1 / 3)
  assert row['searches'] == pytest.approx(12 / 7) and row['revised_per_tree'] == 2
  assert row['malformed_per_tree'] == 0 and row['stop_deadline_share'] == pytest.approx(1 / 7)
  assert not {'malformed', 'revised', 'stop_deadline'} & set(row)  # some are counts of the sampler


HEALTHY = dict(reward=0.5, logprob=-0.4, logprob_gap=1e-3, entropy=0.4, kl=0.05, policy_tokens_per_tree=40,
               stop_malformed_share=0.1, stop_budget_share=0.1, stop_context_full_share=0.0,
               groups_alike_wrong=0.5, grad_norm=1.0, repetition=0.0, gibberish=0.0, judge_gap=0.0)


def get_config(**monitor):
  config = base.get_config().unlock()
  config.monitor.update(window=3, patience=2, entropy_low=0.01, grad_norm=20.0)
  config.monitor.update(monitor)
  return config


def alarms(changes, **limits):
  """The alarms at the end of a run whose steps have these figures."""
  rows = [metrics.remember(HEALTHY | {'step': step} | change) for step, change in enumerate(changes, start=1)]
  return metrics.find_alarms(rows, get_config(**limits).monitor)


def test_what_was_sampled_is_added_up_over_processes(monkeypatch):
  monkeypatch.setattr(metrics.transfer, 'gather_objects', lambda value: [value] * 2)
  sampled = {'tokens_decoded': 9, 'tokens_generated': 7, 'tokens_prefilled': 5, 'calls_open': 2, 'segments': 3,
             'stop_budget': 1, 'seconds': 1.5, 'requests_failed': 1, 'servers_reloaded': 2}
  row = metrics.summary([], [], sampled)
  assert {name: row[name] for name in sampled} == {
    'tokens_decoded': 18, 'tokens_generated': 14, 'tokens_prefilled': 10, 'calls_open': 4, 'segments': 6,
    'stop_budget': 2, 'seconds': 1.5, 'requests_failed': 2, 'servers_reloaded': 4}


@pytest.mark.parametrize('name, change', [
  ('logprob_fall', dict(logprob=-1.5)),
  ('logprob_gap', dict(logprob_gap=0.2)),
  ('entropy_low', dict(entropy=0.001)),
  ('entropy_high', dict(entropy=4.0)),
  ('kl', dict(kl=2.0)),
  ('length_fall', dict(policy_tokens_per_tree=7)),
  ('length_growth', dict(policy_tokens_per_tree=210)),
  ('cut', dict(stop_budget_share=0.6)),
  ('malformed', dict(stop_malformed_share=0.6)),
  ('groups_alike_wrong', dict(groups_alike_wrong=1.0)),
  ('grad_norm', dict(grad_norm=30.0)),
  ('repetition', dict(repetition=0.4)),
  ('gibberish', dict(gibberish=0.1)),
  ('judge_gap', dict(judge_gap=0.3)),
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
    dict(logprob=-0.39, entropy=0.39, kl=0.0, policy_tokens_per_tree=20.8, logprob_gap=3e-7),
    dict(logprob=-0.15, entropy=0.15, kl=0.07, policy_tokens_per_tree=63, stop_budget_share=0.19),
    dict(logprob=-0.01, entropy=0.004, kl=0.02, policy_tokens_per_tree=31, groups_alike_wrong=0.0, grad_norm=2e-7)]
  steps, defaults = [change for change in learning for _ in range(6)], base.get_config().monitor
  assert not any(alarms(steps[:step], **defaults) for step in range(1, len(steps) + 1))


def test_a_length_is_that_of_trees_whatever_else_was_sampled():
  older = {'tokens_generated': 900, 'trees': 10}
  assert metrics.remember(older)['length'] == 90 and metrics.remember(HEALTHY | older)['length'] == 40


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
    stop = metrics.watch(told, row, config, said.append)
    if stop:
      break
  assert told == [metrics.remember(row) for row in rows[:len(told)]]  # so a resumed run has the same history
  return rows, said, stop


BAD = dict(stop_malformed_share=0.9, reward=0.1)


def test_an_alarm_is_said_once_when_it_begins_and_once_when_it_ends():
  rows, said, stop = watched(get_config(), [{}] * 3 + [BAD] * 5 + [{}] * 3)
  assert [row.get('alarms') for row in rows] == [None] * 4 + ['malformed'] * 5 + [None] * 2
  assert said == ['step 5: malformed 0.633 > monitor.malformed=0.5, the mean of 3 steps',
                  'step 10: malformed no longer alarms']
  assert not stop


def test_a_run_stops_after_an_alarm_that_lasts():
  changes = [{}] * 3 + [BAD] * 2 + [{}] * 2 + [BAD] * 4  # an alarm of two steps, and one of three
  _, said, stop = watched(get_config(action='stop', patience=3), changes)
  assert len(said) == 3
  assert stop.startswith('step 11: malformed 0.9 > monitor.malformed=0.5 for 3 steps (monitor.action=')
  assert watched(get_config(action='stop', patience=3), changes[:-1])[2] == ''
