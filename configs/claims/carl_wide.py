"""CARL's wide sweep: lambda 0.5, 0.95 and 1; critics that start cold, or warmed up without curation (tables 9 and 10).

    jaxsearch critic-warmup  … --config.critic_warmup.curated=False --config.out=runs/claims/carl/critic_random    # as in carl.py
    jaxsearch sweep --config configs/claims/carl_wide.py

90 runs; --config.out=runs/claims/carl reuses the runs of carl.py. The prompted rows of table 2 need no training:
`jaxsearch eval --config configs/carl.py --config.grow.template=world_carl_forced`, SFT is `jaxsearch sample` and `sft`.
"""

from configs.claims import carl
from configs.claims.carl import HERE


def get_config():
  config = carl.get_config()
  warm, ppo = {'critic.warm_start': f'{HERE}/critic'}, {'config': 'configs/search_r1_ppo.py', 'credit.lam': 0.95}
  config.variants = config.variants | {
    **{f'CARL, lambda {lam}': warm | {'credit.lam': lam} for lam in (0.5, 0.95, 1.0)},
    'CARL, cold': {},
    'CARL, random warm-up': {'critic.warm_start': f'{HERE}/critic_random'},
    'Search-R1 PPO, cold': ppo,
  }
  config.seeds = tuple(range(10))
  config.out = 'runs/claims/carl_wide'
  return config
