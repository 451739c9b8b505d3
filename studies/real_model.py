"""The result of launch/smollm2.sh: reinforcement learning against the cold start and against one search.

    DATA=FOLDER bash launch/smollm2.sh
    python -m studies.real_model --folder runs/smollm2_wiki --out runs/smollm2_wiki

Differences are paired by question and pooled over the seeds of reinforcement learning. Open questions decide:
their answer is neither yes nor no nor named in the question. Rows are kept in the folder --out; without flags
a clone prints ours; `--out docs/claims/runs/larger` those of 1,403 other questions (benchmarks/RESULTS.md).
"""

import functools
import itertools
import pathlib

import numpy as np

from jaxsearch.evaluation import results, verdicts
from jaxsearch.evaluation.figures import look_up
from studies import common

DECIDE = 'hotpotqa', '2wikimultihopqa'
FIGURES = 'em_open', 'em', 'f1', 'em_substring'
POLICIES = {'closed-book': 'direct', 'closed-book, by examples': 'direct_few', 'one search': 'rag',
            'one search, by examples': 'rag_few', 'cold start': 'cold_policy'}
TRAINED = {'reinforcement learning': 'rl', 'CuSearch': 'cusearch',  # PREFIX_SEED.json; the first is GRPO
           'CuSearch, real questions': 'real'}


def row_of(path: pathlib.Path) -> dict:
  """Returns figure -> 'benchmark/id' -> value of a result of `jaxsearch bench`."""
  records = results.read_result(path)['predictions']
  return {figure: {'/'.join(question[:2]): round(value, 4) for question, value in of.items()}
          for figure in FIGURES for of in [results.by_question(records, figure)]}


def study(given, out) -> str:
  """Adds the results that are there, and returns the tables."""
  folder = pathlib.Path(given.folder)
  files = {name: folder / f'{file}.json' for name, file in POLICIES.items()}
  files |= {f'{name}/{path.stem[len(prefix) + 1:]}': path for name, prefix in TRAINED.items()
            for path in sorted(folder.glob(f'{prefix}_*.json'))}
  parts = {name: functools.partial(row_of, path) for name, path in files.items() if path.exists()}
  rows = common.measured(out, parts, others=True)
  if not any('/' in name for name in rows):
    raise FileNotFoundError(f'{folder}/rl_SEED.json: no result of `jaxsearch bench` for a seed')
  return '\n\n'.join(report(rows, which) for which in (DECIDE, ()))


def report(rows, which) -> str:
  """Writes figures over some benchmarks, all if (), and what each way of training adds to those before it."""
  runs = {name: {'': rows[name]} for name in POLICIES if name in rows}  # policy -> seed -> figures
  trained = {name: {row[len(name) + 1:]: rows[row] for row in sorted(rows) if row.startswith(f'{name}/')}
             for name in TRAINED}
  runs |= {name: seeds for name, seeds in trained.items() if seeds}
  first = next(row for seeds in runs.values() for row in seeds.values())
  asked = {figure: [name for name in first[figure] if not which or name.split('/')[0] in which]
           for figure in FIGURES}
  of = lambda policy, figure, seeds: 100 * np.array([  # [seeds, questions]
    [runs[policy][seed][figure][name] for name in asked[figure]] for seed in seeds])
  headings = {figure: look_up(figure).heading for figure in FIGURES}
  scores = [{'policy': policy, 'seeds': len(seeds)} | {
    heading: f'{of(policy, figure, seeds).mean():.1f}' for figure, heading in headings.items()}
            for policy, seeds in runs.items()]

  def gain(policy, other, figure):
    once = '' in runs[other]
    seeds = list(runs[policy]) if once else sorted(runs[policy].keys() & runs[other])  # the same of both
    gained = of(policy, figure, seeds) - of(other, figure, [''] if once else seeds)
    return verdicts.estimate(gained[0] if len(gained) == 1 else gained)  # of one seed: over questions

  gains = [common.table([{f'{policy} minus': other} | {
    heading: common.interval(gain(policy, other, figure)) for figure, heading in headings.items()}
    for other in itertools.takewhile(policy.__ne__, runs) if runs[other].keys() & {'', *runs[policy]}])
    for policy in runs if policy in TRAINED]
  number, still = len(asked['em']), len(asked['em_open'])
  title = f'{" and ".join(which) or "all benchmarks"}, in %: {number} questions, {still} of them open'
  return '\n\n'.join([title, common.table(scores), *gains])


if __name__ == '__main__':
  common.main('real_model', study, {'full': {}}, folder='runs/smollm2_wiki')
