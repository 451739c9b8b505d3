"""Search-R2 as published, for a pod: Qwen2.5-7B, 512 questions x 5 drafts, one revision each (section 5.1, appendix E).

    jaxsearch train --config configs/search_r2_qwen2_5_7b.py --config.model=Qwen2.5-7B \
        --config.data.questions=train.jsonl --config.search.url=http://retriever:8000/retrieve \
        --config.judge.url=http://judge:8000/v1 --config.judge.model=DeepSeek-R1-Distill-Qwen-7B --config.out=/shared/run

300 steps, one update each, on all 512 questions; 3 passages, at most 4 turns of the actor, 3,000 tokens of its own and 15,000
of a path; learning rate 1e-6 after a warm-up over 28.5 % of the updates, KL 0.001. The question is the user turn of a chat
("raw chat format"). Every 50 steps greedy EM on each of the seven data sets of Search-R1's test.parquet (figure 5; here on the
first 500 questions of each), with the refiner off. Not run by us at this size.
"""

from ml_collections import config_dict

from configs import search_r1_grpo_qwen2_5_3b, search_r2


def get_config():
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.method = 'search_r2'
  config.model = 'Qwen2.5-7B'
  config.out = 'runs/search_r2_qwen2_5_7b'
  config.steps = 300
  ours = search_r2.get_config()
  config.grow.update({name: value for name, value in ours.grow.items() if name not in config.grow})
  config.grow.update(review='search_r2', chat=True, max_tokens=3000)
  config.credit, config.judge = ours.credit, ours.judge
  config.judge.update(kind='chat', max_tokens=3000)
  config.sampler.update(slots=64, length=15000, max_observation=15000)  # slots of each process; passages are never cut
  config.refiner = config_dict.create(
    model=config.get_oneway_ref('model'), slots=16, length=config.sampler.get_oneway_ref('length'))
  config.train.update(aggregate='seq-mean-token-mean', row_length=15000, mini_batch=0)
  config.optim.lr_warmup_updates = 85  # 28.5 % of 300, rounded down as verl does
  config.eval.update(grow=ours.eval.grow, temperatures=(0.0,), every=50, number=500, questions='test.parquet')
  return config.lock()
