"""Search-R1 with PPO on the embedded world: the rollouts and the reward of configs/search_r1_grpo.py, credited by a critic.

    jaxsearch train --config configs/search_r1_ppo.py
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config()
  config.unlock()
  config.method = 'search_r1_ppo'
  config.out = 'runs/search_r1_ppo'
  config.steps = 200
  config.questions_per_step = 64
  config.group_size = 2
  config.credit = config_dict.create(gamma=1.0, lam=1.0)
  config.critic.enabled = True
  config.eval.every = 50
  return config.lock()
