"""Search-R2's tables 3, 4, 5, 7 and 8, row by row, and a frozen refiner.

    jaxsearch sweep --config configs/claims/search_r2_tables.py

110 runs; --config.out=runs/claims/search_r2 reuses those of search_r2.py. Tables 3 and 8 add one part at a time, by the paper's
names. Table 4 raises N_max without process reward and joint optimization, so its first row is '+ Meta-Refiner'. Table 5 is at the
end of the report: the change of EM over the change of seconds. The paper trains 300 steps on three models.
"""

from configs.claims import search_r2

RAW = {'grow.process': False, 'credit.joint': False}  # the Meta-Refiner alone


def get_config():
  config = search_r2.get_config()
  config.title = 'Search-R2: its tables'
  known = config.variants
  config.variants = {
    'Search-R1': known['Search-R1'],
    'Search-R1, n=10': known['Search-R1'] | {'group_size': 10},        # table 7
    '+ Meta-Refiner': RAW,                                             # tables 3 and 8, and N_max 1 of table 4
    '+ process reward': {'credit.joint': False},
    'Search-R2': known['Search-R2'],                                   # joint optimization too
    'without process reward': {'grow.process': False},
    'N_max 2': RAW | {'grow.max_revisions': 2},                        # table 4
    'N_max 3': RAW | {'grow.max_revisions': 3},
    'N_max 4': RAW | {'grow.max_revisions': 4},
    'frozen refiner': {'grow.refiner': 'frozen'},                      # reviews of the initial weights
    'Search-R2, probed': {'grow.probe': 0.1},                          # for A_prec, V_inter, S_trim; has no costs
  }
  config.seeds = tuple(range(10))
  config.out = 'runs/claims/search_r2_tables'
  return config
