"""Search-R1 with GRPO on the embedded world: every kind of question, arithmetic included.

    jaxsearch train --config configs/search_r1_grpo.py

About 8 s a step on two CPU cores.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method = 'search_r1'
  config.out = 'runs/search_r1_grpo'
  config.steps = 200
  config.eval.every = 50
  return config.lock()
