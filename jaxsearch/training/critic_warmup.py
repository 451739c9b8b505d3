"""Warms a critic up before the policy is trained: CARL's appendix C, `jaxsearch critic-warmup`.

  closed_book.jsonl   whether five closed-book rollouts of every question were right
  tiers.jsonl         the tier of every question: 2 where any of them was right, else 1
  rollouts.jsonl      trees of the chosen questions, half closed-book, half tool-required or tool-optional
  answers_STEP.jsonl  whether the policy was right on held-out questions, before and after; where the critic moves its backbone
  metrics.jsonl       a row an update; every `check_every` updates with the figures of the gate on held-out questions
  checkpoints/        the critic (and the backbone that it shares), for `critic.warm_start`
  calibration.png     predicted against actual success on the held-out rollouts, before and after

All of it is in the folder of `config.out`; rerun the command to resume, rollouts included. Training ends at the first check
after `min_updates` that passes the gate; with `min_updates` = `max_updates` it takes so many, whatever the gate would say. The
policy's weights are frozen but for the backbone; `backbone_rate=0` leaves the policy as it was. Of several processes each grows,
lays out and assesses every n-th tree; all of them read all records and values.

The gate looks at rollouts of held-out questions under the prompt of training (tool-optional, `config.grow` as it is), since the
critic will be asked about these; for the signs at tool-required ones too, as in the paper.
"""

import collections
import dataclasses
import functools
import io
import pathlib
import sys
import types
from collections.abc import Callable, Sequence

import jax
import ml_collections
import numpy as np

from jaxsearch import config_check, setup
from jaxsearch.data.questions import Question
from jaxsearch.files import write_whole
from jaxsearch.methods import find_method
from jaxsearch.models.encoder import TextEncoder, recipe_of
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Tools
from jaxsearch.training import batch as batches
from jaxsearch.training import checkpoint, critic, metrics_log, progress, row_files, runs
from jaxsearch.training import step as steps
from jaxsearch.trees.layout import TrainingRows, take_back
from jaxsearch.trees.tree import Role, Tree

CHUNK = 256  # rollouts between two saves
KINDS = ('closed-book', 'tool-required', 'multi-hop', 'tool-optional')  # of rollouts; all but the first share a bucket

Figures = Callable[[Sequence[Tree], dict[str, int]], dict[str, float]]  # (trees, tiers) -> figures, NaN where undefined


class GateFailed(runs.RunStopped):
  """The critic is not good enough after `max_updates`; the message says by how much."""


def warm_up(config: ml_collections.ConfigDict, gate_figures: Figures, plot: Callable) -> dict[str, float]:
  """`jaxsearch critic-warmup`: rolls out, trains the critic, returns the figures that passed the gate, or raises `GateFailed`.

  Args:
    gate_figures: what the gate looks at, and more, of held-out rollouts with the critic's values on them.
    plot: called with ({name: (V(s_0) [N], outcomes [N])}, path) for the reliability diagram.
  """
  settings = config.critic_warmup
  meshes.start_distributed(**config.distributed)
  with config.unlocked():
    config.steps, config.checkpoint_every = settings.max_updates, settings.check_every
  config_check.check(config)
  method, mesh = find_method(config.method), meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  first = jax.process_index() == 0
  with runs.RunFolder(config, shown=('loss', 'gate_auc', 'gate_explained')) as run:
    folder = run.out
    for made_with in meshes.of_first(row_files.read(folder / 'rollouts_config.json')):
      checkpoint.check_same_run(made_with, config)
    if first:
      row_files.write(folder / 'rollouts_config.json', [config_check.to_saved(config)])
    model_config, params = setup.load_policy(config, mesh)
    local = meshes.local_mesh(mesh)
    engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
    engine.load(meshes.local(steps.cast(params, config.dtype)))
    tools = functools.cache(lambda second: open_tools(config, second, local))
    grow_all = functools.partial(roll_out, config, method, engine, tools, run.publish)
    trees, tiers = collect(config, grow_all, engine.tokenizer, params, folder, run.say)
    held_out, buckets = split(trees, tiers, settings)
    asked = [(question, 'tool-optional', False) for question in {tree.question.id: tree.question for tree in held_out}.values()]
    em = lambda step: float(np.mean([one['right'] for one in grow_all(asked, folder / f'answers_{step}.jsonl', outcome)]))
    em_before = em(0) if critic.is_shared(config) and settings.backbone_rate else None
    engine.unload(cache=True)
    student = Student(config, model_config, params, mesh)
    curves = {'before': student.assess(held_out)}
    student.state, _ = run.restore(student.state)
    run.start()
    curves['warmed up'] = student.assess(held_out)
    figures = gate_figures(held_out, tiers)
    step, done = run.last_step, run.last_step >= settings.min_updates and passes(figures, settings.gate)
    for step in () if done else run.steps():
      clock = progress.Clock()
      with clock('train'):
        row = student.learn(draw(buckets, settings.trees, np.random.default_rng([config.seed, step])))
      check = step % settings.check_every == 0 or step == settings.max_updates
      if check:
        curves['warmed up'] = student.assess(held_out)
        figures = gate_figures(held_out, tiers)
        row |= {f'gate_{name}': value for name, value in figures.items()}
      run.finish_step(step, row | clock.row(row['tokens_trained']), student.state, lambda: {
        'decoder': dataclasses.asdict(model_config), 'critic': not critic.is_shared(config)})
      if check and step >= settings.min_updates and passes(figures, settings.gate):
        break
    if first:
      plot(curves, shown := io.BytesIO())
      write_whole(folder / 'calibration.png', shown.getvalue())
  if settings.min_updates < settings.max_updates and not passes(figures, settings.gate):
    shown = [', '.join(f'{name} {value:.2f}' for name, value in found.items()) for found in (figures, settings.gate)]
    raise GateFailed(f'{config.out}: after {settings.max_updates} updates the critic has {shown[0]}; the gate is {shown[1]}. '
                     'More questions, more updates (critic_warmup.max_updates) or a higher rate may help.')
  if em_before is not None:  # the policy's backbone has moved
    engine.load(meshes.local(steps.cast(steps.without_head(student.state.params), config.dtype)))
    figures |= {'em_before': em_before, 'em_after': em(step)}
  return figures


def collect(config: ml_collections.ConfigDict, grow_all: Callable, tokenizer, params: dict,
            folder: pathlib.Path, say: Callable[[str], None]) -> tuple[list[Tree], dict[str, int]]:
  """The rollouts to learn from, and the held-out ones, with their rewards, and the tier of each question."""
  settings = config.critic_warmup
  questions = setup.load_questions(config, '+'.join(filter(None, (config.data.questions, settings.extra_questions))))
  order = np.random.default_rng(config.seed).permutation(len(questions))[:settings.questions]
  questions = [questions[i] for i in order]
  for kind in KINDS:
    own = [question for question in questions if kind in ('closed-book', 'tool-optional', required(question, settings))]
    setup.check_room(config, tokenizer, own, say, **_changes(settings, kind))
  closed_book = [(question, 'closed-book', False) for question in questions for _ in range(settings.tier_rollouts)]
  tiers = tiers_by(grow_all(closed_book, folder / 'closed_book.jsonl', outcome))
  if jax.process_index() == 0:
    row_files.write(folder / 'tiers.jsonl', [{'id': key, 'tier': tier} for key, tier in tiers.items()])
  texts = [question.question for question in questions]
  if settings.encoder:  # a sentence encoder (all-MiniLM-L6-v2, say)
    points = TextEncoder(settings.encoder, recipe_of(settings.encoder)).passages(texts)
  else:
    points = embedded(texts, tokenizer, params)
  clusters = list(map(tuple, meshes.of_first(clusters_by_source(points, questions, settings, config.seed))))
  chosen, held_out = choose(questions, tiers, clusters, settings, config.seed)
  rng, wanted = np.random.default_rng([config.seed, 1]), []
  for question in chosen:
    if question.id in held_out:
      wanted += [(question, 'tool-optional', False), (question, required(question, settings), False)]
    else:
      wanted += [(question, kind, bool(rng.random() < settings.second_share))
                 for kind in ('closed-book', tool_kind(question, tiers[question.id], settings, rng))]
  trees = []
  for record, (question, kind, _) in zip(grow_all(wanted, folder / 'rollouts.jsonl', Tree.to_json), wanted):
    trees.append(Tree.from_json(record, tokenizer, question))
    trees[-1].root.data.update(kind=kind, held_out=question.id in held_out)
  return [tree for tree in trees if tree.count()], tiers


def tool_kind(question: Question, tier: int, settings: ml_collections.ConfigDict, rng: np.random.Generator) -> str:
  """The kind of a question's rollout with tools: a share of those of `tool_optional_tiers` is tool-optional."""
  optional = rng.random() < settings.tool_optional_share * (tier in settings.tool_optional_tiers)
  return 'tool-optional' if optional else required(question, settings)


def required(question: Question, settings: ml_collections.ConfigDict) -> str:
  """The kind of a rollout that has to use tools: 'multi-hop' for questions from `multi_hop_sources`."""
  return 'multi-hop' if question.metadata.get('source') in settings.multi_hop_sources else 'tool-required'


def _changes(settings: ml_collections.ConfigDict, kind: str) -> dict:
  """Of the arguments of `grow`, for rollouts of a kind."""
  return dict(settings.get(kind.replace('-', '_'), {}))


def tiers_of(agent: Agent, questions: Sequence[Question], number: int, key) -> dict[str, int]:
  """The tier of each question for an agent that answers closed-book: 2 if one of `number` rollouts is right, else 1."""
  trees, _ = rollout(agent, [question for question in questions for _ in range(number)], key)
  return tiers_by([outcome(tree) for tree in trees])


def outcome(tree: Tree) -> dict:
  """All that tiers ask of a rollout: {'id' of its question, 'right': 0 or 1}."""
  return {'id': tree.question.id, 'right': tree.question.score(tree.answer)}


def tiers_by(outcomes: Sequence[dict]) -> dict[str, int]:
  """Question id -> 2 if any of its closed-book rollouts was right, else 1."""
  tiers = dict.fromkeys((one['id'] for one in outcomes), 1)
  return tiers | {one['id']: 2 for one in outcomes if one['right']}


def mixed(questions: Sequence[Question], tiers: dict[str, int]) -> list[Question]:
  """As many questions of either tier as there are of the smaller one, taking turns, each tier in its order."""
  by_tier = [[question for question in questions if tiers[question.id] == tier] for tier in (1, 2)]
  return [question for pair in zip(*by_tier) for question in pair]


def roll_out(config: ml_collections.ConfigDict, method: types.ModuleType, engine: Engine, tools: Callable[[bool], Tools],
             publish: Callable[[], None], wanted: Sequence[tuple[Question, str, bool]], path: pathlib.Path,
             record: Callable[[Tree], dict]) -> list[dict]:
  """A `record` for each (question, one of `KINDS`, whether with the second search), read from `path` or new.

  They are grown and appended in chunks; a chunk that was not written whole is grown again, to the same trees. What a tree draws
  depends on its place in `wanted`, not on the chunks, nor on the processes, each of which grows a part of every chunk.
  Raises RunStopped if most searches of a chunk failed.
  """
  settings = config.critic_warmup
  changes = {kind: dict(config.grow) | _changes(settings, kind) for kind in KINDS}
  first = jax.process_index() == 0
  written = row_files.read(path) if first else []
  kept = meshes.of_first(len(written) if len(written) == len(wanted) else len(written) // CHUNK * CHUNK)
  if first and kept < len(written):
    row_files.write(path, written[:kept])
  agent = Agent(engine, lambda question, tree: method.grow(question, tree, **changes[question.metadata['kind']]), Tools(),
                setup.make_agent(config, engine, Tools()).sampling)
  key = jax.random.fold_in(jax.random.key(config.seed), len(wanted))
  done = []
  for start in range(0, len(wanted), CHUNK):
    if start < kept:
      done += meshes.of_first(written[start:start + CHUNK])
      continue
    part, trees = wanted[start:start + CHUNK], {}
    own = range(len(part))[meshes.own_part()]
    for second in sorted({second for *_, second in part}):
      numbers = [number for number in own if part[number][2] == second]
      questions = [dataclasses.replace(part[i][0], metadata=part[i][0].metadata | {'kind': part[i][1]}) for i in numbers]
      grown, metrics = rollout(agent, questions, key, tools=tools(second), numbers=[start + number for number in numbers])
      runs.check_searches(runs.failures_of_all(metrics), path.name, stop=config.search.max_failed_steps > 0)
      trees |= dict(zip(numbers, grown))
    for tree in trees.values():
      tree.prune()
      tree.reward = method.reward(tree)
    new, _ = meshes.gather_items([record(trees[number]) for number in own])
    done += new
    if first:
      row_files.append(path, new)
      publish()
      print(f'{path.name}: {len(done)} of {len(wanted)} rollouts', file=sys.stderr, flush=True)
  return done


def open_tools(config: ml_collections.ConfigDict, second: bool, mesh: jax.sharding.Mesh) -> Tools:
  """The tools of a config, or with a search of other quality: that of `critic_warmup.second_search`."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.search.update(config.critic_warmup.second_search if second else {})
  return setup.open_tools(config, mesh=mesh)


def embedded(texts: Sequence[str], tokenizer, params: dict) -> np.ndarray:
  """[number, D], of length 1: the mean of a text's token embeddings in the policy, less that of all texts."""
  table = meshes.whole(params['embedding']).astype(np.float32)
  means = np.stack([table[tokenizer.encode(text)].mean(axis=0) for text in texts])
  points = means - means.mean(axis=0)
  return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-8)


def clusters_of(points: np.ndarray, number: int, seed: int) -> np.ndarray:
  """The cluster [number of points] of each point, by k-means."""
  from scipy.cluster.vq import kmeans2
  return kmeans2(points, min(number, len(points)), minit='++', seed=seed)[1]


def clusters_by_source(points: np.ndarray, questions: Sequence[Question], settings: ml_collections.ConfigDict,
                       seed: int) -> list[tuple[str, int]]:
  """(source, cluster in it) of each question: the questions of a source have `clusters` of their own, or `source_clusters`."""
  sources, found = [question.metadata.get('source', '') for question in questions], [None] * len(questions)
  for source in sorted(set(sources)):
    own = [number for number, one in enumerate(sources) if one == source]
    for number, cluster in zip(own, clusters_of(points[own], settings.source_clusters.get(source, settings.clusters), seed)):
      found[number] = source, int(cluster)
  return found


def choose(questions: Sequence[Question], tiers: dict[str, int], clusters: Sequence, settings: ml_collections.ConfigDict,
           seed: int) -> tuple[list[Question], set[str]]:
  """The questions to roll out, and the ids of those among them that are held out for the gate.

  `trajectories` / 2 are to learn from: `tier_2_share` of tier 2 as far as there are such, each tier even over clusters. On top
  come `held_out` times as many of each tier. Not curated (the paper's 'random-data'), they are the first ones.
  """
  number, chosen, held_out = round(settings.trajectories // 2 * (1 + settings.held_out)), [], set()
  if not settings.curated:
    chosen = list(questions[:number])
  else:
    rng = np.random.default_rng([seed, 2])
    tier_2 = sum(tier == 2 for tier in tiers.values())
    wanted = {2: min(round(number * settings.tier_2_share), tier_2)}
    wanted[1] = min(number - wanted[2], len(questions) - tier_2)
    for tier in (2, 1):
      members = collections.defaultdict(list)
      for index in rng.permutation(len(questions)):
        if tiers[questions[index].id] == tier:
          members[clusters[index]].append(questions[index])
      turns = (question for turn in range(len(questions)) for own in members.values() for question in own[turn:turn + 1])
      chosen += [question for question, _ in zip(turns, range(wanted[tier]))]
  rng = np.random.default_rng([seed, 3])
  for tier in (1, 2):
    ids = [question.id for question in chosen if tiers[question.id] == tier]
    held_out |= set(rng.permutation(ids)[:round(len(ids) * settings.held_out / (1 + settings.held_out))].tolist())
  return chosen, held_out


def split(trees: Sequence[Tree], tiers: dict[str, int],
          settings: ml_collections.ConfigDict) -> tuple[list[Tree], list[list[Tree]]]:
  """(trees of held-out questions, the others in four buckets: tier 1 or 2, closed-book or not; one if nothing is curated)."""
  buckets = {f'tier {tier} {kind}': [] for tier in (1, 2) for kind in KINDS[:2]}
  for tree in trees:
    if not tree.root.data['held_out'] and any(node.tokens for node in tree.nodes(Role.POLICY)):
      kind = 'closed-book' if tree.root.data['kind'] == 'closed-book' else 'tool-required'
      buckets[f'tier {tiers[tree.question.id]} {kind}'].append(tree)
  held_out = [tree for tree in trees if tree.root.data['held_out']]
  if not settings.curated:
    return held_out, [[tree for own in buckets.values() for tree in own]]
  if empty := [name for name, own in buckets.items() if not own]:
    raise ValueError(f'no rollouts of {", ".join(empty)}: take more questions (critic_warmup.questions), unless the policy is '
                     'closed-book always right, or never')
  return held_out, list(buckets.values())


class Student:
  """The critic that is warmed up: its state, its compiled step, and its values of (parameters, batch)."""

  @memory.named('setting up training', memory.STATE)
  def __init__(self, config: ml_collections.ConfigDict, model_config, params: dict, mesh: jax.sharding.Mesh):
    self.config, self.mesh, settings, shared = config, mesh, config.critic_warmup, critic.is_shared(config)
    optim = dict(learning_rate=settings.head_rate, lr_warmup_updates=settings.lr_warmup_updates,
                 weight_decay=config.critic.weight_decay, schedule='constant')
    self.state, self.train_step = critic.open_critic(config, model_config, params, mesh, settings.max_updates, optim=optim,
                                                     backbone_rate=settings.backbone_rate)
    self.values = steps.make_value_step(model_config, mesh=mesh, shared=shared)

  @memory.named('updating the critic', memory.UPDATE)
  def learn(self, trees: Sequence[Tree]) -> dict[str, float]:
    """One update on the rewards of trees, of which each process lays out a part; its metrics."""
    rows = rows_of(self.config, trees[meshes.own_part()])
    batch = batches.make_batch(rows, self.config.train.micro_rows, trees=len(trees), critic=True)
    self.state, result = self.train_step(self.state, batches.place(batch, self.mesh))
    return metrics_log.to_row(result)

  @memory.named('computing values', memory.UPDATE)
  def assess(self, trees: Sequence[Tree]) -> tuple[np.ndarray, np.ndarray]:
    """Writes the critic's values onto the spans of trees, in every process; (V(s_0) [N], outcomes [N]), predicted and actual
    success of those under the prompt of training."""
    own = trees[meshes.own_part()]
    rows = rows_of(self.config, own)
    take_back(rows, own, batches.compute_on_rows(
      self.values, self.state.params, rows, self.config.train.micro_rows, self.mesh, len(trees)), 'values')
    found, _ = meshes.gather_items([[node.values for node in tree.nodes(Role.POLICY)] for tree in own])
    for tree, values in zip(trees, found, strict=True):
      for node, of_node in zip(tree.nodes(Role.POLICY), values, strict=True):
        node.values = of_node
    starts = [(spans[0].values[0], tree.reward) for tree in trees if tree.root.data['kind'] == 'tool-optional'
              if (spans := [node for node in tree.nodes(Role.POLICY) if node.tokens])]
    return tuple(np.array(starts, np.float64).reshape(-1, 2).T)


def rows_of(config: ml_collections.ConfigDict, trees: Sequence[Tree]) -> TrainingRows:
  """Training rows of this process's trees, in which the target of every trained token is the reward of its tree."""
  for tree in trees:
    for node in tree.nodes(Role.POLICY):
      node.returns = node.values = np.full(len(node.tokens), tree.reward, np.float32)  # clipped to the target: not at all
  return batches.lay_out_own(trees, config.train.row_length, pad_id=0, how=config.train.aggregate)


def draw(buckets: Sequence[Sequence[Tree]], number: int, rng: np.random.Generator) -> list[Tree]:
  """`number` trees, as many from each bucket."""
  each = number // len(buckets)
  return [bucket[i] for bucket in buckets for i in rng.choice(len(bucket), each, replace=len(bucket) < each)]


def passes(figures: dict[str, float], gate: ml_collections.ConfigDict) -> bool:
  """Tells whether every figure reaches its threshold; NaN (signs without a pair) fails, 0 or less is off."""
  return all(least <= 0 or figures[name] >= least for name, least in gate.items())
