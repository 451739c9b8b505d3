"""Search-R1 with GRPO on the embedded world: every kind of question, arithmetic included.

    jaxsearch train --config configs/search_r1_grpo.py

About 8 s a step on two CPU cores. Copy this file to configure a method of your own.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.unlock()  # so that groups may get new fields
  config.method = 'search_r1'
  config.out = 'runs/search_r1_grpo'
  config.steps = 200
  config.grow.update(max_turns=6, max_tokens=64)  # settings of the method's `grow`, here those of base
  config.credit.singleton = 'raw'    # what the only chain of a group gets: its reward ('raw') or 0 ('zero')
  config.eval.every = 50
  return config.lock()
