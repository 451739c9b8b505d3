"""Lists every field of a config; its values train Search-R1 with GRPO in the embedded world on two CPU cores.

    jaxsearch train --config base --config.out=runs/base

This file is the reference of the fields. The other configs start from it and change a handful of lines. Any
field is set on the command line with --config.FIELD=VALUE; configs/checks.py holds the range of each.
"""

import ml_collections
from ml_collections import config_dict

from jaxsearch import tools


def get_config():
  config = ml_collections.ConfigDict()

  config.method = 'search_r1'        # a file of jaxsearch/methods, without '.py': how trees grow, and how
                                     # they are credited
  config.steps = 60                  # a step: rollouts for `questions_per_step` questions, then updates on
                                     # them
  config.questions_per_step = 16
  config.group_size = 8              # trees per question (a method's `sizes` may share them out differently);
                                     # 1 only with a critic or with a method such as SLATE that compares
                                     # inside a tree
  config.seed = 0                    # of everything random
  config.out = 'runs/base'           # run folder: metrics.jsonl, checkpoints/, report.html, TensorBoard
                                     # files; or 'gs://BUCKET/RUN' (docs/pods.md)
  config.progress = True             # a line after each step
  config.log = ()                    # services that get what TensorBoard gets: 'wandb', 'trackio' (extras of
                                     # these names)
  config.rollouts = 2                # questions of each step whose rollouts are kept for `jaxsearch view`,
                                     # with tokens and credit; -1 is all of the first process, 0 none

  # The policy: 'world-tiny' (shipped with its tokenizer), a Hugging Face folder, a GGUF file, or
  # 'random:PRESET' for random weights of a preset, drawn from `seed`.
  config.model = 'world-tiny'
  config.tokenizer = ''              # folder or GGUF file; '' takes the model's own (the world's for
                                     # random:PRESET)
  config.dtype = 'float32'           # of activations, and of the sampler's weights; 'bfloat16' on
                                     # accelerators (a single CPU device samples in float32, with the weights
                                     # rounded)
  config.remat = 'none'              # what the backward pass recomputes to save memory: 'none', 'dots' (all
                                     # but matrix products) or 'full' (all but the inputs of layers)
  config.attention = 'auto'          # over training rows: 'auto' (on TPUs and GPUs a kernel that skips fully masked blocks),
                                     # 'flash' (JAX's own kernels; each path is computed by itself, so shared prefixes are
                                     # computed once per path) or 'dense'

  config.data = config_dict.create(
    questions='world:rl',            # 'world:SPLIT', a FlashRAG JSONL file, parquet of Search-R1 or verl, a
                                     # folder of `datasets` (both need .[tables]), or a file as
                                     # published: 'hotpotqa:FILE', '2wiki:FILE', 'musique:FILE', 'nq:FILE',
                                     # 'triviaqa:FILE', 'popqa:FILE', 'bamboogle:FILE', 'gsm8k:FILE',
                                     # 'finqa:FILE' (reports in the questions) or 'finqa_search:FILE' (reports
                                     # in the corpus); '+' joins several
    corpus='world',                  # 'world', a Search-R1 JSONL file, or the passages of 'hotpotqa:FILE',
                                     # '2wiki:FILE', 'musique:FILE', 'finqa:FILE'; '+' joins several
    hops=(),                         # of the world's questions take those with these numbers of hops; ()
                                     # takes all
    arithmetic=True,                 # whether to take the world's questions about sums and differences
    number=0,                        # `train` uses only the first `number` questions, so that a run sees them again; 0: all
  )
  config.search = config_dict.create(
    backend='bm25',                  # 'bm25' over `data.corpus`, 'index' (a folder of `jaxsearch index`),
                                     # 'http' (Search-R1 retrieval servers), 'web' (Google by way of SERPER,
                                     # key in SERPER_API_KEY), 'simulated' (a writer makes documents up)
    engine='rank_bm25',              # for 'bm25'; 'sparse' is faster above some ten thousand passages
    index='',                        # for 'index': its folder
    encoder='',                      # for 'index': folder of its encoder; '' is where it was when the index
                                     # was built
    url='',                          # of the server of 'http' (a comma between several of the same corpus),
                                     # or of the chat server of the writer, such as http://HOST/v1
    cache='',                        # file that keeps the replies of 'http', 'web' and the writer 'chat'; ''
                                     # keeps none
    replay=False,                    # for 'http': take all results from the cache of an earlier run; no
                                     # server is asked
    writer='world',                  # for 'simulated': 'world' (writes about the embedded world without a
                                     # model), 'chat' (a model behind `url`, key in OPENAI_API_KEY) or 'model'
                                     # (one on a sampler of our own)
    writer_model='',                 # its name at the chat server, or its Hugging Face folder or GGUF file
    writer_temperature=0.8,          # of 'chat' and 'model'; above 0 a query that is sent again finds other
                                     # documents
    writer_templates='',             # for 'chat' and 'model': a folder with prompts of yours, see
                                     # trees/templates.py
    noise_start=0.0, noise_end=0.5,  # for 'simulated': probability of noise at the first step and at the last
    noise_eval=config_dict.placeholder(float),  # the same in evaluations; None takes that of the first step
    noise_false=False,               # whether noisy documents state false facts; False: they are true, but of
                                     # no help
    noise=0.0,                       # for 'bm25': probability that a search, in training and evaluation, finds
                                     # passages about other things
    noise_each='call',               # 'call': each call draws anew whether it is noisy; 'query': a query always finds the same
    price=0.001,                     # for 'web': of a credit (a search), as in SERPER's smallest package, in
                                     # dollars; counted in searches_cost, beside searches_paid
    by_source=False,                 # each question searches its own source ('hotpotqa:…') alone: with 'bm25' the parts of
                                     # `data.corpus` that come from it; with 'http' and 'index' its name replaces {source} in
                                     # `url` and in `index`
    topk=2,                          # passages per search
    words=0,                         # of a passage the policy sees the first `words`; 0 is all
    timeout=30.0,                    # seconds until a search counts as failed, retries included
    max_failed_steps=3,              # training stops after this many steps in a row in which most searches failed,
                                     # or most calls of a judge, reader or refiner, or of tools whose server is gone;
                                     # 0 is never
  )
  for backend in tools.declared().values():
    config.search.update(backend.fields)  # of back ends that are not shipped
  config.tools = ()                  # tools that an instruct model may call: 'search', 'open' (a document), 'find' (words in
                                     # it), 'python', 'finish'; (): 'search', or with mcp.servers only what these offer
  config.mcp = config_dict.create(   # MCP servers, which offer tools too; needs .[mcp]
    servers=(),                      # commands ("KEY=$KEY npx …" hands on a variable), or addresses of streamable HTTP (key in
                                     # JAXSEARCH_MCP_TOKEN)
    timeout=30.0,                    # seconds until a call counts as failed
  )
  config.python = config_dict.create(  # the sandbox, for methods whose tool is code (CARL)
    seconds=2.0,                     # compute time of a program
    memory=64,                       # MiB of a program
    output=4000,                     # characters kept of what it prints
    workers=4,                       # programs at a time
  )

  # Arguments of the method's functions, explained in its file and its config. `template`: a name or a file of yours with
  # {question} in it, see trees/templates.py. `chat`: for instruct models. `grammar`: how the policy acts: in 'tags', or by
  # tool calls as 'hermes' (Qwen2.5, Qwen3, ChatML), 'qwen3_coder' or 'llama3' write them; 'auto' chooses by the chat template.
  # `malformed`: such an action gets a 'reply' or is the 'end' of the episode. `fold`: what a chain does before a turn once its
  # path fills the share `fold_at` of sampler.length: 'oldest' drops old results, 'summary' goes on from a summary of at most
  # `fold_tokens` that the policy writes, see docs/methods.md.
  config.grow = config_dict.create(template='world', chat=False, grammar='tags', malformed='reply', max_turns=6,
                                   max_tokens=64, fold='never', fold_at=0.75, fold_tokens=128)
  config.credit = config_dict.create(normalize_std=True)
  config.reward = 'match'            # for methods that reward right answers (Search-R1, CARL, …): 'match', by the rule of the
                                     # question, or 'judge', for free answers: (score of `judge` + 1) / 2
  config.judge = judge('world')      # the judge of reward='judge', and of methods that ask one (SLATE, Search-R2)
  config.second_judge = judge('none')  # with reward='judge': another model that scores the same answers but sets no reward, as
                                     # policies learn to please the judge that does
  config.sizes = config_dict.create()  # for methods that decide how many trees a question gets (CuSearch's
                                       # AR3PO)

  config.sampler = config_dict.create(
    engine='jax',                    # 'jax' (ours) or 'llama_cpp', in this process; 'vllm' or 'sglang', the
                                     # servers at `urls` (docs/pods.md)
    urls='',                         # such as http://HOST:8000, a comma between them
    folder='',                       # in which servers find new weights, on a disk that all share; ''
                                     # is OUT/weights
    timeout=300.0,                   # seconds to wait for a server's reply; the run ends if no server answers for this long
    slots=32,                        # paths that are decoded at the same time. A tree with branches takes
                                     # several; trees that find no free slot wait
    length=768,                      # tokens of the longest path
    pages=0,                         # pages of the KV cache, 32 tokens each; 0: enough for half of the slots at full length, on
                                     # a CPU for all. When pages run out, paths that wait for a tool are prefilled again later
    weights='same',                  # 'same': samples with the weights that are trained; 'int8', 'fp8': with their matrices in
                                     # 8 bits, in evaluations too; this needs importance weights
    temperature=1.0,                 # of rollouts in training
    max_observation=512,             # tokens of an observation, documents or output of a program: more is cut
                                     # off
    tensor=0,                        # devices that share one copy of the sampler's weights: the greatest common divisor of this
                                     # value, the number of devices and that of key/value heads; 0: of the latter two. 1 avoids
                                     # collectives, but each device then reads all weights (docs/plans.md)
    tool_workers=16,                 # tool calls at a time
    deterministic=True,              # the schedule never depends on the clock; needed to resume to the same
                                     # bits
    release=config_dict.placeholder(bool),  # frees the KV cache and the sampler's weights while the step
                                     # trains; None: on accelerators, not on CPU, and not with
                                     # train.async_steps=1
    episode_deadline=config_dict.placeholder(float),  # seconds until a tree has to end; None is off, another
                                     # needs deterministic=False
    # Slots are decoded in segments; between them the host looks at the slots. 0 and () are the default of the platform.
    segment_steps=0,                 # most tokens of a slot in a segment; default 32 on a CPU, 8 elsewhere
    enough=0,                        # on a CPU a segment ends once this many slots have finished: a low number leaves slots idle
                                     # for less time, a high one saves switches between device and host; default slots / 16
    prefill_lengths=(),              # context is prefilled in chunks of these lengths in tokens; default (32, 128) on a CPU,
                                     # (64, 512) elsewhere
    prefill_tokens=0,                # most tokens in all chunks of a call; default 512 on a CPU, 4096 elsewhere
  )

  config.train = config_dict.create(
    row_length=768,                  # tokens of a training row, at least sampler.length. A prefix that a question's trees share
                                     # is there once; where they branch, they may go on in another row
    micro_rows=4,                    # rows per forward and backward pass; a multiple of mesh.data * mesh.fsdp
    epochs=1,                        # passes over the rollouts of a step
    mini_batch=0,                    # trees per update, at most: a pass splits the step's trees into as few equal parts as that
                                     # allows and makes one update on each. 0: one update per pass, on all trees
    async_steps=0,                   # 1: the rollouts of step n + 1 run while step n is trained, with the parameters that step n
                                     # began with; importance weights correct for their age. 0: rollouts and training take turns
    carry=0,                         # a rollout ends once all but this many questions are done; these go on in the next step, so
                                     # that no long episode holds up a batch. Tokens sampled by older parameters keep their
                                     # log-probabilities; importance weights correct for them. 0: none
    refill=0,                        # questions that a step may draw to replace groups with equal rewards and
                                     # no credit, which teach nothing; 0: none (docs/credit.md)
    old_logprobs=config_dict.placeholder(str),  # denominator of the ratio: 'sampler' (captured while
                                     # sampling) or 'recompute' (by the trainer; costs a forward pass where a
                                     # step makes several updates); None: 'recompute' with importance weights
                                     # (loss.importance_cap), else 'sampler'
    chunk=1024,                      # tokens of a device that are projected onto the vocabulary at a time;
                                     # less saves memory
    aggregate='token-mean',          # how the loss is averaged: 'token-mean', 'seq-mean-token-mean',
                                     # 'seq-mean-token-sum', 'span-mean' or 'step-mean', see trees/layout.py
    penalties='',                    # how KL and entropy are averaged: one of the same; '' as the loss
  )
  config.loss = config_dict.create(
    kind='clip',                     # 'clip' (PPO, GRPO), 'cispo' (a clipped token keeps its gradient) or 'gspo'
                                     # (one ratio for a sequence), see docs/credit.md
    clip_low=0.2, clip_high=0.2,     # the ratio is clipped to 1 - clip_low … 1 + clip_high
    dual_clip=config_dict.placeholder(float),  # c > 1 bounds the loss of negative advantages at c times them;
                                     # None is off
    importance='token',              # importance weights between sampler and trainer: one for each 'token' or each 'sequence';
                                     # 'token-mask' and 'sequence-mask' drop tokens or sequences whose weight is outside
                                     # importance_floor … importance_cap
    importance_floor=0.5,
    importance_cap=config_dict.placeholder(float),  # largest importance weight between sampler and trainer, see docs/credit.md;
                                     # 0: off. None: off with train.old_logprobs='sampler'; else 2 if any of these holds:
                                     # dtype='bfloat16', train.async_steps=1, train.carry > 0, sampler.weights in 8 bits,
                                     # sampler.engine other than 'jax', importance other than 'token'; otherwise off
    kl_coef=0.001,                   # of the KL (k3) to the initial policy; 0 keeps no copy of it in memory
    entropy_coef=0.0,
  )

  config.optim = config_dict.create(  # AdamW
    learning_rate=1e-4,
    schedule='constant',             # after the warm-up: 'constant', or 'cosine' down to 0 at the last update
    lr_warmup_updates=0,             # linear warm-up; in updates, see train.mini_batch
    b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0,
    clip_norm=1.0,                   # of the global gradient norm
    master_weights=True,             # True: parameters are kept in float32, and computing uses a copy in `dtype`; False: they
                                     # are kept in `dtype` alone, and updates are rounded stochastically (unbiased)
    max_skipped=10,                  # the run stops after this many updates in a row that were not finite
  )

  # A low-rank adapter (models/lora.py), trained on the frozen policy in place of its parameters; `optim` is
  # then about it.
  config.lora = config_dict.create(
    rank=0,                          # 0 is off
    alpha=64.0,                      # the adapter is scaled by alpha / rank
    targets=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),  # matrices that get an adapter
  )

  config.critic = config_dict.create(  # for PPO and CARL
    enabled=False,
    shared=False,                    # False: a decoder of its own with a value head, started as a copy of the
                                     # policy; True: a head of two layers on the policy (CARL)
    learning_rate=1e-4,              # learning rate of the head. The critic has its own optimizer, whose other settings are
                                     # those of `optim`
    backbone_rate=config_dict.placeholder(float),  # learning rate of the critic's decoder, or with shared=True of its updates of
                                     # the policy's backbone; None: as the head's. 0 freezes it: shared=False is then a linear
                                     # head on the initial model
    lr_warmup_updates=0,             # of both rates
    weight_decay=0.0,                # of all but the head
    value_clip=0.5,                  # shared=False: how far a value may move in the updates of a step; None
                                     # is off
    coef=0.5,                        # shared=True: factor of the squared error; it changes an update only where optim.clip_norm
                                     # clips the gradient
    warm_start='',                   # run folder of `jaxsearch critic-warmup` to start the critic (and shared
                                     # backbone) from
  )

  config.sft = config_dict.create(   # for `jaxsearch sft` alone
    demonstrations='',               # JSONL file, see training/sft.py, or 'world:SPLIT' for the gold chains
                                     # of its questions
    per_step=32,                     # demonstrations
  )

  # Evaluation on held-out questions before the first step, every few steps and after the last:
  # evaluations.jsonl.
  config.eval = config_dict.create(
    every=0,                         # steps between evaluations; 0 is never
    questions='world:test',          # as `data.questions`; `data.hops` and `data.arithmetic` apply here too
    number=200,                      # questions: the first `number` of each source ('hotpotqa:…+2wiki:…' has two); 0: all
    temperatures=(1.0, 0.0),         # evaluate at each of them; em_before and em_after are those of the first
    grow=config_dict.create(),       # arguments of the method's grow that differ from training
    tiers='',                        # file of `jaxsearch tiers`; evaluations then also say where tools were
                                     # needed
    right='em',                      # what counts as right in the EM by tier, hops or data set and in `errors`: 'em', or
                                     # 'em_entity', CARL's rule
  )

  # Monitors of collapse, see docs/methods.md. An alarm is a mean over the newest `window` steps that is
  # beyond its threshold. The group may change when a run is resumed.
  config.monitor = config_dict.create(
    action='warn',                   # 'warn': prints a line when an alarm begins and ends; 'stop': also ends
                                     # the run if one lasts
    window=5,                        # steps
    patience=5,                      # steps that an alarm lasts before 'stop'
    logprob_fall=1.0,                # fall of the mean log-probability of a sampled token since the first
                                     # steps, in nats
    logprob_gap=0.1,                 # mean difference between the trainer's log-probabilities and the
                                     # sampler's, in nats
    entropy_low=config_dict.placeholder(float),  # nats per token; a policy that has learnt its task may be
                                                 # very sure of it
    entropy_high=3.0,                # nats per token; an untrained policy has the logarithm of the vocabulary
                                     # size
    kl=1.0,                          # KL (k3) per token to the initial policy
    length_fall=5.0,                 # the policy's tokens of a tree in the first steps, divided by those now
    length_growth=5.0,               # those now, divided by those in the first steps
    cut=0.5,                         # share of trees that ran out of turns, tokens or context
    malformed=0.5,                   # share of trees that ended with neither a search nor an answer
    groups_alike_wrong=0.95,         # share of groups with equal rewards and no right answer: nothing is
                                     # learnt from them
    judge_gap=0.2,                   # by how much the judge that pays is kinder than `second_judge`, on average
    repetition=0.3,                  # share of the 4-grams of tokens that a span had already
    gibberish=0.05,                  # share of sampled tokens with a probability below 1e-4
    grad_norm=config_dict.placeholder(float),  # of the gradient before it is clipped; its scale depends on
                                               # the model
  )

  config.mesh = config_dict.create(
    data=1, fsdp=-1, tensor=1,       # devices along each axis; one may be -1, for all that are left
    accelerator=False,               # True: a run ends at once where JAX finds neither a GPU nor a TPU
  )
  config.distributed = config_dict.create(
    enabled=False,                   # True for several processes; on TPU pods and SLURM leave the rest to JAX
                                     # ('' and -1)
    coordinator='', num_processes=-1, process_id=-1,
  )
  config.xla_deterministic = False   # True: programs of GPUs add in one order, which is slower, so that runs repeat
                                     # to the bit (docs/pods.md)

  config.checkpoint_every = 10       # steps; the last is always saved. On accelerators the next step goes on
                                     # meanwhile
  config.keep_checkpoints = 2        # the newest; older ones are deleted
  config.profile = ()                # steps whose trace goes to OUT/profile: `xprof OUT/profile` shows it (pip install xprof)

  return config.lock()


def judge(kind: str) -> config_dict.ConfigDict:
  """Returns the settings of a judge."""
  return config_dict.create(
    kind=kind,                       # 'world' knows the gold chains; 'local' is a model on our sampler, 'chat' a
                                     # server
    errors=0.0, lenient=0.0,         # for 'world': `errors`, share of scores made wrong; `lenient`, share of searches that
                                     # score 1 whatever they are
    model='',                        # for 'local': Hugging Face folder or GGUF file; for 'chat': its name at the
                                     # server
    chat=True,                       # for 'local': whether it wants its chat template
    slots=16, length=4096, stop=(),  # for 'local'
    url='', timeout=120.0,           # for 'chat'
    concurrency=8,                   # for 'chat': requests at a time, of each process; each is sent while other
                                     # slots decode
    cache='',                        # for 'chat': a file that keeps replies; '' keeps none
    max_tokens=512,
    templates='',                    # for 'local' and 'chat': a folder with prompts of yours, see
                                     # trees/templates.py
  )  # fmt: skip
