"""CuSearch and the baselines of its table 3 over ten seeds, searching a corpus.

    jaxsearch sweep --config configs/claims/cusearch_wide.py

70 runs; --config.out=runs/claims/cusearch reuses the runs of cusearch.py. cusearch_tables.py has the simulator, as in the paper,
and the prompt-level baselines.
"""

from configs.claims import cusearch


def get_config():
  config = cusearch.get_config()
  config.variants = config.variants | {
    'GRPO-Half': {'credit.strategy': 'full', 'questions_per_step': 12},  # K/G questions: K chains to train on, no more rolled out
    'Top-K reward': {'credit.strategy': 'topk_reward'},
  }
  config.seeds = tuple(range(10))
  config.out = 'runs/claims/cusearch_wide'
  return config
