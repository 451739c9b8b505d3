"""The three parts of benchmarks/accelerator.py in a tiny form, all but the speed of a device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import accelerator, accelerator_kernels

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.slow  # of a script for devices that are rarely there
SMALL = '--presets=world-reader', '--length=192', '--slots=3'
TINY = '--gib=0.001', '--dtype=float32'


def last_line(*arguments):
  """What the benchmark ends with; nothing in it is infinite or no number."""
  command = [sys.executable, ROOT / 'benchmarks/accelerator.py', *arguments]
  settings = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
  out = subprocess.run(command, cwd=ROOT, env=settings, check=True, stdout=subprocess.PIPE, text=True).stdout
  return json.loads(out.splitlines()[-1], parse_constant=pytest.fail)


def results(*arguments):
  """The last line of a part that fails nowhere."""
  found = last_line(*arguments, *TINY)
  assert found['device']['platform'] == 'cpu' and found['limits']['tflops'] > 0 and 'failed' not in found
  return found


def test_check():
  found = results('check', *SMALL)
  rows, auto = found['rows_world-reader'], found['auto_and_dense']
  assert 0 < max(rows['errors'].values()) < 0.02  # by interpretation
  assert 0 < max(found['flash_world-reader']['errors'].values()) < 0.02
  for kind in ('decode', 'prefill'):
    errors = found[f'{kind}_world-reader']['errors']
    assert errors['written'] == 0 < errors['result'] < 0.02
  assert all(found[f'{kind}_world-reader']['errors']['result'] < 0.02 for kind in ('int8', 'fp8'))
  again = found['started_again']
  assert again['parameters_differ_by'] == 0 and again['read_seconds'] < again['compile_seconds']
  assert found['device']['hosts'] == 1 and found['device']['mesh'] == {'data': 1, 'fsdp': 1, 'tensor': 1}
  assert auto['loss'] == auto['loss_dense'] and auto['logprob_gap'] == auto['grad_norm'] == 0  # on CPUs both are dense


def test_a_wrong_kernel_fails(capsys, monkeypatch):
  attend = accelerator_kernels.paged_attention.attend
  wrong = lambda q, *given, **options: attend(q * 1.1, *given, **options)
  monkeypatch.setattr(accelerator_kernels.paged_attention, 'attend', wrong)
  monkeypatch.setattr(accelerator, 'rows_kernel', lambda *_: {})
  for other in ('auto_and_dense', 'started_again', 'quantised_product'):
    monkeypatch.setattr(accelerator, other, lambda *_: {})
  assert accelerator.main(['check', *SMALL, *TINY]) == 1
  failed = json.loads(capsys.readouterr().out.splitlines()[-1])['failed']
  assert list(failed) == ['decode_world-reader', 'prefill_world-reader']
  assert all('differs from the dense path' in reason for reason in failed.values())


def test_settings_of_decode_attention(monkeypatch):
  monkeypatch.setattr(accelerator_kernels, 'SETTINGS', [(1, 16, 4, 2), (2, 16, 4, 2)])
  monkeypatch.setattr(accelerator_kernels, 'STEPS', 1)
  config = accelerator.preset('world-reader')
  *found, ours = accelerator_kernels.decoding_settings(config, 2, 600, 300).items()
  assert ours[0] == 'ours' and min(ms for _, ms in (*found, ours)) > 0
  assert len(found) == 2 and found[0][1] <= found[1][1]  # the fastest first


def test_decode():
  found = results('decode', '--preset=world-reader', '--slots=2', '--lengths', '64')
  assert found['token_at_64']['ms'] >= found['token_at_64']['ms_least'] > 0
  assert found['token_at_64']['launches_a_token'] > 3  # layers of the model
  assert 0 < found['host']['host_share'] < 1


def test_update(monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')  # a host with several
  found = results('update', '--preset=world-reader', '--length=320', '--rollouts=2', '--rows=1',
                  '--run=world-reader', '--questions=2', '--tokens=24')
  assert found['update']['planned_gib'] > 0 and found['update']['peak_gib'] is None  # CPUs do not tell
  assert found['update']['tokens'] == 2 * 64 + (1 + 2) * 128
  launches, all_of_them, *longest = found['update']['kernels'].values()
  assert launches > 12 == len(longest) and all_of_them >= sum(longest) > 0
  assert found['run']['compilations_of_steps'][2] == 0 and found['run']['logprob_gap'] < 0.05
  assert found['run']['seconds_train'] > 0 and found['run']['seconds_rollout'] > 0


def test_a_third_step_that_compiles_and_a_sampler_that_differs_fail(capsys, monkeypatch):
  monkeypatch.setattr(accelerator, 'policy_update', lambda *_: {})
  monkeypatch.setattr(accelerator, 'real_run', lambda *_: {'compilations': 1, 'logprob_gap': 0.06})
  assert accelerator.main(['update', *TINY]) == 1
  assert list(json.loads(capsys.readouterr().out.splitlines()[-1])['failed']) == ['compilations', 'logprob_gap']
