"""Search-R2's claim: a refiner that cuts drafts at their flaw and regenerates teaches more than more drafts do (its table 7).

    jaxsearch sweep --config configs/claims/search_r2.py        # what decides first; _bed.py says how to make the policy
    jaxsearch sweep --config configs/claims/search_r2.py:tables # the rows of its tables 3, 4, 5, 7 and 8, against Search-R1

The actor searches a wrong title somewhere in a third of its chains and knows what a review looks like. Greedily it seldom errs,
so rates are three times those of the other grids and evaluations sample at temperature 1. Areas are taken at equal
tokens, so '+ refiner' and more drafts need not cost the same. Every policy is evaluated as the paper deploys it: one chain, the
refiner off. studies/trimming.py measures A_prec and S_trim of the trained ones.
"""

import ml_collections

from configs.claims._bed import ACTOR, BED, PATHS, control

SEARCH_R1 = {'config': 'configs/search_r1_grpo.py', 'grow.max_turns': 3, 'train.aggregate': 'seq-mean-token-mean'}
RAW = {'grow.process': False, 'credit.joint': False}  # the Meta-Refiner alone
ROWS = {
  'Search-R1, n = 5': SEARCH_R1 | {'group_size': 5},
  'Search-R1, n = 10': SEARCH_R1 | {'group_size': 10},
  '+ refiner': RAW, '+ process reward': {'credit.joint': False},
  'Search-R2': {},  # joint optimization too
  'frozen refiner': {'grow.refiner': 'frozen'},
  'random refiner': {'grow.refiner': 'random', 'grow.random_share': 0.5},
  **control(3),
}
MORE = {  # table 4 raises N_max without process reward and joint optimization; its first row is '+ refiner'
  'without process reward': {'grow.process': False},
  **{f'N_max {n}': RAW | {'grow.max_revisions': n} for n in (2, 3, 4)},
  'Search-R2, probed': {'grow.probe': 0.1},  # for A_prec, V_inter, S_trim; has no costs
}
TABLES = {'': (ROWS, 'Search-R2', ('Search-R1, n = 10', 'random refiner')),
          'tables': (ROWS | MORE, 'Search-R1, n = 5', ())}


def get_config(table: str = ''):
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'Search-R2: revised drafts against more drafts'
  config.base = 'configs/search_r2.py'
  config.common = BED | PATHS | {
    'model': ACTOR, 'optim.learning_rate': 3e-5, 'eval.temperatures': (1.0,), 'checkpoint_every': 6, 'train.row_length': 960}
  rows, config.baseline, config.primary = TABLES[table]
  config.variants = {name: {'grow.max_turns': 4} | changes for name, changes in rows.items()}
  config.seeds = tuple(range(5))
  config.out = 'runs/claims/search_r2'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
