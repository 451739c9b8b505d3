"""SLATE as published, for a pod: Qwen2.5-3B (table 3). All else is as in slate_qwen2_5_7b.py.

    jaxsearch train --config configs/slate_qwen2_5_3b.py --config.model=Qwen2.5-3B \
        --config.data.questions=train.jsonl --config.search.url=http://retriever:8000/retrieve \
        --config.judge.url=http://judge:8000/v1 --config.judge.model=NAME --config.out=/shared/run

Not run by us at this size.
"""

from configs import slate_qwen2_5_7b


def get_config():
  config = slate_qwen2_5_7b.get_config().unlock()
  config.model = 'Qwen2.5-3B'
  config.out = 'runs/slate_qwen2_5_3b'
  return config.lock()
