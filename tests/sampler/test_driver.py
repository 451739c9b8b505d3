"""What the driver makes of requests, under a policy that only counts: tools, services, failures, episodes."""

import collections
import contextlib
import dataclasses
import functools
import math
import threading
import time
import types

import jax
import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.sampler.driver import Cancelled, Episode, GrowthError, Schedule
from jaxsearch.sampler.requests import (
  Ask,
  Call,
  Generate,
  Request,
  RunPython,
  Sampling,
  Score,
  Search,
  ToolFailure,
  Tools,
  failing,
)
from jaxsearch.sampler.served import ServedDecoding, Span
from jaxsearch.tools.python_sandbox import PythonSandbox
from jaxsearch.tools.simulated import SimulatedSearch
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import Letters


class Counting(contextlib.nullcontext):
  """Writes `max_tokens` times 'x' for a span, one a decode step, in three slots."""
  deterministic, episode_deadline, length = True, math.inf, 200
  evicted = seconds_waited = 0
  figures = property(lambda self: {})
  room = property(lambda self: len(self.running) < 3)
  busy = decodes = property(lambda self: bool(self.running))

  def __init__(self, schedule):
    super().__init__()
    self.schedule, self.running, self.claimed = schedule, {}, 0

  def claim(self, waiting):
    self.claimed += (free := self.claimed < 6)
    return waiting.popleft() if free else None

  def release(self, episode):
    self.claimed -= 1

  def generate(self, pending, most):
    pending.episode.requests += 1
    self.running[pending] = 0

  def place(self):
    return []

  def decode(self):
    self.schedule.steps += 1
    self.running = {pending: count + 1 for pending, count in self.running.items()}
    ended = [pending for pending, count in self.running.items() if count == pending.request.max_tokens]
    for pending in ended:
      self.schedule.add(pending.episode, tokens_decoded=self.running.pop(pending))
    write = lambda request: request.node.append('x' * request.max_tokens, Role.POLICY)
    return [(pending, write(pending.request)) for pending in ended]


class ByTheClock(Counting):
  deterministic = False


class Library:
  """Finds a page for everything, after a while; fails for queries that end in '!'."""

  def __init__(self, seconds=0.0):
    self.seconds = seconds

  def search(self, queries, topk):
    time.sleep(self.seconds)
    if queries[0].endswith('!'):
      raise ConnectionError('connection refused')
    return [[Document('1', 'Title', f'about {query}')] for query in queries]


def run(grows, policy=Counting, observer=None, **tools):
  """Runs growth functions of a tree; returns the trees and the metrics."""
  trees = [Tree(Letters(), Question(f'q{number}', '?', ('x',))) for number in range(len(grows))]
  growths = [Episode(number, grow(tree), tree) for number, (grow, tree) in enumerate(zip(grows, trees))]
  tools = Tools(**{'search': Library(), 'answer_reserve': 8, **tools})
  return trees, Schedule(policy, growths, tools, observer=observer).run()


def prompt(tree, size=10):
  return tree.root.append('p' * size, Role.PROMPT)


def test_calls_and_lists_are_served_together_in_order():
  def grow(tree):
    node = prompt(tree)
    tree.answer = yield [Call(lambda _: 6 * 7), Generate(node, max_tokens=3), Call(lambda _: 1 / 0),
                         Search(node, 'it')]
    assert (yield []) == []

  (tree,), metrics = run([grow])
  product, node, failure, documents = tree.answer
  assert product == 42 and node.text == 'xxx' and documents[0].text == 'about it'
  assert failure == ToolFailure('ZeroDivisionError: division by zero')
  assert metrics['tool_calls'] == 3 and metrics['tool_calls_failed'] == 1


def test_calls_behind_one_span_share_its_room_and_are_counted_by_name():
  def grow(tree):
    node = prompt(tree, 100)
    show = lambda text: f'[{text}]'
    tree.answer = yield [Call(lambda tools: 'page ' * 99, node, 'open', name, show) for name in 'ab']

  (tree,), metrics = run([grow])
  assert tree.answer == [('page ' * 99)[:(200 - 100) // 2 - 8 - 2]] * 2  # the reserve, and the brackets
  assert metrics['calls_open'] == metrics['tool_calls'] == 2
  (tree,), _ = run([grow], max_observation=40)
  assert tree.answer == [('page ' * 99)[:40 // 2 - 2]] * 2


def test_failures_are_told_counted_and_belong_to_their_episode():
  """What all episodes are told at their ends adds up to the metrics of the rollout."""
  def grow(tree, down):
    node = yield Generate(prompt(tree), max_tokens=2)
    tree.answer = yield Search(node, 'it' + '!' * down)
    yield Generate(node, max_tokens=3)
    tree.stop = Stop.BUDGET

  ended = []
  observer = lambda tree, request, counts: ended.append(counts) if request is None else None
  grows = [functools.partial(grow, down=number % 3 == 0) for number in range(9)]
  trees, metrics = run(grows, observer=observer)
  failure = ToolFailure('ConnectionError: connection refused', 'connection')
  assert [tree.answer == failure for tree in trees] == [True, False, False] * 3
  whole = lambda counts: collections.Counter({name: count for name, count in counts.items()
                                              if isinstance(count, int)})
  total = sum(map(whole, ended), collections.Counter())
  assert total.pop('requests') == 18 and total == {
    'episodes': 9, 'stop_budget': 9, 'tokens_decoded': 45, 'tool_calls': 9, 'calls_search': 9,
    'tool_calls_failed': 3, 'tool_calls_failed_connection': 3, 'searches_asked': 9, 'searches_failed': 3}
  assert {name: metrics[name] for name in total} == total and metrics['searches_failed_share'] == 1 / 3
  assert metrics['last_failure'] == failure.reason and failing(metrics) is None  # not more than half


@pytest.mark.parametrize('policy', [Counting, ByTheClock])
def test_a_tool_that_hangs_is_given_up_at_its_deadline(policy):
  def grow(tree):
    tree.answer = yield Search((yield Generate(prompt(tree), max_tokens=2)), 'it')

  trees, metrics = run([grow] * 3, policy, search=Library(3600), deadline=0.1)
  assert [tree.answer for tree in trees] == [ToolFailure('no reply within 0.1 seconds', 'timeout')] * 3
  assert metrics['tool_calls_failed_timeout'] == metrics['searches_failed'] == 3
  assert failing(metrics) == '3 of 3 searches failed; the last: no reply within 0.1 seconds'


@pytest.mark.parametrize('policy', [Counting, ByTheClock])
def test_a_search_that_found_no_thread_in_time_has_failed_and_is_never_made(policy):
  """Of two threads, each at its first search until long after the deadline."""
  class Slow:
    begun = 0

    def search(self, queries, topk):
      self.begun += 1
      assert over.wait(20)

  def grow(tree):
    node = yield Generate(prompt(tree), max_tokens=2)
    tree.answer = yield [Search(node, 'it') for _ in range(4)]

  slow, over, before = Slow(), threading.Event(), set(threading.enumerate())
  _, metrics = run([grow] * 6, policy, search=slow, workers=2, deadline=0.2)
  assert metrics['searches_asked'] == metrics['searches_failed'] == metrics['tool_calls_failed_timeout'] == 24
  over.set()
  for thread in set(threading.enumerate()) - before:
    thread.join(20)
  assert slow.begun == 2


def test_a_service_is_asked_for_many_at_a_time():
  def grow(tree, number):
    node = yield Generate(prompt(tree), max_tokens=2 + number)
    tree.answer = yield Ask('double', number)
    yield Generate(node, max_tokens=2)
    failed, missing = yield [Ask('broken', number), Ask('nobody', number)]
    assert failed.reason.startswith('broken: ZeroDivisionError') and missing.reason == 'there is no nobody'

  calls = []
  services = {'double': lambda items: calls.append(items) or [2 * item for item in items],
              'broken': lambda items: [1 / 0 for _ in items]}
  trees, metrics = run([functools.partial(grow, number=number) for number in range(8)], services=services)
  assert [tree.answer for tree in trees] == [0, 2, 4, 6, 8, 10, 12, 14]
  assert sorted(item for items in calls for item in items) == list(range(8))
  assert len(calls) == 2 and len(calls[0]) == 6  # as many episodes as are under way
  assert metrics['service_calls'] == 16 and metrics['tool_calls'] == 0
  assert metrics['service_calls_failed_error'] == metrics['service_calls_failed'] == 8
  assert metrics['last_service_failure'] == 'broken: ZeroDivisionError: division by zero'


class Server:
  """A service that takes single items on threads."""

  def __init__(self, concurrency, reply):
    self.concurrency, self.reply, self.asked, self.items = concurrency, reply, threading.Event(), []

  def __call__(self, items):
    self.items += items
    self.asked.set()
    return [self.reply(item) for item in items]


def test_the_record_of_a_score_that_another_model_gives_has_a_number_for_each_continuation():
  request = Ask('refiner', Score(node=None, continuations=('a', 'b')))
  assert request.summary([np.array([-0.1]), np.array([-2.0, -1.0])]) == [-0.1, -3.0]
  assert Ask('judge', 'is it?').summary(0.5) == 0.5


REPLIES = 1, TimeoutError('slow'), None


@pytest.mark.parametrize('service', [lambda items: items, Server(2, lambda item: item)])
def test_a_service_may_fail_for_some_items_or_give_what_cannot_be_read(service):
  def grow(tree):
    tree.answer = yield [Ask('judge', reply) for reply in REPLIES]

  (tree,), metrics = run([grow], services={'judge': service})
  assert tree.answer == [1, ToolFailure('judge: TimeoutError: slow', 'timeout'),
                         ToolFailure('judge: a reply that cannot be read', 'malformed')]
  assert {name: value for name, value in metrics.items() if name.startswith('service_calls')} == {
    'service_calls': 3, 'service_calls_failed': 2, 'service_calls_failed_timeout': 1,
    'service_calls_failed_malformed': 1}
  assert failing(metrics) == ('2 of 3 calls of judge or reader failed; '
                              'the last: judge: a reply that cannot be read')


def test_a_service_behind_a_server_is_asked_while_others_decode():
  def asks(tree):
    node = yield Generate(prompt(tree), max_tokens=2)
    tree.answer = yield [Ask('judge', number) for number in range(4)]
    yield Generate(node, max_tokens=2)

  def decodes(tree):
    node = yield Generate(prompt(tree), max_tokens=40)
    tree.answer = service.asked.wait(20)  # there is more to decode, and it is asked all the same
    yield Generate(node, max_tokens=2)

  together = threading.Barrier(2, timeout=20)
  service = Server(2, lambda item: together.wait() * 0 + 10 * item)
  services = {'judge': service}
  trees, metrics = run([asks, decodes], ByTheClock, services=services, deadline=1e-9)  # that is of tools alone
  assert [tree.answer for tree in trees] == [[0, 10, 20, 30], True] and len(service.items) == 4
  assert metrics['service_calls'] == 4 and metrics['tool_calls'] == metrics['service_calls_failed'] == 0
  service = Server(1, lambda item: 10 * item)
  (tree,), _ = run([asks], services={'judge': service})
  assert tree.answer == [0, 10, 20, 30] and service.items == [0, 1, 2, 3]  # one at a time


def test_a_rollout_behind_a_server_ends_once_it_is_cancelled():
  def generate(request, most, sampling, seed):
    asked.append(seed)
    return Span([1], 'length', [-1.0])

  def grow(tree):
    yield Generate(prompt(tree), max_tokens=1)

  asked, server = [], types.SimpleNamespace(generate=generate, length=200, slots=2, episodes=4, figures={},
                                            episode_deadline=math.inf)
  policy = functools.partial(ServedDecoding, server, jax.random.key(0), Sampling())
  trees = [Tree(Letters()) for _ in range(30)]
  episodes = [Episode(number, grow(tree), tree) for number, tree in enumerate(trees)]
  with pytest.raises(Cancelled):
    Schedule(policy, episodes, Tools(), cancelled=lambda: len(asked) > 4).run()
  assert len(asked) < 10


def test_an_error_in_a_generator_names_the_question():
  def raises(tree):
    yield Generate(prompt(tree), max_tokens=4)
    raise KeyError('gold')

  def mistaken(tree):
    yield 'nonsense'

  with pytest.raises(GrowthError, match="q0.*KeyError.*'gold'"):
    run([raises])
  with pytest.raises(GrowthError, match="'nonsense' is no request"):
    run([mistaken])


def test_the_searches_of_programs_are_counted():
  def grow(tree, code):
    yield RunPython((yield Generate(prompt(tree), max_tokens=4)), code)

  codes = ['search("a")\ntry:\n  search("down!")\nexcept Exception:\n  pass', 'print(1)',
           'search("a", "many")', 'search("down!")']
  with contextlib.closing(PythonSandbox(workers=1)) as sandbox:
    _, metrics = run([functools.partial(grow, code=code) for code in codes], python=sandbox)
  assert (metrics['searches_asked'], metrics['searches_failed']) == (3, 2)  # one mistake is the program's own
  assert (metrics['tool_calls'], metrics['tool_calls_failed']) == (4, 1)
  assert failing(metrics) == '2 of 3 searches failed; the last: ConnectionError: connection refused'


class TwoSlots(Counting):
  room = property(lambda self: len(self.running) < 2)


class Told:
  """A writer of simulated searches that writes the seed."""

  def write(self, queries, topk, noisy, seeds, question=None):
    return [[Document('', '', f'{seed} {noise}')] for seed, noise in zip(seeds, noisy)]


def test_a_simulated_search_draws_for_each_call_of_each_tree_whatever_the_schedule():
  def grow(tree):
    node, tree.answer = prompt(tree), []
    for _ in range(4):
      node = yield Generate(node, max_tokens=1 + ord(tree.question.id[1]) % 3)
      documents = yield Search(node, 'again')
      tree.answer.append(documents[0].text)

  def told(policy):
    trees, _ = run([grow] * 6, policy, search=SimulatedSearch(Told(), noise_start=0.5))
    return [tree.answer for tree in trees]

  texts = told(Counting)
  assert texts == told(TwoSlots) == told(ByTheClock)
  drawn = [text.split() for of_tree in texts for text in of_tree]
  assert len({seed for seed, _ in drawn}) == 24 and {noise for _, noise in drawn} == {'True', 'False'}


@dataclasses.dataclass(frozen=True)
class Nap(Request):
  """A kind of request that nobody knows but who asks it."""
  seconds: float
  node = None
  tool = 'nap'

  def submit(self, schedule, pending):
    schedule.start(pending, lambda: time.sleep(self.seconds) or 'rested', 'naps', 2)

  def finish(self, schedule, pending, result, seconds):
    schedule.add(pending.episode, naps=1)
    return result


def test_a_new_kind_of_request_is_its_class():
  def grow(tree):
    tree.answer = yield [Nap(0.0), Generate(prompt(tree), max_tokens=2)]

  (tree,), metrics = run([grow])
  assert tree.answer[0] == 'rested' and tree.answer[1].text == 'xx' and metrics['naps'] == 1
