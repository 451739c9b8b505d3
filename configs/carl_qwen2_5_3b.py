"""CARL as published, for a pod: Qwen2.5-3B-Instruct. All is as in configs/carl_qwen2_5_7b.py, but what the smaller policy knows.

    jaxsearch critic-warmup --config configs/carl_qwen2_5_3b.py … --config.out=/shared/warmup
    jaxsearch train --config configs/carl_qwen2_5_3b.py --config.critic.warm_start=/shared/warmup --config.out=/shared/run

Not run by us at this size.
"""

from configs import carl_qwen2_5_7b


def get_config():
  config = carl_qwen2_5_7b.get_config().unlock()
  config.model = 'Qwen2.5-3B-Instruct'
  config.out = 'runs/carl_qwen2_5_3b'
  config.critic_warmup.tier_2_share = 0.35  # table 4
  return config.lock()
