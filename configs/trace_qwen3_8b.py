"""TRACE for a pod, as far as its settings are known to us: Qwen3-8B on multi-hop questions.

    jaxsearch train --config configs/trace_qwen3_8b.py --config.model=Qwen3-8B \
        --config.data.questions=hotpotqa:train.json --config.search.url=http://retriever:8000/retrieve --config.out=/shared/run

512 questions x 2 trees, presumably the smallest of its settings. The rest is that of Tree-GRPO's pod config. Not run.
"""

from configs import trace, tree_grpo_qwen2_5_3b


def get_config():
  config = tree_grpo_qwen2_5_3b.get_config().unlock()
  ours = trace.get_config()
  config.method = 'trace'
  config.model = 'Qwen3-8B'
  config.out = 'runs/trace_qwen3_8b'
  del config.grow['rounds'], config.grow['branches']
  config.grow.update(extra=ours.grow.extra, success=ours.grow.success, chat=True)
  config.credit, config.sizes, config.eval.grow = ours.credit, ours.sizes, ours.eval.grow
  return config.lock()
