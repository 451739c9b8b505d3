"""SLATE's claims: truncated sampling, judged steps, their number, a judge that errs, the bonus for early answers.

    jaxsearch sweep --config configs/claims/slate.py          # the 2 x 2 first; _bed.py says how to make the policy
    jaxsearch sweep --config configs/claims/slate.py:bonus    # after the commands below

The policy is CuSearch's, which goes on too seldom. Control: a judge whose scores are drawn at random. With the answers of other
questions SLATE learns to search as well, because their gold chains praise going on too (docs/claims.md).

The 2 x 2 decides (its tables 1 and 2): whole chains or truncated steps, judged rewards or exact match. All of its rows are
the method 'slate', so a malformed action ends a chain in each, and steps count alike; 'whole, EM' is Search-R1's reward and
sampling. 'truncated, EM' completes a chain from every sibling, so that a search can earn; it pays with tokens, and areas are
taken at equal tokens. The judge is exact, or wrong about a quarter of what it scores, always alike about the same text.

'bonus' starts from a policy that searches too much, because its judge praised every search, and goes on with one that praises
half of them:

    jaxsearch train --config configs/slate.py --config.model=runs/beds/grown --config.judge.lenient=1 --config.steps=12
        --config.grow.early_bonus=0 '--config.data.hops=(3,)' --config.search.noise=0.1 --config.out=runs/claims/slate_searcher
    jaxsearch export --checkpoint runs/claims/slate_searcher --out runs/claims/slate_searcher/policy
"""

import ml_collections

from configs.claims._bed import BED, GROWN, PATHS, control

WHOLE = {'grow.k': 1, 'group_size': 5, 'credit.whole': True}
ROWS = {name: {'grow.early_bonus': 0.0} | changes for name, changes in {
  'SLATE': {},
  'whole, judge': WHOLE,                                    # table 2, a
  'truncated, EM': {'grow.rewards': 'completed'},           # table 2, b, a search not at 0
  'whole, EM': WHOLE | {'grow.rewards': 'outcome'},         # Search-R1
  'k = 1': {'grow.k': 1}, 'k = 3': {'grow.k': 3}, 'k = 7': {'grow.k': 7},  # table 4
  'SLATE, 25 % errors': {'judge.errors': 0.25},
  'whole, judge, 25 % errors': WHOLE | {'judge.errors': 0.25},
  'scores at random': {'judge.errors': 2 / 3},
  **control(3),
}.items()}
LENIENT = {'model': 'runs/claims/slate_searcher/policy', 'judge.lenient': 0.5}
BONUS = {'no bonus': LENIENT | {'grow.early_bonus': 0.0}, 'bonus': LENIENT | {'grow.early_bonus': 0.1}}


def get_config(part: str = ''):
  config = ml_collections.ConfigDict(convert_dict=False)  # the order of the variants is that of the table
  config.title = 'SLATE: truncated steps and whole chains, judge and exact match'
  config.base = 'configs/slate.py'
  config.common = BED | PATHS | {'model': GROWN, 'train.row_length': 1536}
  config.variants, config.baseline = {'': (ROWS, 'SLATE'), 'bonus': (BONUS, 'no bonus')}[part]
  config.primary = ('whole, judge', 'truncated, EM', 'whole, EM') if not part else ('bonus',)
  config.seeds = tuple(range(5))
  config.out = 'runs/claims/slate'
  config.parallel = 0  # one on each GPU, or one
  return config.lock()
