"""SLATE as published, for a pod: Qwen2.5-7B, an adapter of rank 16, a chat server as judge (section 5.3).

    jaxsearch train --config configs/slate_qwen2_5_7b.py --config.model=Qwen2.5-7B \
        --config.data.questions=train.jsonl --config.search.url=http://retriever:8000/retrieve \
        --config.judge.url=http://judge:8000/v1 --config.judge.model=NAME --config.out=/shared/run

For tables 1, 2 and 4; slate_qwen2_5_3b.py is for table 3. Rows as overrides: claims/slate_tables.py, of table 4
claims/slate.py. 500 steps of 32 questions, 5 alternatives for each of at most 4 steps, 3 passages, 4096 tokens a path,
learning rate 1e-6, KL 0.001, alpha 64. The frozen parameters, in bfloat16, are the reference too. The judge was Gemma 3
27B. Not run by us at this size.
"""

from configs import search_r1_grpo_qwen2_5_3b, slate


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.method = 'slate'
  config.model = 'Qwen2.5-7B'
  config.out = 'runs/slate_qwen2_5_7b'
  config.questions_per_step, config.group_size = 32, 1
  ours = slate.get_config()
  config.grow, config.credit, config.judge = ours.grow, ours.credit, ours.judge
  config.grow.update(template='search_r1', budget=4, max_tokens=500)
  config.judge.update(kind='chat', concurrency=64)  # 32 questions x 5 x 2 = 320 scores at every level of a step
  config.eval.grow = ours.eval.grow
  config.sampler.slots = 64                # of each process
  config.train.update(aggregate='step-mean', row_length=12800, mini_batch=0)  # a row holds all alternatives of a question
  config.lora.update(rank=16, alpha=64.0)
  config.optim.lr_warmup_updates = 0
  return config.lock()
