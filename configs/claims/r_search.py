"""R-Search's claims: evidence makes better answers (table 3), GRPO beats PPO (4 and 7), R-Search beats Search-R1 (2).

    jaxsearch sweep --config configs/claims/r_search.py         # what decides first
    jaxsearch sweep --config configs/claims/r_search.py --config.baseline='R-Search (PPO)' --report-only

A fifth to a third of the questions are comparisons, which can be guessed. 'no box' is the paper's ablation, without
evidence in prompt, reward and format; 'box alone' asks for evidence that nothing rewards. All start from a policy that was
taught both formats. What decides is the gain, EM above that of the start.
"""

import ml_collections

from configs.claims._bed import BED, control

ROWS = {
  'Search-R1 (EM)': {'config': 'configs/search_r1_grpo.py', 'group_size': 5},
  'no box': {'config': 'configs/r_search_without_evidence.py'},  # F1 and the format of Search-R1
  'box alone': {'credit.evidence_weight': 0.0, 'credit.gamma_evidence': 0.0},
  'box and its format': {'credit.evidence_weight': 0.0},
  'R-Search': {},
  'R-Search, not gated': {'credit.evidence_needs_search': False},  # equations 4 and 5 alone
  'R-Search (PPO)': {'config': 'configs/r_search_ppo.py', 'critic.learning_rate': 1e-4,  # ten times the policy's
                     'critic.lr_warmup_updates': 1},  # 0.05 of 12
  **control(2),
}


def get_config():
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'R-Search: with and without evidence, GRPO and PPO, and Search-R1'
  config.base = 'configs/r_search.py'
  config.common = BED | {
    'model': 'runs/beds/both', 'data.hops': (2,), 'grow.max_turns': 4, 'sampler.length': 896, 'train.row_length': 896}
  config.variants = ROWS
  config.baseline = 'R-Search'
  config.primary = ('no box', 'R-Search (PPO)')
  config.seeds = tuple(range(5))
  config.out = 'runs/claims/r_search'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
