"""The loop itself, in this process, on a mesh of eight devices; and the errors it gives before anything starts."""

import json
import math
import pathlib
import pickle
import re
import sys
import threading
import types

import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import base, slate
from jaxsearch import cli, setup
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation.run import held_out, open_agent
from jaxsearch.methods import Context, carl, cusearch, search_r1, search_r1_ppo
from jaxsearch.models import hub
from jaxsearch.models.decoder import Decoder, initial_params, parameter_shapes
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.rewards.judge import Answer
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import GREEDY, Ask, Score, Search
from jaxsearch.training import batch as batches
from jaxsearch.training import checkpoint, growing, loop, row_files, runs
from jaxsearch.training import learner as learners
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import Letters
from tests.processes import as_processes
from tests.tools.serving import server

REQUIRED = ('step reward em searches loss kl entropy tokens_generated tokens_trained seconds_generate seconds_tools '
            'seconds_train seconds_score seconds_save idle_share clip_fraction ratio ratio_max grad_norm logprob_gap '
            'logprob_gap_max learning_rate padded_share policy_loss skipped compilations').split()


@pytest.fixture
def config(child, tmp_path, monkeypatch):
  child.make_inputs(tmp_path)
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  return child.get_config(tmp_path, str(tmp_path / 'run'))


def test_a_run_on_eight_devices(config, capfd, monkeypatch):
  toy = sys.modules['jaxsearch.methods.toy']
  credit = toy.credit

  def credit_with_figure(groups, context, **settings):
    credit(groups, context, **settings)
    context.metrics['groups_alike_wrong'] = 0.125  # of a method whose rewards are per turn

  monkeypatch.setattr(toy, 'credit', credit_with_figure)
  config.steps, config.progress = 3, True
  config.mesh.update(data=2, fsdp=2, tensor=2)
  config.train.update(micro_rows=4, mini_batch=0, epochs=1)
  config.eval.update(every=2, number=4, questions=config.data.questions)
  last = loop.train(config, held_out)
  lines = [line for line in capfd.readouterr().err.splitlines() if 'jaxsearch: step' in line]
  assert [re.fullmatch(r'jaxsearch: step (\d)/3(?:, \d+ s left)?, reward [\d.]+, em [\d.]+, searches 1', line)[1]
          for line in lines] == ['1', '2', '3']
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2, 3]
  for row in rows:
    assert not [name for name in REQUIRED if row.get(name) is None]
    assert row['logprob_gap_max'] < 1e-4 and row['ratio_max'] == pytest.approx(1, abs=1e-4)
    assert row['groups_alike_wrong'] == 0.125  # the method's, not that of the trees' rewards
    assert row['searches'] == 1 and row['tokens_generated'] == row['tokens_trained'] == 100
    assert row['tokens_in_rows'] < row['tokens_on_paths'] == row['tokens_per_tree'] * row['trees']  # two chains share a prompt
  assert rows[0]['kl'] == pytest.approx(0, abs=1e-6) and rows[2]['kl'] > rows[0]['kl']
  assert last['loss'] == pytest.approx(rows[2]['loss'])
  evaluations = row_files.read(pathlib.Path(config.out) / 'evaluations.jsonl')
  assert [(row['step'], row['temperature'], row['n']) for row in evaluations] == [
    (step, temperature, 4) for step in (0, 2, 3) for temperature in (1.0, 0.0)]
  model_config, params, host = checkpoint.load_params(config.out)
  assert Tokenizer.from_json(host['tokenizer']).encode('red') == Tokenizer.load(config.model).encode('red')
  assert host['step'] == 3 and host['config']['method'] == 'toy'
  assert np.isfinite(np.asarray(params['embedding'])).all()


def test_a_run_may_train_on_the_first_questions_alone(config, monkeypatch):
  def stop(questions, *_, **__):
    raise RuntimeError([question.id for question in questions])

  monkeypatch.setattr(loop, 'QuestionBatches', stop)
  every = [question.id for question in load_questions(config.data.questions)]
  for number, expected in ((0, every), (2, every[:2])):
    config.data.number = number
    with pytest.raises(RuntimeError) as error:
      loop.train(config)
    assert error.value.args == (expected,)


def test_a_prefix_that_branches_share_counts_for_each_path():
  tree = Tree(None, Question('1', 'Which?', ('red',)))
  node = tree.root.append([1, 2, 3], Role.PROMPT)
  for tokens in ([4, 5], [6]):
    node.append(tokens, Role.POLICY)
  tree.reward = 0.5
  row = loop.summary([[tree]], [[tree]])
  assert row['tokens_on_paths'] == 9 and row['tokens_per_tree'] == 6


def test_names_of_means_and_shares_say_so():
  trees = [Tree(None, Question('1', 'Which?', ('red',))) for _ in range(4)]
  for tree, (searches, failures, revised) in zip(trees, ((4, 2, 1), (1, 1, 0), (0, 0, 0), (0, 0, 0))):
    tree.metrics.update(searches=searches, tool_failures=failures, revised=revised)
    tree.reward = 0.0
  trees[0].stop = Stop.DEADLINE
  row = loop.summary([trees], [trees])
  assert row['searches'] == 1.25 and row['tool_failures_per_tree'] == 0.75 and row['malformed_per_tree'] == 0
  assert row['revised_per_tree'] == 0.25 and row['stop_deadline_share'] == 0.25
  assert not {'tool_failures', 'malformed', 'revised', 'stop_deadline'} & set(row)  # some are counts of the sampler


def test_the_samplers_memory_in_bfloat16_and_its_weights_in_the_loss(config, child, monkeypatch):
  """What lives on the devices in bfloat16, when; master weights, moments and gradients are float32."""
  def in_bfloat16():
    return sum(x.nbytes for x in jax.live_arrays() if x.dtype == 'bfloat16')

  live, wrong, before = [], False, in_bfloat16()
  load, update = Engine.load, loop.update

  def loading(engine, params):
    live.append(('load', in_bfloat16() - before))
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {'bfloat16'}
    load(engine, jax.tree.map(lambda x: x * 3, params) if wrong else params)
    live.append(('cache', sum(x.nbytes for x in jax.tree.leaves(engine._cache))))

  monkeypatch.setattr(Engine, 'load', loading)
  monkeypatch.setattr(loop, 'update', lambda *args: live.append(('update', in_bfloat16() - before)) or update(*args))
  config.dtype, config.steps, config.critic.enabled, config.loss.kl_coef = 'bfloat16', 2, False, 0.0
  config.mesh.update(data=1, fsdp=4, tensor=2)
  config.train.update(micro_rows=4, mini_batch=0, epochs=1)
  rows = []
  for release, wrong in ((True, False), (False, False), (True, True)):
    live.clear()
    config.out, config.sampler.release = f'{config.out}-{release}-{wrong}', release
    loop.train(config)
    rows.append(rows_of(config, 'loss', 'grad_norm', 'logprob_gap', 'importance_weight', 'importance_capped', 'ratio_max'))
    params = 2 * sum(math.prod(shape) for shape in jax.tree.leaves(
      parameter_shapes(child.NUMBERS), is_leaf=lambda x: isinstance(x, tuple)))
    cache = live[1][1]
    kept = 0 if release else cache + params
    assert cache > params and live == [('load', params), ('cache', cache), ('update', kept),
                                       ('load', params + (0 if release else cache)), ('cache', cache), ('update', kept)]
  assert rows[0] == rows[1]
  for _, _, gap, weight, capped, ratio in rows[0]:
    assert 0 < gap < 0.1 and weight == pytest.approx(1, abs=0.05) and weight != 1 and capped == 0 and ratio == 1
  for _, _, gap, weight, capped, ratio in rows[2]:
    assert gap > 0.3 and 0 < capped < 0.9 and 0 < weight <= 2 and ratio == 1


@pytest.mark.parametrize('processes', [2, 3])
@pytest.mark.parametrize('adaptive', [False, True])
def test_what_a_tree_draws_depends_on_no_process(monkeypatch, processes, adaptive):
  """Threads stand in for processes; a tree that was grown says its number, its key, and what its generator drew."""
  questions = [Question(str(place), '?', ('a',)) for place in range(6)]
  config = ml_collections.ConfigDict(dict(group_size=3, sizes=dict(adaptive=adaptive), sampler=dict(release=False),
                                          train=dict(async_steps=0)))
  rates = {str(place): [place / 5] for place in range(6)}

  def grown(_, questions, key, *, numbers, **__):
    words = np.asarray(jax.random.key_data(key)).tolist()
    trees = [Tree(None, question, np.random.default_rng([*words, number]))
             for question, number in zip(questions, numbers, strict=True)]
    for tree, number in zip(trees, numbers):
      tree.root.append([number], Role.POLICY).data['drawn'] = tree.rng.random()
    return trees, {'tokens_decoded': 1, 'tokens_prefilled': 2, 'seconds': 3}

  monkeypatch.setattr(growing, 'rollout', grown)
  learner = types.SimpleNamespace(config=config)

  def run():
    context = Context(7, np.random.default_rng(0), {'pass_rates': rates})
    groups, row = loop.grow(learner, growing.begin(config, cusearch, None, jax.random.key(4), questions, context))
    return row['tokens_generated'], [
      [(tree.question.id, node.tokens, node.data) for tree in group for node in tree.nodes(Role.POLICY)] for group in groups]

  _, alone = run()
  found = as_processes(processes, monkeypatch, run)
  assert [groups for _, groups in found] == [alone[process::processes] for process in range(processes)]
  assert {tokens for tokens, _ in found} == {processes}
  trees = [tree for group in alone for tree in group]
  assert [group[0][0] for group in alone] == [question.id for question in questions]
  assert len({number for _, (number,), _ in trees}) == len({data['drawn'] for *_, data in trees}) == len(trees) == 18
  assert sorted(map(len, alone)) == ([2, 2, 3, 3, 4, 4] if adaptive else [3] * 6)


def grown_groups(questions: int = 48, size: int = 4) -> list[list[Tree]]:
  """Chains of up to four searches about different questions, with the values of a critic."""
  rng, groups = np.random.default_rng(0), []
  for number in range(questions):
    prompt, question = rng.integers(1, 99, 60).tolist(), Question(str(number), 'Which?', ('a',))
    groups.append([Tree(Letters(), question) for _ in range(size)])
    for tree in groups[-1]:
      tree.answer, searches = str(rng.choice(['a', 'b'])), int(rng.integers(5))
      tree.metrics = dict(searches=searches, found=searches, malformed=0, tool_failures=0)
      node = tree.root.append(prompt, Role.PROMPT)
      for turn in range(2 * searches + 1):
        length = int(rng.integers(20, 60))
        node = node.append(rng.integers(1, 99, length).tolist(), Role.OBSERVATION if turn % 2 else Role.POLICY,
                           logprobs=None if turn % 2 else rng.normal(-1, 0.3, length).tolist())
        node.values, node.data['segment'] = rng.random(length).astype(np.float32), 'invoke'
  return groups


@pytest.mark.parametrize('processes', [2, 4, 16])
@pytest.mark.parametrize(('method', 'settings', 'how'), [
  (search_r1, {}, 'token-mean'), (cusearch, {'strategy': 'auto', 'keep': 40}, 'seq-mean-token-mean'),
  (cusearch, {'strategy': 'random', 'keep': 30, 'drop_alike': True}, 'token-mean'), (search_r1_ppo, {}, 'span-mean'),
  (carl, {}, 'step-mean')])
def test_the_trees_stay_where_they_grew_and_are_credited_as_one_batch(monkeypatch, processes, method, settings, how):
  """Advantages and loss weights of several processes are those of one."""
  def run():
    groups = grown_groups()[meshes.own_part()]
    context = Context(3, np.random.default_rng(3), {})
    method.credit(groups, context, **settings)
    trained = loop.credited(groups)
    row = loop.summary(groups, trained) | context.of_all(sum(map(len, groups)))
    sizes, places = meshes.gather_items([len(group) for group in trained])
    own, parts = dict(zip(places, trained)), []
    for part in batches.mini_batches(sizes, 50, np.random.default_rng(1)):
      trees = {(group, member): own[group][member] for group, member in part if group in own}
      rows = batches.lay_out_own(list(trees.values()), 1024, pad_id=0, how=how, share_trained=False)
      parts.append({key: [(node.advantages, rows.loss_weights[rows.places[node]]) for node in tree.walk() if node.trained]
                    for key, tree in trees.items()})
    return row, parts

  expected_row, expected = run()
  found = as_processes(processes, monkeypatch, run)
  for row, _ in found:
    assert row.keys() == expected_row.keys()
    for name in row:
      own_average = name in ('selected_depth_mean', 'retrieval_share', 'value_error', 'opposed_pairs_share', 'advantage_invoke')
      assert own_average or row[name] == pytest.approx(expected_row[name], rel=1e-6), name
  for index, part in enumerate(expected):
    joined = {key: spans for _, parts in found for key, spans in parts[index].items()}
    assert joined.keys() == part.keys()
    for key, spans in part.items():
      for (advantage, weights), (other, others) in zip(spans, joined[key], strict=True):
        np.testing.assert_allclose(other, advantage, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(others, weights)


@pytest.mark.parametrize(('method', 'settings'), [(search_r1, {}), (cusearch, {'keep': 640})])
def test_what_sixteen_processes_exchange_is_next_to_nothing(monkeypatch, method, settings):
  """At most 1 % of the trees themselves, which all used to get, with the rows that move to where there is room."""
  groups = grown_groups(256, 5)
  size = 15 * len(pickle.dumps(groups))

  def run():
    context = Context(3, np.random.default_rng(3), {})
    own = groups[meshes.own_part()]
    method.credit(own, context, **settings)
    trained = loop.credited(own)
    loop.summary(own, trained), context.of_all(sum(map(len, own)))
    meshes.gather_items([len(group) for group in trained])
    return batches.lay_out_own([tree for group in trained for tree in group], 1024, pad_id=0)

  before = meshes.exchanged['bytes']
  rows = as_processes(16, monkeypatch, run)
  assert meshes.exchanged['bytes'] > before

  left = iter(rows)
  lock = threading.Lock()

  def batch():
    with lock:
      own = next(left)
    return batches.make_batch(own, 16).count

  counts = as_processes(16, monkeypatch, batch)
  assert set(counts) == {-(-sum(len(own.tokens) for own in rows) // 16)}
  assert meshes.exchanged['bytes'] - before < 0.01 * size


@pytest.mark.parametrize('kl_on', ['all', 'wrong'])
def test_the_kl_may_be_about_wrong_answers_alone(config, kl_on):
  config.train.kl_on = kl_on
  config.train.row_length = 1024
  tokenizer = types.SimpleNamespace(pad_id=0)
  learner = types.SimpleNamespace(config=config, agent=types.SimpleNamespace(engine=types.SimpleNamespace(tokenizer=tokenizer)))
  trees = [tree for group in grown_groups() for tree in group]
  assert {tree.question.score(tree.answer) for tree in trees} == {0.0, 1.0}
  search_r1.credit([trees], Context(0, np.random.default_rng(0), {}))
  rows = learners.into_rows(learner, trees, share_trained=False)
  for tree in trees:
    for node in (node for node in tree.walk() if node.trained and node.tokens):
      right = kl_on == 'wrong' and tree.question.score(tree.answer)
      place = rows.places[node]
      np.testing.assert_array_equal(rows.kl_weights[place], 0 if right else rows.loss_weights[place])
  assert rows.kl_weights.any()
  config.train.update(aggregate='seq-mean-token-sum', penalties='token-mean')  # of the surrogate, and of KL and entropy
  summed = learners.into_rows(learner, trees, share_trained=False)
  np.testing.assert_array_equal(summed.loss_weights, rows.loss_weights)
  assert np.abs(summed.gains).sum() > 2 * np.abs(rows.gains).sum()


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
  rows, others = (row_files.read(pathlib.Path(run) / 'metrics.jsonl') for run in (whole, broken))
  for row, other in zip(rows, others, strict=True):
    assert {name: row[name] for name in ('loss', 'kl', 'grad_norm', 'critic_loss')} == {
      name: other[name] for name in ('loss', 'kl', 'grad_norm', 'critic_loss')}
    assert row['logprob_gap_max'] < 1e-4  # the sampler has the merged parameters too
  assert rows[0]['kl'] == 0 and rows[1]['kl'] > 0

  assert cli.main(['export', f'--checkpoint={whole}', f'--out={tmp_path / "plain"}', f'--config.model={config.model}']) == 0
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
  learner = learners.make_learner(lora_config)
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
  assert [row['loss'] for row in row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')] == [None, None]


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


def test_prompts_that_leave_no_room_are_counted_or_refused():
  config = base.get_config().unlock()
  tokenizer = setup.load_tokenizer(config)
  questions = [Question(str(words), 'Who ' * words + '?', ()) for words in (1, 2, 3, *[1] * 200, 40)]
  lengths = [len(tokenizer.encode(f'Question: {question.question}\n')) for question in questions]
  said = []

  def check(length):
    config.sampler.length = length
    setup.check_room(config, tokenizer, questions, said.append)

  most = max(lengths)
  check(most + config.grow.max_tokens)
  assert not said
  check(most + config.grow.max_tokens - 1)
  less = 'leaves less than grow.max_tokens=64 after the prompts of'
  assert said == [f'sampler.length={most + 63} {less} 1 of 204 questions (up to {most} tokens)']
  said.clear()
  check(most)
  short = sum(own + 64 > most for own in lengths)
  assert said == [f'sampler.length={most} leaves no room to write after the prompts of 1 of 204 questions (up to {most} tokens)',
                  f'sampler.length={most} {less} {short} of 204 questions (up to {most} tokens)']
  check(min(lengths) + 16)
  for length in (min(lengths) + 15, min(lengths)):
    with pytest.raises(ValueError, match=f'any prompt: they have {min(lengths)} to {most} tokens, and a short span has 16'):
      check(length)
  config.grow.max_tokens = 3
  check(min(lengths) + 3)
  with pytest.raises(ValueError, match='and a short span has 3'):
    check(min(lengths) + 2)


@pytest.mark.parametrize('first', [
  lambda node: [], lambda node: Score(node, (' yes',)), lambda node: [Search(node, 'Who?')], lambda node: 1 / 0, None])
def test_a_method_that_does_not_begin_with_the_policy_has_room(first, monkeypatch):
  def grow(question, tree):
    if first:
      yield first(tree.root.append('word ' * 99, Role.PROMPT))

  monkeypatch.setattr(setup.methods, 'find_method', lambda _: types.SimpleNamespace(grow=grow))
  config = base.get_config().unlock()
  config.sampler.length, config.grow = 4, {}
  setup.check_room(config, setup.load_tokenizer(config), [Question('1', 'Who?', ())], pytest.fail)
def passage(handler):
  """What a retrieval server says of any query."""
  queries = json.loads(handler.body)['queries']
  hit = {'document': {'id': '1', 'contents': '"red"\nThe red.'}, 'score': 1.0}
  body = json.dumps({'result': [[hit]] * len(queries)}).encode()
  handler.send_response(200)
  handler.send_header('content-length', str(len(body)))
  handler.end_headers()
  handler.wfile.write(body)


@pytest.fixture
def remote(config):
  """The run with a search behind a server; it compiles little."""
  config.mesh.update(data=1, fsdp=8, tensor=1)
  config.train.update(micro_rows=8, mini_batch=0, epochs=1)
  config.critic.enabled, config.loss.kl_coef, config.checkpoint_every, config.search.backend = False, 0.0, 1, 'http'
  return config


def rows_of(config, *names):
  return [tuple(row.get(name) for name in names) for row in row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')]


def checkpoints_of(config):
  return sorted(int(path.name) for path in pathlib.Path(config.out).glob('checkpoints/*'))


def test_a_row_says_what_searches_of_the_web_cost(remote, tmp_path, monkeypatch):
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  remote.search.update(backend='web', price=0.5, cache=str(tmp_path / 'kept'))
  remote.eval.update(every=2, number=2, questions=remote.data.questions, temperatures=(1.0,))
  remote.steps = 2
  with server((200, {'organic': [{'title': 'red', 'snippet': 'The red.'}]})) as (remote.search.url, seen):
    loop.train(remote, held_out)
  evaluations = row_files.read(pathlib.Path(remote.out) / 'evaluations.jsonl')
  paid = [row['searches_paid'] for row in [*row_files.read(pathlib.Path(remote.out) / 'metrics.jsonl'), *evaluations]]
  assert sum(paid) == len(seen) > 0 and evaluations[1]['searches_paid'] == 0  # those of the first are kept
  assert all(cost == 0.5 * count for count, cost in rows_of(remote, 'searches_paid', 'searches_cost'))


def test_a_dead_server_is_said_at_once_and_stops_the_run_which_resumes(remote, capsys):
  remote.search.update(timeout=0.5, max_failed_steps=2)
  remote.eval.update(every=6, number=2, questions=remote.data.questions, temperatures=(1.0,))
  with server() as (remote.search.url, _):
    pass  # nobody is there any more
  with pytest.raises(runs.RunStopped, match=r'step 2: most searches failed in 2 steps in a row \(search.max_failed_steps=2\)\. '
                     r'10 of 10 searches failed; the last: SearchError: .*; the last checkpoint is that of step 1; '):
    loop.train(remote, held_out)
  said = capsys.readouterr().err.splitlines()
  assert [line.partition(' failed')[0] for line in said] == [
    'jaxsearch: evaluation after step 0, temperature 1: 2 of 2 searches',
    'jaxsearch: step 1: 10 of 10 searches', 'jaxsearch: step 2: 10 of 10 searches']
  assert f'the last: SearchError: search at {remote.search.url}' in said[1]
  assert said[2].endswith(' (2 steps in a row; the run stops after 2)')
  names = 'failed_steps_in_a_row', 'searches_asked', 'searches_failed', 'searches_failed_share'
  assert rows_of(remote, *names) == [(1, 10, 10, 1.0), (2, 10, 10, 1.0)] and checkpoints_of(remote) == [1]
  [evaluation] = row_files.read(pathlib.Path(remote.out) / 'evaluations.jsonl')
  assert (evaluation['searches_asked'], evaluation['searches_failed']) == (2, 2) and 'SearchError' in evaluation['last_failure']

  remote.steps = 5
  remote.search.update(timeout=30.0, max_failed_steps=3)
  down = lambda: len(rows_of(remote, 'step')) in (1, 3)  # in steps 2 and 4
  with server(lambda handler: handler.send_error(404) if down() else passage(handler)) as (remote.search.url, _):
    loop.train(remote, held_out)
  assert rows_of(remote, *names[:3]) == [(1, 10, 10), (2, 10, 10), (0, 10, 0), (1, 10, 10), (0, 10, 0)]  # step 1 still counts
  assert 'step 2: 10 of 10 searches failed; the last: SearchError' in capsys.readouterr().err  # the reason anew
  assert checkpoints_of(remote) == [4, 5]


def test_a_judge_that_is_down_is_said_and_stops_nothing(remote, monkeypatch, capsys):
  toy, grow = sys.modules['jaxsearch.methods.toy'], sys.modules['jaxsearch.methods.toy'].grow

  def judged(question, tree, **settings):
    yield from grow(question, tree, **settings)
    yield Ask('judge', Answer(question, tree.answer))

  monkeypatch.setattr(toy, 'grow', judged)
  monkeypatch.setattr(toy, 'SERVICES', ('judge',), raising=False)
  remote.judge, remote.steps, remote.search.backend, remote.search.max_failed_steps = slate.get_config().judge, 2, 'bm25', 1
  with server((404, {})) as (url, _):
    remote.judge.update(kind='chat', url=url, model='judge')
    loop.train(remote)
  names = 'service_calls', 'service_calls_failed', 'searches_failed', 'failed_steps_in_a_row'
  assert rows_of(remote, *names) == [(10, 10, 0, 0)] * 2
  said = capsys.readouterr().err.splitlines()
  assert said[0].startswith('jaxsearch: step 1: 10 of 10 calls of judge or reader failed; the last: judge: ChatError: chat at ')
  assert said[1:] == ['jaxsearch: step 2: 10 of 10 calls of judge or reader failed, as before']
