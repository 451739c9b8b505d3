"""All systems on one bed: the same questions, steps and seeds; what counts is the area under EM against tokens.

    jaxsearch sweep --config configs/claims/systems.py
    python -m studies.rejection && python -m studies.trained systems    # rejection-sampled SFT too

75 runs. All start from the shipped policy but Search-R2, whose has seen what a review looks like, and CARL, whose writes code and
contexts. ZeroSearch trains and is evaluated on simulated results, as often wrong.
"""

import ml_collections

from configs.claims._bed import BED

FIVE = {'group_size': 5}
TREES = {'train.row_length': 1536, 'train.micro_rows': 2}

ROWS = {  # name -> config file, its changes
  'Search-R1': ('search_r1_grpo', FIVE),
  'Search-R1 (PPO)': ('search_r1_ppo', FIVE | {'critic.learning_rate': 1e-4}),
  'R1': ('r1', FIVE),
  'ZeroSearch': ('zerosearch', FIVE | {
    'search.noise': 0.0, 'search.noise_start': 0.1, 'search.noise_end': 0.1, 'search.noise_eval': 0.1}),
  'ReSearch': ('research', FIVE),
  'StepSearch': ('step_search', FIVE | {'critic.learning_rate': 1e-4}),
  'CuSearch': ('cusearch', FIVE | {'credit.keep': 40}),
  'Search-R2': ('search_r2', FIVE | {'train.row_length': 960}),
  'R-Search': ('r_search', FIVE),
  'SLATE': ('slate', TREES),
  'CARL': ('carl', FIVE | {
    'grow.max_segments': 13, 'train.epochs': 1, 'train.mini_batch': 0, 'critic.learning_rate': 1e-4}),
  'IGPO': ('igpo', FIVE),
  'GiGPO': ('gigpo', FIVE),
  'Tree-GRPO': ('tree_grpo', TREES),
  'TRACE': ('trace', TREES),
}


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'All systems on one bed'
  config.base = 'configs/search_r1_grpo.py'
  config.common = BED | {'train.row_length': 640}
  config.variants = {name: {'config': f'configs/{file}.py'} | changes for name, (file, changes) in ROWS.items()}
  config.baseline = 'Search-R1'
  config.seeds = tuple(range(5))
  config.out = 'runs/claims/systems'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
