"""ReSearch with GRPO on the embedded world: F1, or a little for the right format.

    jaxsearch train --config configs/research.py

The shipped policy was not taught to box its answers. A model that can follow the paper's prompt needs
--config.grow.template=research --config.grow.boxed=True --config.grow.max_tokens=500.
"""

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.method = 'research'
  config.out = 'runs/research'
  config.steps = 200
  config.group_size = 5
  config.questions_per_step = 25
  config.credit.singleton = 'raw'    # what the only chain of a group gets: its reward ('raw') or 0 ('zero')
  config.grow.boxed = False          # True: the answer is the content of \boxed{} inside <answer>
  config.eval.every = 50
  return config.lock()
