"""Questions of three and four hops in a context that two hops fill: Search-R1 with GRPO, folded by summaries.

    python -m recipes folded --config folded --out runs/folded/chains.jsonl
    jaxsearch sft --config sft --config.sft.demonstrations=runs/folded/chains.jsonl --config.out=runs/folded/sft
    jaxsearch export --checkpoint runs/folded/sft --out runs/folded/start
    jaxsearch train --config folded --config.model=runs/folded/start

To compare without folds: --config.grow.fold=never. The chains have 2.1 folds each and no path is longer than 384 tokens.
docs/methods.md has the figures, on 100 questions (--config.eval.number=100).
"""

from configs import base


def get_config():
  config = base.get_config()
  config.out = 'runs/folded/train'
  config.steps = 20
  config.data.update(hops=(3, 4), arithmetic=False)
  config.questions_per_step = 16
  config.group_size = 8
  config.grow.update(max_turns=5, fold='summary', fold_at=0.35, fold_tokens=64)
  config.sampler.update(slots=64, length=384)
  config.train.update(row_length=768, micro_rows=2)
  config.eval.update(every=config.steps, number=0)
  return config.lock()
