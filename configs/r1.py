"""R1 without search on the embedded world: GRPO as in configs/search_r1_grpo.py, but a chain is one span, without search.

    jaxsearch train --config configs/r1.py

Search-R1's baseline 'R1'. A policy that writes a search all the same ends its chain without an answer. Models that were not
warm-started on the world need --config.grow.template=r1 --config.grow.max_tokens=500.
"""

from configs import search_r1_grpo


def get_config():
  config = search_r1_grpo.get_config()
  config.out = 'runs/r1'
  config.grow.max_turns = 0
  return config.lock()
