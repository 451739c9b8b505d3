"""What revising costs: a training step of Search-R2 beside one of Search-R1 with as many drafts.

    python benchmarks/branching.py [--threshold 0] [--steps 4] [--repeats 4]

The embedded world's policy and questions. Reviews are scored and written by the policy, and the world's judge
is asked about what right traces found; nothing is probed. Search-R1 is the same method without revisions and
without a judge. The two take turns on the same questions. The learning rate is 0, so each repeat does the
same work. The first one compiles and does not count; the fastest of the others does. The last line is one
JSON object: seconds a step and their ratio, the share of drafts that were revised (a higher threshold revises
fewer), what was decoded and prefilled against Search-R1, the judge's calls and seconds a step, and the share
of all context that was in the cache. The world's judge is a function: a model behind a server adds its time.
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
from jaxsearch.training import growing, learner as learners, metrics
from jaxsearch.training.update import update


def learner_of(revises: bool, threshold: float, out: str) -> learners.Learner:
  config = search_r2.get_config().unlock()
  config.out, config.optim.learning_rate = out, 0.0
  config.grow.update(threshold=threshold, max_revisions=int(revises), process=revises)
  return learners.make_learner(config)


def step(learner: learners.Learner, method, batches: QuestionBatches, number: int) -> tuple[float, dict]:
  """Makes one training step; returns its seconds and metrics."""
  start, clock = time.perf_counter(), metrics.Clock()
  batches.drawn = (number - 1) * learner.config.questions_per_step  # every step again
  current = growing.begin(learner, method, batches, number)
  groups = current.groups()
  method.credit(groups, current.context, **learner.config.credit)
  trained = metrics.credited(groups)
  row = metrics.summary(groups, trained, current.sampled) | update(learner, trained, number, clock)
  jax.block_until_ready(learner.state.params)
  return time.perf_counter() - start, row


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--threshold', type=float, default=0.0)
  parser.add_argument('--steps', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=4)
  args = parser.parse_args()
  method = methods.find_method('search_r2')
  with tempfile.TemporaryDirectory() as folder:
    pair = {'search_r1': learner_of(False, args.threshold, folder),
            'search_r2': learner_of(True, args.threshold, folder)}
    config = pair['search_r1'].config
    questions = setup.load_questions(config, config.data.questions)
    batches = QuestionBatches(questions, config.questions_per_step, seed=config.seed)
    seconds, rows = {name: [] for name in pair}, {name: [] for name in pair}
    for number in range(1, args.steps + 1):
      times = {name: [] for name in pair}
      for _ in range(1 + args.repeats):
        for name, learner in pair.items():
          elapsed, row = step(learner, method, batches, number)
          times[name].append(elapsed)
          rows[name].append(row)
      for name in pair:
        seconds[name].append(min(times[name][1:]))
  one, two = (float(np.mean(values)) for values in seconds.values())
  steps = sorted(b / a for a, b in zip(*seconds.values()))
  of = lambda name, figure: float(np.mean([row[figure] for row in rows[name]]))
  ratio = lambda figure: round(of('search_r2', figure) / of('search_r1', figure), 3)
  reused, prefilled = of('search_r2', 'tokens_reused'), of('search_r2', 'tokens_prefilled')
  print(json.dumps({
    'device': jax.devices()[0].device_kind,
    'search_r1_seconds': round(one, 2), 'search_r2_seconds': round(two, 2),
    'times_search_r1': round(two / one, 3), 'steps': [round(value, 2) for value in steps],
    'revised': round(of('search_r2', 'revised_per_tree'), 3),
    'tokens_decoded_times': ratio('tokens_decoded'), 'tokens_prefilled_times': ratio('tokens_prefilled'),
    'judge_calls': round(of('search_r2', 'service_calls'), 1),
    'judge_seconds': round(of('search_r2', 'seconds_services'), 3),
    'reused_share': round(reused / (reused + prefilled), 3)}))


if __name__ == '__main__':
  main()
