"""CARL's claim: credit by segment makes better answers with fewer needless calls than credit by trajectory (its tables 2 and 3).

    MIX="--config configs/carl.py --config.data.hops=(1,) --limit 3000"
    jaxsearch tiers $MIX --questions world:rl --out runs/claims/carl/tiers_rl.jsonl --mixed runs/claims/carl/rl.jsonl
    jaxsearch tiers $MIX --questions world:test --out runs/claims/carl/tiers.jsonl --mixed runs/claims/carl/test.jsonl
    PPO="--config configs/search_r1_ppo.py --config.model=world-carl --config.critic_warmup.closed_book.template=world_direct"
    jaxsearch tiers $PPO --questions runs/claims/carl/test.jsonl --out runs/claims/carl/tiers_search_r1.jsonl
    WARM="--config.data.questions=runs/claims/carl/rl.jsonl --config.sampler.length=640 --config.train.row_length=640"
    jaxsearch critic-warmup --config configs/carl.py $WARM --config.out=runs/claims/carl/critic
    jaxsearch critic-warmup $PPO $WARM --config.out=runs/claims/carl/ppo_critic
    jaxsearch sweep --config configs/claims/carl.py

9 runs, two at a time on two cores, all from the same weights, which have seen the formats of both systems. Half of the questions
are of tier 2: in CARL's format, the policy answers them closed-book before training. Each system is compared on the tiers of its
own format. All questions have one hop, since a guess at a comparison is often right.
"""

import ml_collections

HERE = 'runs/claims/carl'


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CARL: credit by segment against credit by trajectory'
  config.base = 'configs/carl.py'
  config.common = {
    'steps': 16, 'questions_per_step': 12, 'group_size': 5, 'model': 'world-carl', 'data.questions': f'{HERE}/rl.jsonl',
    'sampler.length': 640, 'train.row_length': 640,
    'eval': {'every': 16, 'number': 0, 'questions': f'{HERE}/test.jsonl', 'tiers': f'{HERE}/tiers.jsonl'},
  }
  own = {'eval.tiers': f'{HERE}/tiers_search_r1.jsonl'}
  config.variants = {
    'CARL': {'critic.warm_start': f'{HERE}/critic', 'grow.max_segments': 7},  # 3 calls
    'Search-R1 PPO': own | {'config': 'configs/search_r1_ppo.py', 'critic.warm_start': f'{HERE}/ppo_critic', 'credit.lam': 0.95},
    'Search-R1 GRPO': own | {'config': 'configs/search_r1_grpo.py'},
  }
  config.baseline = 'Search-R1 PPO'
  config.seeds = (0, 1, 2)
  config.out = HERE
  config.parallel = 0  # one on each accelerator, two on CPU
  return config.lock()
