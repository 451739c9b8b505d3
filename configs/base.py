"""Every field there is, with the values that train Search-R1 with GRPO in the embedded world.

    jaxsearch train --config configs/base.py --config.out=runs/base

Runs on two CPU cores as it stands. Other configs call `get_config` here and change a handful of lines; an unknown key
or a value of another type is an error.
"""

import ml_collections
from ml_collections import config_dict


def get_config():
  config = ml_collections.ConfigDict()

  config.method = 'search_r1'        # a file of jaxsearch/methods: its grow, reward and credit
  config.steps = 60                  # a step: rollouts of `questions_per_step * group_size` trees, then the updates
  config.questions_per_step = 16
  config.group_size = 8              # trees per question; with 1 there is nothing to compare
  config.seed = 0
  config.out = 'runs/base'           # metrics.jsonl, checkpoints/, TensorBoard files
  config.progress = True             # a progress bar on the terminal

  # The policy: 'world-tiny' (shipped with its tokenizer), a Hugging Face folder, a GGUF file, or 'random:PRESET' for
  # random weights of a preset, seeded by `seed`.
  config.model = 'world-tiny'
  config.tokenizer = ''              # folder or GGUF file; '' takes the model's own (the world's for random:PRESET)
  config.dtype = 'float32'           # of activations and of the sampler; 'bfloat16' on accelerators
  config.remat = 'none'              # what the backward pass recomputes: 'none', 'dots' or 'full'

  config.data = config_dict.create(
    questions='world:rl',            # 'world:SPLIT', a FlashRAG JSONL file, or 'hotpotqa:FILE', '2wiki:', 'musique:',
                                     # 'gsm8k:', 'finqa:' as published; several joined by '+'
    corpus='world',                  # 'world', a Search-R1 JSONL file, or 'hotpotqa:FILE', '2wiki:', 'musique:'; or several
    hops=(),                         # of the world's questions only those with so many hops; () is all
    arithmetic=True,                 # whether questions of the world that want a sum or a difference are asked
  )
  config.search = config_dict.create(
    backend='bm25',                  # 'bm25' over `data.corpus`, 'http': a Search-R1 retrieval server, 'web': Google by
                                     # way of SERPER (key in SERPER_API_KEY), 'simulated': documents that a writer makes up
    engine='rank_bm25',              # or 'bm25s', for more than some ten thousand passages
    url='',                          # of the 'http' server, or of the chat server of the writer, such as http://HOST/v1
    cache='',                        # file that keeps the answers of 'web' and of the writer 'chat'; '' keeps none
    writer='world',                  # of 'simulated': 'world' (the embedded world, without a model), 'chat' (a model behind
                                     # `url`, key in OPENAI_API_KEY) or 'model' (a chat model of ours, on its own sampler)
    writer_model='',                 # its name at the chat server; or its Hugging Face folder or GGUF file
    noise_start=0.0, noise_end=0.5,  # of 'simulated': probability that a query gets noise, at the first and the last step
    topk=2,                          # passages per search
    timeout=30.0,                    # seconds until a search counts as failed, all attempts together
  )
  config.python = config_dict.create(  # the sandbox of methods whose tool is code
    seconds=2.0, memory=64,          # of computing, and MiB, for a program
    output=4000,                     # characters kept of what it prints
    workers=4,                       # programs at a time
  )  # fmt: skip
  # Arguments of the method's functions: their names are those in its file.
  # `template` is a name or a file of yours with {question} in it, see trees/templates.py; `chat` is for instruct models.
  config.grow = config_dict.create(template='world', chat=False, max_turns=6, max_tokens=64)
  config.credit = config_dict.create(normalize_std=True)
  config.sizes = config_dict.create()  # for methods that decide how many trees a question gets

  config.sampler = config_dict.create(
    slots=32,                        # rows of the KV cache: trees that grow at the same time
    length=768,                      # tokens of a slot: the longest path
    temperature=1.0, top_p=1.0, top_k=0,
    tool_workers=16,                 # calls of tools at a time
    deterministic=True,              # the schedule depends on nothing that the clock decides; exact resume needs it
  )  # fmt: skip

  config.train = config_dict.create(
    row_length=768,                  # tokens of a training row; whole trees are packed into rows, larger ones left out
    micro_rows=4,                    # rows per forward and backward pass, a multiple of mesh data * fsdp
    epochs=1,                        # passes over the rollouts of a step
    mini_batches=1,                  # updates per pass
    old_logprobs='sampler',          # the ratio's denominator: 'sampler' (as captured) or 'recompute'
    chunk=1024,                      # tokens projected onto the vocabulary at a time
    aggregate='token-mean',          # or 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean': see trees/layout.py
  )
  config.loss = config_dict.create(
    clip_low=0.2, clip_high=0.2,
    dual_clip=config_dict.placeholder(float),  # a bound c > 1 on the loss of negative advantages; None is off
    kl_coef=0.001,                   # of the k3 KL to the initial policy; 0 keeps no reference in memory
    entropy_coef=0.0,
  )  # fmt: skip

  config.optim = config_dict.create(
    learning_rate=1e-4,
    schedule='constant',             # after the warm-up: 'constant' or 'cosine' to 0 at the last update
    lr_warmup_updates=0,
    b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0,
    clip_norm=1.0,                   # of the global gradient norm
    master_weights=True,             # parameters in float32, a copy in `dtype` for the forward pass; else `dtype` only
    max_skipped=10,                  # non-finite updates in a row after which the run stops
  )  # fmt: skip

  # A low-rank adapter on the frozen policy (models/lora.py) in place of all its parameters; `optim` then is about the adapter.
  config.lora = config_dict.create(
    rank=0,                          # 0 is off
    alpha=64.0,                      # the product of the factors counts alpha / rank
    targets=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),  # 'embedding' and 'unembedding' are possible too
  )  # fmt: skip

  config.critic = config_dict.create(  # for PPO
    enabled=False,
    shared=False,                    # False: a second decoder with a value head, begun as a copy of the policy; True: a head
                                     # with two layers on the policy itself (CARL)
    learning_rate=1e-4,              # of the second decoder, or of that head; everything else as in `optim`
    lr_warmup_updates=0,                # not shared: of the second decoder
    value_clip=0.5,                  # not shared: how far a value may move in the updates of a step; None is off
    coef=0.5, backbone_share=0.5,    # shared: weight of the squared error; factor of its gradient into the backbone
    warm_start='',                   # run folder of `jaxsearch critic-warmup`, with which critic (and shared backbone) begin
  )

  config.sft = config_dict.create(   # for `jaxsearch sft` alone
    demonstrations='',               # JSONL file, see training/sft.py, or 'world:SPLIT' for the gold chains of its questions
    per_step=32,
  )

  # Held-out questions, asked before the first step, every so many steps and after the last: DIR/evaluations.jsonl.
  config.eval = config_dict.create(
    every=0,                         # steps; 0 is never
    questions='world:test',          # as `data.questions`; `data.hops` and `data.arithmetic` hold here too
    number=200,                      # the first so many; 0 is all
    temperatures=(1.0, 0.0),         # the first gives em_before and em_after
    grow=config_dict.create(),       # arguments of the method's grow that differ from training
    tiers='',                        # file of `jaxsearch tiers`: evaluations then tell where tools were needed
  )

  config.mesh = config_dict.create(data=1, fsdp=-1, tensor=1)  # sizes; -1 takes the devices that are left
  config.distributed = config_dict.create(
    enabled=False,                   # several processes; '' and -1 below let JAX find the values on pods and SLURM
    coordinator='', num_processes=-1, process_id=-1,
  )  # fmt: skip

  config.checkpoint_every = 10       # steps; the last step is always saved
  config.keep_checkpoints = 2        # the newest; older ones are deleted

  return config.lock()
