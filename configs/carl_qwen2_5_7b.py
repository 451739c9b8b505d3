r"""CARL as published, for a pod: Qwen2.5-7B-Instruct, table 5 of the paper.

    jaxsearch critic-warmup --config configs/carl_qwen2_5_7b.py --config.distributed.enabled=False … --config.out=/shared/warmup
    jaxsearch train --config configs/carl_qwen2_5_7b.py --config.model=Qwen2.5-7B-Instruct \
        --config.data.questions=hotpotqa:hotpot_train_v1.1.json+2wiki:train.json+gsm8k:train.jsonl \
        --config.search.url=http://retriever:8000/retrieve --config.critic.warm_start=/shared/warmup --config.out=/shared/run

500 steps of 256 questions x 5, 4 epochs in mini-batches of 64 trajectories, 15 segments at most, contexts of at most 256
tokens, 3 passages a search, clip 0.2, KL and entropy 0.001. Learning rates, after a linear warm-up over 100 steps of 80 updates:
1e-6 for the policy, 5e-6 for the critic's head, half of the policy's for the critic's share of the backbone. The critic's warm-up
runs in one process; a second retriever stands for the paper's commercial one in 30 % of its rollouts. Not run by us at this size.
"""

from configs import carl, search_r1_grpo_qwen2_5_3b


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config()
  config.unlock()
  config.method = 'carl'
  config.model = 'Qwen2.5-7B-Instruct'
  config.out = 'runs/carl_qwen2_5_7b'
  config.questions_per_step, config.group_size = 256, 5
  ours = carl.get_config()
  config.grow, config.credit = ours.grow, ours.credit
  config.grow.update(template='carl', chat=True, max_tokens=512, context_tokens=256)
  # A tree holds raw output and contexts beside its path: up to 7 * (512 + 256) tokens more than the path has.
  config.train.update(aggregate='step-mean', epochs=4, mini_batch=64, row_length=9472)
  config.python.workers = config.sampler.tool_workers = 64  # a program holds its worker while it searches
  config.loss.update(clip_low=0.2, clip_high=0.2, kl_coef=0.001, entropy_coef=0.001)
  config.optim.update(learning_rate=1e-6, lr_warmup_updates=8000, b1=0.9, b2=0.999, weight_decay=0.01, clip_norm=1.0)
  config.critic.update(enabled=True, shared=True, learning_rate=5e-6, backbone_rate=5e-7, weight_decay=0.01, lr_warmup_updates=8000, coef=0.5)
  config.critic_warmup = carl.critic_warmup(
    closed_book=dict(template='carl_direct', tools=False), tool_required=dict(template='carl_multi_hop'),
    second_search=dict(url='http://better-retriever:8000/retrieve'))
  config.critic_warmup.update(
    questions=60000, trajectories=32000, clusters=50, trees=80, head_rate=5e-6, backbone_rate=5e-7,
    lr_warmup_updates=100, min_updates=1800, max_updates=2400)
  return config.lock()
