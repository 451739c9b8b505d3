"""SLATE's wide sweep: k, the temperature of the choice, the bonus for early answers.

    jaxsearch sweep --config configs/claims/slate_wide.py

130 runs; --config.out=runs/claims/slate reuses the runs of slate.py.
"""

from configs.claims import slate


def get_config():
  config = slate.get_config()
  config.variants = config.variants | {
    **{f'k = {k}': {'grow.k': k, 'train.row_length': 448 * max(k // 2, 2)} for k in (1, 3, 7)},
    **{f'eta = {eta}': {'grow.eta': eta, 'train.row_length': 1280} for eta in (0.1, 0.3, 1.0, 2.0)},
    'best of k': {'grow.best': True, 'train.row_length': 1280},
    **{f'bonus = {bonus}': {'grow.early_bonus': bonus, 'train.row_length': 1280} for bonus in (0.0, 0.3)},
  }
  config.seeds = tuple(range(10))
  config.out = 'runs/claims/slate_wide'
  return config
