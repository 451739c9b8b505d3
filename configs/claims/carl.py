"""CARL's claim: credit by segment makes better answers with fewer needless calls than credit by trajectory (its tables 2 and 3).

    MIX="--config configs/carl.py --config.data.hops=(1,) --limit 3000"
    jaxsearch tiers $MIX --questions world:rl --out runs/claims/carl/tiers_rl.jsonl --mixed runs/claims/carl/rl.jsonl
    jaxsearch tiers $MIX --questions world:test --out runs/claims/carl/tiers.jsonl --mixed runs/claims/carl/test.jsonl
    WARM="--config.data.questions=runs/claims/carl/rl.jsonl --config.sampler.length=640 --config.train.row_length=640
          --config.critic_warmup.backbone_rate=0 --config.critic_warmup.min_updates=100 --config.critic_warmup.max_updates=100"
    EVERY="--config.train.aggregate=token-mean"
    jaxsearch critic-warmup --config configs/carl.py $WARM --config.out=runs/claims/carl/critic
    jaxsearch critic-warmup --config configs/carl.py $WARM $EVERY --config.out=runs/claims/carl/critic_of_tokens
    jaxsearch sweep --config configs/claims/carl.py

9 runs, two at a time on two cores. All have CARL's rollouts (prompt, code, contexts, at most three calls), the same updates,
rates and entropy bonus. They differ in what a token is credited with, and how the loss is averaged. PPO reads V before every
token, so its critic learned there, on the same rollouts and for as many updates as CARL's, which learned the starts of segments.
Warm-ups train the head of the critic alone: all rows start from the same weights. Search-R1 in its own format is in
carl_formats.py, lambda alone in carl_lambda.py. Half of the questions are of tier 2 (answered closed-book before training). All
have one hop, since a guess at a comparison is often right.
"""

import ml_collections

HERE = 'runs/claims/carl'
WARM = {'critic.warm_start': f'{HERE}/critic'}


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CARL: credit by segment against credit by token and by trajectory'
  config.base = 'configs/carl.py'
  config.common = {
    'steps': 16, 'questions_per_step': 12, 'group_size': 5, 'model': 'world-carl', 'data.questions': f'{HERE}/rl.jsonl',
    'sampler.length': 640, 'train.row_length': 640, 'grow.max_segments': 7,  # 3 calls
    'eval': {'every': 16, 'number': 0, 'questions': f'{HERE}/test.jsonl', 'tiers': f'{HERE}/tiers.jsonl', 'right': 'em_entity'},
  }
  config.variants = {
    'CARL': WARM,
    'PPO': {'critic.warm_start': f'{HERE}/critic_of_tokens', 'credit.level': 'token', 'credit.lam': 0.95,
            'train.aggregate': 'token-mean'},
    'GRPO': {'credit.level': 'trajectory', 'critic.enabled': False, 'train.aggregate': 'token-mean'},
  }
  config.baseline = 'PPO'
  config.seeds = (0, 1, 2)
  config.out = HERE
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
