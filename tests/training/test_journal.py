"""Rollouts that were journaled are not grown again, and rollouts one step ahead resume as they were."""

import dataclasses
import errno
import functools
import json
import pathlib
import sys
import threading

import numpy as np
import pytest

from jaxsearch import setup
from jaxsearch.data.questions import Question
from jaxsearch.sampler.rollout import rollout
from jaxsearch.training import RunStopped, journal, loop, runs
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


def tree_of(number: int) -> Tree:
  tree = Tree(Letters(), Question(str(number), '?', ('a',)), np.random.default_rng(number))
  tree.root.append([number], Role.PROMPT).append([1, 2], Role.POLICY, logprobs=[-0.1, -1 / 3])
  return tree


def reopened(folder: pathlib.Path, wanted=lambda step: True, run: dict | None = None, whole: bool = False) -> None:
  def check(saved):
    if saved != (run or {}):
      raise ValueError

  journal.reopen(folder, run or {}, check, wanted, whole)


def test_what_was_written_is_read_up_to_where_a_process_was_killed(tmp_path):
  reopened(tmp_path)
  for number in range(5):
    assert journal.append(tmp_path, 3, number % 2, number, tree_of(number), {'episodes': 1})
  found = journal.read(tmp_path, 3)
  assert sorted(found) == [0, 1, 2, 3, 4] and found[2]['counts'] == {'episodes': 1} and found[2]['tree']['id'] == '2'
  file = tmp_path / 'journal/3.0.jsonl'
  whole = file.read_bytes()
  starts = [0, *(place + 1 for place, byte in enumerate(whole) if byte == ord('\n'))]
  for size in (0, 1, starts[1] - 1, starts[1], starts[1] + 7, starts[2] - 1, len(whole) - 1):
    file.write_bytes(whole[:size])
    expected = {1, 3} | {number for number, end in zip((0, 2, 4), starts[1:]) if end <= size}
    assert set(journal.read(tmp_path, 3)) == expected
    reopened(tmp_path)  # so that what is appended begins a line
    journal.append(tmp_path, 3, 0, 9, tree_of(9), {})
    assert set(journal.read(tmp_path, 3)) == expected | {9}


def test_only_wanted_steps_of_this_run_are_kept_and_whole_ones_where_bits_count(tmp_path):
  reopened(tmp_path)
  for step in (2, 3, 13):
    journal.append(tmp_path, step, 0, 0, tree_of(0), {})
  journal.end(tmp_path, 2, 0)
  journal.keep(tmp_path, lambda step: step != 13)
  assert [bool(journal.read(tmp_path, step)) for step in (2, 3, 13)] == [True, True, False]
  reopened(tmp_path, lambda step: step < 4, whole=True)
  assert [set(journal.read(tmp_path, step)) for step in (2, 3)] == [{0}, set()]
  reopened(tmp_path, run={'seed': 1})
  assert not journal.read(tmp_path, 2) and json.loads((tmp_path / 'journal/run.json').read_text()) == {'seed': 1}


def test_notes_that_json_does_not_hold_leave_a_tree_out(tmp_path):
  reopened(tmp_path)
  for note in ((1, 2), {1: 2}, float('nan'), object(), np.zeros(3)):
    tree = tree_of(0)
    tree.root.children[0].data['note'] = note
    assert not journal.append(tmp_path, 1, 0, 0, tree, {})
  assert not journal.read(tmp_path, 1)


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


def watch_rollouts(monkeypatch) -> list[tuple[int, ...]]:
  """The numbers of the trees of each rollout from now on."""
  grown = []

  def watched(*arguments, numbers, **options):
    grown.append(tuple(numbers))
    return rollout(*arguments, numbers=numbers, **options)

  monkeypatch.setattr(loop, 'rollout', watched)
  return grown


def killed(config, monkeypatch, owner, name: str, after: int) -> None:
  """Trains until a function is called once too often."""
  with monkeypatch.context() as patch:
    patch.setattr(owner, name, killing(getattr(owner, name), after))
    with pytest.raises(Killed):
      loop.train(config)


def outcome(config) -> list[tuple]:
  return [tuple(row[name] for name in ('step', 'loss', 'reward', 'logprob', 'grad_norm', 'tokens_generated', 'searches_asked',
                                       'tool_calls', 'drawn_per_tree', 'memory')) for row in runs.read(
    pathlib.Path(config.out) / 'metrics.jsonl')]


@pytest.mark.parametrize('deterministic', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_step_grows_only_what_is_missing(config, monkeypatch, deterministic):
  """Or all of it, where the same bits are promised and it was not all there."""
  config.steps, config.sampler.deterministic = 2, deterministic
  loop.train(config)
  expected, grown, config.out = outcome(config), watch_rollouts(monkeypatch), f'{config.out}-killed'
  killed(config, monkeypatch, runs.RunFolder, 'journal_tree', 16)  # ten trees a step
  ended = set(journal.read(pathlib.Path(config.out), 2))
  assert len(ended) == 6
  grown.clear()
  killed(config, monkeypatch, loop, 'update', 0)  # resumes, and is killed once all trees are there
  loop.train(config)
  assert grown == [tuple(number for number in range(10) if deterministic or number not in ended), ()]
  for row, other in zip(outcome(config), expected, strict=True):
    assert row == (other if deterministic else pytest.approx(other, rel=1e-5))
  rows = runs.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert 'trees_journaled' not in rows[0] and rows[1]['trees_journaled'] == 10
  assert rows[1]['tokens_decoded'] == rows[0]['tokens_decoded'] and rows[1]['segments'] == 0


@pytest.mark.parametrize(('owner', 'name', 'after', 'again'), [
  (runs.RunFolder, 'journal_tree', 33, [0, 10]),  # in the rollout of step 4, while step 3 is trained
  pytest.param(loop, 'update', 2, [0, 10], marks=pytest.mark.slow),
  pytest.param(runs.RunFolder, 'finish_step', 1, [0, 0, 10], marks=pytest.mark.slow)])
def test_one_step_ahead_trees_are_of_the_parameters_before_the_last_update(config, monkeypatch, owner, name, after, again):
  """Killed at any point the run resumes to the same bits."""
  config.train.async_steps, prepare, sampled_by = 1, loop.prepare, []

  def prepared(learner, step):
    sampled_by.append((step, int(learner.state.updates)))
    return prepare(learner, step)

  monkeypatch.setattr(loop, 'prepare', prepared)
  grown = watch_rollouts(monkeypatch)
  loop.train(config)
  assert sampled_by == [(1, 0), (2, 0), (3, 1), (4, 2)] and grown == [tuple(range(10))] * 4
  gaps = [row['logprob_gap'] for row in runs.read(pathlib.Path(config.out) / 'metrics.jsonl')]
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


def test_a_full_disk_stops_the_run(config, monkeypatch):
  def full(*_):
    raise OSError(errno.ENOSPC, 'No space left on device', 'journal/1.0.jsonl')

  with runs.RunFolder(config, shown=()) as run:
    run.reopen_journal([1.0], 'digest', 0)
    monkeypatch.setattr(journal, '_write', full)
    with pytest.raises(RunStopped, match='journal/1.0.jsonl: No space left on device; there is no checkpoint yet'):
      run.journal_tree(1, 0, tree_of(0), {})
