"""Supervised training of the world's policy on a file of demonstrations, one JSON object a line:

    {"spans": [{"role": "prompt", "text": "..."}, {"role": "policy", "text": "..."}, {"role": "observation", "text": "..."}]}

    jaxsearch sft --config configs/sft.py --config.sft.demonstrations=demonstrations.jsonl
"""

from configs import base


def get_config():
  config = base.get_config()
  config.out = 'runs/sft'
  config.steps = 200
  config.optim.update(learning_rate=3e-4, lr_warmup_updates=20, schedule='cosine')
  config.checkpoint_every = 50
  return config.lock()
