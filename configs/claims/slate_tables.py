"""SLATE's tables on the embedded world: the methods it is compared with (tables 1 and 3), its ablation (2).

    jaxsearch sweep --config configs/claims/slate_tables.py

36 runs. All are evaluated as one chain of up to 6 actions and a last span; their curves are the paper's figure 2. The rows
'direct', 'CoT', 'RAG', 'IRCoT' and 'Search-o1' of tables 1 and 3 are not trained and not here. Table 4 is in slate.py.
"""

from configs.claims import slate


def get_config():
  config = slate.get_config().unlock()
  config.title = 'SLATE: its tables on the embedded world'
  config.variants = {
    # Tables 1 and 3.
    'R1': {'config': 'configs/r1.py', 'group_size': 5},
    'Search-R1': {'config': 'configs/search_r1_grpo.py', 'group_size': 5},
    'ZeroSearch': {'config': 'configs/zerosearch.py', 'group_size': 5, 'search.noise': 0.0},
    'ReSearch': {'config': 'configs/research.py', 'group_size': 5},
    'StepSearch': {'config': 'configs/step_search.py', 'group_size': 5},
    'SLATE': {},  # table 2 (d)
    # Table 2.
    '(a) whole chains, judged': slate.WHOLE,
    '(b) exact match': {'grow.rewards': 'outcome'},
    '(c) exact match, last step': {'grow.rewards': 'final'},
  }
  config.primary = ()
  config.seeds = (0, 1, 2, 3)
  config.out = 'runs/claims/slate_tables'
  return config.lock()
