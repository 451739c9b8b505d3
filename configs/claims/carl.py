"""CARL's claim: credit by segment makes better answers with fewer needless calls than credit by trajectory (its tables 2 and 3).

    jaxsearch tiers   --config configs/carl.py --config.model=runs/world_policy/coder --config.data.hops='(1, 2)' --config.data.arithmetic=False --limit 150 --out runs/claims/carl/tiers.jsonl
    jaxsearch warmup  --config configs/carl.py --config.model=runs/world_policy/coder --config.data.hops='(1, 2)' --config.data.arithmetic=False --config.out=runs/claims/carl/critic
    jaxsearch warmup  --config configs/search_r1_ppo.py --config.model=runs/world_policy/coder --config.data.hops='(1, 2)' --config.data.arithmetic=False --config.out=runs/claims/carl/ppo_critic
    jaxsearch compare --config configs/claims/carl.py

9 runs, two at a time on two cores, all from the same weights, which have seen the formats of both systems: those that
`jaxsearch world --policy` makes last. Tier 2 is what the policy knows by heart before training.
"""  # noqa: E501

import ml_collections

HERE = 'runs/claims/carl'
CODER = 'runs/world_policy/coder'


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CARL: credit by segment against credit by trajectory'
  config.base = 'configs/carl.py'
  config.common = {
    'steps': 16, 'questions_per_step': 12, 'group_size': 5, 'model': CODER, 'data.hops': (1, 2),
    'data.arithmetic': False, 'sampler.length': 640, 'eval': {'every': 16, 'number': 150, 'tiers': f'{HERE}/tiers.jsonl'},
  }
  config.variants = {
    'CARL': {'critic.warm_start': f'{HERE}/critic'},
    'Search-R1 PPO': {'config': 'configs/search_r1_ppo.py', 'critic.warm_start': f'{HERE}/ppo_critic', 'credit.lam': 0.95},
    'Search-R1 GRPO': {'config': 'configs/search_r1_grpo.py'},
  }
  config.baseline = 'Search-R1 PPO'
  config.seeds = (0, 1, 2)
  config.out = HERE
  config.parallel = 0  # one on each accelerator, two on CPU
  return config.lock()
