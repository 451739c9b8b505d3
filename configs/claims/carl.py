"""CARL's claim: credit by segment makes as good answers with fewer needless calls (its tables 2, 3 and 10).

    WARM="--config configs/carl.py --config.model=runs/beds/tiers --config.data.questions=runs/beds/tiers/learn.jsonl
          --config.data.corpus=runs/beds/tiers/corpus.jsonl --config.search.topk=1 --config.sampler.length=384
          --config.train.row_length=384 --config.critic_warmup.second_search.backend=bm25
          --config.critic_warmup.backbone_rate=0 --config.critic_warmup.min_updates=100 --config.critic_warmup.max_updates=100"
    EVERY="--config.train.aggregate=token-mean"
    jaxsearch critic-warmup $WARM --config.out=runs/claims/carl/critic
    jaxsearch critic-warmup $WARM $EVERY --config.out=runs/claims/carl/critic_of_tokens
    jaxsearch sweep --config configs/claims/carl.py

The policy of the bed (`python -m recipes beds tiers exchanged --config.out=runs/beds`) knows 60 countries by heart, tier 2, and
calls its tool on them too; two of five contexts lose what was found, so that a needless call can hurt. All rows have CARL's
rollouts, updates and rates, no KL penalty and no entropy bonus. They differ in what a token is credited with, and how the loss is
averaged; the control learns from the answers of other questions. PPO reads V before every token, so its critic learned there, for
as many updates; warm-ups train the head of the critic alone.
"""

import ml_collections

HERE, BEDS = 'runs/claims/carl', 'runs/beds'
TIERS = f'{BEDS}/tiers'
WARM = {'critic.warm_start': f'{HERE}/critic'}


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CARL: credit by segment against credit by token and by trajectory'
  config.base = 'configs/carl.py'
  config.common = {
    'steps': 12, 'questions_per_step': 12, 'group_size': 5, 'checkpoint_every': 12,
    'model': TIERS, 'data.questions': f'{TIERS}/learn.jsonl', 'data.corpus': f'{TIERS}/corpus.jsonl', 'search.topk': 1,
    'sampler.slots': 128, 'sampler.length': 384, 'train.row_length': 384, 'grow.max_segments': 7,  # 3 calls
    'loss.kl_coef': 0.0, 'loss.entropy_coef': 0.0,
    'eval': {'every': 3, 'number': 0, 'questions': f'{TIERS}/held_out.jsonl', 'tiers': f'{TIERS}/tiers.jsonl',
             'temperatures': (1.0,)},
  }
  config.variants = {
    **{f'lambda {lam}': WARM | {'credit.lam': lam} for lam in (0.0, 0.5, 1.0)},
    'PPO': {'critic.warm_start': f'{HERE}/critic_of_tokens', 'credit.level': 'token', 'credit.lam': 0.95,
            'train.aggregate': 'token-mean'},
    'GRPO': {'credit.level': 'trajectory', 'critic.enabled': False, 'train.aggregate': 'token-mean'},
    'answers exchanged': WARM | {'credit.lam': 1.0, 'data.questions': f'{BEDS}/exchanged_tiers.jsonl'},
  }
  config.baseline, config.primary = 'lambda 0.0', ('lambda 1.0',)
  config.seeds = tuple(range(8))
  config.out = HERE
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
