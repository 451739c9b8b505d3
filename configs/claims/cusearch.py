"""CuSearch's claim: of the same rollouts, training on the K that searched most teaches more than on K at random or on all.

    jaxsearch sweep --config configs/claims/cusearch.py

15 runs, two at a time on two cores. Table 3 of the paper compares with Random-K, which rolls out and trains on as many
chains; table 1 with GRPO-Full, which trains on all, twice as many here. The same runs against the latter:

    jaxsearch sweep --config configs/claims/cusearch.py --config.baseline=GRPO-Full --report-only
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CuSearch: which rollouts to train on'
  config.base = 'configs/cusearch.py'  # a question gets 3 chains
  config.common = {
    'steps': 20, 'questions_per_step': 24, 'credit.keep': 36, 'data.hops': (1, 2, 3), 'data.arithmetic': False,
    'sampler.length': 640, 'train.row_length': 640, 'eval': {'every': 20, 'number': 150},
  }
  config.variants = {
    'GRPO-Full': {'credit.strategy': 'full'},
    'Random-K': {'credit.strategy': 'random'},
    'SDGA-Anti': {'credit.strategy': 'anti'},
    'SDGA-Auto': {'credit.strategy': 'auto'},
    'SDGA-Phase': {'credit.strategy': 'phase'},
  }
  config.baseline = 'Random-K'
  config.seeds = (0, 1, 2)
  config.out = 'runs/claims/cusearch'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
