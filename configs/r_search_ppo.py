"""R-Search with PPO on the embedded world: as configs/r_search.py, credited by a critic.

    jaxsearch train --config configs/r_search_ppo.py

As in the authors' scripts the critic has ten times the policy's rate and a warm-up over 0.05 of its updates, here 5 of 100.
"""

from configs import r_search


def get_config():
  config = r_search.get_config().unlock()
  config.out = 'runs/r_search_ppo'
  config.credit.estimator = 'ppo'
  config.critic.update(enabled=True, learning_rate=1e-3, lr_warmup_updates=5)
  return config.lock()
