"""CuSearch with frozen weights: what the choice of chains does to the first gradient.

    python -m recipes beds growing --config.out=runs/beds
    python -m studies.cusearch

Takes three checkpoints of one Search-R1 run, with chains of mean depth about 0.65, 1.0 and 1.5. Each grows,
on one, two and three hops separately, batches of 24 questions x 6 chains, of which K = 72 are selected. The
gradient of each chain, the mean over its tokens as in the loss, is kept as a sketch (gradients.py), so a
strategy's gradient is a weighted sum. It is compared with the gradient of the expected EM on all other
batches: REINFORCE with the question's other chains as the baseline, summed over tokens.
"""

import functools
import json
import pathlib

import jax
import numpy as np

from configs import cusearch as method_config
from jaxsearch import setup
from jaxsearch.advantages import group_relative
from jaxsearch.evaluation import verdicts
from jaxsearch.methods import Context, cusearch
from jaxsearch.trees.tree import Role
from studies import common
from studies.gradients import Sketches
from studies.search_r2 import gold

STARTS, HOPS, DRAWS = (0.65, 1.0, 1.5), (1, 2, 3), 10
SIZES = {'full': {'batches': 8, 'questions': 24, 'group': 6},
         'tiny': {'batches': 2, 'questions': 2, 'group': 2}}
STRATEGIES = ('full', 'random', 'auto', 'phase', 'anti', 'topk_reward', 'within')
_relative = jax.jit(group_relative, static_argnames=('num_groups', 'singleton'))


def start_of(folder: str, depth: float) -> str:
  """Returns the checkpoint of a run with about this depth, '' for the shipped policy that it began from."""
  rows = [json.loads(line) for line in (pathlib.Path(folder) / 'metrics.jsonl').read_text().splitlines()]
  # A row tells of the weights before its update.
  step = min(rows, key=lambda row: abs(row['searches'] - depth))['step'] - 1
  return f'{folder}/checkpoints/{step}' if step else ''


def cosine(a, b) -> float:
  return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12))


def measure(given, depth, hops) -> dict:
  """Returns the figures of a start and a number of hops, by batch."""
  config = method_config.get_config().unlock()
  number = given.batches * given.questions
  config.sampler.length = 1024
  questions = common.paths('world:rl', [hops])[-number:]
  bed = common.open_bed(config, questions, given.start or start_of(given.run, depth))
  trees = [tree for group in common.grow(bed, 0, copies=given.group) for tree in group]
  depths = np.array([cusearch.depth(tree, 5) for tree in trees])
  em = np.array([tree.question.score(tree.answer) for tree in trees])
  rewards = np.array([cusearch.reward(tree) for tree in trees])
  tokens = np.array([tree.count(Role.POLICY) for tree in trees])
  asking = np.array([sum(len(node.tokens) for node in tree.nodes(Role.POLICY) if node.data.get('documents'))
                     for tree in trees])
  # [N,width]: of each chain the sketched gradient of its mean log-probability of a token
  sketches = Sketches(bed.policy.config, bed.policy.params)
  found = sketches([list(tree.nodes(Role.POLICY)) for tree in trees]) / tokens[:, None]
  ids = np.repeat(np.arange(number), given.group)
  mean = lambda x: np.repeat(x.reshape(number, -1).mean(axis=1), given.group)
  leave_one_out = (em - mean(em)) * given.group / (given.group - 1)
  of_batch = np.repeat(np.arange(given.batches), given.questions * given.group)
  weights = leave_one_out * tokens
  pull = np.stack([weights[of_batch == b] @ found[of_batch == b] for b in range(given.batches)])
  figures, rng = {}, np.random.default_rng(1)
  for b in range(given.batches):
    here, target = np.flatnonzero(of_batch == b), pull.sum(axis=0) - pull[b]
    for strategy in STRATEGIES:
      for singleton in ('raw', 'zero'):
        for shuffled in (False, True):
          every = []
          for _ in range(1 if strategy == 'full' and not shuffled else DRAWS):
            earned = rng.permutation(rewards[here]) if shuffled else rewards[here]
            mask = cusearch.select(depths[here], earned, ids[here], Context(1, rng, {}), strategy,
                                   len(here) // 2, 5)
            advantages = np.asarray(_relative(earned, ids[here] - ids[here][0], num_groups=given.questions,
                                              mask=mask, singleton=singleton))
            counts = np.bincount(ids[here][mask])
            every.append([cosine(advantages @ found[here], target), (counts == 1).sum() / mask.sum(),
                          asking[here][mask].sum() / max(asking[here].sum(), 1), (counts > 0).sum()])
          name = f'{strategy} {singleton}' + ' shuffled' * shuffled
          figures.setdefault(name, []).append(np.round(np.mean(every, axis=0), 4).tolist())
  from_mean = lambda x: (x - mean(x)).reshape(number, -1)
  away, earned = from_mean(depths), from_mean(em)
  return {'depth': float(depths.mean()), 'em': float(em.mean()), 'figures': figures,
          'target_halves': cosine(*(pull[half::2].sum(axis=0) for half in (0, 1))),
          'depth_between': float(mean(depths).var() / max(depths.var(), 1e-12)),
          'within': np.round([(away * earned).sum(axis=1), (away**2).sum(axis=1)], 3).T.tolist()}


def control(given, own, noise) -> dict:
  """Returns the EM of the deepest start on three hops: reading gold chains, or among random documents."""
  config = method_config.get_config().unlock()
  config.search.noise = noise
  bed = common.open_bed(config, common.paths('world:rl', [3])[-given.batches * given.questions:],
                        given.start or start_of(given.run, STARTS[-1]))
  trees = common.grow(bed, 1, own=own or setup.bind_grow(config))
  return {'em': float(np.mean([tree.question.score(tree.answer) for tree, in trees]))}


def study(given, out) -> str:
  """Measures what is missing and returns the tables."""
  cells = {f'depth {depth:g}, {hops} hops': (depth, hops) for depth in STARTS for hops in HOPS}
  parts = {name: functools.partial(measure, given, *cell) for name, cell in cells.items()}
  parts |= {'gold chains': functools.partial(control, given, gold, 0.0),
            'random documents': functools.partial(control, given, None, 1.0)}
  rows = common.measured(out, parts)
  by = lambda name, figure, hops=HOPS: {
    (depth, h): np.array(rows[f'depth {depth:g}, {h} hops']['figures'][name])[:, figure]
    for depth in STARTS for h in hops}
  first = []
  for strategy in STRATEGIES:
    for singleton in ('raw', 'zero'):
      name = f'{strategy} {singleton}'
      cells_of = {f'{depth:g}/{h}': f'{of.mean():.2f}' for (depth, h), of in by(name, 0).items()}
      shuffled = verdicts.estimate(np.mean(list(by(name + ' shuffled', 0).values()), axis=0))
      over = {figure: np.mean(list(by(name, place).values()))
              for place, figure in enumerate(('singletons', 'coverage', 'questions'), start=1)}
      first.append({'cosine at depth/hops': name} | cells_of | {
        figure: f'{value:.2f}' for figure, value in over.items()} | {
        'shuffled': common.interval(shuffled, 1, 2)})

  def gap(a, b, starts=STARTS):
    """Estimates a difference of cosines, over batches of two and of three hops."""
    differ = lambda h: np.mean([by(a, 0)[depth, h] - by(b, 0)[depth, h] for depth in starts], axis=0)
    return verdicts.estimate(np.concatenate([differ(h) for h in (2, 3)]))

  contrasts = {'Auto - Random, zero': (gap('auto zero', 'random zero'), 0.05),
               'Random - Anti, zero': (gap('random zero', 'anti zero'), 0.05),
               'within-question - Random, zero': (gap('within zero', 'random zero'), 0.05)}
  for a, b in (
      ('auto raw', 'random raw'), ('random raw', 'anti raw'), ('within raw', 'random raw'),
      ('phase zero', 'random zero'), ('phase raw', 'random raw'), ('topk_reward zero', 'random zero'),
      ('full zero', 'random zero'), ('auto raw', 'auto zero'), ('anti raw', 'anti zero')):
    contrasts[f'{a} - {b}'] = gap(a, b), None
  for depth in STARTS:
    contrasts[f'Auto - Random, zero, depth {depth:g}'] = gap('auto zero', 'random zero', [depth]), None
  third = []
  for name in cells:
    row, pairs = rows[name], np.array(rows[name]['within'])
    scale = max(pairs[:, 1].mean(), 1e-12)
    slope = pairs[:, 0].mean() / scale
    of_slope = verdicts.estimate(slope + (pairs[:, 0] - slope * pairs[:, 1]) / scale)
    third.append({'start': name, 'depth': row['depth'], 'EM': f'{100 * row["em"]:.1f}',
                  "the question's share of the variance of depth": f'{row["depth_between"]:.2f}',
                  'points of EM a search, within a question': common.interval(of_slope, 100),
                  'cosine of two halves of the target': f'{row["target_halves"]:.2f}'})
  of = lambda name: f'{100 * rows[name]["em"]:.1f} %'
  about = (f'{given.batches} batches of {given.questions} x {given.group}. Deepest start, three hops: gold '
           f'chains {of("gold chains")}, random documents {of("random documents")}.')
  return '\n\n'.join([about, common.table(first), common.verdicts_of(contrasts, 'cosine', 1, 3),
                      common.table(third)])


if __name__ == '__main__':
  common.main('cusearch', study, SIZES, run='runs/beds/growing', start='')
