"""R-Search's claim that evidence keeps from guessing: EM where all gold passages were found, and where not.

    jaxsearch sweep --config configs/claims/r_search.py
    python -m studies.speculation

The trained policies answer the held-out questions of the grid once more, greedily. A right answer without the
passages was guessed, or came from another passage; half of the comparisons are guessed right. The rows of
2026-11-27 matched passages by title, and leave out the 12 of 360 questions whose titles are ambiguous.
"""

import functools

import numpy as np

from configs.claims import r_search as grid
from jaxsearch.evaluation import sweep, verdicts
from jaxsearch.evaluation.answers import read_held_out
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.trees.tree import Role, Tree
from studies import common

SIZES = {'full': {'number': 0}, 'tiny': {'number': 6}}
WITH, WITHOUT = 'R-Search', 'no box'


def found_all(tree: Tree) -> bool:
  """Tells whether the searches of a tree returned the passage of every step to its answer."""
  found = {document.id for node in tree.nodes(Role.POLICY) for document in node.data.get('documents', ())}
  return found >= {step['passage_id'] for step in tree.question.metadata['steps']}


def answers(run: sweep.SweepRun, number: int) -> dict:
  """Answers the first `number` held-out questions, all if 0: which found all, which are right."""
  questions, _ = read_held_out(run.config)
  bed = common.open_bed(run.config, questions[:number or None], str(run.out), **run.config.eval.grow)
  trees = [tree for tree, in common.grow(bed, run.config.seed, sampling=GREEDY)]
  return {'found': [int(found_all(tree)) for tree in trees],
          'right': [int(tree.question.score(tree.answer)) for tree in trees]}


def study(given, out) -> str:
  """Measures what is missing and returns the table."""
  runs = [run for run in sweep.plan(grid.get_config()) if run.variant in (WITH, WITHOUT)]
  parts = {f'{run.variant}/{run.seed}': functools.partial(answers, run, given.number)
           for run in runs if sweep.finished(run)}
  return report(common.measured(out, parts, others=True))


def report(rows) -> str:
  """Writes the table: shares over seeds and questions, and differences of those paired by both."""
  seeds_of = lambda name: {part.split('/')[1] for part in rows if part.startswith(f'{name}/')}
  seeds = sorted(seeds_of(WITH) & seeds_of(WITHOUT))
  if not seeds:
    raise FileNotFoundError(f'{WITH} and {WITHOUT}: no seed of both is finished')
  values = {variant: np.stack([split(rows[f'{variant}/{seed}']) for seed in seeds], axis=1)
            for variant in (WITH, WITHOUT)}
  values[f'{WITH} - {WITHOUT}'] = values[WITH] - values[WITHOUT]
  names = 'found all passages', 'EM where it did', 'EM where it did not'
  return common.table([{'policy': policy, 'seeds': len(seeds)} | {
    name: common.interval(verdicts.estimate(cells), 100) for name, cells in zip(names, of_policy)}
    for policy, of_policy in values.items()])


def split(row) -> np.ndarray:
  """Returns [3,Q]: whether all passages were found, and EM where they were and where not.

  A share among some questions is a ratio; its value at a question is what that moves it by (linearised), so
  that the mean over the questions is the share.
  """
  found, right = (np.array(row[name], bool) for name in ('found', 'right'))
  among = lambda of: right[of].mean() + of * (right - right[of].mean()) / of.mean()
  return np.stack([found, among(found), among(~found)])


if __name__ == '__main__':
  common.main('speculation', study, SIZES)
