"""Search-R1 with GRPO as published, for a pod: Qwen2.5-3B, NQ and HotpotQA questions, E5 on Wikipedia.

    jaxsearch train --config configs/search_r1_grpo_qwen2_5_3b.py --config.model=Qwen2.5-3B \
        --config.data.questions=train.jsonl --config.search.url=http://retriever:8000/retrieve --config.out=/shared/run

Meant for 16 devices of 80 GB or more (16 x H100, 16 x v5p), see docs/plans.md; parameters, moments and the reference policy are
split over `fsdp`. On 8 x v6e 256 slots are too many: --config.sampler.slots=128. Numbers as in Jin et al. 2025: 512
questions x 5, 4 turns of 500 tokens, 4096 tokens a path, learning rate 1e-6 after a warm-up over 28.5 % of 500 steps, KL 0.001;
3 passages, cut to 500 tokens together, as in the authors' scripts and SLATE's code. The authors' code makes ten updates of 256
rollouts a step and uses the chat template: --config.train.mini_batch=256 --config.optim.lr_warmup_updates=1425
--config.grow.chat=True. Not run at this size.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.model = 'Qwen2.5-3B'              # a Hugging Face folder
  config.out = 'runs/search_r1_grpo_qwen2_5_3b'
  config.dtype = 'bfloat16'
  config.remat = 'full'
  config.steps = 500
  config.questions_per_step = 512
  config.group_size = 5
  config.data.questions = 'train.jsonl'
  config.search.update(backend='http', url='http://127.0.0.1:8000/retrieve', topk=3)
  config.grow.update(template='search_r1', max_turns=4, max_tokens=500)
  config.sampler.update(slots=256, length=4096, max_observation=500, tool_workers=128, deterministic=False)
  config.train.update(row_length=4096, micro_rows=16, mini_batch=1280)  # 256 prompts: two updates a step
  config.loss.kl_coef = 0.001
  config.optim.update(learning_rate=1e-6, lr_warmup_updates=285)
  config.distributed.enabled = True
  config.mesh.accelerator = True
  return config.lock()
