"""R-Search with PPO on the embedded world: as configs/r_search.py, credited by a critic.

    jaxsearch train --config configs/r_search_ppo.py
"""

from configs import r_search


def get_config():
  config = r_search.get_config()
  config.unlock()
  config.out = 'runs/r_search_ppo'
  config.credit.estimator = 'ppo'
  config.critic.enabled = True
  return config.lock()
