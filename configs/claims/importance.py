"""Do importance weights between sampler and trainer matter in bfloat16?

    jaxsearch sweep --config configs/claims/importance.py

Another trainer's user saw Search-R1 collapse with truncated weights, so these runs are longer than others.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'Search-R1 in bfloat16, with and without importance weights'
  config.base = 'configs/search_r1_grpo.py'
  config.common = {
    'dtype': 'bfloat16', 'steps': 60, 'questions_per_step': 16, 'group_size': 5, 'data.hops': (1, 2),
    'data.arithmetic': False, 'grow.max_turns': 3, 'sampler.slots': 64, 'sampler.length': 448,
    'train.row_length': 896, 'train.micro_rows': 2, 'checkpoint_every': 30, 'eval.every': 10, 'eval.number': 80,
  }
  config.variants = {
    'without weights': {'loss.importance_cap': 0.0},
    'capped at 2': {'loss.importance_cap': 2.0},
    'masked tokens': {'loss.importance': 'token-mask'},
  }
  config.baseline = 'without weights'
  config.seeds = (0, 1, 2)
  config.out = 'runs/claims/importance'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
