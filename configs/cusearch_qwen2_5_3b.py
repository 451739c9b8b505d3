"""CuSearch as published, for a pod: Qwen2.5-3B, 64 questions x 3 chains, 96 chosen by their searches (appendix A).

    jaxsearch train --config configs/cusearch_qwen2_5_3b.py --config.model=Qwen2.5-3B \
        --config.data.questions=train.jsonl --config.search.url=http://simulator:8000/v1 \
        --config.search.writer_templates=PROMPTS --config.out=/shared/run

What the paper leaves to ZeroSearch is from the published GRPO recipe: the model's chat template, 203 steps, a warm-up over 95 %
of them, noise from 0 to 0.5, 5 turns of 500 tokens, 5 documents in 2,048 tokens. Evaluations have the noise of the last step:
the paper's tables 1 to 5 and 7 evaluate with the simulator. PROMPTS holds the prompts that the simulator was tuned with, as
useful.txt and noisy.txt (see trees/templates.py); without it our own are used. In the paper's Search-R1 setting:
--config.search.backend=http --config.search.url=http://retriever:8000/retrieve --config.search.topk=3
--config.sampler.max_observation=500. GRPO-Full makes twice as many updates a step: --config.credit.strategy=full
--config.optim.lr_warmup_updates=1158. Not run by us at this size.
"""

from configs import cusearch, search_r1_grpo_qwen2_5_3b


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.method = 'cusearch'
  config.out = 'runs/cusearch_qwen2_5_3b'
  config.steps = 203
  config.questions_per_step, config.group_size = 64, 3
  ours = cusearch.get_config()
  config.credit, config.sizes = ours.credit, ours.sizes
  config.credit.keep = 96
  config.grow.update(chat=True, max_turns=5)  # figure 5; S
  config.train.update(aggregate='seq-mean-token-mean', mini_batch=32)  # M: three updates a step, six with strategy 'full'
  config.search.update(backend='simulated', writer='chat', writer_model='Simulation_LLM_google_7B_V2', topk=5,
                       url='http://127.0.0.1:8000/v1', noise_start=0.0, noise_end=0.5, noise_eval=0.5)
  config.sampler.max_observation = 2048
  config.sampler.slots = 96  # of each process: a step has 192 chains, so that two hosts are full and more slots would be empty
  config.optim.lr_warmup_updates = 579  # 193 steps of three updates
  return config.lock()
