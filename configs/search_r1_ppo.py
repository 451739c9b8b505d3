"""Search-R1 with PPO on the embedded world: the rollouts and the reward of configs/search_r1_grpo.py, credited by a critic.

    jaxsearch train --config configs/search_r1_ppo.py

For a warm critic, as in CARL's comparison, run `jaxsearch critic-warmup` on this config, then train with
--config.critic.warm_start=ITS_FOLDER.
"""

from ml_collections import config_dict

from configs import base, carl


def get_config():
  config = base.get_config().unlock()
  config.method = 'search_r1_ppo'
  config.out = 'runs/search_r1_ppo'
  config.steps = 200
  config.questions_per_step = 64
  config.group_size = 2
  config.credit = config_dict.create(gamma=1.0, lam=1.0)
  config.critic.enabled = True
  config.critic_warmup = carl.critic_warmup(
    closed_book=dict(template='world', max_turns=0), tool_required={},
    second_search=dict(backend='simulated', noise_start=0.5))
  config.critic_warmup.gate.update(auc=0.55, sign=0.0, explained=0.25)  # 200 updates never passed 0.66 and 0.29; no segments
  config.eval.every = 50
  return config.lock()
