"""R-Search with PPO as published, for a pod (tables 4 and 7): as configs/r_search_qwen2_5_3b.py, credited by a critic.

    jaxsearch train --config configs/r_search_ppo_qwen2_5_3b.py --config.model=Qwen2.5-3B-Instruct …

The critic starts as a copy of the policy. Its learning rate of 1e-5 and warm-up ratio of 0.05 are those of the authors' scripts;
the paper gives none. The paper samples five rollouts a question, the scripts one, so that a step is one update:
--config.group_size=1 --config.optim.lr_warmup_updates=185 --config.critic.lr_warmup_updates=9; at 7B 120 steps (114 and 6).
Not run by us at this size.
"""

from configs import r_search_qwen2_5_3b


def get_config():
  config = r_search_qwen2_5_3b.get_config().unlock()
  config.out = 'runs/r_search_ppo_qwen2_5_3b'
  config.credit.estimator = 'ppo'
  config.critic.update(enabled=True, learning_rate=1e-5, lr_warmup_updates=48)  # 0.05 of 975
  return config.lock()
