"""Rows of metrics on disk, and how the updates of a step become one row."""

import json
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxsearch.training import metrics, row_files

CONFIG = ConfigDict({'log': ()})


def test_a_resumed_log_has_every_step_once(tmp_path):
  with metrics.open_log(tmp_path, 0, CONFIG) as write:
    for step in (1, 2, 3):
      write('metrics.jsonl', [{'step': step, 'loss': step / 2}])
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 4, "lo')  # killed while writing
  with metrics.open_log(tmp_path, 2, CONFIG) as write:
    write('metrics.jsonl', [{'step': 3, 'loss': float('nan')}])
  assert row_files.read(tmp_path / 'metrics.jsonl') == [
    {'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 1.0}, {'step': 3, 'loss': None}]
  assert list((tmp_path / 'tensorboard').iterdir())


def test_a_new_run_begins_an_empty_file(tmp_path):
  (tmp_path / 'evaluations.jsonl').write_text('{"step": 0}\n{"step": 5}\n')
  row_files.keep_steps(tmp_path / 'evaluations.jsonl', 0)
  assert (tmp_path / 'evaluations.jsonl').read_text() == ''


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


def test_a_slow_compilation_is_told(capsys):
  for seconds in (3.0, 31.4):
    jax.monitoring.record_event_duration_secs(metrics.COMPILATION, seconds, fun_name='decode')
  said = capsys.readouterr().err
  assert re.fullmatch(r'jaxsearch: compiled decode in 31 s, program \d+\n', said)


def test_goodput_is_the_share_of_all_time_since_the_row_before():
  metrics.Clock().row(1)
  start = time.perf_counter()
  time.sleep(0.1)  # as in a save
  clock = metrics.Clock()
  with clock('train'):
    time.sleep(0.1)
  row = clock.row(1)
  assert row['goodput'] == pytest.approx(row['seconds_train'] / (time.perf_counter() - start), rel=0.2)
  assert row['goodput'] < 0.8 < row['seconds_train'] / row['seconds']


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
