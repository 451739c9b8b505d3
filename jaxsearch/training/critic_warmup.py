"""Warms a critic up before the policy is trained: CARL's appendix C, `jaxsearch critic-warmup`.

  closed_book.jsonl   whether five closed-book rollouts of every question were right
  tiers.jsonl         the tier of every question, see curation.py
  chosen.jsonl        the questions that are rolled out, and which of them are held out
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
it is), since the critic will be asked about these. The signs take tool-required ones too, as in the paper.
"""

import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxsearch import config_check, setup
from jaxsearch.data.questions import Question
from jaxsearch.files import write_whole
from jaxsearch.methods import find_method
from jaxsearch.models import hub
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.models.encoder import TextEncoder, recipe_of
from jaxsearch.parallel import memory, mesh as meshes, transfer
from jaxsearch.sampler import driver
from jaxsearch.sampler.requests import Tools
from jaxsearch.training import (
  batch as batches,
  curation,
  learner as learners,
  metrics,
  row_files,
  run_folder as runs,
  state as states,
  step as steps,
)
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
  if config.reward != 'match':
    raise ValueError(f"reward={config.reward!r}: a warm-up learns what is right by the questions' rule; set "
                     "reward='match'")
  meshes.start_distributed(**config.distributed)
  with config.unlocked():
    config.steps, config.checkpoint_every = settings.max_updates, settings.check_every
    config.optim.schedule, config.eval.every = 'constant', 0  # nothing is evaluated
    config.critic.update(learning_rate=settings.head_rate, backbone_rate=settings.backbone_rate, coef=1.0,
                         lr_warmup_updates=settings.lr_warmup_updates)
  config_check.check(config)
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  with runs.RunFolder(config, shown=('loss', 'gate_auc', 'gate_explained')) as run:
    made_with, *of = run.read('rollouts_config.json') or [None]
    if made_with:
      runs.check_same_run(made_with, config)
    model_config, params = setup.load_policy(config, mesh)
    began = {'reference': hub.fingerprint(params)}
    same = lambda host: hub.check_base(began | host, began['reference'], config.model)
    for host in of:
      same(host)
    run.write('rollouts_config.json', [config_check.to_saved(config), began])
    policy = Policy(run, model_config, params, mesh)
    trees, tiers = collect(policy, params)
    held_out, buckets = curation.split(trees, tiers, settings)
    moves = learners.is_shared(config) and settings.backbone_rate  # the policy's backbone
    em_before = policy.em(held_out, 0) if moves else None
    policy.engine.unload(cache=True)
    student = Student(config, model_config, params, mesh)
    del params  # its state has a copy
    curves = {'before': student.assess(held_out)}
    student.state, _ = run.restore(student.state, check=same)
    run.start()
    host = began | {'decoder': dataclasses.asdict(model_config), 'critic': not learners.is_shared(config)}

    def look() -> dict[str, float]:
      curves['warmed up'] = student.assess(held_out)
      return gate_figures(held_out, tiers)

    step, figures = train(run, student, host, buckets, look)
    if jax.process_index() == 0:
      plot(curves, shown := io.BytesIO())
      write_whole(run.out / 'calibration.png', shown.getvalue())
    if settings.min_updates < settings.max_updates and not passes(figures, settings.gate):
      reached, gate = (', '.join(f'{name} {value:.2f}' for name, value in values.items())
                       for values in (figures, settings.gate))
      raise GateFailed(
        f'{config.out}: after {settings.max_updates} updates the critic has {reached}; the gate is {gate}. '
        'More questions, more updates (critic_warmup.max_updates) or a higher rate may help.')
    if moves:
      policy.load(states.without_head(student.state.params))
      figures |= {'em_before': em_before, 'em_after': policy.em(held_out, step)}
  return figures


def train(run: runs.RunFolder, student: 'Student', host: dict, buckets: Sequence[Sequence[Tree]],
          look: Callable[[], dict[str, float]]) -> tuple[int, dict[str, float]]:
  """Updates the critic until the figures of `look` pass the gate, or to the last step; returns both.

  `host` goes into the checkpoints.
  """
  config, settings = run.config, run.config.critic_warmup
  figures, step = look(), run.last_step
  checks = lambda: step % settings.check_every == 0 or step == settings.max_updates
  is_done = lambda: checks() and step >= settings.min_updates and passes(figures, settings.gate)
  for step in () if is_done() else run.steps():
    clock = metrics.Clock()
    with clock('train'):
      row = student.learn(curation.draw(buckets, settings.trees, np.random.default_rng([config.seed, step])))
    if checks():
      figures = look()
      row |= {f'gate_{name}': value for name, value in figures.items()}
    run.finish_step(step, row | clock.row(row['tokens_trained']), student.state, lambda: host)
    if is_done():
      break
  return step, figures


def passes(figures: dict[str, float], gate: ConfigDict) -> bool:
  """Tells whether every figure reaches its threshold; 0 asks nothing, NaN (undefined) reaches none."""
  return all(least <= 0 or figures[name] >= least for name, least in gate.items())


def collect(policy: 'Policy', params: dict) -> tuple[list[Tree], dict[str, int]]:
  """Returns the rollouts to learn from and those held out, with their rewards, and the questions' tiers."""
  config, settings, tokenizer = policy.config, policy.config.critic_warmup, policy.engine.tokenizer
  names = '+'.join(filter(None, (config.data.questions, settings.extra_questions)))
  questions = setup.load_questions(config, names)
  order = np.random.default_rng(config.seed).permutation(len(questions))[:settings.questions]
  questions = [questions[place] for place in order]
  for kind in curation.KINDS:
    asked = [question for question in questions
             if kind in ('closed-book', 'tool-optional', curation.required(question, settings))]
    setup.check_room(config, tokenizer, asked, policy.run.say, **_changes(settings, kind))
  closed_book = [(question, 'closed-book', False)
                 for question in questions for _ in range(settings.tier_rollouts)]
  tiers = curation.tiers_by(policy.answer(closed_book, 'closed_book.jsonl', curation.outcome))
  policy.run.write('tiers.jsonl', [{'id': key, 'tier': tier} for key, tier in tiers.items()])
  rows = policy.run.read('chosen.jsonl')
  if not rows:  # once: clusters are of floats, which another machine may round differently
    rows = _choose(policy, params, questions, tiers)
    policy.run.write('chosen.jsonl', rows)
  by_id = {question.id: question for question in questions}
  if others := [row['id'] for row in rows if row['id'] not in by_id]:
    raise ValueError(f'{policy.run.out}/chosen.jsonl: {others[0]!r} is no question of this run; put its '
                     'questions back, or delete the folder')
  chosen, held_out = [by_id[row['id']] for row in rows], {row['id'] for row in rows if row['held_out']}
  rng, wanted = np.random.default_rng([config.seed, 1]), []
  for question in chosen:
    if question.id in held_out:
      wanted += [(question, kind, False) for kind in ('tool-optional', curation.required(question, settings))]
    else:
      for kind in ('closed-book', curation.tool_kind(question, tiers[question.id], settings, rng)):
        wanted.append((question, kind, bool(rng.random() < settings.second_share)))
  trees = []
  for record, (question, kind, _) in zip(policy.answer(wanted, 'rollouts.jsonl', Tree.to_json), wanted):
    if record['id'] != question.id:
      raise ValueError(f'{policy.run.out}: rollouts.jsonl is of other questions than chosen.jsonl; '
                       'delete it, or put back the one that belongs to it')
    tree = Tree.from_json(record, tokenizer, question)
    tree.root.data.update(kind=kind, held_out=question.id in held_out)
    if tree.count():
      trees.append(tree)
  return trees, tiers


def _choose(policy: 'Policy', params: dict, questions: Sequence[Question],
            tiers: dict[str, int]) -> list[dict]:
  """Returns the rows of chosen.jsonl, the same in every process: process 0's clusters decide."""
  config, settings = policy.config, policy.config.critic_warmup
  texts = [question.question for question in questions]
  if settings.encoder:  # a sentence encoder (all-MiniLM-L6-v2, say)
    points = TextEncoder(settings.encoder, recipe_of(settings.encoder)).passages(texts)
  else:
    points = curation.embedded(texts, policy.engine.tokenizer, params)
  clusters = transfer.broadcast(curation.clusters_by_source(points, questions, settings, config.seed))
  chosen, held_out = curation.choose(questions, tiers, list(map(tuple, clusters)), settings, config.seed)
  return [{'id': question.id, 'held_out': question.id in held_out} for question in chosen]


def _changes(settings: ConfigDict, kind: str) -> dict:
  """Returns the arguments of `grow` that differ in rollouts of a kind."""
  return dict(settings.get(kind.replace('-', '_'), {}))


class Policy:
  """The policy on its sampler, whose rollouts are kept in the run folder."""

  def __init__(self, run: runs.RunFolder, model_config: DecoderConfig, params: dict, mesh: Mesh):
    self.config, self.run, self._mesh = run.config, run, meshes.local_mesh(mesh)
    self.engine = setup.open_engine(self.config, model_config, setup.load_tokenizer(self.config), self._mesh)
    self._tools = functools.cache(self._open_tools)
    self.load(params)

  def _open_tools(self, second: bool) -> Tools:
    """Opens the tools of the config, or with the search of `critic_warmup.second_search`."""
    config = self.config.copy_and_resolve_references().unlock()
    config.search.update(config.critic_warmup.second_search if second else {})
    return setup.open_tools(config, mesh=self._mesh)

  def load(self, params: dict) -> None:
    self.engine.load(transfer.local(states.cast(params, self.config.dtype)))

  def em(self, held_out: Sequence[Tree], step: int) -> float:
    """Returns the share of right answers to the questions of these trees, under the prompt of training."""
    questions = {tree.question.id: tree.question for tree in held_out}.values()
    asked = [(question, 'tool-optional', False) for question in questions]
    rows = self.answer(asked, f'answers_{step}.jsonl', curation.outcome)
    return float(np.mean([row['right'] for row in rows]))

  def answer(self, wanted: Wanted, name: str, record: Callable[[Tree], dict]) -> list[dict]:
    """Returns a `record` for each rollout, read from the file `name` or new.

    They are grown and appended in chunks, of which each process grows a part; a chunk that was not written
    whole is grown again. What a tree draws depends on its place in `wanted` alone. Raises RunStopped if most
    searches of a chunk failed.
    """
    done = self.run.read(name)
    if len(done) < len(wanted):
      done = done[:len(done) // CHUNK * CHUNK]
      self.run.write(name, done)
    for start in range(len(done), len(wanted), CHUNK):
      part = list(enumerate(wanted))[start:start + CHUNK][transfer.local_part()]
      grown = self._grow(part, len(wanted), name)
      new, _ = transfer.gather_items([record(grown[place]) for place, _ in part])
      done += new
      if jax.process_index() == 0:
        row_files.append(self.run.out / name, new)
        self.run.publish()
        print(f'{name}: {len(done)} of {len(wanted)} rollouts', file=sys.stderr, flush=True)
    return done

  def _grow(self, part: Sequence[tuple[int, tuple]], seed: int, name: str) -> dict[int, Tree]:
    """Returns {place: tree} of rollouts, pruned and with their rewards."""
    config, method, trees = self.config, find_method(self.config.method), {}
    agents = {kind: setup.make_agent(config, self.engine, self._tools(False),
                                     **_changes(config.critic_warmup, kind)) for kind in curation.KINDS}
    key = jax.random.fold_in(jax.random.key(config.seed), seed)
    for with_second in (False, True):
      episodes = {place: driver.new_episode(agents[kind], question, key, place)
                  for place, (question, kind, second) in part if second == with_second}
      figures = driver.run(agents['tool-optional'], list(episodes.values()), key,
                           tools=self._tools(with_second)) if episodes else {}
      runs.check_searches(runs.failures_of_all(figures), name, stop=config.search.max_failed_steps > 0)
      trees |= {place: episode.tree for place, episode in episodes.items()}
    for tree in trees.values():
      tree.prune()
      tree.reward = method.reward(tree)
    return trees


class Student:
  """The critic that is warmed up, with its update and value programs."""

  @memory.named('setting up training', memory.STATE)
  def __init__(self, config: ConfigDict, model_config: DecoderConfig, params: dict, mesh: Mesh):
    self.state, self._step = learners.open_critic(config, model_config, params, mesh, config.steps)
    self._values = steps.make_value_step(model_config, mesh=mesh, shared=learners.is_shared(config))
    self._pack = functools.partial(batches.pack, mesh=mesh, settings=config.train, attention=config.attention)

  @memory.named('updating the critic', memory.UPDATE)
  def learn(self, trees: Sequence[Tree]) -> dict[str, float]:
    """Makes one update; the target of every token is its tree's reward. Returns its metrics."""
    local = trees[transfer.local_part()]
    for tree in local:
      for node in tree.nodes(Role.POLICY):
        # `values` at the target, so that no value is clipped.
        node.returns = node.values = np.full(len(node.tokens), tree.reward, np.float32)
    self.state, result = self._step(self.state, self._pack(local, at_most=len(trees), critic=True).batch)
    return metrics.to_row(result)

  @memory.named('computing values', memory.UPDATE)
  def assess(self, trees: Sequence[Tree]) -> tuple[np.ndarray, np.ndarray]:
    """Writes the critic's values onto the spans of trees, in every process.

    Returns (V(s_0) [N], outcomes [N]), predicted and actual success of those under the prompt of training.
    """
    packed = self._pack(trees[transfer.local_part()], at_most=len(trees))
    batches.note(packed, self._values(self.state.params, packed.batch), 'values')
    of_nodes = [[node.values for node in tree.nodes(Role.POLICY)] for tree in packed.trees]
    starts = []
    for tree, of_tree in zip(trees, transfer.gather_items(of_nodes)[0], strict=True):
      nodes = tree.nodes(Role.POLICY)
      for node, values in zip(nodes, of_tree, strict=True):
        node.values = values
      first = next((node for node in nodes if node.tokens), None)
      if first and tree.root.data['kind'] == 'tool-optional':
        starts.append((first.values[0], tree.reward))
    return tuple(np.array(starts, np.float64).reshape(-1, 2).T)
