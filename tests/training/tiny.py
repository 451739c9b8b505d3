"""Shipped configs made small: two steps of few short chains, for a random model of any tokenizer."""

import dataclasses
import importlib
import pathlib

import jax

from jaxsearch.models import hub
from jaxsearch.models.architecture import initial_params, preset
from jaxsearch.models.decoder import Decoder
from jaxsearch.models.tokenizer import Tokenizer


def qwen3(folder: pathlib.Path, tokenizer: Tokenizer) -> str:
  """A Qwen3 with few random weights, as a folder."""
  sizes = dict(vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2,
               num_kv_heads=1, head_dim=16, dtype='float32')
  config = dataclasses.replace(preset('qwen3-0.6b'), **sizes)
  hub.save(Decoder(config, params=initial_params(config, jax.random.key(0))), folder, tokenizer)
  return str(folder)


def small_config(name: str, model: str, out: pathlib.Path, native: bool = True):
  """A config of configs/ for one device; `native`: in the calls of the model, with prompts for them."""
  config = importlib.import_module(f'configs.{name}').get_config().unlock()
  config.model, config.out, config.progress, config.steps = model, str(out), False, 2
  if native:
    own = config.method in ('r_search', 'carl', 'research', 'step_search')
    config.grow.update(template='r1' if name == 'r1' else config.method if own else 'search_r1', grammar='auto')
  changes = dict(max_tokens=24, max_turns=2, budget=2, k=2, max_segments=3, context_tokens=8)
  changes |= {'review': 'search_r2'} if native else {}
  for field, value in changes.items():
    if field in config.grow:
      config.grow[field] = min(value, config.grow[field]) if type(value) is int else value
  config.questions_per_step, config.group_size = 2, 1 if config.method == 'slate' else 2
  config.sampler.update(slots=4, length=1024, max_observation=128)
  config.train.update(row_length=2048, micro_rows=1, epochs=1, mini_batch=0, chunk=256)
  config.mesh.update(data=1, fsdp=1, tensor=1)
  config.eval.every, config.critic.warm_start, config.remat = 0, '', 'full'
  config.optim.update(learning_rate=1e-4)
  return config
