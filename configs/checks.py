"""Lists what the fields of a config may hold, alone and together, and which have to be set.

Every command checks its config before it loads anything.

A number's rule is a text: comparisons joined by ' and ', alternatives by ' or '. The rule of a name is the
tuple of known names. The rule of a tuple is that of its elements. None is fine where a field may be None. The
key is the full name of a field, or '*.NAME' for all fields of that name without their own rule. Floats have
to be finite, with a rule or without.
"""

import importlib.util
import sys

from jaxsearch import tools

BACKENDS = tools.declared()
COUNT = '>= 1'
SHARE = '>= 0 and <= 1'  # probabilities and discounts too
WEIGHT = '>= 0'

FIELDS = {
  'seed': '>= 0 and <= 4294967295',
  'dtype': ('float32', 'bfloat16'),
  'remat': ('none', 'dots', 'full'),
  'attention': ('auto', 'flash', 'dense'),
  'log': ('wandb', 'trackio'),
  'rollouts': '= -1 or >= 0',

  '*.backend': tuple(BACKENDS),
  **{f'search.{name}': rule for backend in BACKENDS.values() for name, rule in backend.checks.items()},
  'search.engine': ('rank_bm25', 'sparse'),
  'search.writer': ('world', 'chat', 'model'),
  'search.noise_each': ('call', 'query'),

  'tools': tuple(tools.TOOLS),

  # Bounded, since a checkpoint may say them.
  'python.seconds': '> 0 and <= 600',
  'python.memory': '>= 1 and <= 16384',
  'python.output': '>= 1 and <= 1000000',
  'python.workers': '>= 1 and <= 1024',

  'sampler.weights': ('same', 'int8', 'fp8'),
  'sampler.engine': ('jax', 'vllm', 'sglang', 'llama_cpp'),

  'train.async_steps': '= 0 or = 1',
  'train.old_logprobs': ('sampler', 'recompute'),
  'train.aggregate': ('token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean', 'span-mean'),
  'train.penalties': (
    '', 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'step-mean', 'span-mean'),

  'loss.kind': ('clip', 'cispo', 'gspo'),
  'loss.dual_clip': '> 1',
  'loss.importance': ('token', 'token-mask', 'sequence', 'sequence-mask'),
  'loss.importance_cap': '= 0 or >= 1',

  '*.schedule': ('constant', 'cosine'),
  'optim.b1': '>= 0 and < 1',
  'optim.b2': '>= 0 and < 1',

  'lora.targets': ('q', 'k', 'v', 'o', 'gate', 'up', 'down'),

  'eval.right': ('em', 'em_entity'),

  'monitor.action': ('warn', 'stop'),
  **{f'monitor.{name}': '> 0' for name in ('logprob_fall', 'logprob_gap', 'entropy_high', 'kl', 'grad_norm')},
  'monitor.length_fall': '> 1',
  'monitor.length_growth': '> 1',
  **{f'monitor.{name}': SHARE for name in (
    'cut', 'malformed', 'groups_alike_wrong', 'judge_gap', 'repetition', 'gibberish')},

  'distributed.process_id': '>= -1',

  # Of search, sampler, judge and reader.
  '*.timeout': '> 0',
  '*.length': '>= 2',
  '*.row_length': '>= 2',
  'reward': ('match', 'judge'),
  'judge.kind': ('world', 'local', 'chat'),
  'second_judge.kind': ('none', 'world', 'local', 'chat'),

  # Arguments of `grow`, `credit` and `sizes`. Your method's need a rule where finite is not enough.
  '*.grammar': ('tags', 'hermes', 'qwen3_coder', 'llama3', 'auto'),
  '*.malformed': ('reply', 'end'),
  '*.fold': ('never', 'oldest', 'summary'),
  '*.fault': ('working', 'empty', 'irrelevant', 'garbage'),
  '*.refiner': ('policy', 'frozen', 'random'),
  '*.eta': '> 0',
  '*.rewards': ('judge', 'outcome', 'completed', 'final', 'none'),
  'credit.level': ('segment', 'token', 'trajectory'),
  'credit.estimator': ('grpo', 'ppo'),
  **{f'credit.{name}': WEIGHT for name in (
    'evidence_weight', 'gamma_evidence', 'gamma_answer', 'key_weight', 'weight')},
  'credit.strategy': ('full', 'random', 'topk_reward', 'auto', 'phase', 'anti', 'within'),
  'credit.singleton': ('raw', 'zero'),

  '*.classifier': ('policy', 'model'),

  # configs/carl.py: the warm-up of a critic.
  **{f'critic_warmup.{name}': COUNT for name in (
    'questions', 'tier_rollouts', 'clusters', 'source_clusters.gsm8k', 'max_updates', 'check_every')},
  **{f'critic_warmup.{name}': SHARE for name in (
    'tool_optional_share', 'tier_2_share', 'second_share', 'gate.auc', 'gate.sign')},
  'critic_warmup.tool_optional_tiers': '= 1 or = 2',
  'critic_warmup.trajectories': '>= 2',
  'critic_warmup.held_out': '> 0 and < 1',
  'critic_warmup.trees': '>= 4',  # one of each bucket
  'critic_warmup.gate.explained': '<= 1',

  # configs/world_policy.py and world_beds.py: their stages, and the shares of what a stage trains on.
  '*.sharpen': '> 0',
  **{f'carl.gate.{figure}': SHARE for figure in ('by_heart', 'guessed', 'best')},

  # Of any group.
  **{f'*.{name}': COUNT for name in (
    'topk', 'slots', 'concurrency', 'fold_tokens', 'max_tokens', 'max_segments', 'context_tokens', 'max_response', 'k',
    'budget', 'updates', 'rows', 'hops', 'rounds', 'max_thoughts', 'max_documents', 'document_tokens', 'summary_tokens',
    'look_ahead', 'max_sentences', 'max_searches', 'extract_tokens', 'reasoning_tokens', 'max_steps')},
  **{f'*.{name}': SHARE for name in (
    'noise_start', 'noise_end', 'noise_eval', 'errors', 'lenient', 'fold_at', 'random_share', 'probe', 'success',
    'search_below', 'mask_below', 'passages', 'retellings', 'drills', 'renamed', 'at_once', 'one_search', 'evidence', 'noise',
    'reviews', 'statements', 'closed_book', 'forced', 'episodes', 'searches', 'answers', 'one_call', 'lost', 'wrong',
    'repeat', 'em_most')},
  **{f'*.{name}': '>= 0' for name in (
    'learning_rate', 'lr_warmup_updates', 'max_turns', 'max_revisions', 'branches', 'extra', 'weight_decay', 'early_bonus',
    'one_passage', 'bridge', 'free_text', 'composed', 'described', 'HotpotQA')},

  # Single fields of one rule.
  **dict.fromkeys((
    'steps', 'questions_per_step', 'group_size', 'checkpoint_every', 'keep_checkpoints', 'profile', 'data.hops',
    'sampler.max_observation', 'sampler.tool_workers', 'sampler.prefill_lengths', 'train.micro_rows', 'train.epochs',
    'train.chunk', 'optim.max_skipped', 'sft.per_step', 'monitor.window', 'monitor.patience', 'credit.keep', 'credit.max_depth',
    'credit.window', 'sizes.smallest', 'sizes.largest', 'growing.group_size', 'growing.steps', 'growing.questions_per_step',
    'gate.number'), COUNT),
  **dict.fromkeys((
    'data.number', 'search.max_failed_steps', 'search.words', 'search.writer_temperature', 'search.price', 'sampler.pages',
    'sampler.tensor', 'sampler.segment_steps', 'sampler.enough', 'sampler.prefill_tokens', 'train.mini_batch', 'train.carry',
    'train.refill', 'loss.clip_high', 'loss.kl_coef', 'loss.entropy_coef', 'lora.rank', 'critic.coef', 'critic.backbone_rate',
    'eval.every', 'eval.number', 'eval.temperatures', 'monitor.entropy_low', 'critic_warmup.backbone_rate',
    'critic_warmup.min_updates'), WEIGHT),
  **dict.fromkeys((
    'sampler.temperature', 'sampler.episode_deadline', 'optim.eps', 'optim.clip_norm', 'lora.alpha', 'critic.value_clip',
    'sizes.strength', 'critic_warmup.head_rate'), '> 0'),
  **dict.fromkeys((
    'search.noise', 'loss.clip_low', 'loss.importance_floor', 'credit.process_unsearched', 'credit.gamma', 'credit.lam',
    'credit.format_weight', 'sizes.prior', 'gate.em', 'reading.whole', 'reader.whole'), SHARE),
  **dict.fromkeys(('mesh.data', 'mesh.fsdp', 'mesh.tensor', 'distributed.num_processes'), '= -1 or >= 1'),
}  # fmt: skip

# {field: (the field that chooses a back end, engine or judge, its choices that do not read the field)}. It is a mistake to
# set the field on the command line all the same.
JUDGES = ('judge', 'second_judge')
UNREAD = {
  'search.index': ('search.backend', ('bm25', 'http', 'web', 'simulated')),
  'search.url': ('search.backend', ('bm25', 'index')),
  'search.writer_model': ('search.backend', ('bm25', 'index', 'http', 'web')),
  'sampler.urls': ('sampler.engine', ('jax',)),
  **{f'{judge}.url': (f'{judge}.kind', ('none', 'world', 'local')) for judge in JUDGES},
  **{f'{judge}.model': (f'{judge}.kind', ('none', 'world')) for judge in JUDGES},
}


def together(config, training):
  """Yields values that do not fit together; most of them matter to a training run alone."""
  if config.sampler.episode_deadline is not None and config.sampler.deterministic:
    yield (f'sampler.episode_deadline={config.sampler.episode_deadline} needs sampler.deterministic=False: '
           'the clock would decide what is sampled')
  if (config.tools or config.mcp.servers) and config.grow.get('grammar', 'tags') == 'tags':
    yield "tools and mcp.servers are called, which tags cannot: set grow.grammar='auto'"
  fold_at, fold_tokens = config.grow.get('fold_at', 0.75), config.grow.get('fold_tokens', 128)
  length = config.sampler.length
  if config.grow.get('fold') == 'summary' and fold_at * length + fold_tokens >= length:
    yield (f'grow.fold_at={fold_at} of sampler.length={length} leaves no room for a summary of '
           f'grow.fold_tokens={fold_tokens}')
  if config.search.noise and (config.search.backend != 'bm25' or config.search.by_source):
    yield f"search.noise={config.search.noise} is for search.backend='bm25' without by_source"
  sampler = config.sampler
  if sampler.engine == 'llama_cpp' and sampler.urls:
    yield (f"sampler.urls={sampler.urls!r}: a server of sampler.engine='llama_cpp' takes no weights of ours; leave "
           'it empty, and one runs in this process')
  if not training:
    return
  critic, train, loss, search = config.critic, config.train, config.loss, config.search
  if sampler.engine != 'jax' and sampler.temperature != 1:
    yield (f'sampler.temperature={sampler.temperature} must be 1 with sampler.engine={sampler.engine!r}: '
           'servers give log-probabilities at 1')
  if sampler.engine != 'jax' and sampler.weights != 'same':
    yield f"sampler.weights={sampler.weights!r} is for sampler.engine='jax'; servers quantise as they are told"
  if sampler.engine in ('vllm', 'sglang') and not sampler.folder and '://' in config.out:
    yield f'sampler.folder is not set: servers do not read new weights from out={config.out!r}'
  if config.lora.rank > 0 and critic.enabled and critic.shared:
    yield (f'lora.rank={config.lora.rank}: an adapter cannot share its frozen backbone with a critic; '
           'set critic.shared=False')
  if critic.enabled and critic.learning_rate == 0 and critic.backbone_rate is not None:
    yield 'critic.learning_rate=0.0 must be > 0 where critic.backbone_rate is set'
  for name, value in (('level', 'trajectory'), ('estimator', 'grpo')):
    if critic.enabled and config.credit.get(name) == value:
      yield (f'critic.enabled=True: credit.{name}={value!r} sets no returns, which a critic learns; set '
             'critic.enabled=False')
  for name, values in (('level', ('segment', 'token')), ('estimator', ('ppo',))):
    if not critic.enabled and config.credit.get(name) in values:
      yield f'credit.{name}={config.credit[name]!r} needs critic.enabled=True'
  if config.credit.get('whole') and config.grow.get('k', 1) != 1:
    yield f'credit.whole=True compares whole chains: set grow.k=1, not {config.grow.k}'
  if config.credit.get('level') == 'token' and train.aggregate == 'step-mean':
    yield ("credit.level='token' with train.aggregate='step-mean' would read a value at every token from a critic "
           "that learns values only at the starts of segments: set train.aggregate='token-mean'")
  if config.grow.get('rewards') == 'none':
    yield "grow.rewards='none' rewards nothing: it is for eval.grow"
  if critic.warm_start and not critic.enabled:
    yield f'critic.warm_start={critic.warm_start!r} means nothing where critic.enabled=False'
  if config.sampler.length > train.row_length:
    yield (f'sampler.length={config.sampler.length} is more than train.row_length={train.row_length}: '
           'the longest path would not fit into a training row')
  if loss.importance_cap and train.old_logprobs == 'sampler':
    yield (f"loss.importance_cap={loss.importance_cap} with train.old_logprobs='sampler' would count the gap "
           "between sampler and trainer twice; set train.old_logprobs='recompute'")
  if loss.importance != 'token' and (loss.importance_cap == 0 or train.old_logprobs == 'sampler'):
    yield (f'loss.importance={loss.importance!r} means nothing without importance weights; leave '
           'loss.importance_cap and train.old_logprobs at None')
  if loss.kind == 'gspo' and train.aggregate in ('token-mean', 'seq-mean-token-sum'):
    yield (f"train.aggregate={train.aggregate!r} with loss.kind='gspo' would weigh a sequence by its length; set "
           "'seq-mean-token-mean', or for trees that branch 'span-mean' or 'step-mean'")
  if loss.kind == 'cispo' and loss.dual_clip is not None:
    yield f"loss.dual_clip={loss.dual_clip} means nothing with loss.kind='cispo', which bounds every weight"
  if train.async_steps and config.sampler.release:
    yield ('sampler.release=True with train.async_steps=1 would free what samples while the step trains; '
           'set it to None')
  if (train.async_steps or train.carry) and train.old_logprobs == 'recompute' and loss.importance_cap == 0:
    yield ("loss.importance_cap=0 with train.async_steps=1 or train.carry and train.old_logprobs='recompute' "
           'corrects nothing for the older parameters that sampled; leave the cap at None')
  if train.refill and critic.enabled:
    yield (f'train.refill={train.refill} would replace nothing with critic.enabled=True: a critic gives credit '
           'where rewards are equal, too')
  if train.carry >= config.questions_per_step:
    yield (f'train.carry={train.carry} must be less than questions_per_step={config.questions_per_step}: '
           'nothing would be left to train on in the first step')
  if config.sampler.weights != 'same' and (train.old_logprobs == 'sampler' or loss.importance_cap == 0):
    yield (f'sampler.weights={config.sampler.weights!r} needs importance weights; leave loss.importance_cap and '
           'train.old_logprobs at None')
  adaptive, smallest, largest = (config.sizes.get(name) for name in ('adaptive', 'smallest', 'largest'))
  if adaptive and smallest and largest and not 2 <= smallest <= config.group_size <= largest:
    yield (f'sizes.smallest={smallest} <= group_size={config.group_size} <= sizes.largest={largest} must '
           'hold where sizes.adaptive=True, and sizes.smallest >= 2: one chain has nothing to compare with')
  able = [name for name, backend in BACKENDS.items() if backend.by_source]
  if search.by_source and search.backend not in able:
    yield f'search.by_source=True is for the backends {", ".join(map(repr, able))}, not {search.backend!r}'
  for name in set(config.log) & set(FIELDS['log']) - set(sys.modules):
    if importlib.util.find_spec(name) is None:
      yield f"log={config.log!r} needs the package {name!r}: pip install 'jaxsearch[{name}]'"
  if config.eval.every and not config.eval.temperatures:
    yield 'eval.temperatures=() must hold at least one temperature where eval.every is set'
  asks_world = lambda source: any(part.startswith('world:') for part in source.split('+'))
  searches_world = config.data.corpus == 'world' and (
    search.backend not in BACKENDS or BACKENDS[search.backend].corpus(search))
  if (config.eval.every and asks_world(config.eval.questions) and not asks_world(config.data.questions)
      and not searches_world):
    yield (f'eval.questions={config.eval.questions!r} would ask about the embedded world: set eval.questions to '
           'held-out questions of yours, or eval.every=0')


def needs(config, services):
  """Returns the fields that have to be set, by kind as in `tools.Backend` ('source': questions, documents).

  `services` are those of the method, as it names them in SERVICES.
  """
  backend, search = BACKENDS[config.search.backend], config.search
  needed = {'data.questions': 'source', 'eval.questions': 'source', 'model': 'policy'}
  needed |= {'data.corpus': 'source'} if backend.corpus(search) else {}
  needed |= {f'search.{name}': kind for name, kind in backend.needs(search).items()}
  if 'reader' in services:
    needed['reader.model'] = 'model'
  judges = ['judge', 'second_judge'] if config.reward == 'judge' else {'judge'} & set(services)
  for name in judges:
    chat = {f'{name}.url': 'url', f'{name}.model': 'name'}
    needed |= {'chat': chat, 'local': {f'{name}.model': 'model'}}.get(config[name].kind, {})
  if 'refiner' in config and config.grow.get('refiner') == 'frozen':
    needed['refiner.model'] = 'model'
  if config.grow.get('classifier') == 'model':
    needed['classifier.model'] = 'model'
  if config.sampler.engine in ('vllm', 'sglang') or config.sampler.urls:
    needed['sampler.urls'] = 'url'
  optional = {'eval.tiers': config.eval.tiers, 'tokenizer': config.tokenizer,
              'critic.warm_start': config.critic.warm_start,
              'critic_warmup.encoder': 'critic_warmup' in config and config.critic_warmup.encoder}
  return needed | {field: 'path' for field, value in optional.items() if value}
