"""R-Search's claim: a reward for evidence from which another model can answer makes better answers (its table 3).

    jaxsearch sweep --config configs/claims/r_search.py

6 runs, two at a time on two cores.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'R-Search: with and without the evidence reward'
  config.base = 'configs/r_search.py'
  config.common = {
    'steps': 24, 'questions_per_step': 16, 'data.hops': (1, 2), 'data.arithmetic': False,
    'sampler.length': 512, 'train.row_length': 512, 'eval': {'every': 24, 'number': 150},
  }
  config.variants = {
    'with evidence reward': {'credit.evidence_weight': 1.0},
    'without': {'credit.evidence_weight': 0.0},
  }
  config.baseline = 'without'
  config.seeds = (0, 1, 2)
  config.out = 'runs/claims/r_search'
  config.parallel = 0  # one on each accelerator, two on CPU
  return config.lock()
