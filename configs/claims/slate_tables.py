"""SLATE's tables on the embedded world: the methods it is compared with (tables 1 and 3), its ablation (2), its group size (4).

    jaxsearch sweep --config configs/claims/slate_tables.py

48 runs. All are evaluated as one chain of up to 6 actions and a last span; their curves are the paper's figure 2. The rows
'direct', 'CoT', 'RAG', 'IRCoT' and 'Search-o1' of tables 1 and 3 are not trained and not here.
"""

from configs.claims import slate


def get_config():
  config = slate.get_config()
  config.title = 'SLATE: its tables on the embedded world'
  k = {'train.row_length': 1280}
  config.variants = {
    # Tables 1 and 3.
    'R1': {'config': 'configs/r1.py', 'group_size': 5},
    'Search-R1': config.variants['Search-R1'],
    'ZeroSearch': {'config': 'configs/zerosearch.py', 'group_size': 5},
    'ReSearch': {'config': 'configs/research.py', 'group_size': 5},
    'StepSearch': {'config': 'configs/step_search.py', 'group_size': 5},
    'SLATE': config.variants['SLATE'],  # table 2 (d), table 4 k = 5
    # Table 2.
    '(a) whole chains, judged': k | {'grow.k': 1, 'group_size': 5, 'credit.whole': True},
    '(b) exact match': k | {'grow.rewards': 'outcome'},
    '(c) exact match, last step': k | {'grow.rewards': 'final'},
    # Table 4.
    **{f'k = {size}': k | {'grow.k': size} for size in (1, 3, 7)},
  }
  config.seeds = (0, 1, 2, 3)
  config.out = 'runs/claims/slate_tables'
  return config.lock()
