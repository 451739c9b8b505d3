"""What rollouts one step ahead save: steps with `train.async_steps=1` beside those one after the other.

    python benchmarks/ahead.py [--search-ms 1000] [--steps 6] [--repeats 2]

The embedded world's policy and questions, on one device that both share; every search is slowed down by
`--search-ms`. The two run in turn, `--repeats` times each; the first two steps of a run compile or have
nothing ahead and do not count. The last line is one JSON object: the median seconds of a step either way and
their ratio, the ratio of every repeat, and for steps ahead the seconds of a rollout and of waiting for the
next one.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time

import jax
import numpy as np

from configs import base
from jaxsearch import setup
from jaxsearch.training import loop, row_files


@dataclasses.dataclass
class SlowSearch:
  """A search back end that takes `seconds` longer."""
  inner: object
  seconds: float

  def search(self, queries, topk=3):
    time.sleep(self.seconds)
    return self.inner.search(queries, topk)


def steps_of(ahead: int, steps: int, out: str) -> list[dict]:
  """The rows of a run, without its first two."""
  config = base.get_config().unlock()
  config.out, config.steps, config.progress, config.rollouts = out, steps + 2, False, 0
  config.train.async_steps, config.checkpoint_every = ahead, steps + 2
  loop.train(config)
  return row_files.read(pathlib.Path(out) / 'metrics.jsonl')[2:]


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--search-ms', type=float, default=1000.0)
  parser.add_argument('--steps', type=int, default=6)
  parser.add_argument('--repeats', type=int, default=2)
  args = parser.parse_args()
  open_tools, rows = setup.open_tools, {0: [], 1: []}
  setup.open_tools = lambda *given, **options: dataclasses.replace(
    tools := open_tools(*given, **options), search=SlowSearch(tools.search, args.search_ms / 1000))
  with tempfile.TemporaryDirectory() as folder:
    for repeat in range(args.repeats):
      for ahead in rows:
        rows[ahead].append(steps_of(ahead, args.steps, f'{folder}/{repeat}-{ahead}'))
  median = lambda repeats, name: float(np.median([row[name] for repeat in repeats for row in repeat]))
  in_turn, ahead = (median(rows[kind], 'seconds') for kind in (0, 1))
  repeats = [median([one], 'seconds') / median([other], 'seconds') for one, other in zip(rows[0], rows[1])]
  print(json.dumps({
    'device': jax.devices()[0].device_kind, 'search_ms': args.search_ms, 'seconds_in_turn': round(in_turn, 2),
    'seconds_ahead': round(ahead, 2), 'times_faster': round(in_turn / ahead, 3),
    'repeats': [round(value, 3) for value in repeats],
    'seconds_rollout': round(median(rows[1], 'seconds_rollout'), 2),
    'seconds_waited': round(median(rows[1], 'seconds_generate'), 2)}))


if __name__ == '__main__':
  main()
