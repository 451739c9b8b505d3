"""CARL against Search-R1 in its own format, as in the paper's tables 2 and 9: warmed up, warmed up without curation, and cold.

    MIX="--config configs/carl.py --config.data.hops=(1,) --limit 3000"
    WARM="--config.data.questions=runs/claims/carl_formats/rl.jsonl --config.sampler.length=640 --config.train.row_length=640
          --config.critic_warmup.backbone_rate=0 --config.critic_warmup.min_updates=100 --config.critic_warmup.max_updates=100"
    PPO="--config configs/search_r1_ppo.py --config.model=world-carl --config.critic_warmup.closed_book.template=world_direct
         --config.critic.shared=True --config.critic.learning_rate=2.5e-4 --config.critic.backbone_rate=2.5e-5
         --config.critic.weight_decay=0.01"
    ANY="--config.critic_warmup.curated=False" HERE=runs/claims/carl_formats
    jaxsearch tiers $MIX --questions world:rl --out $HERE/tiers_rl.jsonl --mixed $HERE/rl.jsonl
    jaxsearch tiers $MIX --questions world:test --out $HERE/tiers.jsonl --mixed $HERE/test.jsonl
    jaxsearch tiers $PPO --questions $HERE/test.jsonl --out $HERE/tiers_search_r1.jsonl
    jaxsearch critic-warmup --config configs/carl.py $WARM --config.out=$HERE/critic
    jaxsearch critic-warmup --config configs/carl.py $WARM $ANY --config.out=$HERE/critic_random
    jaxsearch critic-warmup $PPO $WARM --config.out=$HERE/ppo_critic
    jaxsearch critic-warmup $PPO $WARM $ANY --config.out=$HERE/ppo_critic_random
    jaxsearch sweep --config configs/claims/carl_formats.py

Half of the questions are of tier 2 (answered closed-book before training). Besides the format, the rows have the same updates,
rates, entropy bonus, number of calls and kind of critic; they start from the same weights, and their critics from as many updates
of the head alone. Each system is measured on the tiers of its own format. The prompted rows of table 2 need no training:
`jaxsearch eval --config configs/carl.py --config.grow.template=world_carl_forced`; SFT is `jaxsearch sample` and `sft`.
"""

import ml_collections

HERE = 'runs/claims/carl_formats'
SAME = {  # as configs/carl.py has it
  'train.epochs': 4, 'train.mini_batch': 60, 'optim.learning_rate': 5e-5, 'optim.b2': 0.999, 'loss.entropy_coef': 0.001,
  'grow.max_turns': 3, 'eval.tiers': f'{HERE}/tiers_search_r1.jsonl'}
CRITIC = {'critic.shared': True, 'critic.learning_rate': 2.5e-4, 'critic.backbone_rate': 2.5e-5, 'critic.weight_decay': 0.01,
          'credit.lam': 0.95}


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'CARL against Search-R1'
  config.base = 'configs/carl.py'
  config.common = {
    'steps': 16, 'questions_per_step': 12, 'group_size': 5, 'model': 'world-carl', 'data.questions': f'{HERE}/rl.jsonl',
    'sampler.length': 640, 'train.row_length': 640,
    'eval': {'every': 16, 'number': 0, 'questions': f'{HERE}/test.jsonl', 'tiers': f'{HERE}/tiers.jsonl', 'right': 'em_entity'},
  }
  three_calls = {'grow.max_segments': 7}
  ppo = {'config': 'configs/search_r1_ppo.py'} | SAME | CRITIC
  config.variants = {
    'CARL': three_calls | {'critic.warm_start': f'{HERE}/critic'},
    'CARL, random warm-up': three_calls | {'critic.warm_start': f'{HERE}/critic_random'},
    'CARL, cold': three_calls,
    'Search-R1 PPO': ppo | {'critic.warm_start': f'{HERE}/ppo_critic'},
    'Search-R1 PPO, random warm-up': ppo | {'critic.warm_start': f'{HERE}/ppo_critic_random'},
    'Search-R1 PPO, cold': ppo,
    'Search-R1 GRPO': {'config': 'configs/search_r1_grpo.py'} | SAME,
  }
  config.baseline = 'Search-R1 PPO'
  config.seeds = (0, 1, 2)
  config.out = HERE
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
