"""CuSearch's claim: of the same rollouts, training on the K that searched most teaches more than on K at random.

    jaxsearch sweep --config configs/claims/cusearch.py         # what decides first; _bed.py says how to make the policy
    jaxsearch sweep --config configs/claims/cusearch.py:full    # against training on all, by equal updates and by the paper's
    jaxsearch sweep --config configs/claims/cusearch.py:enough  # condition C1: from a policy that searches as much as it should
    jaxsearch sweep --config configs/claims/cusearch.py:quiet   # condition C2: nothing that a repeated search could mend
    jaxsearch sweep --config configs/claims/cusearch.py:again   # and beside the same noise on every repeat

'within' keeps the deepest half of each question's chains, so that depth is the policy's choice. 'raw' and 'zero' are what a
chain that is left alone of its question is credited with: its reward, or nothing.
"""

import ml_collections

from configs.claims._bed import ACTOR, BED, GROWN, PATHS, control

STRATEGIES = {'Random': 'random', 'Auto': 'auto', 'Phase': 'phase', 'Anti': 'anti', 'within': 'within'}
ROWS = {f'{name}, {singleton}': {'credit.strategy': strategy, 'credit.singleton': singleton}
        for singleton in ('zero', 'raw') for name, strategy in STRATEGIES.items()} | control(3)
RANDOM = 'Random, zero'
FULL = {name: ROWS[name] for name in (RANDOM, 'Auto, zero', 'Phase, zero')} | {
  'Full': {'credit.strategy': 'full'}, 'Full, two updates': {'credit.strategy': 'full', 'train.mini_batch': 48},
  'Top-K reward': {'credit.strategy': 'topk_reward', 'credit.singleton': 'zero'},
  'DAPO': {'credit.strategy': 'full', 'credit.drop_alike': True},
  'AR3PO': {'credit.strategy': 'full', 'sizes.adaptive': True, 'data.number': 64},
}
ENOUGH = {name: ROWS[name] | {'model': ACTOR} for name in (RANDOM, 'Auto, zero')}
QUIET = {name: ROWS[name] | {'search.noise': 0.0} for name in (RANDOM, 'Auto, zero')}
AGAIN = {name: ROWS[name] | {'search.noise_each': 'query'} for name in (RANDOM, 'Auto, zero')}
TABLES = {'': (ROWS, ('Auto, zero', 'Phase, zero', 'Anti, zero')), 'full': (FULL, ('Full',)),
          'enough': (ENOUGH, ('Auto, zero',)), 'quiet': (QUIET, ('Auto, zero',)), 'again': (AGAIN, ('Auto, zero',))}


def get_config(table: str = ''):
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CuSearch: which rollouts to train on'
  config.base = 'configs/cusearch.py'
  config.common = BED | PATHS | {
    'model': GROWN, 'group_size': 6, 'credit.keep': 48, 'train.row_length': 640}
  config.variants, config.primary = TABLES[table]
  config.baseline = RANDOM
  config.seeds = tuple(range(5 if table else 8))  # as the spread of the first five asks for
  config.out = f'runs/claims/cusearch{f"_{table}" * (table in ("enough", "quiet", "again"))}'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
