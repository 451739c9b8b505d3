"""The loop itself, in this process, on a mesh of eight devices."""

import collections
import functools
import operator
import pathlib
import pickle
import re
import sys
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import slate
from jaxsearch import cli, setup
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation.answers import held_out
from jaxsearch.methods import Context, carl, cusearch, search_r1, search_r1_ppo
from jaxsearch.models import hub
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.rewards.judge import Answer
from jaxsearch.sampler.requests import Ask
from jaxsearch.training import (
  batch as batches,
  learner as learners,
  loop,
  metrics,
  rollout_file,
  row_files,
  run_folder,
  saved_policies,
  update,
)
from jaxsearch.training.metrics import credited, summary
from jaxsearch.trees.layout import count_trained, lay_out
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters
from tests.processes import as_processes
from tests.tools.serving import server

REQUIRED = ('step reward em searches loss kl entropy tokens_generated tokens_trained seconds_generate '
            'seconds_tools seconds_train seconds_score seconds_save idle_share clip_fraction ratio ratio_max '
            'grad_norm logprob_gap logprob_gap_max learning_rate padded_share policy_loss skipped '
            'compilations').split()


def rows_of(config, *names):
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  return [tuple(row.get(name) for name in names) for row in rows]


def test_a_run_on_eight_devices(config, capfd, monkeypatch):
  toy = sys.modules['jaxsearch.methods.toy']
  credit = toy.credit

  def credit_with_figure(groups, context, **settings):
    credit(groups, context, **settings)
    context.metrics['groups_alike_wrong'] = 0.125  # of a method whose rewards are per turn

  monkeypatch.setattr(toy, 'credit', credit_with_figure)
  config.steps, config.progress, config.data.number, config.rollouts = 3, True, 6, -1
  config.mesh.update(data=2, fsdp=2, tensor=2)
  config.train.micro_rows = 4
  config.eval.update(every=2, number=4, questions=config.data.questions)
  last = loop.train(config, held_out)
  said = [line for line in capfd.readouterr().err.splitlines() if 'jaxsearch: step' in line]
  pattern = r'jaxsearch: step (\d)/3(?:, \d+ s left)?, reward [\d.]+, em [\d.]+, searches 1'
  assert [re.fullmatch(pattern, line)[1] for line in said] == ['1', '2', '3']
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2, 3]
  for row in rows:
    assert not [name for name in REQUIRED if row.get(name) is None]
    assert row['logprob_gap_max'] < 1e-4 and row['ratio_max'] == pytest.approx(1, abs=1e-4)
    assert row['critic_skipped'] == row['critic_skipped_in_a_row'] == 0
    assert 0 < row['goodput'] <= 1 and row['tokens_per_second_update'] > 0
    assert row['groups_alike_wrong'] == 0.125  # the method's, not that of the trees' rewards
    assert row['searches'] == 1 and row['tokens_generated'] == row['tokens_trained'] == 100
    on_paths = row['tokens_per_tree'] * row['trees']
    assert row['tokens_in_rows'] < row['tokens_on_paths'] == on_paths  # two chains share a prompt
  assert rows[0]['kl'] == pytest.approx(0, abs=1e-6) and rows[2]['kl'] > rows[0]['kl']
  assert last['loss'] == pytest.approx(rows[2]['loss'])
  evaluations = row_files.read(pathlib.Path(config.out) / 'evaluations.jsonl')
  assert [(row['step'], row['temperature'], row['n']) for row in evaluations] == [
    (step, temperature, 4) for step in (0, 2, 3) for temperature in (1.0, 0.0)]
  kept = rollout_file.members(pathlib.Path(config.out) / rollout_file.FILE)
  asked = {record['id'] for _, _, records in kept for record in records}
  assert asked == {question.id for question in load_questions(config.data.questions)[:6]}  # data.number
  _, params, host = saved_policies.load_params(config.out)
  assert Tokenizer.from_json(host['tokenizer']).encode('red') == Tokenizer.load(config.model).encode('red')
  assert host['step'] == 3 and host['config']['method'] == 'toy'
  assert np.isfinite(np.asarray(params['embedding'])).all()


def test_bfloat16_frees_the_sampler_for_the_update_and_weighs_what_it_rounds(config, monkeypatch):
  """Master weights, moments and gradients are float32, so what is bfloat16 is the sampler's."""
  update, live = loop.update, []
  in_bfloat16 = lambda: sum(x.nbytes for x in jax.live_arrays() if x.dtype == 'bfloat16')
  monkeypatch.setattr(loop, 'update', lambda *args: live.append(in_bfloat16()) or update(*args))
  config.dtype, config.steps, config.critic.enabled, config.loss.kl_coef = 'bfloat16', 2, False, 0.0
  before, rows = in_bfloat16(), []
  for release in (True, False):
    config.out, config.sampler.release = f'{config.out}-{release}', release
    loop.train(config)
    rows.append(rows_of(config, 'loss', 'grad_norm', 'logprob_gap', 'importance_weight', 'importance_capped'))
  assert live[:2] == [before] * 2 and min(live[2:]) > before and rows[0] == rows[1]
  for _, _, gap, weight, capped in rows[0]:
    assert 0 < gap < 0.1 and weight == pytest.approx(1, abs=0.05) and weight != 1 and capped == 0


@pytest.mark.parametrize('changes', [dict(attention='flash'), {'sampler.weights': 'int8'}])
def test_ways_to_compute_change_no_more_than_rounding(config, changes):
  """Chains in place of trees change sums alone; weights of 8 bits the tokens too, by which the gap is seen."""
  config.steps, rows = 2, []
  for change in ({}, changes):
    config.out = f'{config.out}-{len(rows)}'
    config.update_from_flattened_dict(change)
    loop.train(config)
    rows.append(rows_of(config, 'loss', 'grad_norm', 'kl', 'logprob_gap', 'importance_weight', 'tokens_in_rows'))
  (*same, gap, _, tokens), (*others, other_gap, weight, other_tokens) = (of_run[1] for of_run in rows)
  if 'attention' in changes:
    assert others == pytest.approx(same, rel=1e-3, abs=1e-5) and other_tokens > tokens
  else:
    assert 10 * gap < other_gap < 1e-3 and weight == pytest.approx(1, abs=1e-3)  # random weights say little


def grown_groups(questions: int = 48, size: int = 4) -> list[list[Tree]]:
  """Chains of up to four searches about different questions, with the values of a critic."""
  rng, groups = np.random.default_rng(0), []
  for number in range(questions):
    prompt, question = rng.integers(1, 99, 60).tolist(), Question(str(number), 'Which?', ('a',))
    groups.append([Tree(Letters(), question) for _ in range(size)])
    for member, tree in enumerate(groups[-1]):
      tree.root.data['member'] = member
      tree.answer, searches = str(rng.choice(['a', 'b'])), int(rng.integers(5))
      tree.metrics = dict(searches=searches, found=searches, malformed=0, tool_failures=0)
      node = tree.root.append(prompt, Role.PROMPT)
      for turn in range(2 * searches + 1):
        tokens = rng.integers(1, 99, int(rng.integers(20, 60))).tolist()
        logprobs = rng.normal(-1, 0.3, len(tokens)).tolist()
        node = node.append(tokens, Role.OBSERVATION) if turn % 2 else node.append(
          tokens, Role.POLICY, sampler_logprobs=logprobs)
        node.values, node.data['segment'] = rng.random(len(tokens)).astype(np.float32), 'invoke'
  return groups


@pytest.mark.parametrize(('method', 'settings', 'how'), [
  (cusearch, {'strategy': 'auto', 'keep': 40}, 'seq-mean-token-mean'),
  (cusearch, {'strategy': 'random', 'keep': 30, 'drop_alike': True}, 'token-mean'),
  (search_r1_ppo, {}, 'span-mean'), (carl, {}, 'step-mean')])
def test_trees_stay_where_they_grew_and_are_credited_as_one_batch(monkeypatch, method, settings, how):
  """Advantages and loss weights of four processes are those of one, and next to nothing is exchanged."""
  def run():
    groups = grown_groups()[transfer.local_part()]
    context = Context(3, np.random.default_rng(3), {})
    method.credit(groups, context, **settings)
    trained = credited(groups)
    last = jax.process_index() == jax.process_count() - 1
    called = {'calls_python': 1} if last else {}
    row = summary(groups, trained, called) | context.of_all(sum(map(len, groups)))
    parts = []
    for forest in batches.split(trained, 50, np.random.default_rng(1)):
      totals = sum(transfer.gather_objects(count_trained(forest)))
      rows = lay_out(forest, 1024, pad_id=0, how=how, share_trained=False, totals=totals)
      parts.append({(tree.question.id, tree.root.data['member']): [
        (node.advantages, rows.loss_weights[rows.places[node]]) for node in tree.nodes(Role.POLICY)]
        for tree in forest})
    return row, parts

  expected_row, expected = run()
  before = transfer.exchanged['bytes']
  found = as_processes(4, monkeypatch, run)
  assert 0 < transfer.exchanged['bytes'] - before < 0.02 * 3 * len(pickle.dumps(grown_groups()))
  of_one_process = {'opposed_pairs_share', 'advantage_invoke'}
  for row, _ in found:
    assert row.keys() == expected_row.keys()
    for name in row.keys() - of_one_process:
      assert row[name] == pytest.approx(expected_row[name], rel=1e-6), name
  for index, part in enumerate(expected):
    joined = {key: spans for _, parts in found for key, spans in parts[index].items()}
    assert joined.keys() == part.keys()
    for key, spans in part.items():
      for (advantage, weights), (other, others) in zip(spans, joined[key], strict=True):
        np.testing.assert_allclose(other, advantage, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(others, weights)


def test_penalties_may_be_averaged_otherwise_than_the_surrogate(config):
  config.train.update(row_length=1024)
  pack = functools.partial(batches.pack, mesh=meshes.make_mesh(1, 8, 1), attention='auto', share_trained=False)
  trees = [tree for group in grown_groups() for tree in group]
  search_r1.credit([trees], Context(0, np.random.default_rng(0), {}))
  rows = pack(trees, settings=config.train).rows
  config.train.update(aggregate='seq-mean-token-sum', penalties='token-mean')  # of surrogate and KL
  summed = pack(trees, settings=config.train).rows
  np.testing.assert_array_equal(summed.loss_weights, rows.loss_weights)
  assert np.abs(summed.gains).sum() > 2 * np.abs(rows.gains).sum()


def test_a_critic_needs_a_credit_with_returns(config):
  config.critic.enabled, groups = True, grown_groups()
  search_r1.credit(groups, Context(0, np.random.default_rng(0), {}))
  with pytest.raises(ValueError, match='sets no returns'):
    update.update(types.SimpleNamespace(config=config), groups, 1, metrics.Clock())


def test_an_evaluation_asks_the_critic_and_no_judge(config, monkeypatch):
  config.reward, tree = 'judge', grown_groups()[0][0]
  ask = lambda items: pytest.fail(f'{len(items)} answers are judged')
  tools = types.SimpleNamespace(services={'judge': ask})
  learner = types.SimpleNamespace(
    config=config, agent=types.SimpleNamespace(tools=tools), verdicts={}, mesh=meshes.make_mesh(1, 8, 1),
    state=types.SimpleNamespace(critic=types.SimpleNamespace(params=None)),
    values=lambda _, batch: np.full(batch.targets.shape, 0.25, np.float32))
  config.train.row_length = 1024
  monkeypatch.setattr(loop, 'prepare', lambda *_: types.SimpleNamespace(engine=None, tools=tools))
  monkeypatch.setattr(setup, 'make_agent', lambda *_, **__: None)
  run = types.SimpleNamespace(write_evaluation=lambda rows: None)
  loop.evaluate_policy(run, learner, sys.modules['jaxsearch.methods.toy'], 1, lambda *given: given[3]([tree]) or [])
  assert all((node.values == 0.25).all() for node in tree.nodes(Role.POLICY)) and tree.judged is None
  assert tree.reward == tree.question.score(tree.answer)


def saved(run, step):
  """Every array of a checkpoint's parameters by its path, read without jaxsearch."""
  found = ocp.StandardCheckpointer().restore(pathlib.Path(run) / 'checkpoints' / str(step) / 'params')
  return {path: np.asarray(value) for path, value in ocp.tree.to_flat_dict(found, sep='/').items()}


def test_a_run_of_sft_is_no_run_of_train(monkeypatch):
  monkeypatch.setattr(loop.hub, 'check_base', lambda *_: None)
  run = types.SimpleNamespace(restore=lambda state, check: check({'demonstrations': ''}))
  learner = types.SimpleNamespace(state=None, fingerprint=[], config=types.SimpleNamespace(model='', out='runs/a'))
  with pytest.raises(ValueError, match='runs/a holds a run of `jaxsearch sft`: set another out'):
    loop.resume(run, learner, None)


def test_an_adapter_learns_on_its_base_which_is_the_reference_and_becomes_a_plain_model(config, tmp_path):
  config.lora.update(rank=4, alpha=8.0)
  config.steps, config.critic.enabled, plain = 2, False, str(tmp_path / 'plain')
  learner = learners.make_learner(config)
  assert all(map(operator.is_, jax.tree.leaves(learner.base), jax.tree.leaves(learner.reference)))
  loop.train(config)
  adapter = saved(config.out, 2)
  assert set(adapter) == {f'layers/{name}/{factor}' for name in config.lora.targets for factor in 'ab'}
  (first,), (second,) = rows_of(config, 'kl')
  assert first == 0 < second
  assert max(rows_of(config, 'logprob_gap_max')) < (1e-4,)  # the sampler has the merged parameters too
  assert cli.main(['export', f'--checkpoint={config.out}', f'--out={plain}', f'--config.model={config.model}']) == 0
  base, exported = (hub.load(folder).params for folder in (config.model, plain))
  sums = {'q': 'ldr,lrnh->ldnh', 'k': 'ldr,lrnh->ldnh', 'v': 'ldr,lrnh->ldnh', 'o': 'lnhr,lrd->lnhd'}
  for name, value in base['layers'].items():
    if name in config.lora.targets:
      factors = (adapter[f'layers/{name}/{factor}'] for factor in 'ab')
      value = value + 8.0 / 4 * np.einsum(sums.get(name, 'lir,lro->lio'), *factors)
      assert np.abs(value - base['layers'][name]).max() > 1e-4
    np.testing.assert_allclose(exported['layers'][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
  np.testing.assert_array_equal(exported['embedding'], base['embedding'])


@pytest.fixture
def remote(config):
  """The run with a search behind a server; it compiles little."""
  config.critic.enabled, config.loss.kl_coef, config.checkpoint_every = False, 0.0, 1
  config.search.backend, config.eval.number, config.eval.temperatures = 'http', 2, (1.0,)
  return config


def test_an_evaluation_that_a_kill_left_out_is_made_up_for(remote):
  remote.search.backend, remote.eval.every, remote.steps = 'bm25', 2, 2

  def killed(agent, config, step, judged):
    if step == 2:
      raise KeyboardInterrupt
    return held_out(agent, config, step, judged)

  with pytest.raises(KeyboardInterrupt):
    loop.train(remote, killed)
  assert (pathlib.Path(remote.out) / 'checkpoints' / '2').exists()  # saved before
  for _ in range(2):
    loop.train(remote, held_out)
    evaluations = row_files.read(pathlib.Path(remote.out) / 'evaluations.jsonl')
    assert [row['step'] for row in evaluations] == [0, 2]


def test_a_row_says_what_searches_of_the_web_cost(remote, tmp_path, monkeypatch):
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  remote.search.update(backend='web', price=0.5, cache=str(tmp_path / 'kept'))
  remote.eval.every = remote.steps = 2
  with server((200, {'organic': [{'title': 'red', 'snippet': 'The red.'}]})) as (remote.search.url, seen):
    loop.train(remote, held_out)
  evaluations = row_files.read(pathlib.Path(remote.out) / 'evaluations.jsonl')
  paid = [row['searches_paid'] for row in evaluations] + [count for count, in rows_of(remote, 'searches_paid')]
  assert sum(paid) == len(seen) > 0 and evaluations[1]['searches_paid'] == 0  # those of the first are kept
  assert all(cost == 0.5 * count for count, cost in rows_of(remote, 'searches_paid', 'searches_cost'))


def failures(capsys):
  """The lines on stderr but for those of programs, which a busy machine compiles long enough to mention."""
  return [line for line in capsys.readouterr().err.splitlines() if 'compiled ' not in line]


def test_a_dead_server_is_said_at_once_and_stops_the_run(remote, capsys):
  remote.search.update(timeout=0.5, max_failed_steps=2)
  remote.eval.every = 6
  with server() as (remote.search.url, _):
    pass  # nobody is there any more
  stops = (r'step 2: most searches, judgements or calls of a service or tool failed in 2 steps in a row '
           r'\(search.max_failed_steps=2\)\. 10 of 10 searches failed; the last: SearchError: .*; '
           r'the last checkpoint is that of step 1; ')
  with pytest.raises(run_folder.RunStopped, match=stops):
    loop.train(remote, held_out)
  said = failures(capsys)
  assert [line.partition(' failed')[0] for line in said] == [
    'jaxsearch: evaluation after step 0, temperature 1: 2 of 2 searches',
    'jaxsearch: step 1: 10 of 10 searches', 'jaxsearch: step 2: 10 of 10 searches']
  assert f'the last: SearchError: search at {remote.search.url}' in said[1]
  assert said[2].endswith(' (2 steps in a row; the run stops after 2)')
  names = 'failed_steps_in_a_row', 'searches_asked', 'searches_failed'
  assert rows_of(remote, *names) == [(1, 10, 10), (2, 10, 10)]
  [evaluation] = row_files.read(pathlib.Path(remote.out) / 'evaluations.jsonl')
  assert (evaluation['searches_asked'], evaluation['searches_failed']) == (2, 2)
  assert 'SearchError' in evaluation['last_failure']


def test_a_judge_that_is_down_is_said_and_stops_the_run(remote, monkeypatch, capsys):
  toy, grow = sys.modules['jaxsearch.methods.toy'], sys.modules['jaxsearch.methods.toy'].grow

  def judged(question, tree, **settings):
    yield from grow(question, tree, **settings)
    yield Ask('judge', Answer(question, tree.answer))

  monkeypatch.setattr(toy, 'grow', judged)
  monkeypatch.setattr(toy, 'SERVICES', ('judge',), raising=False)
  remote.judge, remote.steps = slate.get_config().judge, 3
  remote.search.update(backend='bm25', max_failed_steps=2)
  with server((404, {})) as (url, _):
    remote.judge.update(kind='chat', url=url, model='judge')
    with pytest.raises(run_folder.RunStopped, match='calls of a service or tool failed in 2 steps in a row'):
      loop.train(remote)
  names = 'service_calls', 'service_calls_failed', 'searches_failed', 'failed_steps_in_a_row'
  assert rows_of(remote, *names) == [(10, 10, 0, 1), (10, 10, 0, 2)]
  run = types.SimpleNamespace(config=remote, say=print)
  dead = {'step': 3, 'judgements': 4, 'judge_failed': 3}
  assert loop.count_failed_steps(run, dead, {}, [{'failed_steps_in_a_row': 1}]) == {'failed_steps_in_a_row': 2}
  for fault, steps in (('connection', 2), ('refused', 0)):  # of an MCP server; of the policy's own mistakes
    calls = {'step': 3, 'tool_calls': 4, 'tool_calls_failed': 3, f'tool_calls_failed_{fault}': 3, 'last_failure': ''}
    assert loop.count_failed_steps(run, calls, {}, [{'failed_steps_in_a_row': 1}])['failed_steps_in_a_row'] == steps
  said = failures(capsys)
  assert said[0].startswith(
    'jaxsearch: step 1: 10 of 10 calls of judge or reader failed; the last: judge: ChatError: chat at ')
  assert said[1:] == ['jaxsearch: step 2: 10 of 10 calls of judge or reader failed, as before '
                      '(2 steps in a row; the run stops after 2)']


def test_what_a_first_step_compiles_is_known_before_it(config, monkeypatch):
  """As on an accelerator: the sampler's programs come first, updates as they are reached."""
  monkeypatch.setattr(loop, 'jax', types.SimpleNamespace(
    default_backend=lambda: 'gpu', process_index=lambda: 0, tree=jax.tree))
  compiled, awaited = collections.Counter(), collections.Counter()

  def heard(event, _, fun_name='', **__):
    if event == metrics.COMPILATION:
      compiled.update([fun_name.removeprefix('jit(').removesuffix(')')])

  monkeypatch.setattr(metrics, 'await_programs', lambda names: (awaited.update(names), compiled.clear()))
  jax.clear_caches()
  jax.monitoring.register_event_duration_secs_listener(heard)
  config.steps = 1
  loop.train(config)
  jax.monitoring.unregister_event_duration_listener(heard)
  assert {name: compiled[name] for name in awaited} == awaited and awaited['prefill'] > 2
  assert awaited['train_step'] == awaited['score'] == 2  # of the policy and of its critic
