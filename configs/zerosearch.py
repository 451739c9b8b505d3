"""ZeroSearch on the embedded world: GRPO with F1, searching made-up documents among which noise grows.

    jaxsearch train --config configs/zerosearch.py

The simulator needs no model here. With one, behind a server that speaks the chat protocol (vLLM, SGLang, …):

    ... --config.search.writer=chat --config.search.url=http://HOST:8000/v1 --config.search.writer_model=NAME

or on our sampler: --config.search.writer=model --config.search.writer_model=FOLDER. The published simulators want the prompt that
they were tuned with: put it into useful.txt and noisy.txt of a folder, --config.search.writer_templates=FOLDER. Evaluate on the
true passages: jaxsearch eval ... --config.search.backend=bm25; with noise: --config.search.noise_eval=0.5.
"""

from configs import base, cusearch


def get_config():
  config = base.get_config().unlock()
  config.method = 'cusearch'
  config.out = 'runs/zerosearch'
  config.steps = 100
  config.credit = cusearch.get_config().credit
  config.credit.update(strategy='full', format_weight=0.0)  # all chains, and F1 alone
  config.search.update(backend='simulated', noise_start=0.0, noise_end=0.5)
  config.eval.every = 50
  return config.lock()
