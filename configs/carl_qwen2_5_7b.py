"""CARL as published, for a pod: Qwen2.5-7B-Instruct, table 5 of the paper.

    jaxsearch critic-warmup --config configs/carl_qwen2_5_7b.py … --config.out=/shared/warmup
    jaxsearch train --config configs/carl_qwen2_5_7b.py --config.critic.warm_start=/shared/warmup --config.out=/shared/run

500 steps of 256 questions x 5, 4 epochs in mini-batches of 64 trajectories, at most 15 segments of 2048 tokens and contexts of
256, clip 0.2, KL and entropy 0.001; every 25 steps greedy EM on the first 500 questions of each benchmark. Learning rates, after
a linear warm-up over 100 steps of 80 updates: 1e-6 for the policy, 5e-6 for the critic's head, 5e-7 for its share of the
backbone. The working directory holds the data files under their authors' names, and all-MiniLM-L6-v2, the folder of the sentence
encoder. BM25 returns 3 of the passages that come with the question's own data set; GSM8K has none. In the warm-up, a second
retriever takes the place of the paper's commercial one in 30 % of the rollouts. Not run by us at this size.
"""

from ml_collections import config_dict

from configs import carl, search_r1_grpo_qwen2_5_3b

TRAIN = ('hotpotqa:hotpot_train_v1.1.json', '2wiki:train.json')
DEV = ('hotpotqa:hotpot_dev_distractor_v1.json', '2wiki:dev.json', 'musique:musique_ans_v1.0_dev.jsonl')
MORE = 'musique:musique_ans_v1.0_train.jsonl'  # for the critic's warm-up; the policy does not train on it


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.method = 'carl'
  config.model = 'Qwen2.5-7B-Instruct'
  config.out = 'runs/carl_qwen2_5_7b'
  config.questions_per_step, config.group_size = 256, 5
  config.data.questions = '+'.join((*TRAIN, 'gsm8k:train.jsonl'))
  config.data.corpus = '+'.join((*TRAIN, *DEV, MORE, 'finqa:dev.json'))
  config.search.update(backend='bm25', engine='sparse', by_source=True, topk=3)
  ours = carl.get_config()
  config.grow, config.credit = ours.grow, ours.credit
  config.grow.update(template='carl', chat=True, max_tokens=2048, context_tokens=256)
  # A tree holds raw output and contexts beside its path; one that is longer than a row is split at a branch.
  config.train.update(aggregate='step-mean', penalties='token-mean', epochs=4, mini_batch=64, row_length=9472)
  config.sampler.max_observation, config.python.output = 2048, 12000  # 7 passages (table 8)
  config.python.workers = config.sampler.tool_workers = 64  # a program holds its worker while it searches
  config.loss.update(clip_low=0.2, clip_high=0.2, kl_coef=0.001, entropy_coef=0.001)
  config.optim.update(learning_rate=1e-6, lr_warmup_updates=8000, b1=0.9, b2=0.999, weight_decay=0.01, clip_norm=1.0)
  config.critic.update(enabled=True, shared=True, learning_rate=5e-6, backbone_rate=5e-7, weight_decay=0.01, coef=0.5,
                       lr_warmup_updates=8000)
  config.critic_warmup = carl.critic_warmup(
    closed_book=dict(template='carl_direct', tools=False), tool_required=dict(template='carl_forced'),
    second_search=dict(backend='http', url='http://better-retriever:8000/retrieve', by_source=False))
  config.critic_warmup.update(
    extra_questions=MORE, questions=60000, trajectories=32000, tier_2_share=0.45, clusters=50, encoder='all-MiniLM-L6-v2',
    trees=80, head_rate=5e-6, backbone_rate=5e-7, lr_warmup_updates=100, min_updates=1800, max_updates=2400,
    multi_hop=config_dict.create(template='carl_multi_hop'), multi_hop_sources=('hotpotqa', '2wiki', 'musique'),
    source_clusters=config_dict.create(gsm8k=30))
  config.eval.update(every=25, number=500, temperatures=(0.0,), right='em_entity',
                     questions='+'.join((*DEV, 'gsm8k:test.jsonl', 'finqa_search:dev.json')))
  return config.lock()
