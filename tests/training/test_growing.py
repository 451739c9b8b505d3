"""Trees that are grown a step ahead or over several steps: by which parameters, and how a run resumes with them."""

import collections
import dataclasses
import functools
import json
import pathlib
import sys
import threading
import types

import numpy as np
import pytest

from configs import base
from jaxsearch import setup
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question, QuestionBatches
from jaxsearch.rewards.judge import Reasoned
from jaxsearch.sampler import driver
from jaxsearch.sampler.requests import Ask, Generate, Sampling, Score, Search, ToolFailure, Tools
from jaxsearch.tools.calls import NoRoom
from jaxsearch.tools.tool import listed
from jaxsearch.training import growing, held, loop, refill, row_files, update
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters
from tests.processes import as_processes
from tests.sampler.test_driver import Counting, Library


@pytest.fixture
def config(config):
  config.steps, config.checkpoint_every, config.critic.enabled, config.rollouts = 4, 1, False, 0
  config.train.async_steps = 1
  return config


class Killed(BaseException):
  """Stands in for a kill: nothing handles it."""


def killing(function, after: int):
  """The function; it raises instead of its call number `after`, counted from 0, and always from then on."""
  calls = []

  @functools.wraps(function)
  def call(*arguments, **options):
    calls.append(arguments)
    if len(calls) > after:
      raise Killed
    return function(*arguments, **options)

  return call


def test_numbers_of_trees_depend_on_no_process(monkeypatch):
  """A tree draws from its number: of three for each question, those of larger groups come last."""
  sizes = [2, 2, 3, 3, 4, 4]
  alone = growing.local_trees(sizes, 3)
  assert alone == {0: [0, 1], 1: [3, 4], 2: [6, 7, 8], 3: [9, 10, 11], 4: [12, 13, 14, 30], 5: [15, 16, 17, 33]}
  parts = as_processes(3, monkeypatch, lambda: growing.local_trees(sizes, 3))
  assert alone == {place: numbers for part in parts for place, numbers in part.items()}
  assert list(parts[1]) == [1, 4]


def outcome(config) -> list[tuple]:
  names = ('step', 'loss', 'reward', 'logprob', 'grad_norm', 'tokens_generated', 'searches_asked', 'tool_calls',
           'drawn_per_tree', 'memory')
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  return [tuple(row[name] for name in names) for row in rows]


def test_one_step_ahead_trees_are_of_older_parameters_and_a_killed_run_resumes_to_the_bit(config, monkeypatch):
  """Chains are folded, so that the trees of a checkpoint have summaries and copies of them."""
  config.grow.update(fold='summary', fold_at=0.1, fold_tokens=4)
  loop.train(config)
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  gaps = [row['logprob_gap'] for row in rows]
  assert {row['folds_per_tree'] for row in rows} == {1}
  assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3  # by parameters that are a step old
  expected, config.out = outcome(config), f'{config.out}-killed'
  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(loop, 'update', killing(loop.update, 2))  # step 3; the checkpoint of step 2 has its trees
    loop.train(config)
  grown, run = [], driver.run
  monkeypatch.setattr(driver, 'run', lambda agent, episodes, *given, **options: grown.append(len(episodes)) or run(
    agent, episodes, *given, **options))
  loop.train(config)
  assert outcome(config) == expected and grown == [10]  # of step 4


def test_the_rollout_of_a_step_runs_while_the_step_before_is_trained(config, monkeypatch):
  """An update waits for the first search of the next rollout, and that search for the end of the update."""
  config.steps, open_tools, update, waited = 3, setup.open_tools, loop.update, []
  searched, updated = ({step: threading.Event() for step in range(5)} for _ in range(2))
  updated[0].set()

  class Waiting:
    def __init__(self, inner):
      self.inner = inner

    def set_step(self, step, steps):
      self.step = step

    def search(self, queries, topk):
      searched[self.step].set()
      waited.append(updated[self.step - 1].wait(200))
      return self.inner.search(queries, topk)

  def updating(learner, groups, step, clock):
    waited.append(step == config.steps or searched[step + 1].wait(200))
    row = update(learner, groups, step, clock)
    updated[step].set()
    return row

  monkeypatch.setattr(loop, 'update', updating)
  monkeypatch.setattr(setup, 'open_tools', lambda *given, **options: dataclasses.replace(
    tools := open_tools(*given, **options), search=Waiting(tools.search), deadline=300.0))
  loop.train(config)
  assert all(waited) and len(waited) == 33


def test_what_fails_on_either_side_ends_the_other(config, monkeypatch):
  """The error of a rollout ahead is that of the run; an update that is killed leaves no thread behind."""
  toy = sys.modules['jaxsearch.methods.toy']
  for owner, name, after in ((toy, 'grow', 15), (loop, 'update', 1)):  # the sixth tree of step 2; step 2
    with monkeypatch.context() as patch, pytest.raises(Killed):
      patch.setattr(owner, name, killing(getattr(owner, name), after))
      loop.train(config)
  assert not [thread for thread in threading.enumerate() if 'growing' in thread.name]


def long_grow(question, tree, *, max_tokens):
  """As the toy's, but every fourth question takes ten turns."""
  node = tree.root.append(f'{question.question} ', Role.PROMPT)
  for _ in range(1 if int(question.id) % 4 else 10):
    node = yield Generate(node, max_tokens=max_tokens)
    documents = yield Search(node, question.question)
    tree.metrics['searches'] += 1
    node = node.append(grammar.information(documents[:1], tree.tokenizer.special_tokens), Role.OBSERVATION)
  node = yield Generate(node, max_tokens=max_tokens)
  tree.answer = node.text
  tree.metrics['drawn'] = tree.rng.random()


def sampled(tree):
  return [(node.tokens, node.sampler_logprobs) for node in tree.nodes(Role.POLICY)]


@pytest.mark.slow
@pytest.mark.parametrize('ahead', [0, 1])
def test_long_trees_go_on_in_the_next_step_and_a_killed_run_resumes_to_the_bit(config, monkeypatch, ahead):
  monkeypatch.setattr(sys.modules['jaxsearch.methods.toy'], 'grow', long_grow)
  config.train.update(carry=2, refill=2, async_steps=ahead, row_length=512)
  config.sampler.length, config.sampler.slots, config.group_size = 512, 8, 2
  begin, update, before, trained = growing.begin, loop.update, {}, []

  def beginning(*given):
    for one in given[4]:
      before.update({(episode.tree.question.id, one.step): sampled(episode.tree) for episode in one.episodes})
    return begin(*given)

  def updating(learner, groups, *given):
    trained.append([tree.question.id for group in groups for tree in group])
    for tree in (tree for group in groups for tree in group):
      for (name, _), spans in before.items():
        if name == tree.question.id and spans and spans[0] == sampled(tree)[0]:
          kept.append(sampled(tree)[:len(spans)] == spans)
    return update(learner, groups, *given)

  kept = []
  with monkeypatch.context() as patch:
    patch.setattr(growing, 'begin', beginning)
    patch.setattr(loop, 'update', updating)
    loop.train(config)
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row['trees'] for row in rows] == [6, 10, 10, 10] and {row['questions_carried'] for row in rows} == {2}
  assert all(row['groups_alike'] == 0 or row['questions_refilled'] == 2 for row in rows)
  assert 0 < sum(row['questions_refilled'] for row in rows)
  assert kept and all(kept) and max(row['trees_older'] for row in rows) > 0
  older = [row['logprob_gap_max'] for row in rows if row['trees_older'] or (ahead and row['step'] > 1)]
  assert rows[0]['logprob_gap_max'] < 1e-4 and max(older) > 1e-3  # some were carried before they began
  expected, config.out = outcome(config), f'{config.out}-killed'
  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(loop, 'update', killing(loop.update, 2))
    loop.train(config)
  loop.train(config)
  assert outcome(config) == expected


class Drawing(Counting):
  """Draws a span from the number of its tree and of its request, and from the version of the weights."""

  def __init__(self, engine, schedule):
    super().__init__(schedule)
    self.engine = engine

  def decode(self):
    finished = super().decode()
    for pending, node in finished:
      episode = pending.episode
      rng = np.random.default_rng([self.engine.version, episode.number, episode.requests])
      node.tokens, node.data['weights'] = rng.integers(97, 122, len(node.tokens)).tolist(), self.engine.version
      node.sampler_logprobs = rng.normal(size=len(node.tokens)).tolist()
    return finished


def turns_grow(question, tree):
  """One turn, or with every third question seven, each with a search by what was drawn."""
  node = tree.root.append('prompt', Role.PROMPT)
  for _ in range(1 if int(question.id) % 3 else 7):
    node = yield Generate(node, max_tokens=3)
    documents = yield Search(node, node.text)
    node = node.append(f'{documents[0].text} {tree.rng.random():.3f}', Role.OBSERVATION)
  tree.answer = node.text


def counting_learner(monkeypatch, **train):
  """A learner of six questions a step, two trees each, whose policy draws; and its stream of questions."""
  config = base.get_config().unlock()
  config.questions_per_step, config.group_size = 6, 2
  config.train.update(train)
  engine = types.SimpleNamespace(tokenizer=Letters(), length=200, version=0)
  engine.decoding = lambda key, sampling, schedule: Drawing(engine, schedule)
  agent = driver.Agent(engine, turns_grow, Tools(Library()), Sampling())

  def prepare(learner, step):
    engine.version = step
    return agent

  for module in (growing, refill):
    monkeypatch.setattr(module, 'prepare', prepare)
  learner = types.SimpleNamespace(config=config, memory={}, agent=agent, values=None)
  return learner, QuestionBatches([Question(str(i), '?', ('a',)) for i in range(50)], 6)


def steps_of(monkeypatch, steps, stop_after=0):
  """Grows steps with two questions carried; each step's groups, its metrics, and the questions that go on."""
  learner, stream = counting_learner(monkeypatch, carry=2)
  carried, rows = [], []
  for step in range(1, steps + 1):
    current = growing.begin(learner, types.SimpleNamespace(), stream, step, carried)
    groups, carried = current.groups(), current.carried()
    if step == stop_after:
      saved = json.loads(json.dumps(list(map(growing.to_json, carried))))
      carried = growing.from_json(saved, learner.config, learner.agent, stream)
    rows.append(([[tree.to_json() for tree in group] for group in groups], dict(current.context.metrics),
                 [[episode.tree.question.id for episode in one.episodes] for one in carried]))
  return rows


@pytest.mark.parametrize('changes', [
  {}, {'train.carry': 2}, {'loss.kind': 'gspo'}, {'loss.importance': 'sequence'}, {'critic.enabled': True}], ids=str)
def test_what_differs_in_its_loss_is_not_laid_upon_each_other(config, monkeypatch, changes):
  def pack(*_, share_trained, **__):
    assert share_trained == (not changes)
    raise Killed

  monkeypatch.setattr(update.batches, 'pack', pack)
  config.update_from_flattened_dict({'critic.enabled': False} | changes)
  tree = Tree(Letters(), Question('0', '?', ('a',)))
  with pytest.raises(Killed):
    update.update(types.SimpleNamespace(config=config, mesh=None), [[tree]], 1, None)


def test_questions_that_are_carried_are_trained_where_they_end_and_survive_a_checkpoint(monkeypatch):
  rows = steps_of(monkeypatch, 6)
  assert [len(groups) for groups, *_ in rows] == [4, 6, 6, 6, 6, 6]
  trained = [tree['id'] for groups, *_ in rows for group in groups for tree in group]
  left = [name for names in rows[-1][2] for name in names]
  assert len(trained) == 68 and len(left) == 4 and set(collections.Counter(trained + left).values()) == {2}
  versions = [sorted({node['data'].get('weights', step) for node in tree['nodes']})
              for step, (groups, *_) in enumerate(rows, start=1) for group in groups for tree in group]
  assert [1, 2] in versions and max(map(len, versions)) > 1  # old spans are still of the weights that drew them
  assert [metrics['questions_carried'] for _, metrics, _ in rows] == [2] * 6
  assert sum(metrics['trees_older'] for _, metrics, _ in rows) > 4
  for step in (1, 2, 4):
    assert steps_of(monkeypatch, 6, stop_after=step) == rows


def test_other_questions_are_named_where_unfinished_trees_are_of_the_old_ones(monkeypatch):
  learner, stream = counting_learner(monkeypatch, carry=2)
  current = growing.begin(learner, types.SimpleNamespace(), stream, 1)
  current.groups()
  host = {'memory': {}, 'following': None, 'questions': stream.get_state(),
          'carried': list(map(growing.to_json, current.carried()))}
  run, learner.state = types.SimpleNamespace(restore=lambda state, check: (state, host)), None
  with pytest.raises(ValueError, match='cannot resume this stream of questions: questions was'):
    loop.resume(run, learner, QuestionBatches([Question(str(3 * i), '!', ('a',)) for i in range(50)], 6))


def test_figures_of_a_sampler_are_restored_on_any_number_of_processes(monkeypatch):
  learner, stream = counting_learner(monkeypatch)
  told = {'tool_calls_failed_timeout': 1, 'last_failure': 'down'}  # of the second process alone
  first, second = {'tokens_decoded': 3, 'seconds': 2.0}, {'tokens_decoded': 5, 'seconds': 4.0} | told
  saved = {'step': 2, 'metrics': {}, 'rng': np.random.default_rng(0).bit_generator.state, 'asked': [],
           'sampled': [first, second]}
  restored = lambda: growing.restore(saved, learner, stream, []).outcome.result()
  assert restored() == {'tokens_decoded': 8, 'seconds': 3.0} | told
  untold = told | {'tool_calls_failed_timeout': 0}
  assert as_processes(3, monkeypatch, restored) == [
    first | untold, second, {'tokens_decoded': 0, 'seconds': 3.0} | untold]


def test_a_tree_that_is_saved_half_grown_goes_on_as_it_was():
  """Replies of all kinds, siblings that ended in another order, and a generator that asks for something else."""
  def grow(tree, asked='b'):
    node = tree.root.append('prompt', Role.PROMPT)
    first, second = yield [Generate(node, max_tokens=3), Generate(node, max_tokens=4)]
    heard = yield [Search(second, 'a'), Ask('judge', 'right?', first), Score(first, ('x', 'yy'))]
    heard.append((yield Search(second, asked)))
    node = second.append(repr(heard) + f' {heard[1].reason} {tree.rng.random()}', Role.OBSERVATION)
    last = yield Generate(node, max_tokens=2)
    tree.answer = last.text

  def episode(**asked):
    tree = Tree(Letters(), Question('q', '?', ('x',)))
    return driver.Episode(3, grow(tree, **asked), tree)

  replies = [[Document('1', 'T', 'text')], Reasoned(4, 'because'), [[-0.1], None]], ToolFailure('down', 'server')
  half, told = episode(), []
  first, second = next(half.growth)
  later, sooner = (second.node.append('late', Role.POLICY, sampler_logprobs=[-1.5] * 4),
                   first.node.append('now', Role.POLICY, sampler_logprobs=[-0.25] * 3))
  later.data['weights'] = 7
  for asked, given in zip((first, second), (sooner, later)):
    told.append(held.to_json(asked, given))
  three = half.growth.send([sooner, later])
  told += map(held.to_json, three, replies[0])
  half.asked, half.replies, half.requests = [half.growth.send(replies[0])], [replies[1]], 3
  saved = json.loads(json.dumps(held.episode_to_json(half, told)))
  again, observed = episode(), []
  assert held.replay(again, saved, lambda *given: observed.append(given)) == told and len(observed) == 5
  assert (again.requests, again.replies, again.several) == (3, [replies[1]], False)
  for one in (half, again):
    last = one.growth.send(one.replies[0])
    last.node.append('go', Role.POLICY, sampler_logprobs=[-1.0] * 2)
  assert half.tree.to_json() == again.tree.to_json()
  with pytest.raises(ValueError, match='question q: an unfinished tree asks for other things'):
    held.replay(episode(asked='c'), saved, lambda *_: None)
  with pytest.raises(TypeError, match='a reply object cannot be saved'):
    held.to_json(three[0], object())


@pytest.mark.parametrize('found', [[], NoRoom()])
def test_documents_without_room_are_told_from_none_in_a_tree_that_is_saved_half_grown(found):
  def grow(tree):
    node = tree.root.append('prompt', Role.PROMPT)
    node = node.append(listed((yield Search(node, 'a'))), Role.OBSERVATION)
    yield Search(node, 'b')

  def episode():
    tree = Tree(Letters(), Question('q', '?', ('x',)))
    return driver.Episode(0, grow(tree), tree)

  half = episode()
  told = [held.to_json(next(half.growth), found)]
  half.asked, half.replies = [half.growth.send(found)], [[]]
  saved = json.loads(json.dumps(held.episode_to_json(half, told)))
  assert held.replay(episode(), saved, lambda *_: None) == told
