"""CuSearch as published, for a pod: Qwen2.5-3B, 64 questions x 3 chains, the 96 that searched most (appendix A).

    jaxsearch train --config configs/cusearch_qwen2_5_3b.py --config.model=Qwen2.5-3B \
        --config.data.questions=train.jsonl --config.search.url=http://retriever:8000/retrieve --config.out=/shared/run

With the simulator instead of a corpus, as in the paper's main table: --config.search.backend=simulated
--config.search.writer=chat --config.search.writer_model=NAME --config.search.url=http://simulator:8000/v1. Not run by us at
this size.
"""

from configs import cusearch, search_r1_grpo_qwen2_5_3b


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config()
  config.unlock()
  config.method = 'cusearch'
  config.out = 'runs/cusearch_qwen2_5_3b'
  config.questions_per_step, config.group_size = 64, 3
  ours = cusearch.get_config()
  config.credit, config.sizes = ours.credit, ours.sizes
  config.credit.keep = 96
  config.train.update(aggregate='seq-mean-token-mean', mini_batch=32)  # M: three updates a step, six with strategy 'full'
  config.search.topk = 5
  config.optim.lr_warmup_updates = 0
  return config.lock()
