"""TRACE on the embedded world: rollouts go to questions and prefixes of chains whose outcome is open.

    jaxsearch train --config configs/trace.py --config.data.number=N

With few questions (or many steps) they come back, and get as many trees as what is known of them asks for.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'trace'
  config.out = 'runs/trace'
  config.steps = 200
  config.group_size = 2              # trees of a question on average
  config.grow.update(
    extra=2,                         # chains of a tree beside its first
    success=(0.3, 0.5, 0.7),         # predicted from the question, the first observation, …; the last holds for later ones
  )  # fmt: skip
  config.sizes = config_dict.create(
    prior=0.5,                       # predicted success of a question that was not seen before
    strength=2.0,                    # chains that the prior counts as
  )  # fmt: skip
  config.credit = config_dict.create(
    no_answer=0.0,                   # as in configs/tree_grpo.py
    normalize_std=True, singleton='zero',
  )  # fmt: skip
  config.train.update(row_length=1536, micro_rows=2)
  config.eval.grow = config_dict.create(extra=0)
  config.eval.every = 50
  return config.lock()
