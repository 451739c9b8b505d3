"""Warms a critic up before the policy is trained: CARL's appendix C, `jaxsearch critic-warmup`.

  closed_book.jsonl   whether five closed-book rollouts of every question were right
  tiers.jsonl         the tier of every question, see curation.py
  rollouts.jsonl      trees of the chosen questions, half closed-book, half tool-required or tool-optional
  answers_STEP.jsonl  whether the policy was right on held-out questions, before and after; where the critic
                      moves its backbone
  metrics.jsonl       a row an update; every `check_every` updates with the gate's figures on held-out
                      questions
  checkpoints/        the critic (and the backbone that it shares), for `critic.warm_start`
  calibration.png     predicted against actual success on the held-out rollouts, before and after

All of it is in the folder of `config.out`; rerun the command to resume, rollouts included. Training ends at
the first check after `min_updates` that passes the gate; with `min_updates` = `max_updates` it takes so many,
whatever the gate would say. The policy's weights are frozen but for the backbone; `backbone_rate=0` leaves
the policy as it was. Of several processes each grows, lays out and assesses every n-th tree; all of them read
all records and values.

The gate looks at rollouts of held-out questions under the prompt of training (tool-optional, `config.grow` as
it is), since the critic will be asked about these; for the signs at tool-required ones too, as in the paper.
"""

import dataclasses
import functools
import io
import pathlib
import sys
import types
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

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
from jaxsearch.training import checkpoint, critic, curation, metrics_log, progress, row_files, runs
from jaxsearch.training import state as states
from jaxsearch.training import step as steps
from jaxsearch.trees.layout import TrainingRows, take_back
from jaxsearch.trees.tree import Role, Tree

CHUNK = 256  # rollouts between two saves

Figures = Callable[[Sequence[Tree], dict[str, int]], dict[str, float]]  # (trees, tiers) -> figures or NaN
# Rollouts: (question, one of `curation.KINDS`, whether with the second search).
Wanted = Sequence[tuple[Question, str, bool]]


class GateFailed(runs.RunStopped):
  """The critic is not good enough after `max_updates`; the message says by how much."""


def warm_up(config: ConfigDict, gate_figures: Figures, plot: Callable) -> dict[str, float]:
  """Rolls out, trains the critic, and returns the figures that passed the gate, or raises `GateFailed`.

  Args:
    gate_figures: computes what the gate looks at, and more, of held-out rollouts with the critic's values on
      them.
    plot: called with ({name: (V(s_0) [N], outcomes [N])}, file) for the reliability diagram.
  """
  settings = config.critic_warmup
  meshes.start_distributed(**config.distributed)
  with config.unlocked():
    config.steps, config.checkpoint_every = settings.max_updates, settings.check_every
  config_check.check(config)
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  first = jax.process_index() == 0
  with runs.RunFolder(config, shown=('loss', 'gate_auc', 'gate_explained')) as run:
    folder = run.out
    for made_with in meshes.broadcast(row_files.read(folder / 'rollouts_config.json')):
      checkpoint.check_same_run(made_with, config)
    if first:
      row_files.write(folder / 'rollouts_config.json', [config_check.to_saved(config)])
    model_config, params = setup.load_policy(config, mesh)
    local = meshes.local_mesh(mesh)
    engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
    engine.load(meshes.local(states.cast(params, config.dtype)))
    tools = functools.cache(lambda second: open_tools(config, second, local))
    grow_all = functools.partial(roll_out, config, find_method(config.method), engine, tools, run.publish)
    trees, tiers = collect(config, grow_all, engine.tokenizer, params, folder, run.say)
    held_out, buckets = curation.split(trees, tiers, settings)
    unique = {tree.question.id: tree.question for tree in held_out}
    asked = [(question, 'tool-optional', False) for question in unique.values()]

    def em(step: int) -> float:
      """Answers the held-out questions with the policy that the engine has."""
      rows = grow_all(asked, folder / f'answers_{step}.jsonl', curation.outcome)
      return float(np.mean([row['right'] for row in rows]))

    em_before = em(0) if critic.is_shared(config) and settings.backbone_rate else None
    engine.unload(cache=True)
    student = Student(config, model_config, params, mesh)
    curves = {'before': student.assess(held_out)}
    student.state, _ = run.restore(student.state)
    run.start()

    def look() -> dict[str, float]:
      curves['warmed up'] = student.assess(held_out)
      return gate_figures(held_out, tiers)

    figures, step = look(), run.last_step
    is_done = lambda: step >= settings.min_updates and passes(figures, settings.gate)
    for step in () if is_done() else run.steps():
      clock = progress.Clock()
      with clock('train'):
        rng = np.random.default_rng([config.seed, step])
        row = student.learn(curation.draw(buckets, settings.trees, rng))
      check = step % settings.check_every == 0 or step == settings.max_updates
      if check:
        figures = look()
        row |= {f'gate_{name}': value for name, value in figures.items()}
      run.finish_step(step, row | clock.row(row['tokens_trained']), student.state, lambda: {
        'decoder': dataclasses.asdict(model_config), 'critic': not critic.is_shared(config)})
      if check and is_done():
        break
    if first:
      plot(curves, shown := io.BytesIO())
      write_whole(folder / 'calibration.png', shown.getvalue())
  if settings.min_updates < settings.max_updates and not passes(figures, settings.gate):
    reached, gate = (', '.join(f'{name} {value:.2f}' for name, value in values.items())
                     for values in (figures, settings.gate))
    raise GateFailed(
      f'{config.out}: after {settings.max_updates} updates the critic has {reached}; the gate is {gate}. '
      'More questions, more updates (critic_warmup.max_updates) or a higher rate may help.')
  if em_before is not None:  # the policy's backbone has moved
    engine.load(meshes.local(states.cast(states.without_head(student.state.params), config.dtype)))
    figures |= {'em_before': em_before, 'em_after': em(step)}
  return figures


def collect(config: ConfigDict, grow_all: Callable, tokenizer, params: dict,
            folder: pathlib.Path, say: Callable[[str], None]) -> tuple[list[Tree], dict[str, int]]:
  """Returns the rollouts to learn from and the held-out ones, with their rewards, and the tier of each
  question."""
  settings = config.critic_warmup
  names = '+'.join(filter(None, (config.data.questions, settings.extra_questions)))
  questions = setup.load_questions(config, names)
  order = np.random.default_rng(config.seed).permutation(len(questions))[:settings.questions]
  questions = [questions[place] for place in order]
  for kind in curation.KINDS:
    always = kind in ('closed-book', 'tool-optional')
    asked = [question for question in questions if always or kind == curation.required(question, settings)]
    setup.check_room(config, tokenizer, asked, say, **_changes(settings, kind))
  closed_book = [(question, 'closed-book', False)
                 for question in questions for _ in range(settings.tier_rollouts)]
  tiers = curation.tiers_by(grow_all(closed_book, folder / 'closed_book.jsonl', curation.outcome))
  if jax.process_index() == 0:
    row_files.write(folder / 'tiers.jsonl', [{'id': key, 'tier': tier} for key, tier in tiers.items()])
  texts = [question.question for question in questions]
  if settings.encoder:  # a sentence encoder (all-MiniLM-L6-v2, say)
    points = TextEncoder(settings.encoder, recipe_of(settings.encoder)).passages(texts)
  else:
    points = curation.embedded(texts, tokenizer, params)
  clusters = meshes.broadcast(curation.clusters_by_source(points, questions, settings, config.seed))
  chosen, held_out = curation.choose(questions, tiers, list(map(tuple, clusters)), settings, config.seed)
  rng, wanted = np.random.default_rng([config.seed, 1]), []
  for question in chosen:
    if question.id in held_out:
      wanted += [(question, kind, False) for kind in ('tool-optional', curation.required(question, settings))]
    else:
      for kind in ('closed-book', curation.tool_kind(question, tiers[question.id], settings, rng)):
        wanted.append((question, kind, bool(rng.random() < settings.second_share)))
  trees = []
  for record, (question, kind, _) in zip(grow_all(wanted, folder / 'rollouts.jsonl', Tree.to_json), wanted):
    tree = Tree.from_json(record, tokenizer, question)
    tree.root.data.update(kind=kind, held_out=question.id in held_out)
    if tree.count():
      trees.append(tree)
  return trees, tiers


def _changes(settings: ConfigDict, kind: str) -> dict:
  """Returns the arguments of `grow` that differ in rollouts of a kind."""
  return dict(settings.get(kind.replace('-', '_'), {}))


def roll_out(config: ConfigDict, method: types.ModuleType, engine: Engine,
             tools: Callable[[bool], Tools], publish: Callable[[], None], wanted: Wanted, path: pathlib.Path,
             record: Callable[[Tree], dict]) -> list[dict]:
  """Returns a `record` for each rollout, read from `path` or new.

  They are grown and appended in chunks; a chunk that was not written whole is grown again, to the same trees.
  What a tree draws depends on its place in `wanted`, not on the chunks, nor on the processes, each of which
  grows a part of every chunk. Raises RunStopped if most searches of a chunk failed.
  """
  settings = config.critic_warmup
  changes = {kind: dict(config.grow) | _changes(settings, kind) for kind in curation.KINDS}
  grow = lambda question, tree: method.grow(question, tree, **changes[question.metadata['kind']])
  agent = Agent(engine, grow, Tools(), setup.make_agent(config, engine, Tools()).sampling)
  first = jax.process_index() == 0
  written, done = row_files.read(path) if first else [], []
  kept = meshes.broadcast(len(written) if len(written) == len(wanted) else len(written) // CHUNK * CHUNK)
  if first and kept < len(written):
    row_files.write(path, written[:kept])
  for start in range(0, kept, CHUNK):
    done += meshes.broadcast(written[start:start + CHUNK])
  key = jax.random.fold_in(jax.random.key(config.seed), len(wanted))
  for start in range(kept, len(wanted), CHUNK):
    part, trees = wanted[start:start + CHUNK], {}
    local = range(len(part))[meshes.local_part()]
    for second in sorted({second for *_, second in part}):
      places = [place for place in local if part[place][2] == second]
      questions = [dataclasses.replace(question, metadata=question.metadata | {'kind': kind})
                   for question, kind, _ in (part[place] for place in places)]
      grown, metrics = rollout(
        agent, questions, key, tools=tools(second), numbers=[start + place for place in places])
      runs.check_searches(runs.failures_of_all(metrics), path.name, stop=config.search.max_failed_steps > 0)
      trees |= dict(zip(places, grown))
    for tree in trees.values():
      tree.prune()
      tree.reward = method.reward(tree)
    new, _ = meshes.gather_items([record(trees[place]) for place in local])
    done += new
    if first:
      row_files.append(path, new)
      publish()
      print(f'{path.name}: {len(done)} of {len(wanted)} rollouts', file=sys.stderr, flush=True)
  return done


def open_tools(config: ConfigDict, second: bool, mesh: Mesh) -> Tools:
  """Opens the tools of a config, or with the search of `critic_warmup.second_search`."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.search.update(config.critic_warmup.second_search if second else {})
  return setup.open_tools(config, mesh=mesh)


class Student:
  """The critic that is warmed up: its state, its compiled step, and its values of (parameters, batch)."""

  @memory.named('setting up training', memory.STATE)
  def __init__(self, config: ConfigDict, model_config, params: dict, mesh: Mesh):
    self.config, self.mesh, settings = config, mesh, config.critic_warmup
    optim = dict(learning_rate=settings.head_rate, lr_warmup_updates=settings.lr_warmup_updates,
                 weight_decay=config.critic.weight_decay, schedule='constant')
    self.state, self.train_step = critic.open_critic(
      config, model_config, params, mesh, settings.max_updates, optim=optim,
      backbone_rate=settings.backbone_rate)
    self.values = steps.make_value_step(model_config, mesh=mesh, shared=critic.is_shared(config))

  @memory.named('updating the critic', memory.UPDATE)
  def learn(self, trees: Sequence[Tree]) -> dict[str, float]:
    """Makes one update on the rewards of trees, of which each process lays out a part; returns its
    metrics."""
    rows = rows_of(self.config, trees[meshes.local_part()])
    batch = batches.make_batch(rows, self.config.train.micro_rows, trees=len(trees), critic=True)
    self.state, result = self.train_step(self.state, batches.place(batch, self.mesh))
    return metrics_log.to_row(result)

  @memory.named('computing values', memory.UPDATE)
  def assess(self, trees: Sequence[Tree]) -> tuple[np.ndarray, np.ndarray]:
    """Writes the critic's values onto the spans of trees, in every process.

    Returns (V(s_0) [N], outcomes [N]), predicted and actual success of those under the prompt of training.
    """
    local = trees[meshes.local_part()]
    rows = rows_of(self.config, local)
    values = batches.compute_on_rows(
      self.values, self.state.params, rows, self.config.train.micro_rows, self.mesh, len(trees))
    take_back(rows, local, values, 'values')
    gathered, _ = meshes.gather_items([[node.values for node in tree.nodes(Role.POLICY)] for tree in local])
    starts = []
    for tree, values in zip(trees, gathered, strict=True):
      for node, of_node in zip(tree.nodes(Role.POLICY), values, strict=True):
        node.values = of_node
      spans = [node for node in tree.nodes(Role.POLICY) if node.tokens]
      if spans and tree.root.data['kind'] == 'tool-optional':
        starts.append((spans[0].values[0], tree.reward))
    return tuple(np.array(starts, np.float64).reshape(-1, 2).T)


def rows_of(config: ConfigDict, trees: Sequence[Tree]) -> TrainingRows:
  """Lays out this process's trees; the target of every trained token is the reward of its tree."""
  for tree in trees:
    for node in tree.nodes(Role.POLICY):
      # `values` at the target, so that no value is clipped.
      node.returns = node.values = np.full(len(node.tokens), tree.reward, np.float32)
  return batches.lay_out_own(trees, config.train.row_length, pad_id=0, how=config.train.aggregate)


def passes(figures: dict[str, float], gate: ConfigDict) -> bool:
  """Tells whether every figure reaches its threshold; 0 or less asks nothing, and NaN (undefined) reaches
  none."""
  return all(least <= 0 or figures[name] >= least for name, least in gate.items())
