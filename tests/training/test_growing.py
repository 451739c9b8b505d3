"""Trees that are grown a step ahead: which, by which parameters, and how a run resumes with them."""

import dataclasses
import functools
import json
import pathlib
import sys
import threading

import jax
import ml_collections
import numpy as np
import pytest

from jaxsearch import setup
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, cusearch
from jaxsearch.training import growing, loop, row_files, runs
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters


@pytest.fixture
def config(child, tmp_path, monkeypatch):
  """A run of three steps with one update each."""
  child.make_inputs(tmp_path)
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  config = child.get_config(tmp_path, str(tmp_path / 'run'))
  config.steps, config.checkpoint_every, config.critic.enabled, config.rollouts = 4, 1, False, 0
  config.train.update(epochs=1, mini_batch=0, micro_rows=4)
  config.mesh.update(data=2, fsdp=2, tensor=2)
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


def killed(config, monkeypatch, owner, name: str, after: int) -> None:
  """Trains until a function is called once too often."""
  with monkeypatch.context() as patch:
    patch.setattr(owner, name, killing(getattr(owner, name), after))
    with pytest.raises(Killed):
      loop.train(config)


def outcome(config) -> list[tuple]:
  return [tuple(row[name] for name in ('step', 'loss', 'reward', 'logprob', 'grad_norm', 'tokens_generated', 'searches_asked',
                                       'tool_calls', 'drawn_per_tree', 'memory')) for row in row_files.read(
    pathlib.Path(config.out) / 'metrics.jsonl')]


def test_a_checkpoint_holds_the_trees_of_the_next_step(monkeypatch):
  """With their sizes and the method's random numbers, whatever it learnt since."""
  questions = [Question(str(place), '?', ('a',)) for place in range(6)]
  config = ml_collections.ConfigDict(dict(group_size=3, sizes=dict(adaptive=True)))

  def grown(agent, questions, key, *, numbers, **_):
    trees = [Tree(Letters(), question, np.random.default_rng(number)) for question, number in zip(questions, numbers)]
    for tree, number in zip(trees, numbers):
      tree.root.append([number], Role.POLICY, logprobs=[-1 / 3])
    return trees, {'tokens_decoded': len(trees), 'last_failure': 'down'}

  monkeypatch.setattr(growing, 'rollout', grown)
  context = lambda rates: Context(7, np.random.default_rng(3), {'pass_rates': rates})
  first = growing.begin(config, cusearch, None, jax.random.key(4), questions,
                        context({str(place): [place / 5] for place in range(6)}))
  saved = json.loads(json.dumps(first.state()))
  later = growing.restore(saved, config, Letters(), questions, context({}))
  assert later.state() == saved == first.state() and len(set(later.sizes)) > 1
  assert later.context.rng.random() == first.context.rng.random()
  (trees, row), (others, _) = later.wait(), first.wait()
  assert row == {'tokens_decoded': 18, 'last_failure': 'down'}
  assert [(tree.question, tree.to_json()) for tree in trees] == [(tree.question, tree.to_json()) for tree in others]


@pytest.mark.parametrize(('owner', 'name', 'after', 'again'), [
  (loop, 'update', 2, [10]),  # step 3, whose trees the checkpoint of step 2 has
  pytest.param(runs.RunFolder, 'finish_step', 1, [10, 10], marks=pytest.mark.slow)])
def test_one_step_ahead_trees_are_of_the_parameters_before_the_last_update(config, monkeypatch, owner, name, after, again):
  """Killed at any point the run resumes to the same bits."""
  config.train.async_steps, prepare, sampled_by = 1, loop.prepare, []

  def prepared(learner, step):
    sampled_by.append((step, int(learner.state.updates)))
    return prepare(learner, step)

  monkeypatch.setattr(loop, 'prepare', prepared)
  grown, rollout = [], growing.rollout
  monkeypatch.setattr(growing, 'rollout', lambda *given, numbers, **options: grown.append(tuple(numbers)) or rollout(
    *given, numbers=numbers, **options))
  loop.train(config)
  assert sampled_by == [(1, 0), (2, 0), (3, 1), (4, 2)] and grown == [tuple(range(10))] * 4
  gaps = [row['logprob_gap'] for row in row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')]
  assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3  # by parameters that are a step old
  expected, config.out = outcome(config), f'{config.out}-killed'
  killed(config, monkeypatch, owner, name, after)
  grown.clear()
  loop.train(config)
  assert outcome(config) == expected and [len(one) for one in grown] == again


def test_the_rollout_of_a_step_runs_while_the_step_before_is_trained(config, monkeypatch):
  """An update waits for the first search of the next rollout, and that search for the end of the update."""
  config.steps, config.train.async_steps = 3, 1
  open_tools, update, waited = setup.open_tools, loop.update, []
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
  config.train.async_steps, toy = 1, sys.modules['jaxsearch.methods.toy']
  with monkeypatch.context() as patch:
    patch.setattr(toy, 'grow', killing(toy.grow, 15))  # of step 2, at the sixth tree
    with pytest.raises(Killed):
      loop.train(config)
  killed(config, monkeypatch, loop, 'update', 1)
  assert not [thread for thread in threading.enumerate() if '_run' in thread.name]
