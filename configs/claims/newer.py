"""Do the newer methods learn on the embedded world, and faster than Search-R1 for the same tokens?

    jaxsearch sweep --config configs/claims/newer.py

25 short runs. A method's rollouts cost what they cost, so what decides is the area under EM against tokens spent.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'IGPO, GiGPO, Tree-GRPO and TRACE against Search-R1'
  config.base = 'configs/search_r1_grpo.py'
  config.common = {
    'steps': 10, 'questions_per_step': 16, 'data.hops': (1, 2), 'data.arithmetic': False, 'grow.max_turns': 3,
    'sampler.slots': 64, 'sampler.length': 448, 'train.row_length': 896, 'train.micro_rows': 2, 'checkpoint_every': 5,
    'eval.every': 5, 'eval.number': 80,
  }
  config.variants = {
    'Search-R1': {'group_size': 5},
    'IGPO': {'config': 'configs/igpo.py'},
    'GiGPO': {'config': 'configs/gigpo.py'},
    'Tree-GRPO': {'config': 'configs/tree_grpo.py'},  # 2 trees, about as many tokens as 4 chains
    'TRACE': {'config': 'configs/trace.py'},
  }
  config.baseline = 'Search-R1'
  config.seeds = (0, 1, 2, 3, 4)
  config.out = 'runs/claims/newer'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
