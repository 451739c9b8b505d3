"""Every method that trains, and two that only prompt, with the policy on a server: one line of the config."""

import functools
import importlib
import itertools
import math

import jax
import pytest

from jaxsearch import setup
from jaxsearch.evaluation import agents
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.training import loop, row_files
from jaxsearch.trees import grammar, native
from tests.sampler import rollout_servers
from tests.training import tiny
from tests.trees.speaking import small

GROWING = ('search_r1_grpo', 'cusearch', 'search_r2', 'r_search', 'slate', 'carl', 'research', 'step_search', 'igpo', 'gigpo',
           'tree_grpo', 'trace')
CONFIGS = (*GROWING, 'search_r1_ppo', 'r_search_ppo', 'r1', 'zerosearch')  # the last grow as some before them


def student(config, speech):
  """What a policy writes that asks once, then answers, rightly for even seeds."""
  questions = setup.load_questions(config, config.data.questions)[:config.data.number]
  golds = {question.question: question.golden_answers[0] for question in questions}
  calls, tags, code = isinstance(speech, native.Native), speech.tags, 'print(search("a river"))'
  before, _, after = (part.strip() for part in speech.frames.results) if calls else (f'</{tags.observation}>', '', '')

  def script(text, seed):
    asked = max((question for question in golds if question in text), key=text.rfind, default='')
    said, seen = golds.get(asked, '') if seed % 2 == 0 else 'nobody', before in text
    if config.method == 'carl':
      if seen and not (calls and '<context>' in text.rpartition(before)[2].partition(after)[0]):
        return '<context> It is long. </context>'
      if not seen and '</context>' not in text:
        return speech.family.write('python', {'code': code}) if calls else f'```python\n{code}\n```\n'
      return f'\\boxed{{{said}}}'
    if not seen and config.grow.get('max_turns', 1):
      query = 'a river' if seed % 3 else 'a town'
      return '<think>Look.</think>' + (
        speech.family.write('search', {'query': query}) if calls else f'<search> {query} </search>')
    evidence = f'<{grammar.EVIDENCE}> It is so. </{grammar.EVIDENCE}>' * (grammar.EVIDENCE in tags.others)
    return f'<think>So.</think>{evidence}<answer> {said} </answer>'

  return script


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """models(family) -> the folder of a small model with the template of that family."""
  return functools.cache(lambda family: tiny.qwen3(tmp_path_factory.mktemp(family), small(family)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(('name', 'acts'), [
  *itertools.product(CONFIGS, ['tags']), *itertools.product(GROWING, ['hermes']), ('carl', 'llama3'), ('slate', 'qwen3_coder')])
def test_every_method_trains_on_a_server(name, acts, models, tmp_path, monkeypatch):
  monkeypatch.setattr(meshes, 'make_mesh', functools.partial(meshes.make_mesh, devices=jax.devices()[:1]))
  config = tiny.small_config(name, models('hermes' if acts == 'tags' else acts), tmp_path / 'run', native=acts != 'tags')
  config.grow.max_tokens, config.data.number = 160, 4
  if name == 'slate':
    config.lora.rank = 4
  engine = config.sampler.engine = 'sglang' if name in CONFIGS[::2] else 'vllm'
  tokenizer = setup.load_tokenizer(config)
  speech = setup.open_grammar(config, tokenizer)
  server = {'vllm': rollout_servers.Vllm, 'sglang': rollout_servers.Sglang}[engine](tokenizer, student(config, speech))
  with rollout_servers.serving(server) as config.sampler.urls:
    loop.train(config)
  rows = row_files.read(tmp_path / 'run/metrics.jsonl')
  assert len(rows) == 2 and server.label.endswith('-2')
  for row in rows:
    assert math.isfinite(row['loss']) and row['tokens_trained'] > 0 and row['seconds_weights'] > 0
    assert row['searches'] > 0 or name == 'r1'
    assert row['importance_weight'] <= 2.001 and row['requests_failed'] == row['servers_reloaded'] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', ['adaptive_rag', 'flare'])
def test_a_prompted_method_answers_on_a_server(name, models, tmp_path):
  config = importlib.import_module(f'configs.prompted.{name}').get_config().unlock()
  config.model, config.out, config.sampler.engine, config.sampler.slots = models('hermes'), str(tmp_path), 'vllm', 4
  questions = setup.load_questions(config, 'world:test')[:2]
  wrote = lambda text, seed: '<think>So.</think><search> a river </search>. The answer is <answer> Oslo </answer>.'
  server = rollout_servers.Vllm(setup.load_tokenizer(config), wrote)
  with rollout_servers.serving(server) as config.sampler.urls:
    trees, metrics = rollout(agents.open_agent(config), questions, jax.random.key(0), sampling=GREEDY)
  assert len(trees) == 2 and metrics['tokens_decoded'] > 0 and metrics['requests_failed'] == 0
  assert all(tree.stop for tree in trees)
