"""R-Search as published, for a pod: Qwen2.5-3B-Instruct, 2WikiMultiHopQA, evidence read by Llama-3.2-3B-Instruct (section 4).

    jaxsearch train --config configs/r_search_qwen2_5_3b.py --config.model=Qwen2.5-3B-Instruct \
        --config.reader.model=Llama-3.2-3B-Instruct --config.data.questions=2wiki:train.json \
        --config.search.url=http://retriever:8000/retrieve --config.out=/shared/run

195 steps of 256 questions x 5, 3 passages in 1800 tokens, at most 4 searches, 500 tokens a span, 8192 a path, KL 0.001, learning
rate 1e-6 with a warm-up ratio of 0.95 as the paper states it. PPO is configs/r_search_ppo_qwen2_5_3b.py. What else the tables
train:

    7B                           --config.model=Qwen2.5-7B-Instruct; the scripts end after 120 steps: --config.steps=120
                                 --config.optim.lr_warmup_updates=570
    without evidence (table 3)   --config.grow.template=r_search_without_evidence
                                 --config.credit.evidence_weight=0.0 --config.credit.gamma_evidence=0.0
    Search-R1 (table 2), aligned: configs/search_r1_grpo_qwen2_5_3b.py with the model and questions above,
                                 --config.steps=195 --config.questions_per_step=256 --config.train.mini_batch=256
                                 --config.optim.lr_warmup_updates=926 --config.grow.chat=True
                                 --config.sampler.length=8192 --config.sampler.slots=128 --config.train.row_length=8192
                                 --config.sampler.max_observation=1800

Evaluate with 5 passages at temperature 0.1: jaxsearch eval … --config.search.topk=5 --temperature 0.1.
Not run by us at this size.
"""

from configs import r_search, search_r1_grpo_qwen2_5_3b


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.method = 'r_search'
  config.model = 'Qwen2.5-3B-Instruct'
  config.out = 'runs/r_search_qwen2_5_3b'
  config.steps = 195
  config.questions_per_step, config.group_size = 256, 5
  ours = r_search.get_config()
  config.credit, config.reader = ours.credit, ours.reader
  config.grow.template = config.grow.evidence_template = 'r_search'
  config.grow.chat = True
  config.reader.update(model='Llama-3.2-3B-Instruct', chat=True, max_tokens=64, stop=(), slots=128, length=2048)
  config.sampler.update(slots=128, length=8192, max_observation=1800)  # slots of each process
  config.train.row_length = 8192
  config.train.mini_batch = 256            # rollouts: five updates a step
  config.optim.lr_warmup_updates = 926     # 0.95 of 975
  return config.lock()
