"""Search-R2 on the embedded world: drafts are reviewed, and cut and regenerated from their first flawed step.

    jaxsearch train --config configs/search_r2.py

Starts from a policy that has seen what a review looks like. The rows of the paper's tables are in claims/search_r2.py:tables.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'search_r2'
  config.model = 'world-review'
  config.out = 'runs/search_r2'
  config.steps = 100
  config.questions_per_step = 20
  config.group_size = 5
  config.grow.update(
    template='world', review='world',
    max_turns=7,                     # spans of the actor: as many as Search-R1 with 6
    max_response=3000,               # tokens of the actor in a chain, all its spans together
    max_revisions=1,                 # N_max, per draft
    threshold=0.0,                   # revise a draft from this margin of log-probabilities on
    refiner='policy',                # 'frozen' asks `refiner` below; 'random' revises `random_share` of the drafts
    random_share=0.3,
    probe=0.0,                       # share of drafts on which a_prec, v_inter and s_trim are estimated; costs rollouts
    process=True,                    # whether the judge gives a process reward
  )  # fmt: skip
  config.credit = config_dict.create(
    joint=True, normalize_std=True, singleton='raw',
    process_unsearched=0.0,          # the process reward of a trace without a search (M = 0); 1 is the other reading of eq. 16
  )  # fmt: skip
  # For refiner='frozen', and loaded only then: the initial weights, or another model with the policy's tokenizer. It costs its
  # weights once more in `dtype` (7B in bfloat16: 15 GB over the devices of a process) and a KV cache of slots x length.
  config.refiner = config_dict.create(
    model=config.get_oneway_ref('model'), slots=16, length=config.sampler.get_oneway_ref('length'))
  config.train.update(aggregate='seq-mean-token-mean', row_length=1280)  # a trace keeps the steps that were cut off
  config.eval.grow = config_dict.create(max_revisions=0, process=False)  # as it is deployed; max_revisions=1 keeps the refiner
  config.eval.every = 50
  return config.lock()
