"""Every config that ships loads, and names only arguments that its method takes."""

import importlib
import inspect
import pathlib

import pytest

from jaxsearch.config_check import check
from jaxsearch.methods import find_method

NAMES = sorted(path.stem for path in (pathlib.Path(__file__).parent.parent / 'configs').glob('*.py') if path.stem != 'checks')
METHODS = [name for name in NAMES if name not in ('world_policy', 'sft', 'sft_gold', 'smollm2')]


@pytest.mark.parametrize('name', METHODS)
@pytest.mark.parametrize('real', [False, True])
def test_a_config_fits_its_method(name, real):
  if real and ('qwen' in name or name in ('base', 'quickstart')):
    pytest.skip('not meant for SmolLM2')
  config = importlib.import_module('configs.smollm2').get_config(name) if real else importlib.import_module(
    f'configs.{name}').get_config()
  method = find_method(config.method)
  check(config)
  for field in ('grow', 'credit', 'sizes'):
    if hasattr(method, field) or config[field]:
      known = inspect.signature(getattr(method, field)).parameters
      assert set(config[field]) <= set(known), field
  assert set(config.eval.grow) <= set(inspect.signature(method.grow).parameters)
  if 'critic_warmup' in config:
    for kind in ('closed_book', 'tool_required', 'multi_hop'):
      assert set(config.critic_warmup[kind]) <= set(inspect.signature(method.grow).parameters), kind
  assert all(service in config for service in getattr(method, 'SERVICES', ()))
  assert config.is_locked


def test_real_input_is_one_folder():
  from configs import smollm2
  config = smollm2.get_config('cusearch')
  config.folder = '/elsewhere'
  assert config.data.questions == '/elsewhere/qa/train_hotpotqa_2wiki.jsonl'
  assert config.data.corpus == '/elsewhere/wiki_corpus.jsonl'
