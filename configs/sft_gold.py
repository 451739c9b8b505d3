"""Supervised training of the world's policy on gold chains: every step searched, then the right answer.

    jaxsearch sft --config configs/sft_gold.py

The chains are made from the questions that reinforcement learning trains on.
"""

from configs import sft


def get_config():
  config = sft.get_config()
  config.out = 'runs/sft_gold'
  config.sft.demonstrations = 'world:rl'
  return config.lock()
