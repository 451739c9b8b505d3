"""ZeroSearch on the embedded world: Search-R1 with GRPO searches in made-up documents, with more and more noise among them.

    jaxsearch train --config configs/zerosearch.py

The simulator needs no model here. With one, behind a server that speaks the chat protocol (vLLM, SGLang, …):

    ... --config.search.writer=chat --config.search.url=http://HOST:8000/v1 --config.search.writer_model=NAME

or on our sampler: --config.search.writer=model --config.search.writer_model=FOLDER. Evaluate on the true passages:
jaxsearch eval ... --config.search.backend=bm25.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.out = 'runs/zerosearch'
  config.steps = 100
  config.search.update(backend='simulated', noise_start=0.0, noise_end=0.5)
  config.eval.every = 50
  return config.lock()
