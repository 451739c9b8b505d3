"""Every row of CuSearch's tables 3 and 7, and CuSearch with what it is compared to there, over ten seeds.

    jaxsearch sweep --config configs/claims/cusearch_wide.py

110 runs; --config.out=runs/claims/cusearch reuses the runs of cusearch.py.
"""

from configs.claims import cusearch


def get_config():
  config = cusearch.get_config()
  config.variants = config.variants | {
    'GRPO-Half': {'credit.strategy': 'full', 'questions_per_step': 12},  # K/G questions: K chains to train on, no more rolled out
    'Top-K reward': {'credit.strategy': 'topk_reward'},
    'DAPO': {'credit.strategy': 'full', 'credit.drop_alike': True},
    'AR3PO': {'credit.strategy': 'full', 'sizes.adaptive': True},
    'DAPO + SDGA-Phase': {'credit.strategy': 'phase', 'credit.drop_alike': True},
    'AR3PO + SDGA-Phase': {'credit.strategy': 'phase', 'sizes.adaptive': True},
  }
  config.seeds = tuple(range(10))
  config.out = 'runs/claims/cusearch_wide'
  return config
