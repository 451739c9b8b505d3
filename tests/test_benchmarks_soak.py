"""The analysis of benchmarks/soak.py: what grows is named, what is only noisy is not called flat."""

import importlib.util
import json
import os
import pathlib

import numpy as np
import psutil
import pytest

_FILE = pathlib.Path(__file__).parents[1] / 'benchmarks' / 'soak.py'
_SPEC = importlib.util.spec_from_file_location('benchmarks_soak', _FILE)
soak = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(soak)

STEPS = 1200


def make_run(folder, *, an_hour=0.0, noise=2.0, wider_rows=False, compiled=None, **last_sample):
  """Two hours of a run that holds 2000 MiB after a first quarter of 1500, 100 more from step `compiled` on; and its samples."""
  rng = np.random.default_rng(0)
  lifted = 100 * (np.arange(STEPS) >= (STEPS if compiled is None else compiled))
  resident = np.where(np.arange(STEPS) < STEPS // 4, 1500, 2000) + rng.normal(0, noise, STEPS) + an_hour * np.arange(STEPS) / 600
  resident += lifted
  rows = [{'step': i + 1, 'resident_mib': round(size, 1), 'compilations': 2 * (i == compiled),
           'text': 'x' * (i // 10 if wider_rows else 10)} for i, size in enumerate(resident)]
  (folder / 'tensorboard').mkdir()
  (folder / 'tensorboard' / 'events').write_bytes(bytes(STEPS * 100))
  (folder / 'config.json').write_text('{"keep_checkpoints": 2, "checkpoint_every": 10}')
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  for name, at in (('config.json', 0), ('metrics.jsonl', 7200)):
    os.utime(folder / name, (at, at))
  sample = {'fds': 14, 'threads': 34, 'checkpoints': 3,
            'files': {'config.json': [1, 47], 'checkpoints': [30, 2**20], 'metrics.jsonl': [1, 5]}}
  samples = [sample | {'resident_mib': size} for size in resident[::12]]
  samples = samples[:-25] + [one | last_sample for one in samples[-25:]]
  (folder / 'soak.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in samples))
  return folder


def test_a_flat_run(tmp_path):
  found = soak.analyse(make_run(tmp_path))
  assert found['flat'] and found['grows'] == []
  assert found['steps'] == STEPS and found['minutes'] == 120
  assert found['resident_mib'] == dict.fromkeys(('quarter', 'half', 'end'), pytest.approx(2000, abs=2))
  assert abs(found['mib_per_hour']) < 3 and found['interval'][1] < found['limit_mib_per_hour'] == pytest.approx(40, abs=0.1)
  assert found['bytes_per_step']['tensorboard'] == 100 and found['peak_mib'] == pytest.approx(2000, abs=20)
  assert found['checkpoints'] == {'most': 3, 'mib': 1.0} and found['other_files'] == {'config.json': 47}


@pytest.mark.parametrize('change, named', [
  (dict(an_hour=60.0), 'resident_mib'), (dict(noise=400.0), 'resident_mib'), (dict(wider_rows=True), 'metrics.jsonl'),
  (dict(fds=15), 'fds'), (dict(threads=40), 'threads'), (dict(checkpoints=4), 'checkpoints'),
  (dict(files={'config.json': [1, 47], 'leak.tmp': [1, 1]}), 'leak.tmp'),
])  # fmt: skip
def test_what_grows_is_named(tmp_path, change, named):
  found = soak.analyse(make_run(tmp_path, **change))
  assert found['grows'] == [named] and not found['flat']
  if named == 'resident_mib' and 'an_hour' in change:
    assert found['interval'][0] < 60 < found['interval'][1] and found['mib_per_hour'] == pytest.approx(60, abs=2)


@pytest.mark.parametrize('compiled', [STEPS // 2, STEPS * 3 // 4])
def test_programs_that_are_compiled_late_lift_the_line_and_a_leak_is_seen_all_the_same(tmp_path, compiled):
  (flat := tmp_path / 'flat').mkdir(), (leaks := tmp_path / 'leaks').mkdir()
  found = soak.analyse(make_run(flat, compiled=compiled))
  assert found['flat'] and abs(found['mib_per_hour']) < 3 and found['compilations_late'] == 1
  found = soak.analyse(make_run(leaks, compiled=compiled, an_hour=60.0))
  assert found['grows'] == ['resident_mib'] and found['mib_per_hour'] == pytest.approx(60, abs=4)


def test_slow_waves_widen_the_interval():
  steps, one = np.arange(STEPS), np.zeros(STEPS, int)
  _, low, high = soak.slope(2000 + 50 * np.sin(steps / 40), one)
  _, low_of_noise, high_of_noise = soak.slope(2000 + np.random.default_rng(0).normal(0, 35, STEPS), one)
  assert low < 0 < high and high - low > 3 * (high_of_noise - low_of_noise)


def test_a_run_that_was_not_sampled_and_one_that_is_too_short(tmp_path):
  run = make_run(tmp_path)
  (run / 'soak.jsonl').unlink()
  assert soak.analyse(run)['flat'] and 'fds' not in soak.analyse(run)
  lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (run / 'metrics.jsonl').write_text(''.join(lines[:20]))
  with pytest.raises(SystemExit, match='2 saves are too few'):
    soak.analyse(run)


def test_a_folder_with_a_run_and_a_run_that_ends_by_itself(tmp_path):
  with pytest.raises(SystemExit, match='holds a run already: choose another --out'):
    soak.soak('quickstart', [], 1.0, make_run(tmp_path))
  with pytest.raises(SystemExit, match='ended by itself, with status 2'):
    soak.soak('quickstart', ['--config.group_size=none'], 1.0, tmp_path / 'other')


def test_a_sample_counts_what_is_there(tmp_path):
  for name in ('checkpoints/5/params', 'checkpoints/10.orbax-checkpoint-tmp', 'tensorboard'):
    (tmp_path / name).mkdir(parents=True)
  for name in ('checkpoints/5/params/a', 'tensorboard/events', 'metrics.jsonl'):
    (tmp_path / name).write_bytes(bytes(7))
  with (tmp_path / 'soak.jsonl').open('w'):
    found = soak.sample(psutil.Process(), tmp_path)
  assert found['files'] == {'checkpoints': [1, 7], 'tensorboard': [1, 7], 'metrics.jsonl': [1, 7]} and found['checkpoints'] == 2
  assert found['resident_mib'] > 10 and found['fds'] >= 3 and found['threads'] >= 1
