"""Plans of a small config for simulated devices, and for real targets where their compilers are installed."""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import search_r1_grpo
from jaxsearch import cli
from jaxsearch.models.architecture import PRESETS, parameter_shapes, preset
from jaxsearch.parallel import targets
from jaxsearch.planning import costs, plan, programs
from jaxsearch.training import learner
from tests.parallel.compilers import target_of

FEW = ('--config.model=random:world-reader', '--config.sampler.length=64', '--config.sampler.slots=8',
       '--config.train.row_length=128', '--config.train.chunk=64')


@pytest.fixture
def config():
  config = search_r1_grpo.get_config().unlock()
  config.model = 'random:world-reader'
  config.sampler.update(length=64, slots=8)
  config.train.update(row_length=128, micro_rows=8, chunk=64)
  return config.lock()


@pytest.fixture
def target(monkeypatch):
  """Four simulated CPU devices in the place of H100s, of which half the memory is a GiB."""
  monkeypatch.setattr(targets.Target, 'devices', lambda self: jax.devices()[:4])
  return targets.parse('cuda:h100:1x4')


def parameters(model=None):
  shapes = parameter_shapes(model or preset('world-reader'))
  return sum(map(math.prod, jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))))


def test_a_small_plan(config, target):
  """One compilation of all programs; the figures that follow from shapes are computed again here."""
  said = []
  with config.unlocked():
    config.train.micro_rows, config.sampler.engine = 6, 'vllm'
  made = plan.plan(config, target, say=said.append)
  assert said[0] == 'train.micro_rows=6 does not split over 4 devices, planned with 8' and len(said) == 5
  resident, update, decode = made['resident'], made['programs']['update'], made['programs']['decode']
  assert list(made['programs']) == ['update', 'score', 'prefill', 'decode'] and not made['released']
  # Policy and reference over 4 devices, the sampler's weights in 2 lanes over the 2 key/value heads, in
  # float32.
  assert resident['parameters'] == pytest.approx(parameters() * 4 * (1 / 4 + 1 / 4), rel=0.02)
  assert resident['weights'] == pytest.approx(parameters() * 4 / 2, rel=0.02)
  assert resident['moments'] == pytest.approx(parameters() * 8 / 4, rel=0.02)
  # The slots in pages, and again as they are decoded; tokens, rounded up.
  rows, length = 4 + 4, 192
  assert resident['cache'] == 3 * 2 * rows * 1 * 32 * length * 4
  assert update['memory']['gradients'] == pytest.approx(parameters() * 4 / 4, rel=0.02)
  assert update['memory']['resident'] == sum(resident.values())
  assert update['memory']['total'] > sum(resident.values()) + update['memory']['gradients']
  # Two rows of 128 tokens a device; forward and backward of the matrices of the feed-forward layers alone.
  assert update['each']['flops'] > 6 * 3 * 128 * 384 * 3 * 2 * 128
  # State and gradients, read and written; in every micro-batch the passes of a layer read its matrices.
  state = resident['moments'] + parameters() * 4 / 4 + update['memory']['gradients']
  assert update['once']['bytes'] == pytest.approx(2 * state, rel=0.02)
  assert update['each']['bytes'] > 3 * parameters() * 4
  # Half of the model's matrices, and of the cache the slots' half, some window of it.
  assert decode['each']['bytes'] > resident['weights'] + resident['cache'] / 4
  assert {kind for kind, *_ in update['collectives']} & {'all-gather', 'all-reduce'}
  assert update['each']['received'] > 0
  # The slowest resource is the least time.
  assert update['each']['arithmetic'] == update['each']['flops'] / 989e12
  assert update['each']['memory'] == update['each']['bytes'] / 3352e9
  assert update['each']['network'] == update['each']['received'] * 3 / 4 / 450e9
  assert made['fits'] and made['advice'] == ''
  limits, published = made['workloads']['limits'], made['workloads']['published']
  assert made['step_seconds'] == pytest.approx(sum(limits['roofline_seconds'].values()))
  assert made['expected_step_seconds'] == pytest.approx(sum(limits['expected_seconds'].values()))
  # One update; products at half of the peak, every collective 10 us.
  spent = [max(update[part]['arithmetic'] / 0.6, update[part]['memory'] / 0.76, update[part]['network'])
           + 1e-5 * sum(times for _, _, times, in_turn in update['collectives'] if in_turn == (part == 'each'))
           for part in ('once', 'each')]
  micro_batches = math.ceil(math.ceil(made['work']['trained'] / 128) / 8)
  assert limits['expected_seconds']['update'] == pytest.approx(spent[0] + micro_batches * spent[1])
  # A host, one after the other; 2,560 chains of 2.5 spans.
  assert published['expected_seconds']['rollout'] - published['roofline_seconds']['rollout'] > 6400 * 0.77e-3
  assert made['bytes_per_device'] == max(each['memory']['total'] for each in made['programs'].values())
  lines = list(plan.lines(made, target))
  assert any('fits' in line for line in lines)
  # Whole, in float32, through a disk that the servers' host reads.
  assert made['reload_bytes'] == parameters() * 4 and 1 <= made['servers'] <= 3
  assert made['reload_seconds'] == pytest.approx(parameters() * 4 * (1 / 880 + 1 / 2600) / 2**20)
  assert any('new weights, 0.' in line and 'before each rollout' in line for line in lines)
  short = plan.short(made | {'target': 'x'})
  kept = {'fits', 'bytes_per_device', 'reload_seconds', 'step_seconds', 'expected_step_seconds', 'workloads'}
  assert kept <= short.keys() and json.dumps(short)


def test_the_advice_names_the_field_that_makes_room(config, target):
  run = programs.of_config(config, target.devices())
  held = sum((run.parameters, run.moments, run.weights, run.cache))
  advise = lambda limit, run=run, config=config, **needs: plan.advice(config, run, needs, limit)
  assert not run.released and advise(held + 100, update=100) == ''
  assert advise(held + 99, update=100, score=100) == 'a smaller train.micro_rows (for update, score)'
  assert advise(held + 99, decode=100) == 'a smaller sampler.slots: the cache of 8 takes 0.0 GiB (for decode)'
  assert advise(held - 1, update=0).startswith('a smaller sampler.slots')
  assert advise(run.parameters, update=0).startswith('more devices along mesh.fsdp')
  one_row = programs.changed(config, {'train': {'micro_rows': 4}})
  assert advise(held + 99, config=one_row, update=100) == "remat='full' (for update)"
  with one_row.unlocked():
    one_row.remat = 'full'
  assert advise(held + 99, config=one_row, update=100).startswith('mesh.tensor=2')
  hosts = dataclasses.replace(run, hosts=2, released=True, moments=0, load=run.weights)
  assert advise(run.parameters + run.weights, run=hosts, load=run.weights).startswith(
    "hosts of more devices: the sampler's weights take 0.0 GiB of each device")


def test_what_the_sampler_holds_is_counted_where_it_is_released(config, target):
  with config.unlocked():
    config.sampler.release = True
  run = programs.of_config(config, target.devices())
  held = run.parameters + run.moments
  assert run.released and run.resident('score') == held
  assert run.resident('prefill') == held + run.weights + run.cache
  assert run.resident('load') == held + run.weights


@pytest.mark.parametrize('changes, passes', [
  ({}, 1), ({'loss.kl_coef': 0.0}, 0), ({'train.mini_batch': 4, 'dtype': 'bfloat16'}, 2),
  ({'train.mini_batch': 4}, 1),
  ({'train.epochs': 2, 'train.old_logprobs': 'recompute', 'loss.kl_coef': 0.0}, 1)])
def test_what_is_scored_before_updates(config, changes, passes):
  """The reference, and the policy where its own log-probabilities are the old ones of more than one
  update."""
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  assert learner.score_passes(config) == passes


@pytest.mark.parametrize('master, dtype', [(True, 'bfloat16'), (False, 'float32')])
def test_new_weights_are_a_cast_copy(config, target, master, dtype):
  with config.unlocked():
    config.dtype, config.optim.master_weights = dtype, master
  run = programs.of_config(config, target.devices())
  assert run.hosts == 1 and run.load == pytest.approx(parameters() * np.dtype(dtype).itemsize / 4, rel=0.02)


# A compiler's own words; what it counts are arguments, results and temporaries together.
REFUSED = ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (36.00G) exceeds '
           'available HBM (31.25G).')


def test_arguments_of_a_refused_program_are_not_counted_twice(target, monkeypatch):
  def refuse(self):
    raise jax.errors.JaxRuntimeError(REFUSED)

  monkeypatch.setattr(jax.stages.Lowered, 'compile', refuse)
  x = jax.ShapeDtypeStruct((9 * 2**15, 2**14), np.float32,
                           sharding=jax.sharding.SingleDeviceSharding(target.devices()[0]))
  refused = plan.compile_program(programs.Program(jax.jit(lambda x: x + 1), (x,)), target)
  assert refused == plan.Compiled(18 * 2**30, None)


def test_the_search_finds_the_largest_values(config, target, monkeypatch):
  """Without a compiler: a program needs a number of bytes for every row, as wide as its batch or its
  slots, and prefill the same whatever these are."""
  of_prefill = 0
  def compile_program(program, target):
    for tokens in (given.tokens for given in program.args if hasattr(given, 'tokens')):
      return plan.Compiled(1e6 * tokens.shape[tokens.ndim > 1], [])
    return plan.Compiled(of_prefill, [])

  monkeypatch.setattr(plan, 'compile_program', compile_program)
  run = programs.of_config(config, target.devices())
  monkeypatch.setitem(targets.DEVICES, 'cuda:h100', dataclasses.replace(
    target.device, memory=int((run.resident('decode') + 41.5e6) / plan.POOL)))
  with config.unlocked():
    config.train.micro_rows, config.sampler.engine = 6, 'vllm'  # adjusted as in a plan
  found = plan.search(config, target, say=lambda _: None)
  assert found['train.micro_rows'] == 40
  a_slot = run.cache / 8
  assert found['sampler.slots'] == int((41.5e6 + run.cache) / (1e6 + a_slot)) // 2 * 2
  of_prefill = 40e6
  found = plan.search(config, target, say=lambda _: None)
  assert found == {'train.micro_rows': 40, 'sampler.slots': int((1.5e6 + run.cache) / a_slot) // 2 * 2}


def test_a_plan_is_kept_where_its_search_fails(monkeypatch, tmp_path):
  made = {'programs': {}, 'fits': True}
  for name, stand_in in {'plan': lambda *_, **__: made, 'lines': lambda *_: (), 'search': lambda *_: 1 / 0}.items():
    monkeypatch.setattr(plan, name, stand_in)
  monkeypatch.setattr(jax.config, 'update', lambda *_: None)
  command = ['plan', '--target=cuda:h100:1x1', '--search', f'--out={tmp_path / "plan.json"}']
  assert cli.main(command) == 70
  assert json.loads((tmp_path / 'plan.json').read_text()) == made | {'target': 'cuda:h100:1x1'}


@pytest.mark.parametrize('name, kinds', [
  ('carl_qwen2_5_7b', {'update', 'score', 'critic', 'values', 'prefill', 'decode'}),
  ('slate_qwen2_5_7b', {'update', 'score', 'prefill', 'decode'}),
  ('r_search_ppo_qwen2_5_3b', {'update', 'score', 'critic', 'values', 'prefill', 'decode'})])
def test_every_kind_of_run_can_be_planned(name, kinds):
  """At real size, from shapes alone."""
  config = importlib.import_module(f'configs.{name}').get_config()
  with config.unlocked():
    config.train.micro_rows = 8
  run = programs.of_config(config, jax.devices()[:8])
  assert set(run.programs) == kinds
  model = preset('qwen2.5-3b' if '3b' in name else 'qwen2.5-7b')
  count = parameters(model)
  sampled = 2 / math.gcd(8, model.num_kv_heads)
  # Master weights, reference, the critic's own decoder; moments of policy and critic (without embeddings), of
  # an adapter.
  masters = {'carl': 4 + 2, 'slat': 2 + 0.135, 'r_se': 4 + 2 + 4}[name[:4]] / 8
  assert run.parameters == pytest.approx(count * masters, rel=0.03)
  assert run.weights == pytest.approx(count * sampled, rel=0.03)
  assert run.moments == pytest.approx(count * {'carl': 8 + 7, 'slat': 0.27, 'r_se': 16}[name[:4]] / 8,
                                      rel=0.1)
  for program in ('update', 'score', 'critic', 'values'):
    if program in kinds:
      _, (flops, *_) = costs.count(programs.share(config, run)[program][0].trace().jaxpr.jaxpr)
      # FLOPs a token and parameter: 2 forward, with remat 8; attention too
      each = flops / config.train.row_length / count
      assert 1.8 < each < 4 if program in ('score', 'values') else 5 < each < 16, (program, each)


@pytest.mark.slow  # a minute or two each, where the compilers are installed
@pytest.mark.parametrize('name', ['tpu:v5p:2x2x1', 'cuda:h100:1x4', 'cuda:h100:1x1'])
def test_a_real_target(name, tmp_path):
  target_of(name)
  command = [sys.executable, '-m', 'jaxsearch.cli', 'plan', '--config=search_r1_grpo', f'--target={name}',
             *FEW, '--out', str(tmp_path / 'plan.json'), '--config.train.micro_rows=4']
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['fits'] and found['bytes_per_device'] >= sum(found['resident'].values()) and found['step_seconds'] > 0
  whole = json.loads((tmp_path / 'plan.json').read_text())
  assert all(one['once']['bytes'] + one['each']['bytes'] > 0 for one in whole['programs'].values())
  assert whole['programs']['decode']['each']['bytes'] > 0 and whole['programs']['update']['each']['flops'] > 0
  assert np.isfinite(found['step_seconds'])


@pytest.mark.slow  # a minute or two each, where the compilers are installed
@pytest.mark.parametrize('name', ['tpu:v5p:2x2x1', 'cuda:h100:1x4'])
def test_a_decode_step_moves_the_weights_and_what_is_live_in_the_cache(name, monkeypatch):
  """By the kernel, in place: in lanes with split heads, beside a conditional and in a loop whose length is
  data."""
  target = target_of(name)
  model = dataclasses.replace(preset('qwen2.5-3b'), num_layers=6, vocab_size=16384)
  monkeypatch.setitem(PRESETS, 'few-layers', model)
  config = search_r1_grpo.get_config().unlock()
  config.update(model='random:few-layers', dtype='bfloat16')
  config.sampler.update(slots=128, length=4096)
  config.train.update(row_length=4096, micro_rows=4)
  config.lock()
  of_config = programs.of_config

  def sampling(*given):
    run = of_config(*given)
    return dataclasses.replace(run, programs={name: run.programs[name] for name in programs.SAMPLING})

  monkeypatch.setattr(programs, 'of_config', sampling)
  found = plan.plan(config, target, say=lambda _: None)
  decode, run = found['programs']['decode'], programs.of_config(config, target.devices())
  # Two lanes of two devices: bfloat16 weights, and of 64 slots as many tokens as a path has on average in
  # front of a new one.
  token = 6 * 1 * 2 * 128 * 2
  live = 64 * found['work']['mean_length'] * token
  assert run.token == token and run.weights == pytest.approx(parameters(model), rel=0.02)
  assert found['decode_traffic'] == pytest.approx(decode['each']['bytes'] / (run.weights + live))
  assert 1 < found['decode_traffic'] <= 1.2
  for one, share in ((decode, 0.1), (found['programs']['prefill'], 2.5)):  # scores, but no copy of the cache
    assert one['memory']['total'] - sum(found['resident'].values()) < share * run.cache


@pytest.mark.slow
def test_compilers_of_other_devices_change_nothing_for_other_commands():
  target_of('tpu:v5e:2x2')
  target_of('cuda:h100:1x4')
  environment = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
  command = [sys.executable, '-m', 'jaxsearch.cli', 'eval', '--config=search_r1_grpo', '--limit=1',
             '--config.sampler.slots=1']
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
  assert done.returncode == 0
  # no warning of JAX or libtpu
  assert all(line.startswith('jaxsearch: ') for line in done.stderr.splitlines())


@pytest.mark.parametrize(('phases', 'expected'), [({'rollout': 30, 'score': 2, 'update': 8}, 12),
                                                  ({'rollout': 1, 'score': 0, 'update': 99}, 1),
                                                  ({'rollout': 99, 'score': 0, 'update': 1}, 15)])
def test_servers_get_the_devices_that_rollouts_take(phases, expected):
  assert plan.servers(phases, 16) == expected
