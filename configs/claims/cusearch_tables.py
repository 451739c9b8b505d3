"""Tables 3, 4, 5, 7 and 8 of the CuSearch paper, row by row; search is simulated but where a row says 'corpus'.

    jaxsearch sweep --config configs/claims/cusearch_tables.py           # all rows, 29 x 3 runs
    jaxsearch sweep --config configs/claims/cusearch_tables.py:4         # the rows of table 4; runs are shared
    jaxsearch sweep --config configs/claims/cusearch_tables.py:average   # how a chain's tokens are averaged

Updates are counted as in the paper: a mini-batch is a third of K, so the variants that keep K chains make three updates a step
and GRPO-Full makes six. S caps the turns too. AR3PO acts only on questions that it has seen, so the rows of table 7 train on 64
questions, each again every fourth step. Evaluations have the noise of the last step, as the paper evaluates with its simulator.

The rows of `average` are in none of its tables. Equations 23 to 26 sum over the tokens of a chain, so that deeper chains count
more; the mean over each chain, which is ours, takes that away. 'token-mean' is ZeroSearch's code. Compare each row with Random
of the same average: --config.baseline='Random, token-mean'.

Table 6, and with it the middle row of table 8, evaluates runs of table 3 with
another search engine:

    jaxsearch eval --config configs/cusearch.py --checkpoint runs/claims/cusearch_tables/sdga-phase/0 --out F.json \
        --config.search.backend=web
"""

from configs.claims import cusearch

FULL, AUTO, PHASE = ({'credit.strategy': strategy} for strategy in ('full', 'auto', 'phase'))
HALF = FULL | {'questions_per_step': 8}  # K/G questions: K chains to train on, no more rolled out
MAIN = {'GRPO-Full': FULL, 'GRPO-Half': HALF, 'SDGA-Auto': AUTO, 'SDGA-Phase': PHASE}
RANDOM, TOP, ANTI = ({name: {'credit.strategy': strategy}} for name, strategy in (
  ('Random', 'random'), ('Top-K Reward', 'topk_reward'), ('SDGA-Anti', 'anti')))
DEPTH = {f'{name}, S={s}': changes | {'credit.max_depth': s, 'grow.max_turns': s}
         for s in (4, 3) for name, changes in MAIN.items()}
PROMPT_LEVEL = {
  'GRPO-Full, again': FULL, 'DAPO': FULL | {'credit.drop_alike': True}, 'AR3PO': FULL | {'sizes.adaptive': True},
  'SDGA-Phase, again': PHASE, 'DAPO + SDGA-Phase': PHASE | {'credit.drop_alike': True},
  'AR3PO + SDGA-Phase': PHASE | {'sizes.adaptive': True},
}  # fmt: skip
AGAIN = {name: changes | {'data.number': 64} for name, changes in PROMPT_LEVEL.items()}
ENDS = {name: MAIN[name] for name in ('GRPO-Full', 'SDGA-Phase')}
CORPUS = {f'{name}, corpus': changes | {'search.backend': 'bm25'} for name, changes in ENDS.items()}
AVERAGE = {f'{name}, {how}': changes | {'train.aggregate': how} for how in ('token-mean', 'seq-mean-token-sum')
           for name, changes in {**RANDOM, 'SDGA-Auto': AUTO, 'SDGA-Phase': PHASE}.items()}
ROWS = {  # table -> (baseline, its rows)
  '': ('GRPO-Full', MAIN | RANDOM | TOP | ANTI | DEPTH | AGAIN | CORPUS | AVERAGE),
  '3': ('GRPO-Full', MAIN | RANDOM | TOP),
  '4': ('GRPO-Full', MAIN | DEPTH),
  '5': ('Random', ANTI | RANDOM | {'SDGA-Auto': AUTO}),
  '7': ('GRPO-Full, again', AGAIN),
  '8': ('GRPO-Full', ENDS | CORPUS),
  'average': ('Random', RANDOM | {'SDGA-Auto': AUTO, 'SDGA-Phase': PHASE} | AVERAGE),
}


def get_config(table: str = ''):
  config = cusearch.get_config()
  config.title = f'CuSearch, {"table " * table.isdigit()}{table or "its tables"}'
  config.common = config.common | {
    'search.backend': 'simulated', 'search.noise': 0.0, 'search.noise_eval': 0.5, 'train.mini_batch': 16}
  config.baseline, config.variants, config.primary = *ROWS[table], ()
  config.seeds, config.out = (0, 1, 2), 'runs/claims/cusearch_tables'
  return config
