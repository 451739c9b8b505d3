"""Every config that ships loads, and names only arguments that its method takes."""

import importlib
import pathlib

import pytest

from configs import smollm2_wiki
from configs.claims import cusearch_tables
from jaxsearch.config_check import check
from jaxsearch.evaluation import sweep

NAMES = sorted(path.stem for path in (pathlib.Path(__file__).parent.parent / 'configs').glob('*.py')
               if path.stem != 'checks')
METHODS = [name for name in NAMES if name not in ('world_policy', 'world_beds', 'sft', 'sft_gold', 'smollm2',
                                                  'smollm2_wiki')]


@pytest.mark.parametrize('name', [name for name in NAMES if 'qwen' in name or 'llama' in name])
def test_a_pod_config_says_what_a_pod_needs(name):
  """A GPU or TPU, many searches at a time, and no checkpoint of tens of gigabytes in every step."""
  config = importlib.import_module(f'configs.{name}').get_config()
  assert config.mesh.accelerator and config.checkpoint_every == 10
  assert config.search.backend != 'http' or config.sampler.tool_workers >= 128


@pytest.mark.parametrize('name', METHODS)
@pytest.mark.parametrize('real', [False, True])
def test_a_config_fits_its_method(name, real):
  if real and ('qwen' in name or 'llama' in name or name in ('base', 'quickstart')):
    pytest.skip('not meant for SmolLM2')
  module, arguments = ('configs.smollm2', [name]) if real else (f'configs.{name}', [])
  config = importlib.import_module(module).get_config(*arguments)
  check(config)
  assert config.is_locked


@pytest.mark.parametrize('module, arguments, group', [
  ('search_r2', [], 'refiner'), ('search_r2_qwen2_5_7b', [], 'refiner'), ('smollm2', ['r_search'], 'reader')])
def test_a_helper_is_the_policys_model_until_it_is_given_its_own(module, arguments, group):
  """And never the other way round: the policy's stays what it is."""
  config = importlib.import_module(f'configs.{module}').get_config(*arguments).unlock()
  config.model = 'one'
  assert config[group].model == 'one'
  length = config.sampler.length
  config[group].update(model='another', length=length + 1)
  assert (config.model, config.sampler.length) == ('one', length)


def test_the_rows_of_cusearchs_tables():
  """S caps the turns as well as the depth; K chains make three updates a step, GRPO-Full six, GRPO-Half
  three."""
  numbers = {table: len(cusearch_tables.get_config(table).variants) for table in cusearch_tables.ROWS}
  assert numbers == {'': 29, '3': 6, '4': 12, '5': 3, '7': 6, '8': 4, 'average': 9}
  config = cusearch_tables.get_config()
  config.seeds = (0,)
  for run in sweep.plan(config):
    credit, chains = run.config.credit, run.config.questions_per_step * run.config.group_size
    chains = chains if credit.strategy == 'full' else credit.keep
    assert chains / run.config.train.mini_batch == (6 if credit.strategy == 'full'
                                                    and 'Half' not in run.variant else 3)
    assert credit.max_depth == run.config.grow.max_turns == (int(run.variant[-1])
                                                             if 'S=' in run.variant else 5)
    assert run.config.search.backend == ('bm25' if 'corpus' in run.variant else 'simulated')
    assert run.config.search.noise_eval == run.config.search.noise_end == 0.5


@pytest.mark.parametrize('name, model', [
  ('qwen2_5_3b', 'Qwen2.5-3B'), ('qwen2_5_7b', 'Qwen2.5-7B'), ('llama3_2_3b', 'Llama-3.2-3B')])
def test_cusearchs_pod_configs_are_table_2_and_zerosearchs_schedule(name, model):
  config = importlib.import_module(f'configs.cusearch_{name}').get_config()
  assert (config.model, config.questions_per_step, config.group_size) == (model, 64, 3)
  assert config.credit.keep == 96
  assert config.train.mini_batch == 32 and config.credit.max_depth == config.grow.max_turns == 5
  assert config.optim.lr_warmup_updates == int(0.95 * 203 + 0.5) * 96 / 32 and config.steps == 203
  assert (config.optim.learning_rate, config.loss.kl_coef, config.credit.format_weight) == (1e-6, 0.001, 0.2)
  assert (config.search.backend, config.search.topk, config.search.noise_end) == ('simulated', 5, 0.5)
  assert config.search.noise_eval == 0.5  # table 1 evaluates with the simulator
  assert config.grow.chat == ('qwen' in name)  # figure 5; Llama's base model has no chat template


def test_the_stages_of_smollm2_wiki_show_the_policy_the_same():
  stages = {name: smollm2_wiki.get_config(name) for name in ('chains', 'sft', 'rl')}
  for config in stages.values():
    check(config)
    assert config.is_locked
    for group in ('grow', 'search', 'sampler', 'lora'):
      assert config[group] == stages['chains'][group]
  with stages['sft'].unlocked(), stages['rl'].unlocked():
    stages['sft'].made = stages['rl'].made = '/made'
  assert stages['sft'].sft.demonstrations == '/made/chains.jsonl'
  assert (stages['rl'].data.questions, stages['rl'].data.corpus) == ('/made/hard_questions.jsonl',
                                                                     '/made/corpus.jsonl')
  with pytest.raises(ValueError, match="the stages are 'chains', 'sft' and 'rl'"):
    smollm2_wiki.get_config('reinforcement')
