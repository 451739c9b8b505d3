"""Reinforcement learning: questions, trees, rewards, credit, rows, updates, a row of metrics.

`train` is `jaxsearch train`. What differs from method to method is found by name in jaxsearch/methods, whose `__init__.py`
says what a method is.

Every random number is a function of the seed and the step, and the data order is saved: a resumed run equals one that was
never stopped, to the bit.

With `config.train.async_steps=1` the rollouts of step n + 1 run, on a thread of their own, while step n is trained, with the
parameters that step n begins with. Step 1 and step 2 have the initial ones. All that needs other processes is done by the main
thread, so their order is the same in every process.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from jaxsearch import config_check, setup
from jaxsearch.data.questions import QuestionBatches
from jaxsearch.methods import Context, find_method
from jaxsearch.models import hub
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import requests
from jaxsearch.sampler.driver import Agent
from jaxsearch.training import batch as batches
from jaxsearch.training import checkpoint, growing, monitors, runs
from jaxsearch.training import critic as critics
from jaxsearch.training import step as steps
from jaxsearch.trees.layout import TrainingRows, take_back
from jaxsearch.trees.tree import Role, Stop, Tree

Groups = list[list[Tree]]  # the trees of each question
# (agent, config, step, assess) -> rows of evaluations.jsonl; `assess` writes a critic's values onto trees, None without one
Evaluate = Callable[[Agent, ml_collections.ConfigDict, int, Callable[[Sequence[Tree]], None] | None], Iterable[dict]]


def train(config: ml_collections.ConfigDict, evaluate: Evaluate | None = None) -> dict[str, float]:
  """Trains until `config.steps`, or resumes the run in `config.out`; returns the last row of metrics.

  Args:
    evaluate: answers held-out questions, needed if `config.eval.every` is set; see `evaluation.run.held_out`.
  """
  meshes.start_distributed(**config.distributed)
  config_check.check(config)
  if config.eval.every and evaluate is None:
    raise ValueError(f'eval.every={config.eval.every}: train was not given an evaluation')
  method, row = find_method(config.method), {}
  loaded = setup.load_questions(config, config.data.questions)[:config.data.number or None]
  questions = QuestionBatches(loaded, config.questions_per_step, seed=config.seed)
  with runs.RunFolder(config, shown=('reward', 'em', 'searches')) as run:
    setup.check_room(config, setup.load_tokenizer(config), loaded, run.say)
    learner = make_learner(config)
    saved = resume(run, learner, questions)
    run.start()
    history = [monitors.remember(row) for row in run.rows()]
    if run.last_step == 0 and run.wants_evaluation(0):
      examine(run, learner, method, 0, evaluate)
    following = None  # the rollout of the step after, where it is one step ahead
    run.callback(lambda: following and following.abandon())
    for step in run.steps():
      clock, exchanged = runs.Clock(), meshes.exchanged['bytes']
      with clock('generate'):
        current = following or begin(learner, method, questions, step, saved)
        context, (groups, sampled) = current.context, grow(learner, current)
        following, before = None, questions.get_state()
        if config.train.async_steps and step < config.steps:
          following = begin(learner, method, questions, step + 1)
          following.start()
      row = sampled | report_failures(run, learner, step, sampled, row)
      with clock('score'):
        assess(learner, [tree for group in groups for tree in group])
      with clock('reward'):
        method.credit(groups, context, **config.credit)
      trained = credited(groups)
      row |= summary(groups, trained) | context.of_all(sum(map(len, groups)))
      row |= update(learner, trained, step, clock)
      run.write_rollouts(step, groups)
      if following:
        with clock('generate'):
          following.wait()
      row |= clock.row(row['tokens_generated']) | {'step': step, 'bytes_exchanged': meshes.exchanged['bytes'] - exchanged}
      if run.wants_evaluation(step):
        examine(run, learner, method, step, evaluate)
      stop = monitors.watch(history, row, config, run.say)
      run.finish_step(step, row, learner.state, lambda: {
        'memory': learner.memory, 'key': jax.random.key_data(learner.key).tolist(), 'questions': before,
        'following': following and following.state(), 'failed_steps': learner.failed_steps,
        'reference': learner.fingerprint, 'decoder': dataclasses.asdict(learner.model_config)})
      if stop:
        raise runs.RunStopped(stop)
  return row


@dataclasses.dataclass
class Learner:
  """The policy, its sampler, and the compiled programs that train it."""
  config: ml_collections.ConfigDict
  model_config: DecoderConfig
  mesh: jax.sharding.Mesh
  agent: Agent              # the policy as it samples; `prepare` it before a rollout
  state: steps.TrainState   # of the policy, or of its adapter; with that of its critic
  base: dict | None         # the frozen parameters under the adapter; None without one
  merge: Callable           # (base, adapter) -> parameters
  reference: dict | None    # parameters of the frozen initial policy, in the compute dtype; None if there is no KL
  fingerprint: list[float]  # of the initial policy
  train_step: Callable
  score: Callable
  key: jax.Array
  critic_step: Callable | None = None
  values: Callable | None = None       # (parameters of the critic, batch) -> values; None without a critic
  memory: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the method, see methods.Context
  failed_steps: int = 0  # in a row up to now: steps whose searches mostly failed

  @property
  def params(self) -> dict:
    """The parameters of the policy as it is now; with an adapter they are computed anew at every call."""
    with meshes.issuing():
      return steps.without_head(self.state.params) if self.base is None else self.merge(self.base, self.state.params)


@memory.named('setting up training', memory.STATE)
def make_learner(config: ml_collections.ConfigDict) -> Learner:
  """All that training needs before its first step."""
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  model_config, params = setup.load_policy(config, mesh)
  shared, warm = critics.is_shared(config), None
  if config.critic.enabled and config.critic.warm_start:
    _, warm, host = checkpoint.load_trained(config.critic.warm_start, mesh)
    if host['config']['model'] != config.model or host.get('critic', False) == shared:
      raise ValueError(f'critic.warm_start={config.critic.warm_start!r} was warmed up for the model {host["config"]["model"]!r}, '
                       f'critic.shared={not host.get("critic", False)}; here they are {config.model!r}, {shared}')
    learned = host['config']['train']['aggregate']
    if 'step-mean' in (learned, config.train.aggregate) and learned != config.train.aggregate:
      raise ValueError(f'critic.warm_start={config.critic.warm_start!r} was warmed up with train.aggregate={learned!r}, here it '
                       f"is {config.train.aggregate!r}: with 'step-mean' a critic learns starts of spans alone, else every token")
  critic, critic_step = None, None
  if config.critic.enabled:
    critic, critic_step = critics.open_critic(config, model_config, params, mesh, total_updates(config), warm=warm,
                                              **critics.settings_of(config))
  trained = setup.new_adapter(config, model_config, mesh) if config.lora.rank else critic.params if shared else params
  optimizer, train_step = make_update(config, model_config, mesh, trained)
  state = dataclasses.replace(steps.create_state(trained, optimizer, mesh),
                              critic=dataclasses.replace(critic, params={}) if shared else critic)
  local = meshes.local_mesh(mesh)
  engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
  tools = setup.open_tools(config, mesh=local, services=getattr(find_method(config.method), 'SERVICES', ()))
  return Learner(
    config=config, model_config=model_config, mesh=mesh, agent=setup.make_agent(config, engine, tools),
    state=state, base=params if config.lora.rank else None, merge=setup.merger(config, model_config, mesh),
    reference=steps.cast(params, model_config.dtype) if config.loss.kl_coef else None, fingerprint=hub.fingerprint(params),
    train_step=train_step, key=jax.random.key(config.seed), critic_step=critic_step,
    score=steps.make_score_step(model_config, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk),
    values=steps.make_value_step(model_config, mesh=mesh, shared=shared) if config.critic.enabled else None,
  )  # fmt: skip


def make_update(config: ml_collections.ConfigDict, model_config: DecoderConfig, mesh: jax.sharding.Mesh,
                trained: dict) -> tuple[optax.GradientTransformation, Callable]:
  """(optimizer, compiled training step) for the parameters `trained`: arrays, or ShapeDtypeStructs with shardings."""
  weights = dict(config.loss, temperature=config.sampler.temperature, chunk=config.train.chunk,
                 importance_cap=importance_cap(config))
  return steps.make_update(
    functools.partial(steps.policy_loss, config=model_config, **weights), trained, config.optim, total_updates(config),
    mesh=mesh, dtype=model_config.dtype, alpha=config.lora.alpha, factor=lambda name: float(name != steps.HEAD),
    seed=(config.seed, 2))


def importance_cap(config: ml_collections.ConfigDict) -> float:
  """The cap of the importance weights between sampler and trainer; 0 is off: see `losses.importance_weights`."""
  if config.loss.importance_cap is not None:
    return config.loss.importance_cap
  apart = config.dtype == 'bfloat16' or config.train.async_steps
  return 2.0 if apart and config.train.old_logprobs != 'sampler' else 0.0


def recomputes(config: ml_collections.ConfigDict) -> bool:
  """Tells whether the ratio is to the trainer's own log-probabilities, and not to the sampler's."""
  return config.train.old_logprobs == 'recompute' or bool(importance_cap(config))


def total_updates(config: ml_collections.ConfigDict) -> int:
  """How many updates a whole run makes if every tree is trained on; fewer where a method leaves some out."""
  trees = config.questions_per_step * config.group_size
  return config.steps * config.train.epochs * -(-trees // trees_of_update(config))


def trees_of_update(config: ml_collections.ConfigDict) -> int:
  """How many trees an update is on, at most."""
  return config.train.mini_batch or config.questions_per_step * config.group_size


def resume(run: runs.RunFolder, learner: Learner, questions: QuestionBatches) -> dict | None:
  """Puts everything back to where the run's newest checkpoint was made, if there is one.

  Returns the rollouts that were one step ahead, if the checkpoint has any: see `growing.restore`.
  Raises ValueError if the run has another config, or began with another model than `config.model` names now.
  """
  learner.state, host = run.restore(
    learner.state, check=lambda host: hub.check_base(host, learner.fingerprint, learner.config.model))
  if host is not None:
    learner.memory, learner.failed_steps = host['memory'], host.get('failed_steps', 0)  # older checkpoints have none
    learner.key = jax.random.wrap_key_data(np.asarray(host['key'], np.uint32))
    questions.set_state(host['questions'])
  return host and host.get('following')


def report_failures(run: runs.RunFolder, learner: Learner, step: int, sampled: dict, before: dict) -> dict[str, int]:
  """Says at once what mostly failed in the rollout of a step, and counts the steps in a row whose searches did.

  Args:
    sampled: the metrics of this process's rollout; those of all processes are looked at together.
    before: the row of the step before.
  Returns:
    What was asked and failed in all processes, and `failed_steps_in_a_row`, which `RunFolder.finish_step` holds against
    `config.search.max_failed_steps`.
  """
  everywhere, told = runs.failures_of_all(sampled), meshes.gather_objects(requests.failing(sampled, before))
  learner.failed_steps = learner.failed_steps + 1 if requests.mostly_failed(everywhere) else 0
  if message := next(filter(None, told), None):
    count, most = learner.failed_steps, learner.config.search.max_failed_steps
    so_far = f' ({count} steps in a row' + (f'; the run stops after {most})' if most else ')')
    run.say(f'step {step}: {message}{so_far if count > 1 else ""}')
  return everywhere | {'failed_steps_in_a_row': learner.failed_steps}


def examine(run: runs.RunFolder, learner: Learner, method: types.ModuleType, step: int, evaluate: Evaluate) -> None:
  """Evaluates after a step, and says it if most searches failed."""
  rows = list(evaluate(*examinee(learner, method, step)))
  for row in rows:
    if message := requests.failing(row):
      run.say(f'evaluation after step {step}, temperature {row["temperature"]:g}: {message}')
  run.write_evaluation(rows)


def examinee(learner: Learner, method: types.ModuleType, step: int) -> tuple:
  """The arguments of `Evaluate`: the agent as it answers, with the newest parameters, and what its critic says of trees."""
  config, agent = learner.config, prepare(learner, 0)  # without the noise of a curriculum, so that evaluations are alike

  def judged_by_critic(trees: Sequence[Tree]) -> None:
    """Writes values, advantages and outcomes onto finished trees."""
    for tree in trees:
      tree.prune()
    groups = [[tree] for tree in trees if tree.count()]
    assess(learner, [tree for tree, in groups])
    method.credit(groups, Context(0, np.random.default_rng(0), {}), **config.credit)
    for tree in trees:
      tree.reward = tree.question.score(tree.answer)

  agent = setup.make_agent(config, agent.engine, agent.tools, **config.eval.grow)
  return agent, config, step, None if learner.values is None else judged_by_critic


def fresh_context(learner: Learner, step: int) -> Context:
  """What the method may know in a step."""
  return Context(step, np.random.default_rng([learner.config.seed, step]), learner.memory)


def begin(learner: Learner, method: types.ModuleType, questions: QuestionBatches, step: int,
          saved: dict | None = None) -> growing.Growing:
  """Prepares the rollout of a step on the next questions; takes the trees that a checkpoint has `saved` for it, if any."""
  config, asked, context = learner.config, next(questions), fresh_context(learner, step)
  if saved and saved['step'] == step:
    return growing.restore(saved, config, learner.agent.engine.tokenizer, asked, context)
  return growing.begin(config, method, prepare(learner, step), learner.key, asked, context)


def grow(learner: Learner, current: growing.Growing) -> tuple[Groups, dict[str, float]]:
  """The trees of this process, once they are grown; its sampler metrics, and of all processes the tokens generated (decoded) and
  prefilled, whatever became of them: branches that are cut off later have cost as much."""
  trees, row = current.wait()
  row['seconds_rollout'] = row['seconds']  # one step ahead most of them while the step before was trained
  row['tokens_generated'] = row['tokens_decoded']
  costs = meshes.gather_objects({name: row[name] for name in ('tokens_generated', 'tokens_prefilled')})
  row |= {name: sum(one[name] for one in costs) for name in costs[0]}
  for tree in trees:
    tree.prune()  # to what is trained and what leads to it
  if releases(learner.config, jax.default_backend()):
    learner.agent.engine.unload(cache=True)
  return growing.groups_of(current, trees), row


def releases(config: ml_collections.ConfigDict, platform: str) -> bool:
  """Whether the sampler's weights and cache are freed while the step trains."""
  release = config.sampler.release
  return not config.train.async_steps and (platform != 'cpu' if release is None else release)


def prepare(learner: Learner, step: int) -> Agent:
  """The agent with the newest parameters; a simulated search hears how far training is."""
  agent = learner.agent
  agent.engine.unload()  # the old ones go before the new ones come
  params = steps.cast(learner.params, learner.model_config.dtype)  # what moves is small
  if learner.config.train.async_steps:
    params = jax.tree.map(jnp.copy, params)  # the update overwrites its own while these sample
  agent.engine.load(meshes.local(params))
  if hasattr(agent.tools.search, 'set_step'):
    agent.tools.search.set_step(step, learner.config.steps)
  return agent


def credited(groups: Groups) -> Groups:
  """Those of the trees of each group that the method gave credit: what training rows hold."""
  return [[tree for tree in group if any(node.trained and node.advantages is not None for node in tree.walk())]
          for group in groups]


def summary(groups: Groups, trained: Groups) -> dict[str, float]:
  """What came of the trees of all processes: means of reward, exact match, `searches` and the method's other notes
  (`…_per_tree`), shares of stop reasons. And of the `trained` ones: their mean reward, and the tokens that a row for each path
  would have."""
  trees = [tree for group in groups for tree in group]
  kept = [tree for group in trained for tree in group]
  right = [[tree.question.score(tree.answer) for tree in group] for group in groups]
  several = [(group, scores) for group, scores in zip(groups, right) if len(group) > 1]
  rewards = [found for group in groups if (found := [tree.reward for tree in group if tree.reward is not None])]
  values = {
    'reward': [reward for found in rewards for reward in found],
    'reward_retained': [tree.reward for tree in kept],
    'groups_alike': [len(set(found)) == 1 for found in rewards],  # nothing to compare
    'groups_alike_wrong': [len({tree.reward for tree in group}) == 1 and not any(scores) for group, scores in several],
    'em': [score for scores in right for score in scores],
    'logprob': [logprob for tree in trees for node in tree.nodes(Role.POLICY) for logprob in node.logprobs or ()],
    'tokens_per_tree': [tree.count() for tree in trees],
  }  # fmt: skip
  values |= {f'stop_{reason}_share': [tree.stop == reason for tree in trees] for reason in Stop}
  for name in sorted({name for tree in trees for name in tree.metrics}):
    values[name if name == 'searches' else f'{name}_per_tree'] = [
      tree.metrics[name] for tree in trees if name in tree.metrics]
  own = {name: (float(np.sum(found, dtype=np.float64)), len(found)) for name, found in values.items()}
  own_counts = len(trees), sum(leaf.length for tree in kept for leaf in tree.leaves())
  everywhere = meshes.gather_objects((own, own_counts))
  means = {name: [sum(column) for column in zip(*(found[name] for found, _ in everywhere if name in found))]
           for name in dict.fromkeys(name for found, _ in everywhere for name in found)}
  none = {'groups_alike': 1.0, 'logprob': math.nan}  # where there are no values
  number, on_paths = map(sum, zip(*(counts for _, counts in everywhere)))
  return {name: total / count if count else none.get(name, 0.0) for name, (total, count) in means.items()} | {
    'trees': number, 'tokens_on_paths': on_paths}


def into_rows(learner: Learner, trees: Sequence[Tree], share_trained: bool = True) -> TrainingRows:
  """The training rows of this process's trees."""
  everywhere = learner.config.train.kl_on == 'all'
  return batches.lay_out_own(trees, learner.config.train.row_length, pad_id=learner.agent.engine.tokenizer.pad_id,
                             how=learner.config.train.aggregate, penalties=learner.config.train.penalties,
                             share_trained=share_trained,
                             kl_on=lambda tree: everywhere or not tree.question.score(tree.answer))


@memory.named('computing values', memory.UPDATE)
def assess(learner: Learner, trees: Sequence[Tree]) -> None:
  """Writes the critic's values onto the trained spans, if there is a critic."""
  if learner.values is not None:
    rows, state = into_rows(learner, trees), learner.state if critics.is_shared(learner.config) else learner.state.critic
    values = batches.compute_on_rows(learner.values, state.params, rows, learner.config.train.micro_rows, learner.mesh,
                                     learner.config.questions_per_step * learner.config.group_size)
    take_back(rows, trees, values, 'values')


@memory.named('updating the policy', memory.UPDATE)
def update(learner: Learner, groups: Groups, step: int, clock: runs.Clock) -> dict[str, float]:
  """All updates of a step: `epochs` passes over the trees, each with an update for every part of about `mini_batch` trees. A
  part has trees of all processes, each of which lays out its own.

  The parts stay the same in all passes, their order does not. The loss of a part is averaged over the part.
  """
  settings, rng = learner.config.train, np.random.default_rng([learner.config.seed, step])
  critic = learner.config.critic
  clipped = critic.enabled and not critic.shared and critic.value_clip is not None  # then every return counts
  sizes, places = meshes.gather_items([len(group) for group in groups])
  own = dict(zip(places, groups))
  forests = [[own[group][member] for group, member in part if group in own]
             for part in batches.mini_batches(sizes, settings.mini_batch, rng)]
  parts = [into_rows(learner, forest, share_trained=not clipped) for forest in forests]
  with clock('score'):
    packed = score(learner, parts)
  note_logprobs(learner, forests, parts, packed)
  with clock('train'):
    results = [learn(learner, packed[i]) for _ in range(settings.epochs) for i in rng.permutation(len(parts))]
    results = [runs.to_row(result) for result in results]
  found = meshes.gather_objects((sum(len(part.tokens) for part in parts), sum(int(part.real.sum()) for part in parts)))
  rows, tokens = map(sum, zip(*found))
  return runs.mean_of(results) | {'tokens_in_rows': tokens, 'rows': rows, 'updates': len(results),
                                  'padded_share': 1 - tokens / (rows * settings.row_length)}


def score(learner: Learner, parts: Sequence[TrainingRows]) -> list[batches.Batch]:
  """Packs the rows of each update, with the log-probabilities of the policy before all updates and of the reference."""
  settings, reference = learner.config.train, learner.reference
  recompute = recomputes(learner.config)
  one_update = settings.epochs == 1 and not settings.mini_batch  # whose own log-probabilities are the old ones
  policy = learner.params if recompute and not one_update else None

  def scored(part: TrainingRows) -> batches.Batch:
    batch = batches.place(batches.make_batch(
      part, settings.micro_rows, trees=trees_of_update(learner.config), ref=reference is not None,
      critic=learner.values is not None), learner.mesh)
    with meshes.issuing():
      if recompute:
        batch = dataclasses.replace(batch, old_logprobs=None if policy is None else learner.score(policy, batch))
      return batch if reference is None else dataclasses.replace(batch, ref_logprobs=learner.score(reference, batch))

  return [scored(part) for part in parts]


def note_logprobs(learner: Learner, forests: Sequence[Sequence[Tree]], parts: Sequence[TrainingRows],
                  packed: Sequence[batches.Batch]) -> None:
  """Writes the log-probabilities of trainer and reference onto the spans, where rollouts are kept for viewers."""
  if not learner.config.rollouts:
    return
  for forest, rows, batch in zip(forests, parts, packed):
    of_trainer = batch.old_logprobs if recomputes(learner.config) else None
    for name, values in (('old_logprobs', of_trainer), ('ref_logprobs', batch.ref_logprobs)):
      if values is not None:
        take_back(rows, forest, batches.to_rows(values, batch, rows, learner.config.train.micro_rows), name)


def learn(learner: Learner, batch: batches.Batch) -> dict[str, jax.Array]:
  """One update of the policy, then one of the critic, which may move the same backbone; their metrics."""
  critic, shared = learner.state.critic, critics.is_shared(learner.config)
  with meshes.issuing():
    state, result = learner.train_step(dataclasses.replace(learner.state, critic=None), batch, learner.base)
  if critic is not None:
    with meshes.issuing():
      critic, found = learner.critic_step(dataclasses.replace(critic, params=state.params) if shared else critic, batch)
    result |= {f'critic_{name}': found[name] for name in ('loss', 'grad_norm', 'value')}
    if shared:
      state, critic = dataclasses.replace(state, params=critic.params), dataclasses.replace(critic, params={})
  learner.state = dataclasses.replace(state, critic=critic)
  return result
