"""IGPO as published, for a pod: Qwen2.5-3B-Instruct (7B: --config.model), NQ, TriviaQA, HotpotQA and 2Wiki.

    jaxsearch train --config configs/igpo_qwen2_5_3b.py --config.model=Qwen2.5-3B-Instruct \
        --config.data.questions=train.jsonl --config.out=/shared/run

32 questions x 16 chains, at most 10 turns of 2,000 tokens, 32,767 a path, one update a step, learning rate 1e-6, KL 0.001;
search by Google (key in SERPER_API_KEY). The paper names neither the number of steps (here 200) nor a warm-up (none).
The code shows 10 results (--config.search.topk=10), and rewards F1 over sets of words. Not run at this size.
"""

from configs import igpo, search_r1_grpo_qwen2_5_3b


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  ours = igpo.get_config()
  config.method = 'igpo'
  config.model = 'Qwen2.5-3B-Instruct'
  config.out = 'runs/igpo_qwen2_5_3b'
  config.steps = 200
  config.questions_per_step, config.group_size = 32, 16
  config.search.backend = 'web'
  config.grow.update(gains=True, remark=ours.grow.remark, chat=True, max_turns=9, max_tokens=2000)  # one more span follows
  config.credit, config.eval.grow = ours.credit, ours.eval.grow
  config.sampler.update(slots=32, length=32768, max_observation=2048)  # slots of each process
  config.train.update(aggregate='seq-mean-token-mean', row_length=32768, mini_batch=0)
  config.optim.lr_warmup_updates = 0
  return config.lock()
