"""Search-R2's wide sweep: revisions N_max 1 to 4, a frozen refiner, a process reward or none (its tables 3 and 4).

    jaxsearch sweep --config configs/claims/search_r2_wide.py

90 runs; --config.out=runs/claims/search_r2 reuses the runs of search_r2.py.
"""

from configs.claims import search_r2


def get_config():
  config = search_r2.get_config()
  config.variants = config.variants | {
    'N_max 2': {'grow.max_revisions': 2, 'grow.probe': 0.1},
    'N_max 3': {'grow.max_revisions': 3, 'grow.probe': 0.1},
    'N_max 4': {'grow.max_revisions': 4, 'grow.probe': 0.1},
    'frozen refiner': {'credit.joint': False, 'grow.probe': 0.1},
    'without process reward': {'grow.process': False, 'grow.probe': 0.1},
  }
  config.seeds = tuple(range(10))
  config.out = 'runs/claims/search_r2_wide'
  return config
