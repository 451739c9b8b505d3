"""The analysis of benchmarks/soak.py: a flat run is flat, and a leak is named."""

import importlib.util
import json
import os
import pathlib

import numpy as np
import pytest

_FILE = pathlib.Path(__file__).parents[1] / 'benchmarks' / 'soak.py'
_SPEC = importlib.util.spec_from_file_location('benchmarks_soak', _FILE)
soak = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(soak)

STEPS = 1200


def make_run(folder, an_hour):
  """Writes two hours of a run that holds 2000 MiB after a first quarter of 1500, and grows `an_hour` MiB."""
  steps = np.arange(STEPS)
  noise = np.random.default_rng(0).normal(0, 2.0, STEPS)
  resident = np.where(steps < STEPS // 4, 1500, 2000) + noise + an_hour * steps / 600
  rows = [{'step': i + 1, 'resident_mib': round(size, 1), 'compilations': 0} for i, size in enumerate(resident)]
  folder.mkdir()
  (folder / 'config.json').write_text('{"keep_checkpoints": 2, "checkpoint_every": 10}')
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  for name, at in (('config.json', 0), ('metrics.jsonl', 7200)):
    os.utime(folder / name, (at, at))
  sample = {'fds': 14, 'threads': 34, 'checkpoints': 3,
            'files': {'config.json': [1, 47], 'checkpoints': [30, 2**20], 'metrics.jsonl': [1, 5]}}
  samples = [sample | {'resident_mib': size} for size in resident[::12]]
  (folder / 'soak.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in samples))
  return folder


def test_a_leak_is_named_and_a_flat_run_is_flat(tmp_path):
  flat = soak.analyse(make_run(tmp_path / 'flat', 0.0))
  assert flat['flat'] and flat['grows'] == [] and abs(flat['mib_per_hour']) < 3
  leak = soak.analyse(make_run(tmp_path / 'leak', 60.0))
  assert not leak['flat'] and leak['grows'] == ['resident_mib']
  assert leak['interval'][0] < 60 < leak['interval'][1] and leak['mib_per_hour'] == pytest.approx(60, abs=2)
