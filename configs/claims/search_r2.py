"""Search-R2's claim: a refiner that cuts drafts at their flaw and regenerates teaches more than more drafts do (its table 1).

    jaxsearch sweep --config configs/claims/search_r2.py

12 runs, two at a time on two cores, all from the same weights. 'Search-R1, more drafts' generates slightly more tokens than
Search-R2 with its revisions. Every policy is evaluated as the paper deploys it: one chain, the refiner off.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'Search-R2: revised drafts against more drafts'
  config.base = 'configs/search_r2.py'
  config.common = {
    'steps': 12, 'questions_per_step': 12, 'model': 'world-review', 'data.hops': (1, 2), 'data.arithmetic': False,
    'train.aggregate': 'seq-mean-token-mean', 'sampler.length': 576, 'train.row_length': 960, 'eval.every': 12,
    'eval.number': 120,
  }
  search_r1 = {'config': 'configs/search_r1_grpo.py'}
  config.variants = {
    'Search-R1': search_r1 | {'group_size': 5},
    'Search-R1, more drafts': search_r1 | {'group_size': 7},
    'Search-R2': {},
    'random refiner': {'grow.refiner': 'random', 'grow.random_share': 0.5},
  }
  config.baseline = 'Search-R1'
  config.seeds = (0, 1, 2)
  config.out = 'runs/claims/search_r2'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
