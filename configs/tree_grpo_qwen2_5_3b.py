"""Tree-GRPO as published, for a pod: Qwen2.5-3B, HotpotQA questions, E5 on Wikipedia.

    jaxsearch train --config configs/tree_grpo_qwen2_5_3b.py --config.model=Qwen2.5-3B \
        --config.data.questions=hotpotqa:train.json --config.search.url=http://retriever:8000/retrieve --config.out=/shared/run

180 steps of 512 questions x 2 trees x 3 chains, 3 searches, 500 tokens of observation, learning rate 1e-6 after a warm-up over
28.5 % of the updates, KL 0.001, dual clip 3, mini-batches of 64 questions, averaged by token as in the code (the paper
averages each chain first). Not run at this size.
"""

from configs import search_r1_grpo_qwen2_5_3b, tree_grpo


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  ours = tree_grpo.get_config()
  config.method = 'tree_grpo'
  config.out = 'runs/tree_grpo_qwen2_5_3b'
  config.steps = 180
  config.questions_per_step, config.group_size = 512, 2
  config.grow.update(rounds=1, branches=2, max_turns=3)
  config.credit, config.eval.grow = ours.credit, ours.eval.grow
  config.train.update(row_length=8192, micro_rows=16, mini_batch=128)  # in trees: eight updates a step
  config.loss.update(dual_clip=3.0, entropy_coef=0.001)
  config.optim.lr_warmup_updates = 410     # 0.285 of 1,440
  return config.lock()
