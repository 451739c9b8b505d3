"""R-Search's claims: evidence makes better answers (table 3), GRPO beats PPO (4 and 7), R-Search beats Search-R1 (2).

    jaxsearch sweep --config configs/claims/r_search.py

18 runs, two at a time on two cores. The baseline is the paper's ablation, without evidence in prompt, reward and format. The
same runs against PPO, or against Search-R1:

    jaxsearch sweep --config configs/claims/r_search.py --config.baseline='R-Search (PPO)' --report-only
    jaxsearch sweep --config configs/claims/r_search.py --config.baseline=Search-R1 --report-only
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'R-Search: with and without evidence, GRPO and PPO, and Search-R1'
  config.base = 'configs/r_search.py'
  config.common = {
    'steps': 24, 'questions_per_step': 16, 'data.hops': (1, 2), 'data.arithmetic': False,
    'sampler.length': 512, 'train.row_length': 512, 'eval': {'every': 24, 'number': 150},
  }
  config.variants = {
    # As many generated tokens as R-Search, which took 58 a rollout (111k in 1,920). Search-R1 took 40 (29k in 720), so it gets
    # 115 rollouts a step instead of 80.
    'Search-R1': {'config': 'configs/search_r1_grpo.py', 'questions_per_step': 23, 'group_size': 5},
    'without evidence': {'config': 'configs/r_search_without_evidence.py'},
    'R-Search': {},
    'R-Search (PPO)': {'config': 'configs/r_search_ppo.py', 'critic.lr_warmup_updates': 1},  # 0.05 of 24
    'evidence in the format alone': {'credit.evidence_weight': 0.0},
    'equations 4 and 5 alone': {'credit.evidence_needs_search': False},
  }
  config.baseline = 'without evidence'
  config.seeds = (0, 1, 2)
  config.out = 'runs/claims/r_search'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
