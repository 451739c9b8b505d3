"""StepSearch on the embedded world: PPO as in configs/search_r1_ppo.py, every search rewarded for the gold passages it adds.

    jaxsearch train --config configs/step_search.py

A model that was not warm-started on the world needs --config.grow.template=step_search --config.grow.max_tokens=500.
"""

from ml_collections import config_dict

from configs import search_r1_ppo


def get_config():
  config = search_r1_ppo.get_config().unlock()
  config.method = 'step_search'
  config.out = 'runs/step_search'
  config.credit = config_dict.create(
    key_weight=0.618,                # weight of the gold queries in the reward of a chain
    gamma=1.0, lam=1.0,
  )  # fmt: skip
  return config.lock()
