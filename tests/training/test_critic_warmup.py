"""Critics on the policy's backbone: runs that resume to the bit, and the warm-up before them."""

import collections
import functools
import pathlib
import sys
import types
from unittest import mock

import jax
import numpy as np
import pytest

from configs import base, carl
from configs.carl import critic_warmup as warmup_settings
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import competence, plots
from jaxsearch.evaluation.agents import open_critic
from jaxsearch.models import hub
from jaxsearch.models.architecture import initial_params
from jaxsearch.models.decoder import Decoder
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import driver
from jaxsearch.sampler.requests import Search
from jaxsearch.training import (
  critic_warmup,
  learner as learners,
  loop,
  row_files,
  run_folder,
  saved_policies,
  state as states,
  update,
)
from jaxsearch.trees.tree import Role, Tree
from tests.tools.serving import server
from tests.training import child

warm_up = functools.partial(
  critic_warmup.warm_up, gate_figures=competence.gate_figures, plot=plots.reliability)


@pytest.fixture
def method(monkeypatch):
  method = child.halves_method()
  monkeypatch.setitem(sys.modules, method.__name__, method)
  return method


@pytest.fixture
def config(config, method):
  return child.warmup_config(config)


@pytest.fixture
def settings():
  return warmup_settings(closed_book={}, tool_required={}, second_search={})


def test_a_run_with_a_shared_critic_becomes_a_plain_policy(config):
  loop.train(config)
  _, trained, _ = saved_policies.load_trained(config.out, meshes.make_mesh(**config.mesh))
  assert states.HEAD in trained
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert all(row['critic_loss'] > 0 and row['critic_grad_norm'] > 0 for row in rows)
  _, params, _ = saved_policies.load_params(config.out)
  assert jax.tree.structure(params) == jax.tree.structure(hub.load(config.model).params)


def test_the_warm_up_learns_resumes_and_is_begun_with(config, tmp_path, monkeypatch):
  seen = []
  figures = critic_warmup.warm_up(config, plot=plots.reliability, gate_figures=lambda trees, tiers: seen.append(
    trees) or competence.gate_figures(trees, tiers))
  kinds = collections.Counter((tree.question.id, tree.root.data['kind']) for tree in seen[0])
  ids = {name for name, _ in kinds}  # of held-out questions, under the prompt of training
  assert len(ids) == 5
  assert kinds == collections.Counter((name, kind) for name in ids for kind in ('tool-optional', 'tool-required'))
  out = pathlib.Path(config.out)
  rows = row_files.read(out / 'metrics.jsonl')
  assert len(rows) == 4 and rows[-1]['loss'] < rows[0]['loss']
  assert 'gate_auc' in rows[-1] and 'gate_auc' not in rows[0]
  assert figures['explained'] == pytest.approx(rows[-1]['gate_explained'])
  assert (out / 'calibration.png').stat().st_size > 1000
  written = [len(row_files.read(out / f'{name}.jsonl')) for name in (
    'closed_book', 'tiers', 'rollouts', 'answers_0', 'answers_4')]
  assert written == [24, 12, 22, 5, 5]
  asked = [int(row['id']) for row in row_files.read(out / 'answers_0.jsonl')]
  right = np.mean([number % 3 > 0 for number in asked])  # whatever the weights
  assert figures['em_before'] == figures['em_after'] == right

  base = hub.load(config.model).params
  _, warm, _ = saved_policies.load_trained(out, meshes.make_mesh(**config.mesh))
  np.testing.assert_array_equal(warm['embedding'], base['embedding'])  # frozen
  assert np.abs(np.asarray(warm['layers']['q']) - base['layers']['q']).max() > 0

  def never(*_, **__):
    raise AssertionError('rolled out again')
  monkeypatch.setattr('jaxsearch.sampler.driver.Schedule.run', never)
  assert warm_up(config) == pytest.approx(figures, nan_ok=True)  # done is done
  assert len(row_files.read(out / 'metrics.jsonl')) == 4
  config.seed = 1
  with pytest.raises(ValueError, match='seed was 0, now it is 1'):
    warm_up(config)
  config.seed = 0
  config.critic_warmup.gate.explained = 1.0  # never
  with pytest.raises(critic_warmup.GateFailed, match='the gate is .*explained 1.00'):
    warm_up(config)
  assert len(row_files.read(out / 'metrics.jsonl')) == 8

  config.out, config.critic.warm_start = str(tmp_path / 'after'), str(out)
  first_coef, config.loss.kl_coef = config.loss.kl_coef, 0.1
  learner = learners.make_learner(config)
  _, warm, _ = saved_policies.load_trained(out, learner.mesh)
  jax.tree.map(np.testing.assert_array_equal, learner.state.params, warm)
  jax.tree.map(np.testing.assert_array_equal, learner.reference, base)  # the policy before the warm-up
  record, tokenizer = row_files.read(out / 'rollouts.jsonl')[0], learner.agent.engine.tokenizer
  values = []
  # As in training, and in `eval`.
  for assess in (functools.partial(update.assess, learner), open_critic(config, str(out))):
    tree = Tree.from_json(record, tokenizer, Question(record['id'], '?', ('x',)))
    for node in tree.nodes(Role.POLICY):
      node.sampler_logprobs, node.advantages, node.returns = [0.0] * len(node.tokens), 0.0, np.zeros(len(node.tokens))
    assess([tree])
    values.append(np.concatenate([node.values for node in tree.nodes(Role.POLICY)]))
  np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
  assert len(np.unique(values[0])) > 1 and open_critic(config, config.model) is None
  hub.save(Decoder(child.NUMBERS, params=initial_params(child.NUMBERS, jax.random.key(7))), config.model)
  with pytest.raises(ValueError, match='has changed since critic.warm_start='):
    learners.make_learner(config)
  again = config.copy_and_resolve_references()
  again.out, again.critic.warm_start, again.loss.kl_coef = str(out), '', first_coef
  with pytest.raises(ValueError, match='has changed since this run began'):
    warm_up(again)
  config.dtype, config.optim.master_weights = 'bfloat16', False  # a warm start takes the dtype of the run
  assert {x.dtype.name for x in jax.tree.leaves(learners.make_learner(config).state.params)} == {'bfloat16'}
  config.train.aggregate = 'token-mean'
  with pytest.raises(ValueError, match="with train.aggregate='step-mean', here it is 'token-mean'"):
    learners.make_learner(config)
  config.critic.shared = False
  with pytest.raises(ValueError, match='was warmed up for the model'):
    learners.make_learner(config)


def test_a_fixed_number_of_updates_of_the_head_alone_leaves_the_policy_as_it_was(config):
  config.critic_warmup.update(backbone_rate=0.0, min_updates=3, max_updates=3)
  config.critic_warmup.gate.explained = 1.0  # never
  assert 'em_after' not in warm_up(config) and len(row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')) == 3
  _, warm, _ = saved_policies.load_trained(config.out, meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1]))
  assert np.any(warm.pop(states.HEAD)['kernel'])  # began at 0
  jax.tree.map(np.testing.assert_array_equal, warm, hub.load(config.model).params)


def test_rollouts_that_were_cut_off_are_grown_again_and_a_share_has_another_search(config, monkeypatch):
  seen = collections.Counter()

  def counting(agent, episodes, key, *, tools, run=driver.run):
    seen[tools.topk] += len(episodes)
    return run(agent, episodes, key, tools=tools)

  monkeypatch.setattr(critic_warmup, 'CHUNK', 8)
  monkeypatch.setattr(driver, 'run', counting)
  config.search.topk, config.critic_warmup.second_share = 2, 0.5  # `second_search` has topk=1
  warm_up(config)
  assert seen.total() == 24 + 22 + 2 * 5 and 4 <= seen[1] <= 16  # tiers, rollouts, held-out before and after
  path = pathlib.Path(config.out) / 'rollouts.jsonl'
  whole = path.read_text()
  path.write_text(whole[:int(0.7 * len(whole))])  # in the middle of a line and of a chunk
  monkeypatch.setattr(critic_warmup.curation, 'clusters_by_source', lambda *_: pytest.fail('chosen again'))
  warm_up(config)
  assert path.read_text() == whole
  row_files.write(path, row_files.read(path)[::-1])
  with pytest.raises(ValueError, match='rollouts.jsonl is of other questions'):
    warm_up(config)
  row_files.write(path.with_name('chosen.jsonl'), [{'id': 'gone', 'held_out': False}])
  with pytest.raises(ValueError, match="chosen.jsonl: 'gone' is no question of this run"):
    warm_up(config)


def test_rollouts_whose_searches_mostly_failed_are_not_learned_from(config, method):
  halves = method.grow

  def grow(question, tree, *, tools=True, **settings):
    yield from halves(question, tree, tools=tools, **settings)
    if tools:
      yield Search(tree.leaves()[0], question.question)

  method.grow = grow
  with server() as (url, _):
    config.search.update(backend='http', url=url, timeout=0.5)  # nobody is there any more
  config.critic_warmup.second_share = 0.0
  with pytest.raises(run_folder.RunStopped, match='^rollouts.jsonl: 16 of 16 searches failed; the last: SearchError: '):
    warm_up(config)
  folder = pathlib.Path(config.out)
  assert len(row_files.read(folder / 'closed_book.jsonl')) == 24 and not row_files.read(folder / 'rollouts.jsonl')


def test_a_critic_of_its_own_is_warmed_up_too(config, tmp_path):
  config.critic.shared, config.train.aggregate = False, 'token-mean'
  warm_up(config)
  with pytest.raises(ValueError, match='a critic, not a policy'):
    saved_policies.load_params(config.out)
  warmed, config.out, config.critic.warm_start = config.out, str(tmp_path / 'after'), config.out
  learner = learners.make_learner(config)
  _, warm, _ = saved_policies.load_trained(warmed, learner.mesh)
  jax.tree.map(np.testing.assert_array_equal, learner.state.critic.params, warm)
  assert float(np.abs(np.asarray(warm['head']['kernel'])).max()) > 0


def test_a_warm_up_needs_no_questions_to_evaluate(monkeypatch):
  class Checked(Exception):
    pass

  config = carl.get_config()
  config.data.update(questions='mine.jsonl', corpus='mine.jsonl')
  monkeypatch.setattr(critic_warmup.meshes, 'make_mesh', mock.Mock(side_effect=Checked))
  with pytest.raises(Checked):
    critic_warmup.warm_up(config, None, None)


def test_a_resumed_warm_up_believes_the_gate_where_it_would_have_looked():
  config = base.get_config().unlock()
  config.critic_warmup = dict(check_every=2, max_updates=5, min_updates=1, trees=0, gate={'auc': 0.5})
  student = types.SimpleNamespace(state=None, learn=lambda trees: {'tokens_trained': 1})
  for last, expected in ((0, [1, 2]), (1, [2]), (2, []), (3, [4]), (5, [])):
    steps = []
    run = types.SimpleNamespace(config=config, last_step=last, steps=lambda: range(last + 1, 6),
                                finish_step=lambda step, *_: steps.append(step))
    critic_warmup.train(run, student, {}, [[None]], lambda: {'auc': 0.9})
    assert steps == expected


def test_a_run_without_a_critic_warms_none():
  config = base.get_config()
  config.critic.warm_start = 'runs/grpo'
  with pytest.raises(ValueError, match="critic.warm_start='runs/grpo' has no warmed-up critic"):
    learners.check_warm_start(config, {'config': config.to_dict()}, [])
  config.critic.update(enabled=True, shared=True)
  with pytest.raises(ValueError, match="was warmed up for the model 'another'"):
    learners.check_warm_start(config, {'config': config.to_dict() | {'model': 'another'}}, [])


def test_the_gate(settings):
  gate = settings.gate
  good = {'auc': 0.7, 'sign': 0.6, 'explained': 0.45, 'ece': 1.0, 'brier': 1.0}
  assert critic_warmup.passes(good, gate)
  assert not any(critic_warmup.passes(good | {name: value - 0.01}, gate) for name, value in gate.items())
  assert not critic_warmup.passes(good | {'sign': float('nan')}, gate)  # not one pair
  assert not critic_warmup.passes(good | {'auc': float('nan')}, gate)
  gate.sign = 0.0
  assert critic_warmup.passes(good | {'sign': float('nan')}, gate)
