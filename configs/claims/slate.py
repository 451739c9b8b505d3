"""SLATE's claim: judged steps from a shared prefix teach more than whole chains or than their outcome alone (its table 2).

    jaxsearch sweep --config configs/claims/slate.py

9 runs, two at a time on two cores, all evaluated as one chain.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'SLATE: judged steps against outcomes'
  config.base = 'configs/slate.py'
  config.common = {
    'steps': 10, 'questions_per_step': 16, 'data.hops': (1, 2), 'data.arithmetic': False, 'sampler.length': 448,
    'eval.every': 10, 'eval.number': 120,
  }
  config.variants = {
    'Search-R1': {'config': 'configs/search_r1_grpo.py', 'group_size': 5, 'train.row_length': 448},
    'SLATE': {'train.row_length': 1280},
    'SLATE, outcome reward': {'train.row_length': 1280, 'grow.rewards': 'outcome'},
  }
  config.baseline = 'Search-R1'
  config.seeds = (0, 1, 2)
  config.out = 'runs/claims/slate'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
