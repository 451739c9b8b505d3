"""R-Search with GRPO on the embedded world: evidence before the answer, read by a frozen model of another family.

    jaxsearch train --config configs/r_search.py
    jaxsearch train --config configs/r_search_without_evidence.py        # the paper's ablation
    jaxsearch train --config configs/r_search_ppo.py                     # credited by a critic
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'r_search'
  config.out = 'runs/r_search'
  config.steps = 100
  config.group_size = 5
  config.questions_per_step = 20
  config.grow.update(template='world_evidence', max_tokens=128)
  config.grow.evidence_template = 'world'
  config.credit = config_dict.create(
    estimator='grpo',                # or 'ppo', with critic.enabled
    evidence_weight=1.0,             # of the evidence reward
    gamma_evidence=0.2, gamma_answer=0.2,  # the format reward
    evidence_needs_search=True,      # evidence counts only behind documents; False is eqs. 4 and 5 alone
    normalize_std=True,              # for GRPO
    singleton='raw',                 # for GRPO, what the only chain of a group gets: its reward ('raw') or 0 ('zero')
    gamma=1.0, lam=1.0,              # for PPO
  )  # fmt: skip
  config.reader = config_dict.create(  # the frozen model that answers from the evidence
    model='world-reader',            # shipped; for real input a Hugging Face folder or a GGUF file
    max_tokens=24, stop=('\n',), chat=False, slots=32, length=256,
  )  # fmt: skip
  config.eval.every = 50
  return config.lock()
