"""Tree-GRPO on the embedded world: two trees a question, three chains each, two of which branch off the first.

    jaxsearch train --config configs/tree_grpo.py
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'tree_grpo'
  config.out = 'runs/tree_grpo'
  config.steps = 200
  config.group_size = 2              # M, trees of a question
  config.grow.update(
    rounds=1,                        # L, how often a tree branches
    branches=2,                      # N, chains that begin at turns of earlier ones, each time
  )  # fmt: skip
  config.credit = config_dict.create(
    no_answer=0.2,                   # taken off the outcome of a chain without an answer
    normalize_std=True,              # False: not divided by the deviation
    singleton='zero',                # what a chain without another gets: 0, or its reward ('raw')
  )  # fmt: skip
  config.train.update(row_length=1536, micro_rows=2)
  config.eval.grow = config_dict.create(branches=0)
  config.eval.every = 50
  return config.lock()
