"""IGPO on the embedded world: a turn earns what it adds to the log-probability of the gold answer.

    jaxsearch train --config configs/igpo.py
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'igpo'
  config.out = 'runs/igpo'
  config.steps = 200
  config.group_size = 5
  config.grow.update(
    gains=True,                      # False: none, as in evaluations
    remark='Now I know enough to answer.',  # what the policy thinks before the gold answer that is scored
  )  # fmt: skip
  config.credit = config_dict.create(
    gamma=1.0,                       # discount of what later turns earn
    joint=False,                     # True: gains and outcomes are standardised together (the paper's first version)
    no_answer=-2.0,                  # outcome of a chain without an answer
  )  # fmt: skip
  config.train.aggregate = 'seq-mean-token-mean'
  config.eval.grow = config_dict.create(gains=False)
  config.eval.every = 50
  return config.lock()
