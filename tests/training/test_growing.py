"""Trees that are grown a step ahead: by which parameters, and how a run resumes with them."""

import dataclasses
import functools
import pathlib
import sys
import threading

import pytest

from jaxsearch import setup
from jaxsearch.data.questions import Question
from jaxsearch.training import growing, loop, row_files
from tests.processes import as_processes


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
  questions, sizes = [Question(str(place), '?', ('a',)) for place in range(6)], [2, 2, 3, 3, 4, 4]
  alone = growing.local_trees(questions, sizes, 3)
  assert list(alone) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 30, 15, 16, 17, 33]
  assert [question.id for question in alone.values()] == list('001122233344445555')
  parts = as_processes(3, monkeypatch, lambda: growing.local_trees(questions, sizes, 3))
  assert alone == {number: question for part in parts for number, question in part.items()}
  assert {question.id for question in parts[1].values()} == {'1', '4'}


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
  grown, rollout = [], growing.rollout
  monkeypatch.setattr(growing, 'rollout', lambda *given, numbers, **options: grown.append(len(numbers)) or rollout(
    *given, numbers=numbers, **options))
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
