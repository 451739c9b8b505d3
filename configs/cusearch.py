"""CuSearch on the embedded world: of 96 chains a step, train on 48, chosen by how much they searched.

    jaxsearch train --config configs/cusearch.py --config.credit.strategy=phase

Strategies: full, random, topk_reward, auto, phase, anti, within; see methods/cusearch.py. Baselines, with strategy full: DAPO,
--config.credit.drop_alike=True; AR3PO, --config.sizes.adaptive=True with --config.data.number=N, so that questions come back;
GRPO-Half, half of the questions. configs/claims/cusearch_tables.py has the rows of the paper's tables.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'cusearch'
  config.out = 'runs/cusearch'
  config.steps = 100
  config.questions_per_step = 32
  config.group_size = 3
  config.grow.max_turns = 5          # S: what nobody can reach would leave the deepest bucket empty
  config.credit = config_dict.create(
    strategy='phase',                # which chains to train on
    keep=48,                         # K, the number of chains to train on
    max_depth=5,                     # S, the depth that deeper chains count as
    format_weight=0.2,               # w of the reward F1 (1 - w) + w format
    drop_alike=False,                # DAPO: leave out groups whose chains all have the same reward
    normalize_std=True,
    singleton='raw',                 # what the only chain left of a question gets: 'raw', its reward, or 'zero'
    window=4,                        # recent pass rates of a question that `sizes` averages
  )  # fmt: skip
  config.sizes = config_dict.create(
    adaptive=False,                  # AR3PO: more chains for questions with a pass rate in the middle
    smallest=2, largest=8,           # chains that a question gets at least and at most; one has nothing to be compared with
  )
  config.train.aggregate = 'seq-mean-token-mean'  # every retained chain alike: 1/K
  config.eval.every = 50
  return config.lock()
