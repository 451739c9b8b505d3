"""GiGPO on the embedded world: Search-R1's chains, each step also compared with those that began in the same state.

    jaxsearch train --config configs/gigpo.py
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'gigpo'
  config.out = 'runs/gigpo'
  config.steps = 200
  config.group_size = 5
  config.credit = config_dict.create(
    gamma=0.95,                      # discount of a return, for each later step
    weight=1.0,                      # of the comparison of steps (omega)
    invalid=-0.01,                   # what a span earns that neither calls a tool nor answers
    normalize_std=True,              # False: not divided by the deviation
    singleton='raw',                 # what the only chain of a question gets: its reward ('raw') or 0 ('zero')
  )  # fmt: skip
  config.eval.every = 50
  return config.lock()
