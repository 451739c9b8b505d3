"""SLATE on the embedded world: five alternatives a step, judged by a judge that knows the gold chains.

    jaxsearch train --config configs/slate.py
    jaxsearch train --config configs/slate.py --config.judge.kind=chat --config.judge.url=http://127.0.0.1:8000/v1 …
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'slate'
  config.out = 'runs/slate'
  config.steps = 100
  config.questions_per_step = 16
  config.group_size = 1
  config.grow = config_dict.create(
    template='world', chat=False, grammar='tags', malformed='reply', max_tokens=64,
    k=5,                             # alternatives per step
    budget=6,                        # B, steps of a chain; the paper has 4
    eta=0.7,                         # temperature of the choice among the alternatives
    best=False,                      # True: continue from the best one
    early_bonus=0.1,                 # lambda, the bonus for early answers
    rewards='judge',                 # 'outcome', 'completed' and 'final' are without a judge
  )  # fmt: skip
  config.credit = config_dict.create(
    whole=False,                     # True (set k=1 and group_size=5): compares whole chains by their judged rewards
  )  # fmt: skip
  config.sampler.update(slots=40, length=640)
  config.train.update(aggregate='step-mean', row_length=1536, micro_rows=2)  # siblings share a row with their prefix
  config.eval.grow = config_dict.create(rewards='none')  # one chain, as Search-R1 with max_turns=budget
  config.eval.every = 50
  return config.lock()
