"""GiGPO as published, for a pod: Qwen2.5-3B-Instruct (7B: --config.model), Search-R1's questions, E5 on Wikipedia.

    jaxsearch train --config configs/gigpo_qwen2_5_3b.py --config.model=Qwen2.5-3B-Instruct \
        --config.data.questions=train.jsonl --config.search.url=http://retriever:8000/retrieve --config.out=/shared/run

256 questions x 5 chains, at most 4 turns of 512 tokens, prompts of at most 4096, learning rate 1e-6 after a warm-up over 10 %,
KL 0.001, mini-batches of 512 rollouts (in the code a row is a step of a chain, so it makes more updates). The number of steps
(200) is ours. Averaged by token, as in the code; the paper sums over steps. Not run at this size.
"""

from configs import gigpo, search_r1_grpo_qwen2_5_3b


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.method = 'gigpo'
  config.model = 'Qwen2.5-3B-Instruct'
  config.out = 'runs/gigpo_qwen2_5_3b'
  config.steps = 200
  config.questions_per_step, config.group_size = 256, 5
  config.grow.update(chat=True, max_turns=3, max_tokens=512)  # one more span follows
  config.credit = gigpo.get_config().credit
  config.sampler.update(length=4608, slots=224)
  config.train.update(row_length=4608, mini_batch=512)  # three updates a step
  config.optim.lr_warmup_updates = 60
  return config.lock()
