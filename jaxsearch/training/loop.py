"""Reinforcement learning: questions, trees, rewards, credit, rows, updates, a row of metrics.

`train` is `jaxsearch train`. What differs from method to method is found by name in jaxsearch/methods, whose `__init__.py`
says what a method is.

Every random number is a function of the seed and the step, and the data order is saved: a resumed run equals one that was
never stopped, to the bit.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from jaxsearch import setup
from jaxsearch.data.questions import Question, QuestionBatches
from jaxsearch.methods import Context, find_method
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.rollout import Agent, rollout
from jaxsearch.training import batch as batches
from jaxsearch.training import checkpoint, runs
from jaxsearch.training import critic as critics
from jaxsearch.training import step as steps
from jaxsearch.training.runs import open_run
from jaxsearch.trees.layout import TrainingRows, lay_out, take_back
from jaxsearch.trees.tree import Role, Stop, Tree

Groups = list[list[Tree]]  # the trees of each question
SHOWN = ('reward', 'em', 'searches')  # on the progress bar


# (agent, config, step, assess) -> rows of evaluations.jsonl; `assess` writes a critic's values onto trees, None without one
Evaluate = Callable[[Agent, ml_collections.ConfigDict, int, Callable[[Sequence[Tree]], None] | None], Iterable[dict]]


def train(config: ml_collections.ConfigDict, evaluate: Evaluate | None = None) -> dict[str, float]:
  """Trains until `config.steps`, or resumes the run in `config.out`; returns the last row of metrics.

  Args:
    evaluate: answers held-out questions, needed if `config.eval.every` is set; see `evaluation.run.held_out`.
  """
  meshes.start_distributed(**config.distributed)
  check(config)
  if config.eval.every and evaluate is None:
    raise ValueError(f'eval.every={config.eval.every}: train was not given an evaluation')
  method, questions, row = find_method(config.method), open_questions(config), {}
  with open_run(config, SHOWN) as run:
    learner = make_learner(config)
    state, host = run.restore(learner.snapshot())
    if host is not None:
      learner.take(state)
      resume(host, learner, questions)
    run.start()
    if run.last_step == 0 and run.wants_evaluation(0):
      run.write_evaluation(evaluate(*examinee(learner, method, 0)))
    for step in run.steps():
      clock = runs.Clock()
      context = Context(step, np.random.default_rng([config.seed, step]), learner.memory)
      with clock('generate'):
        groups, row = grow(learner, method, next(questions), context)
      trees, kept = sum(map(len, groups)), trainable(groups, config.train.row_length)
      if learner.values is not None:
        with clock('score'):
          assess(learner, [tree for group in kept for tree in group])
      with clock('reward'):
        method.credit(kept, context, **config.credit)
      row = row | summary(groups) | context.metrics | {'trees_too_long': trees - sum(map(len, kept))}
      row = row | update(learner, into_rows(learner, credited(kept)), step, clock)
      row = row | clock.row(row['tokens_generated'])
      if run.wants_evaluation(step):
        run.write_evaluation(evaluate(*examinee(learner, method, step)))
      run.finish_step(step, row, learner.snapshot(), lambda: {
        'memory': learner.memory, 'key': jax.random.key_data(learner.key).tolist(), 'questions': questions.get_state(),
        'reference': learner.fingerprint, 'decoder': checkpoint.decoder_to_json(learner.model_config)})
  return row


@dataclasses.dataclass
class Learner:
  """The policy, its sampler, and the compiled programs that train it."""
  config: ml_collections.ConfigDict
  model_config: DecoderConfig
  mesh: jax.sharding.Mesh
  agent: Agent              # the policy as it samples; load its engine with `params` before a rollout
  state: steps.TrainState  # of the policy, or of its adapter
  base: dict | None         # the frozen parameters under the adapter; None without one
  merge: Callable           # (base, adapter) -> parameters
  reference: dict | None    # parameters of the frozen initial policy, in the compute dtype; None if there is no KL
  fingerprint: list[float]  # of the initial policy
  train_step: Callable
  score: Callable
  key: jax.Array
  critic: critics.Critic | None = None  # of its own; one that shares the policy's backbone is part of `state`
  values: Callable | None = None        # (parameters of the critic, batch) -> values; None without a critic
  memory: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the method, see methods.Context

  @property
  def params(self) -> dict:
    """The parameters of the policy as it is now; with an adapter they are computed anew at every call."""
    return steps.without_head(self.state.params) if self.base is None else self.merge(self.base, self.state.params)

  def snapshot(self) -> steps.TrainState:
    """Everything on the device that a checkpoint holds."""
    return dataclasses.replace(self.state, critic=self.critic and self.critic.state)

  def take(self, snapshot: steps.TrainState) -> None:
    """Goes on from a snapshot."""
    if self.critic is not None:
      self.critic.state = snapshot.critic
    self.state = dataclasses.replace(snapshot, critic=None)


def make_learner(config: ml_collections.ConfigDict) -> Learner:
  """Everything that has to be there before the first step, from a config."""
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  model_config, params = setup.load_policy(config, mesh)
  shared, warm = critics.is_shared(config), None
  if config.critic.enabled and config.critic.warm_start:
    _, warm, host = checkpoint.load_trained(config.critic.warm_start, mesh)
    if host['config']['model'] != config.model or host.get('critic', False) == shared:
      raise ValueError(f'critic.warm_start={config.critic.warm_start!r} was warmed up for the model {host["config"]["model"]!r}, '
                       f'critic.shared={not host.get("critic", False)}; here they are {config.model!r}, {shared}')
    params = steps.without_head(warm) if shared else params
  trained = setup.new_adapter(config, model_config, mesh) if config.lora.rank else params
  if shared:
    trained = params | {steps.HEAD: warm[steps.HEAD] if warm else critics.new_head(config, model_config, mesh)}
  optimizer, train_step = make_update(config, model_config, mesh, trained)
  local = meshes.local_mesh(mesh)
  engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
  tools = setup.open_tools(config, mesh=local, services=getattr(find_method(config.method), 'SERVICES', ()))
  return Learner(
    config=config, model_config=model_config, mesh=mesh, state=steps.create_state(trained, optimizer, mesh),
    agent=setup.make_agent(config, engine, tools),
    base=params if config.lora.rank else None, merge=setup.merger(config, model_config, mesh),
    reference=steps.compute_copy(params, model_config.dtype) if config.loss.kl_coef else None,
    fingerprint=steps.fingerprint(params),
    train_step=train_step, key=jax.random.key(config.seed),
    score=steps.make_score_step(model_config, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk),
    critic=(critics.open_critic(config, model_config, params, mesh, total_updates(config), warm)
            if config.critic.enabled and not shared else None),
    values=steps.make_value_step(model_config, mesh=mesh, shared=shared) if config.critic.enabled else None,
  )  # fmt: skip


def make_update(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh,
                trained: dict) -> tuple[optax.GradientTransformation, Callable]:
  """(optimizer, compiled training step) for the parameters `trained`: arrays, or ShapeDtypeStructs with shardings."""
  shared, schedule = critics.is_shared(config), steps.learning_rate_schedule(config.optim, total_updates(config))
  head_factor = config.critic.learning_rate / config.optim.learning_rate if shared else 1.0
  optimizer = steps.make_optimizer(config.optim, schedule, lambda name: head_factor if name == steps.HEAD else 1.0)
  weights = dict(config.loss, temperature=config.sampler.temperature, chunk=config.train.chunk)
  if shared:
    weights |= dict(value_coef=config.critic.coef, backbone_share=config.critic.backbone_share)
  loss_fn = lambda params, batch: steps.policy_loss(params, batch, config=model_config, **weights)
  return optimizer, steps.make_train_step(
    loss_fn, optimizer, schedule, mesh=mesh, dtype=model_config.dtype, alpha=config.lora.alpha,
    state_shardings=steps.state_shardings(trained, optimizer, mesh))


def total_updates(config: ml_collections.ConfigDict) -> int:
  """How many updates a whole run makes."""
  return config.steps * config.train.epochs * config.train.mini_batches


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for values that do not fit together, naming the fields."""
  if config.train.old_logprobs not in ('sampler', 'recompute'):
    raise ValueError(f"train.old_logprobs={config.train.old_logprobs!r} is none of 'sampler', 'recompute'")
  if config.lora.rank < 0:
    raise ValueError(f'lora.rank={config.lora.rank}: 0 is off, an adapter has at least 1')
  if config.lora.rank and critics.is_shared(config):
    raise ValueError(f'lora.rank={config.lora.rank}: an adapter cannot share its frozen backbone with a critic; '
                     'set critic.shared=False')
  if config.sampler.length > config.train.row_length:
    raise ValueError(f'sampler.length={config.sampler.length} is more than train.row_length={config.train.row_length}: '
                     'the longest path would not fit into a training row')
  if config.group_size < 2 and not config.critic.enabled and not getattr(find_method(config.method), 'ONE_TREE', False):
    raise ValueError(f'group_size={config.group_size}: with one tree a question and no critic there is nothing to compare')


def open_questions(config: ml_collections.ConfigDict) -> QuestionBatches:
  """The endless stream of batches of `config.data.questions`."""
  return QuestionBatches(setup.load_questions(config, config.data.questions), config.questions_per_step, seed=config.seed)


def resume(host: dict[str, Any], learner: Learner, questions: QuestionBatches) -> None:
  """Puts everything that does not live in the train state back to where the checkpoint was made.

  Raises:
    ValueError: the model that `config.model` names is not the one that the run began with.
  """
  checkpoint.check_base(host, learner.fingerprint, learner.config.model)
  learner.memory = host['memory']
  learner.key = jax.random.wrap_key_data(np.asarray(host['key'], np.uint32))
  questions.set_state(host['questions'])


def examinee(learner: Learner, method: types.ModuleType, step: int) -> tuple:
  """The arguments of `Evaluate`: the agent as it answers, with the newest parameters, and what judges it besides."""
  config, agent = learner.config, learner.agent
  agent.engine.load(meshes.local(learner.params))
  set_curriculum(learner, 0)  # without the noise that training has reached by now: all evaluations are alike

  def judged_by_critic(trees: Sequence[Tree]) -> None:
    """Writes values, advantages and outcomes onto finished trees, as far as they fit into training rows."""
    fitting = [[tree] for tree, in trainable([[tree] for tree in trees], config.train.row_length) if tree.count()]
    assess(learner, [tree for tree, in fitting])
    method.credit(fitting, Context(0, np.random.default_rng(0), {}), **config.credit)
    for tree in trees:
      tree.reward = tree.question.score(tree.answer)

  agent = setup.make_agent(config, agent.engine, agent.tools, **config.eval.grow)
  return agent, config, step, None if learner.values is None else judged_by_critic


def grow(learner: Learner, method: types.ModuleType, questions: Sequence[Question],
         context: Context) -> tuple[Groups, dict[str, float]]:
  """The trees of a step with the newest parameters, of all processes, and this process's sampler metrics.

  Each process grows the trees of its own questions: of the global batch every n-th, beginning with its own number.
  """
  config = learner.config
  sizes = [config.group_size] * len(questions)
  if hasattr(method, 'sizes'):
    sizes = method.sizes(questions, config.group_size, context, **config.sizes)
  learner.agent.engine.load(meshes.local(learner.params))
  set_curriculum(learner, context.step)
  places = jax.process_index() + jax.process_count() * np.arange(len(questions))  # in the global batch
  numbers = [int(place) * max(sizes) + member for place, size in zip(places, sizes) for member in range(size)]
  trees, row = rollout(learner.agent, [question for question, size in zip(questions, sizes) for _ in range(size)],
                       jax.random.fold_in(learner.key, context.step), numbers=numbers)
  ends = np.cumsum(sizes)
  groups = [trees[end - size:end] for size, end in zip(sizes, ends)]
  return share(groups, learner.agent.engine.tokenizer), row


def share(groups: Groups, tokenizer) -> Groups:
  """The groups of all processes, in the order of the global batch."""
  if jax.process_count() == 1:
    return groups
  groups = [group for turn in zip(*meshes.gather_objects(groups), strict=True) for group in turn]
  for tree in (tree for group in groups for tree in group):
    tree.tokenizer = tokenizer
  return groups


def trainable(groups: Groups, length: int) -> Groups:
  """The trees that fit into a training row of `length` tokens, each cut down to what is trained and what leads to it.

  A tree with branches may be longer than the longest path. Groups without any tree left drop out.
  """
  for tree in (tree for group in groups for tree in group):
    tree.prune()
  fitting = [[tree for tree in group if tree.count() <= length] for group in groups]
  return [group for group in fitting if group]


def credited(groups: Groups) -> list[Tree]:
  """Those of the trees that the method gave credit: what training rows hold."""
  return [tree for group in groups for tree in group
          if any(node.trained and node.advantages is not None for node in tree.walk())]


def summary(groups: Groups) -> dict[str, float]:
  """What came of the trees: means of reward, exact match and the method's notes (`searches` …), shares of stop reasons."""
  trees = [tree for group in groups for tree in group]
  names = sorted({name for tree in trees for name in tree.metrics})
  noted = {name: float(np.mean([tree.metrics[name] for tree in trees if name in tree.metrics])) for name in names}
  stops = {f'stop_{reason}': float(np.mean([tree.stop == reason for tree in trees])) for reason in Stop}
  rewards = [found for group in groups if (found := [tree.reward for tree in group if tree.reward is not None])]
  return noted | stops | {
    'reward': float(np.mean(np.concatenate(rewards))) if rewards else 0.0,
    'groups_alike': float(np.mean([len(set(found)) == 1 for found in rewards])) if rewards else 1.0,  # nothing to compare
    'trees': len(trees),
    'em': float(np.mean([tree.question.score(tree.answer) for tree in trees])),
    'tokens_generated': sum(tree.count(Role.POLICY) for tree in trees),
    'tokens_per_tree': float(np.mean([tree.count() for tree in trees])),
  }  # fmt: skip


def set_curriculum(learner: Learner, step: int) -> None:
  """Tells a simulated search how far training is."""
  search = learner.agent.tools.search
  if hasattr(search, 'set_step'):
    search.set_step(step, learner.config.steps)


def into_rows(learner: Learner, trees: Sequence[Tree]) -> TrainingRows:
  """The training rows of trees."""
  return lay_out(trees, learner.config.train.row_length, pad_id=learner.agent.engine.tokenizer.pad_id,
                 how=learner.config.train.aggregate)


def assess(learner: Learner, trees: Sequence[Tree]) -> None:
  """Writes the critic's values onto the trained spans."""
  rows = into_rows(learner, trees)
  batch = batches.make_batch(rows, learner.config.train.micro_rows)
  params = learner.state.params if learner.critic is None else learner.critic.state.params
  values = jax.device_get(learner.values(params, batches.place(batch, learner.mesh)))
  take_back(rows, trees, batches.unpack(batch, values, len(rows.tokens)), 'values')


def update(learner: Learner, rows: TrainingRows, step: int, clock: runs.Clock) -> dict[str, float]:
  """All updates of a step: `epochs` passes over the rows, each in `mini_batches` parts."""
  settings = learner.config.train
  recompute = settings.old_logprobs == 'recompute'
  with clock('score'):
    old = score_rows(learner, learner.params, rows) if recompute else rows.old_logprobs
    ref = None if learner.reference is None else score_rows(learner, learner.reference, rows)
  results = []
  with clock('train'):
    rng = np.random.default_rng([learner.config.seed, step])
    for _ in range(settings.epochs):
      parts = batches.mini_batches(len(rows.tokens), settings.mini_batches, rng)
      for part in parts:
        batch = batches.make_batch(batches.take(rows, part, len(parts)), settings.micro_rows,
                                   old_logprobs=old[part], ref_logprobs=None if ref is None else ref[part],
                                   critic=learner.values is not None)
        batch = batches.place(batch, learner.mesh)
        learner.state, result = learner.train_step(learner.state, batch, learner.base)
        results.append(result if learner.critic is None else result | learner.critic.learn(batch))
    results = [runs.to_row(result) for result in results]
  return runs.mean_of(results) | {'padded_share': 1 - rows.fill, 'rows': len(rows.tokens)}


def score_rows(learner: Learner, params: dict, rows: TrainingRows) -> np.ndarray:
  """Log-probabilities [B, T] of the trained tokens under `params`, 0 elsewhere."""
  batch = batches.make_batch(rows, learner.config.train.micro_rows)
  return batches.unpack(batch, jax.device_get(learner.score(params, batches.place(batch, learner.mesh))),
                        len(rows.tokens))
