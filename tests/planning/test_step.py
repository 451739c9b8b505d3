"""From least times to a step, by hand."""

import dataclasses
import importlib
import math

import pytest

from jaxsearch.planning import step


def load(name):
  return importlib.import_module(f'configs.{name}').get_config()


def test_chains_fill_their_paths():
  # 4096 tokens: 256 of the prompt, 4 observations of at most half the rest
  work = step.work(load('search_r1_grpo_qwen2_5_3b'))
  assert (work.questions, work.trees, work.turns, work.observation) == (512, 2560, 4, 480)
  assert work.tokens == (4096 - 256 - 4 * 480) // 5 == 384
  assert work.decoded == 2560 * 5 * 384
  assert work.prefilled == 512 * 256 + 2560 * 4 * 480
  assert work.trained == work.decoded + work.prefilled


def test_limits_of_the_methods_count():
  slate = step.work(load('slate_qwen2_5_7b'))  # 4 steps of 5 alternatives
  assert (slate.branches, slate.turns, slate.decoded) == (5, 3, 32 * 5 * 4 * 500)
  assert slate.trained == 32 * (256 + 5 * 4 * 500 + 3 * 512)
  # 3,000 tokens of its own in a chain, each revised at most once
  refined = step.work(load('search_r2_qwen2_5_7b'))
  assert (refined.trees, refined.turns, refined.tokens) == (512 * 5 * 2, 3, 750)
  branching = load('tree_grpo_qwen2_5_3b')  # 2 trees of 3 chains, eight updates
  work = step.work(branching)
  assert (work.trees, work.chains) == (512 * 2 * 3, 3)
  assert step.calls(work, branching, scored=0, hosts=1, slots=256, segment=32, prefill=2048)['update'][0] == 8
  assert step.work(load('trace_qwen3_8b')).chains == 3
  assert step.work(load('carl_qwen2_5_7b')).turns == 7
  given = step.work(load('carl_qwen2_5_7b'), turns=2, tokens=10, prompt=20, observation=30)
  assert (given.turns, given.tokens, given.prompt, given.observation) == (2, 10, 20, 30)


def test_a_short_path_has_room_for_every_kind_of_token():
  config = load('search_r1_grpo')
  for length in (8, 64, 448):
    with config.unlocked():
      config.sampler.length = length
    work = step.work(config)
    assert min(work.prompt, work.tokens, work.observation) >= 1
    assert length < 64 or work.prompt + 7 * work.tokens + 6 * work.observation <= length


def test_calls_of_a_step():
  """2560 chains on 2 hosts of 256 slots: five rounds; 2560 rows in two updates of 80 micro-batches each."""
  config = load('search_r1_grpo_qwen2_5_3b')
  # 4096 tokens a chain
  work = dataclasses.replace(step.work(config), prompt=0, observation=0, tokens=512, turns=7)
  sizes = dict(hosts=2, slots=256, segment=32, prefill=2048)
  calls = step.calls(work, config, scored=1, **sizes)
  assert calls['decode'] == (5 * 4096 / 32, 5 * 4096) and calls['prefill'] == (0, 0)
  assert calls['update'] == (2, 160) and calls['score'] == (2, 160)
  rounds = {whole: step.calls(work, config, scored=1, **sizes | {'slots': 1024}, whole=whole)['decode'][1]
            for whole in (False, True)}
  assert rounds == {False: 1.25 * 4096, True: 2 * 4096}
  few = step.calls(dataclasses.replace(work, trees=10), config, scored=1, **sizes)
  assert few['decode'][1] == 4096  # slots that stay empty do not make it faster
  with config.unlocked():
    config.train.epochs = 3
  more = step.calls(work, config, scored=2, **sizes)
  assert more['update'] == (6, 480) and more['score'] == (4, 320)


def test_cusearch_trains_on_what_it_keeps():
  config = load('cusearch_qwen2_5_3b')
  work = step.work(config)
  rows = math.ceil(work.trained * 96 / 192 / 4096)
  updates, micro = step.calls(work, config, scored=1, hosts=2, slots=96, segment=32, prefill=2048)['update']
  assert updates == 3 and micro * 16 >= rows > (micro - updates) * 16
  config.unlock().credit.strategy = 'full'
  assert step.calls(work, config, scored=1, hosts=2, slots=96, segment=32, prefill=2048)['update'][0] == 6


def test_seconds_of_phases_add_up():
  seconds = {'decode': (1.0, 0.01), 'prefill': (0.1, 0.0), 'score': (0.5, 2.0), 'update': (1.0, 6.0)}
  times = {'decode': (3, 96), 'prefill': (5, 0), 'score': (2, 4), 'update': (2, 4), 'critic': (9, 9),
           'values': (9, 9)}
  assert step.step_seconds(seconds, times) == pytest.approx({'rollout': 3 + 0.96 + 0.5, 'score': 1 + 8,
                                                             'update': 2 + 24})


def test_expected_times_have_floors():
  assert step.expected(1.2, 0.76, 0.2) == 2.0 and step.expected(0.1, 1.52, 0.2) == 2.0 and step.expected(0, 0, 3) == 3
  # 1.8 ms of memory, 77 collectives of 10 us, 16 kernels of 3.7 us in each of 36 layers
  assert step.expected(1e-4, 1.8e-3, 0.0, collectives=77, layers=36) == pytest.approx(1.8e-3 / 0.76 + 0.77e-3 + 36 * 59.2e-6)
  assert step.expected(1e-4, 1.8e-3, 0.0, collectives=77) == pytest.approx(1.8e-3 / 0.76 + 0.77e-3)


def test_the_published_workload():
  """2,560 chains of 2.5 spans: 6,400 spans of 0.98 ms on hosts, 3,840 searches of 0.1 s, 128 at a time."""
  config = load('search_r1_grpo_qwen2_5_3b')
  work = step.published(step.work(config))
  assert (work.decoded, work.prefilled) == (2560 * 250, 512 * 256 + 3840 * 480)
  assert step.waits(work, hosts=1, workers=128) == pytest.approx(6.272 + 3.0)
  assert step.waits(work, hosts=2, workers=64) == pytest.approx(3.136 + 3.0)
  calls = step.calls(work, config, scored=1, hosts=1, slots=256, segment=32, prefill=2048)
  assert calls['decode'] == (2500 / 32, 2500)  # ten rounds
  assert step.published(step.work(load('tree_grpo_qwen2_5_3b'))).chains == 1
