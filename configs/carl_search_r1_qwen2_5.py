"""Compares CARL on a pod with Search-R1, with PPO or GRPO on CARL's data, search and updates (table 5, right column).

    jaxsearch critic-warmup --config configs/carl_search_r1_qwen2_5.py:ppo_7b … --config.out=W
    jaxsearch train --config configs/carl_search_r1_qwen2_5.py:ppo_7b --config.critic.warm_start=W --config.out=/shared/run
    jaxsearch train --config configs/carl_search_r1_qwen2_5.py:grpo_3b --config.out=/shared/run

The argument is ppo_7b, ppo_3b, grpo_7b or grpo_3b. PPO's critic is a linear head on the frozen initial model, at 1e-5; lambda is
0.95. For table 9 warm all critics up for as many updates: --config.critic_warmup.min_updates=2400, which is max_updates, and
for its random rows --config.critic_warmup.curated=False. Search-R1 may make as many calls as CARL, seven; the paper does not say
how many it allowed. Not run by us at this size.
"""

import importlib

from ml_collections import config_dict

from configs import carl


def get_config(name: str = 'ppo_7b'):
  algorithm, size = name.split('_')
  config = importlib.import_module(f'configs.carl_qwen2_5_{size}').get_config().unlock()
  config.out = f'runs/carl_search_r1_{name}'
  config.grow = config_dict.create(template='search_r1', chat=True, max_turns=7, max_tokens=2048)
  config.train.update(aggregate='token-mean', row_length=config.sampler.length)
  own, config.critic_warmup = config.critic_warmup, config_dict.create()
  if algorithm == 'grpo':
    config.method, config.credit = 'search_r1', config_dict.create(normalize_std=True)
    config.critic.enabled = False
    del config.critic_warmup
    return config.lock()
  config.method, config.credit = 'search_r1_ppo', config_dict.create(gamma=1.0, lam=0.95)
  config.critic.update(shared=False, learning_rate=1e-5, backbone_rate=0.0, weight_decay=0.0)
  config.critic_warmup = carl.critic_warmup(
    closed_book=dict(template='r1', max_turns=0), tool_required={}, second_search=own.second_search.to_dict())
  config.critic_warmup.update({field: own[field] for field in (
    'extra_questions', 'questions', 'trajectories', 'tier_2_share', 'clusters', 'source_clusters', 'encoder', 'trees',
    'lr_warmup_updates', 'min_updates', 'max_updates')})
  config.critic_warmup.update(head_rate=1e-5, backbone_rate=0.0)
  config.critic_warmup.gate.sign = 0.0  # a chain has no segments
  return config.lock()
