"""CARL against Search-R1 in its own format, as in the paper's tables 2 and 9: warmed up, warmed up without curation, and cold.

    PPO="--config configs/search_r1_ppo.py --config.model=world-carl --config.critic_warmup.closed_book.template=world_direct
         --config.critic.shared=True --config.critic.learning_rate=2.5e-4 --config.critic.backbone_rate=2.5e-5
         --config.critic.weight_decay=0.01"
    WARM="--config.data.questions=runs/claims/carl/rl.jsonl --config.sampler.length=640 --config.train.row_length=640
          --config.critic_warmup.backbone_rate=0 --config.critic_warmup.min_updates=100 --config.critic_warmup.max_updates=100"
    ANY="--config.critic_warmup.curated=False"
    jaxsearch tiers $PPO --questions runs/claims/carl/test.jsonl --out runs/claims/carl/tiers_search_r1.jsonl
    jaxsearch critic-warmup $PPO $WARM --config.out=runs/claims/carl/ppo_critic
    jaxsearch critic-warmup $PPO $WARM $ANY --config.out=runs/claims/carl/ppo_critic_random
    jaxsearch critic-warmup --config configs/carl.py $WARM $ANY --config.out=runs/claims/carl/critic_random
    jaxsearch sweep --config configs/claims/carl_formats.py       # after the commands in carl.py, but for its last

Besides the format, the rows have the same updates, rates, entropy bonus, number of calls and kind of critic; they start from the
same weights, and their critics from as many updates of the head alone. Each system is measured on the tiers of its own format.
The prompted rows of table 2 need no training: `jaxsearch eval --config configs/carl.py
--config.grow.template=world_carl_forced`; SFT is `jaxsearch sample` and `sft`.
"""

from configs.claims import carl
from configs.claims.carl import HERE, WARM

SAME = {  # as configs/carl.py has it
  'train.epochs': 4, 'train.mini_batch': 60, 'optim.learning_rate': 5e-5, 'optim.b2': 0.999, 'loss.entropy_coef': 0.001,
  'grow.max_turns': 3, 'eval.tiers': f'{HERE}/tiers_search_r1.jsonl'}
CRITIC = {'critic.shared': True, 'critic.learning_rate': 2.5e-4, 'critic.backbone_rate': 2.5e-5, 'critic.weight_decay': 0.01,
          'credit.lam': 0.95}


def get_config():
  config = carl.get_config()
  config.unlock()
  config.title = 'CARL against Search-R1'
  common = dict(config.common)
  three_calls = {'grow.max_segments': common.pop('grow.max_segments')}
  config.common = common
  ppo = {'config': 'configs/search_r1_ppo.py'} | SAME | CRITIC
  config.variants = {
    'CARL': three_calls | WARM,
    'CARL, random warm-up': three_calls | {'critic.warm_start': f'{HERE}/critic_random'},
    'CARL, cold': three_calls,
    'Search-R1 PPO': ppo | {'critic.warm_start': f'{HERE}/ppo_critic'},
    'Search-R1 PPO, random warm-up': ppo | {'critic.warm_start': f'{HERE}/ppo_critic_random'},
    'Search-R1 PPO, cold': ppo,
    'Search-R1 GRPO': {'config': 'configs/search_r1_grpo.py'} | SAME,
  }
  config.baseline = 'Search-R1 PPO'
  config.out = 'runs/claims/carl_formats'
  return config.lock()
