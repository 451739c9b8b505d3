"""What a revision costs: a training step of Search-R2 beside one of Search-R1 with as many drafts.

    python benchmarks/branching.py [--share 0.3] [--steps 4] [--repeats 4]

The embedded world's policy and questions; 30 % of the drafts are revised from a random step (which fixes the share), without
probing. The two methods take turns on the same questions. The learning rate is 0, so each repeat does the same work. The first
one compiles and does not count; the fastest of the others does. The last line is one JSON object: seconds a step, their ratio,
and the share of a revision's context that was in the cache.
"""

import argparse
import json
import tempfile
import time

import jax
import numpy as np

from configs import search_r2
from jaxsearch import methods, setup
from jaxsearch.data.questions import QuestionBatches
from jaxsearch.methods import Context
from jaxsearch.training import loop, runs


def learner_of(method: str, share: float, out: str):
  config = search_r2.get_config()
  config.unlock()
  config.out = out
  config.optim.learning_rate = 0.0
  config.grow.update(refiner='random', random_share=share, max_revisions=int(method == 'search_r2'), probe=0.0, process=False)
  return loop.make_learner(config)


def step(learner, method, questions, number: int) -> tuple[float, dict]:
  """Seconds of one training step, and its metrics."""
  start, clock = time.perf_counter(), runs.Clock()
  context = Context(number, np.random.default_rng(number), learner.memory)
  groups, row = loop.grow(learner, method, questions, context)
  method.credit(groups, context, **learner.config.credit)
  trained = loop.credited(groups)
  row |= loop.summary(groups, trained)
  row |= loop.update(learner, trained, number, clock)
  jax.block_until_ready(learner.state.params)
  return time.perf_counter() - start, row


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--share', type=float, default=0.3)
  parser.add_argument('--steps', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=4)
  args = parser.parse_args()
  method = methods.find_method('search_r2')
  with tempfile.TemporaryDirectory() as folder:
    learners = {name: learner_of(name, args.share, folder) for name in ('search_r1', 'search_r2')}
    config = learners['search_r1'].config
    batches = QuestionBatches(setup.load_questions(config, config.data.questions), config.questions_per_step, seed=config.seed)
    seconds, rows = {name: [] for name in learners}, {name: [] for name in learners}
    for number in range(1, args.steps + 1):
      questions = next(batches)
      times = {name: [] for name in learners}
      for _ in range(1 + args.repeats):
        for name, learner in learners.items():
          elapsed, row = step(learner, method, questions, number)
          times[name].append(elapsed)
          rows[name].append(row)
      for name in learners:
        seconds[name].append(min(times[name][1:]))
  mean = {name: float(np.mean(values)) for name, values in seconds.items()}
  ratios = sorted(b / a for a, b in zip(*seconds.values()))
  revising = rows['search_r2']
  print(json.dumps({
    'device': jax.devices()[0].device_kind, 'search_r1_seconds': round(mean['search_r1'], 2),
    'search_r2_seconds': round(mean['search_r2'], 2), 'times_search_r1': round(mean['search_r2'] / mean['search_r1'], 3),
    'steps': [round(ratio, 2) for ratio in ratios],
    'revised': round(float(np.mean([row['revised'] for row in revising])), 3),
    'tokens_generated_times': round(sum(row['tokens_decoded'] for row in revising)
                                    / sum(row['tokens_decoded'] for row in rows['search_r1']), 3),
    'reused_share': round(sum(row['tokens_reused'] for row in revising)
                          / sum(row['tokens_reused'] + row['tokens_prefilled'] for row in revising), 3)}))


if __name__ == '__main__':
  main()
