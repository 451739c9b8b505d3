"""Methods train in the calls of their model: a small Qwen3, one with its real tokenizer, and SmolLM2."""

import functools
import math
import pathlib

import jax
import pytest

from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import loop, row_files
from tests.training import tiny
from tests.trees.speaking import real, small, smollm2

SYSTEMS = ('cusearch', 'search_r2', 'r_search', 'slate', 'carl', 'igpo', 'gigpo', 'tree_grpo', 'trace')
MODELS = {'small': lambda folder: tiny.qwen3(folder, small('hermes')),
          'qwen3': lambda folder: tiny.qwen3(folder, real('qwen3')), 'smollm2': lambda folder: str(smollm2())}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(meshes, 'make_mesh', functools.partial(meshes.make_mesh, devices=jax.devices()[:1]))


@pytest.mark.parametrize('system', SYSTEMS)
@pytest.mark.parametrize('model', [
  'small', pytest.param('qwen3', marks=pytest.mark.needs_weights), pytest.param('smollm2', marks=pytest.mark.needs_weights)])
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_steps_in_native_calls(model, system, tmp_path):
  config = tiny.small_config(system, MODELS[model](tmp_path / 'model'), tmp_path / 'run')
  if model == 'smollm2':  # with what fits into a few gigabytes
    config.lora.rank, config.loss.kl_coef = 4, 0.0
    config.critic.update(shared=False, backbone_rate=0.0)
  loop.train(config)
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert len(rows) == 2
  for row in rows:
    assert math.isfinite(row['loss']) and row['tokens_trained'] > 0 and row['logprob_gap_max'] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('system, changes', [
  ('search_r1_ppo', {}), ('search_r1_ppo', {'train.carry': 1}), ('search_r1_grpo', {'train.carry': 1})])
def test_folded_chains_with_a_critic_and_carried_over(system, changes, tmp_path):
  config = tiny.small_config(system, MODELS['small'](tmp_path / 'model'), tmp_path / 'run')
  config.grow.update(fold='summary', fold_at=0.1, fold_tokens=8)
  config.update_from_flattened_dict(changes)
  loop.train(config)
  for row in row_files.read(pathlib.Path(config.out) / 'metrics.jsonl'):
    assert row['folds_per_tree'] > 0 and row['tokens_trained'] > 0 and row['logprob_gap_max'] < 1e-5
