"""The loop itself, in this process, on a mesh of eight devices; and the errors it gives before anything starts."""

import importlib.util
import pathlib
import re
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import base
from jaxsearch import cli
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation.run import held_out, open_agent
from jaxsearch.models import hub
from jaxsearch.models.decoder import Decoder, initial_params
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.sampler.rollout import rollout
from jaxsearch.training import checkpoint, loop, runs
from jaxsearch.trees.tree import Role, Tree

CHILD = pathlib.Path(__file__).with_name('child.py')
REQUIRED = ('step reward em searches loss kl entropy tokens_generated tokens_trained seconds_generate seconds_tools '
            'seconds_train seconds_score seconds_save idle_share clip_fraction ratio ratio_max grad_norm logprob_gap '
            'logprob_gap_max learning_rate padded_share policy_loss skipped compilations').split()


@pytest.fixture(scope='module')
def child():
  spec = importlib.util.spec_from_file_location('child', CHILD)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def config(child, tmp_path, monkeypatch):
  child.make_inputs(tmp_path)
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  return child.get_config(tmp_path, str(tmp_path / 'run'))


def test_a_run_on_eight_devices(config, capfd):
  config.steps, config.progress = 3, True
  config.mesh.update(data=2, fsdp=2, tensor=2)
  config.train.update(micro_rows=4, mini_batch=0, epochs=1)
  config.eval.update(every=2, number=4, questions=config.data.questions)
  last = loop.train(config, held_out)
  lines = [line for line in capfd.readouterr().err.splitlines() if 'jaxsearch: step' in line]
  assert [re.fullmatch(r'jaxsearch: step (\d)/3, \d+ s left, reward [\d.]+, em [\d.]+, searches 1', line)[1]
          for line in lines] == ['1', '2', '3']
  rows = runs.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2, 3]
  for row in rows:
    assert not [name for name in REQUIRED if row.get(name) is None]
    assert row['logprob_gap_max'] < 1e-4 and row['ratio_max'] == pytest.approx(1, abs=1e-4)
    assert row['searches'] == 1 and row['tokens_generated'] == row['tokens_trained'] == 100
    assert row['tokens_in_rows'] < row['tokens_on_paths'] == row['tokens_per_tree'] * row['trees']  # two chains share a prompt
  assert rows[0]['kl'] == pytest.approx(0, abs=1e-6) and rows[2]['kl'] > rows[0]['kl']
  assert last['loss'] == pytest.approx(rows[2]['loss'])
  evaluations = runs.read(pathlib.Path(config.out) / 'evaluations.jsonl')
  assert [(row['step'], row['temperature'], row['n']) for row in evaluations] == [
    (step, temperature, 4) for step in (0, 2, 3) for temperature in (1.0, 0.0)]
  model_config, params, host = checkpoint.load_params(config.out)
  assert host['step'] == 3 and host['config']['method'] == 'toy'
  assert np.isfinite(np.asarray(params['embedding'])).all()


def test_a_prefix_that_branches_share_counts_for_each_path():
  tree = Tree(None, Question('1', 'Which?', ('red',)))
  node = tree.root.append([1, 2, 3], Role.PROMPT)
  for tokens in ([4, 5], [6]):
    node.append(tokens, Role.POLICY)
  tree.reward = 0.5
  row = loop.summary([[tree]], [tree])
  assert row['tokens_on_paths'] == 9 and row['tokens_per_tree'] == 6


@pytest.fixture
def lora_config(config):
  """A run of an adapter, every update a step of its own."""
  config.steps, config.checkpoint_every = 2, 1
  config.mesh.update(data=1, fsdp=2, tensor=4)
  config.train.update(micro_rows=2, mini_batch=0, epochs=1)
  config.lora.update(rank=4, alpha=8.0)
  return config


def saved(run, step):
  """Every array of a checkpoint's parameters by its path, read without jaxsearch."""
  found = ocp.StandardCheckpointer().restore(pathlib.Path(run) / 'checkpoints' / str(step) / 'params')
  return {path: np.asarray(value) for path, value in ocp.tree.to_flat_dict(found, sep='/').items()}


def test_a_run_of_an_adapter_goes_on_to_the_bit_and_becomes_a_plain_model(lora_config, tmp_path):
  config, whole = lora_config, str(tmp_path / 'whole')
  config.steps = 1
  loop.train(config)
  config.steps = 2
  loop.train(config)
  broken, config.out = config.out, whole
  loop.train(config)
  adapter = saved(whole, 2)
  assert sorted(adapter) == sorted(f'layers/{name}/{factor}' for name in config.lora.targets for factor in 'ab')
  for path, value in saved(broken, 2).items():
    np.testing.assert_array_equal(value, adapter[path], err_msg=path)
  rows, others = (runs.read(pathlib.Path(run) / 'metrics.jsonl') for run in (whole, broken))
  for row, other in zip(rows, others, strict=True):
    assert {name: row[name] for name in ('loss', 'kl', 'grad_norm', 'critic_loss')} == {
      name: other[name] for name in ('loss', 'kl', 'grad_norm', 'critic_loss')}
    assert row['logprob_gap_max'] < 1e-4  # the sampler has the merged parameters too
  assert rows[0]['kl'] == 0 and rows[1]['kl'] > 0

  assert cli.main(['export', f'--checkpoint={whole}', f'--out={tmp_path / "plain"}']) == 0
  base, plain = (hub.load(folder).params for folder in (config.model, tmp_path / 'plain'))
  sums = {'q': 'ldr,lrnh->ldnh', 'k': 'ldr,lrnh->ldnh', 'v': 'ldr,lrnh->ldnh', 'o': 'lnhr,lrd->lnhd'}
  for name, value in base['layers'].items():
    if name in config.lora.targets:
      product = np.einsum(sums.get(name, 'lir,lro->lio'), *(adapter[f'layers/{name}/{factor}'] for factor in 'ab'))
      assert np.abs(product).max() > 1e-4
      value = value + 8.0 / 4 * product
    np.testing.assert_allclose(plain['layers'][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
  np.testing.assert_array_equal(plain['embedding'], base['embedding'])

  questions, answers = load_questions(config.data.questions)[:2], []
  for source in (whole, str(tmp_path / 'plain')):
    trees, _ = rollout(open_agent(config, source), questions, jax.random.key(0), sampling=GREEDY)
    answers.append([tree.leaves()[0].path_tokens() for tree in trees])
  assert answers[0] == answers[1]


def test_the_base_of_an_adapter_is_its_reference_and_may_not_change(lora_config, child):
  lora_config.dtype = 'bfloat16'
  learner = loop.make_learner(lora_config)
  for own, shared in zip(jax.tree.leaves(learner.base), jax.tree.leaves(learner.reference), strict=True):
    assert own is shared and own.dtype == 'bfloat16'
  assert {x.dtype.name for x in jax.tree.leaves((learner.state.params, learner.state.critic.params))} == {'float32'}
  lora_config.critic.enabled, lora_config.steps = False, 1
  loop.train(lora_config)
  hub.save(Decoder(child.NUMBERS, params=initial_params(child.NUMBERS, jax.random.key(7))), lora_config.model)
  with pytest.raises(ValueError, match='has changed since this run began'):
    checkpoint.load_params(lora_config.out)
  lora_config.steps = 2
  with pytest.raises(ValueError, match='has changed since this run began'):
    loop.train(lora_config)


def test_another_model_under_the_same_name_is_refused(config, child):
  config.steps = config.checkpoint_every = 1
  config.mesh.update(data=1, fsdp=8, tensor=1)
  config.train.update(micro_rows=8, old_logprobs='recompute')
  loop.train(config)
  hub.save(Decoder(child.NUMBERS, params=initial_params(child.NUMBERS, jax.random.key(7))), config.model)
  config.steps = 2
  with pytest.raises(ValueError, match='has changed since this run began'):
    loop.train(config)


def test_updates_that_are_never_finite_stop_the_run(config, monkeypatch):
  config.mesh.update(data=1, fsdp=8, tensor=1)
  config.train.update(micro_rows=8, mini_batch=0, epochs=1)
  config.optim.max_skipped = 2
  monkeypatch.setattr(sys.modules['jaxsearch.methods.toy'], 'reward', lambda tree: float('inf'))
  from jaxsearch.training.runs import RunStopped
  with pytest.raises(RunStopped, match='step 2: .* not finite in 2 updates in a row'):
    loop.train(config)
  assert [row['loss'] for row in runs.read(pathlib.Path(config.out) / 'metrics.jsonl')] == [None, None]


@pytest.mark.parametrize('changes, words', [
  (dict(group_size=1), 'group_size=1'),
  (dict(method='no_such'), 'there is no jaxsearch/methods/no_such.py'),
  ({'train.old_logprobs': 'both'}, "train.old_logprobs='both'"),
  ({'lora.rank': -1}, 'lora.rank=-1'),
  ({'sampler.length': 4096}, 'sampler.length=4096 is more than train.row_length'),
])
def test_values_that_do_not_fit_are_named_before_anything_is_written(tmp_path, changes, words):
  config = base.get_config()
  config.unlock()
  config.out = str(tmp_path / 'run')
  for name, value in changes.items():
    group, _, field = name.rpartition('.')
    (config[group] if group else config)[field] = value
  with pytest.raises(ValueError, match=words):
    loop.train(config)
  assert not (tmp_path / 'run').exists()
