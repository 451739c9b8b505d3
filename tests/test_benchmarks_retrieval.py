"""A million passages: indexed, killed once and resumed, served to 64 clients in bounded memory (benchmarks/retrieval.py)."""

import json
import pathlib
import subprocess
import sys

import pytest

FILE = pathlib.Path(__file__).parents[1] / 'benchmarks' / 'retrieval.py'


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_passages_are_indexed_killed_resumed_and_served_in_eight_gibibytes(tmp_path, passages=1_000_000):
  command = [sys.executable, FILE, f'--synthetic={passages}', f'--index={tmp_path}/index', '--requests=1000']
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert passages / 2 < found['killed_at'] < passages and found['resumed_at'] == found['killed_at']
  assert found['build_gib'] < 8 and found['bm25_gib'] < 8 and found['hybrid_gib'] < 8
  for kind in ('bm25', 'hybrid'):
    assert (found[f'{kind}_requests'], found[f'{kind}_lost']) == (1000, 0)
