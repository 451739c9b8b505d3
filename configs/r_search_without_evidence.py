"""R-Search without evidence (table 3): no box in the prompt, no reward for it, no part of the format reward.

    jaxsearch train --config configs/r_search_without_evidence.py
"""

from configs import r_search


def get_config():
  config = r_search.get_config().unlock()
  config.out = 'runs/r_search_without_evidence'
  config.grow.template = 'world'           # Search-R1's; for other models 'r_search_without_evidence'
  config.credit.evidence_weight = 0.0
  config.credit.gamma_evidence = 0.0
  return config.lock()
