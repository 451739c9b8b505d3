"""The policy that is trained: what a step computes with it on the devices, and on which trees.

A `Learner` holds the policy, its sampler and the compiled programs. `prepare` readies the sampler for a
rollout; `assess` writes a critic's values onto the trees; `update` makes all updates of a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import GradientTransformation

from jaxsearch import setup
from jaxsearch.methods import find_method
from jaxsearch.models import hub
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.driver import Agent
from jaxsearch.training import batch as batches
from jaxsearch.training import checkpoint, metrics_log, progress
from jaxsearch.training import critic as critics
from jaxsearch.training import state as states
from jaxsearch.training import step as steps
from jaxsearch.training.growing import Groups
from jaxsearch.trees.layout import TrainingRows, take_back
from jaxsearch.trees.tree import Tree


@dataclasses.dataclass
class Learner:
  """The policy, its sampler, and the compiled programs that train it."""
  config: ConfigDict
  model_config: DecoderConfig
  mesh: Mesh
  agent: Agent              # the policy as it samples; `prepare` it before a rollout
  state: states.TrainState   # of the policy, or of its adapter; with that of its critic
  base: dict | None         # the frozen parameters under the adapter; None without one
  merge: Callable           # (base, adapter) -> parameters
  reference: dict | None    # of the frozen initial policy, in the compute dtype; None if there is no KL
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
    """Returns the parameters of the policy as it is now; those of an adapter are merged at every call."""
    with meshes.issuing():
      if self.base is not None:
        return self.merge(self.base, self.state.params)
      return states.without_head(self.state.params)


@memory.named('setting up training', memory.STATE)
def make_learner(config: ConfigDict) -> Learner:
  """Builds all that training needs before its first step."""
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  model_config, params = setup.load_policy(config, mesh)
  shared, warm = critics.is_shared(config), None
  if config.critic.enabled and config.critic.warm_start:
    _, warm, host = checkpoint.load_trained(config.critic.warm_start, mesh)
    check_warm_start(config, host)
  critic, critic_step = None, None
  if config.critic.enabled:
    critic, critic_step = critics.open_critic(config, model_config, params, mesh, total_updates(config),
                                              warm=warm, **critics.settings_of(config))
  trained = critic.params if shared else params
  if config.lora.rank:
    trained = setup.new_adapter(config, model_config, mesh)
  optimizer, train_step = make_update(config, model_config, mesh, trained)
  state = dataclasses.replace(states.create_state(trained, optimizer, mesh),
                              critic=dataclasses.replace(critic, params={}) if shared else critic)
  local = meshes.local_mesh(mesh)
  engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
  tools = setup.open_tools(config, mesh=local, services=getattr(find_method(config.method), 'SERVICES', ()))
  return Learner(
    config=config, model_config=model_config, mesh=mesh, agent=setup.make_agent(config, engine, tools),
    state=state, base=params if config.lora.rank else None, merge=setup.merger(config, model_config, mesh),
    reference=states.cast(params, model_config.dtype) if config.loss.kl_coef else None,
    fingerprint=hub.fingerprint(params), train_step=train_step, key=jax.random.key(config.seed),
    critic_step=critic_step, score=steps.make_score_step(
      model_config, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk),
    values=steps.make_value_step(model_config, mesh=mesh, shared=shared) if config.critic.enabled else None,
  )  # fmt: skip


def check_warm_start(config: ConfigDict, host: dict[str, Any]) -> None:
  """Raises ValueError unless the critic of a checkpoint with this `host` was warmed up for such a run."""
  name, saved, was_shared = config.critic.warm_start, host['config'], not host.get('critic', False)
  if saved['model'] != config.model or was_shared != critics.is_shared(config):
    raise ValueError(
      f'critic.warm_start={name!r} was warmed up for the model {saved["model"]!r}, '
      f'critic.shared={was_shared}; here they are {config.model!r}, {critics.is_shared(config)}')
  learned, aggregate = saved['train']['aggregate'], config.train.aggregate
  if 'step-mean' in (learned, aggregate) and learned != aggregate:
    raise ValueError(
      f'critic.warm_start={name!r} was warmed up with train.aggregate={learned!r}, here it is {aggregate!r}: '
      "with 'step-mean' a critic learns starts of spans alone, else every token")


def make_update(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh,
                trained: dict) -> tuple[GradientTransformation, Callable]:
  """Returns (optimizer, compiled training step) for parameters: arrays, or ShapeDtypeStructs with
  shardings."""
  weights = dict(config.loss, temperature=config.sampler.temperature, chunk=config.train.chunk,
                 importance_cap=importance_cap(config))
  loss = functools.partial(steps.policy_loss, config=model_config, **weights)
  return steps.make_update(loss, trained, config.optim, total_updates(config), mesh=mesh,
                           dtype=model_config.dtype, alpha=config.lora.alpha,
                           factor=lambda name: float(name != states.HEAD), seed=(config.seed, 2))


def importance_cap(config: ConfigDict) -> float:
  """Returns the cap of `losses.importance_weights` between sampler and trainer; 0 is off."""
  if config.loss.importance_cap is not None:
    return config.loss.importance_cap
  apart = config.dtype == 'bfloat16' or config.train.async_steps
  return 2.0 if apart and config.train.old_logprobs != 'sampler' else 0.0


def recomputes(config: ConfigDict) -> bool:
  """Tells whether the ratio is to the trainer's own log-probabilities, and not to the sampler's."""
  return config.train.old_logprobs == 'recompute' or bool(importance_cap(config))


def total_updates(config: ConfigDict) -> int:
  """Counts the updates of a whole run in which every tree is trained on."""
  trees = config.questions_per_step * config.group_size
  return config.steps * config.train.epochs * -(-trees // trees_of_update(config))


def trees_of_update(config: ConfigDict) -> int:
  """Returns how many trees an update is on, at most."""
  return config.train.mini_batch or config.questions_per_step * config.group_size


def prepare(learner: Learner, step: int) -> Agent:
  """Returns the agent with the newest parameters; a simulated search hears how far training is."""
  agent = learner.agent
  agent.engine.unload()  # the old ones go before the new ones come
  params = states.cast(learner.params, learner.model_config.dtype)  # what moves is small
  if learner.config.train.async_steps:
    params = jax.tree.map(jnp.copy, params)  # the update overwrites its own while these sample
  agent.engine.load(meshes.local(params))
  if hasattr(agent.tools.search, 'set_step'):
    agent.tools.search.set_step(step, learner.config.steps)
  return agent


def releases(config: ConfigDict, platform: str) -> bool:
  """Tells whether the sampler's weights and cache are freed while the step trains."""
  release = config.sampler.release
  return not config.train.async_steps and (platform != 'cpu' if release is None else release)


def into_rows(learner: Learner, trees: Sequence[Tree], share_trained: bool = True) -> TrainingRows:
  """Lays out this process's trees."""
  settings = learner.config.train
  kl_on = lambda tree: settings.kl_on == 'all' or not tree.question.score(tree.answer)
  return batches.lay_out_own(trees, settings.row_length, pad_id=learner.agent.engine.tokenizer.pad_id,
                             how=settings.aggregate, penalties=settings.penalties,
                             share_trained=share_trained, kl_on=kl_on)


@memory.named('computing values', memory.UPDATE)
def assess(learner: Learner, trees: Sequence[Tree]) -> None:
  """Writes the critic's values onto the trained spans, if there is a critic."""
  if learner.values is not None:
    config, rows = learner.config, into_rows(learner, trees)
    state = learner.state if critics.is_shared(config) else learner.state.critic
    trees_at_most = config.questions_per_step * config.group_size
    values = batches.compute_on_rows(learner.values, state.params, rows, config.train.micro_rows,
                                     learner.mesh, trees_at_most)
    take_back(rows, trees, values, 'values')


@memory.named('updating the policy', memory.UPDATE)
def update(learner: Learner, groups: Groups, step: int, clock: progress.Clock) -> dict[str, float]:
  """Makes all updates of a step; returns its metrics.

  They are `epochs` passes over the trees, each with an update for every part of about `mini_batch` trees. The
  parts stay the same in all passes, their order does not. A part has trees of all processes, each of which
  lays out its own; its loss is averaged over the part.
  """
  settings, rng = learner.config.train, np.random.default_rng([learner.config.seed, step])
  critic = learner.config.critic
  clipped = critic.enabled and not critic.shared and critic.value_clip is not None  # then every return counts
  sizes, places = meshes.gather_items([len(group) for group in groups])
  local = dict(zip(places, groups))
  forests = [[local[group][member] for group, member in part if group in local]
             for part in batches.mini_batches(sizes, settings.mini_batch, rng)]
  parts = [into_rows(learner, forest, share_trained=not clipped) for forest in forests]
  with clock('score'):
    packed = score(learner, parts)
  note_logprobs(learner, forests, parts, packed)
  with clock('train'):
    results = [learn(learner, packed[i]) for _ in range(settings.epochs) for i in rng.permutation(len(parts))]
    results = [metrics_log.to_row(result) for result in results]
  sizes = sum(len(part.tokens) for part in parts), sum(int(part.real.sum()) for part in parts)
  rows, tokens = map(sum, zip(*meshes.gather_objects(sizes)))
  return metrics_log.mean_of(results) | {'tokens_in_rows': tokens, 'rows': rows, 'updates': len(results),
                                  'padded_share': 1 - tokens / (rows * settings.row_length)}


def score(learner: Learner, parts: Sequence[TrainingRows]) -> list[batches.Batch]:
  """Packs the rows of each update, with the log-probabilities of the policy before all updates and of the
  reference."""
  settings, reference = learner.config.train, learner.reference
  recompute = recomputes(learner.config)
  one_update = settings.epochs == 1 and not settings.mini_batch  # its own log-probabilities are the old ones
  policy = learner.params if recompute and not one_update else None

  def scored(part: TrainingRows) -> batches.Batch:
    batch = batches.place(batches.make_batch(
      part, settings.micro_rows, trees=trees_of_update(learner.config), ref=reference is not None,
      critic=learner.values is not None), learner.mesh)
    with meshes.issuing():
      if recompute:
        old = None if policy is None else learner.score(policy, batch)
        batch = dataclasses.replace(batch, old_logprobs=old)
      if reference is not None:
        batch = dataclasses.replace(batch, ref_logprobs=learner.score(reference, batch))
      return batch

  return [scored(part) for part in parts]


def note_logprobs(learner: Learner, forests: Sequence[Sequence[Tree]], parts: Sequence[TrainingRows],
                  packed: Sequence[batches.Batch]) -> None:
  """Writes the log-probabilities of trainer and reference onto the spans, where rollouts are kept for
  viewers."""
  if not learner.config.rollouts:
    return
  for forest, rows, batch in zip(forests, parts, packed):
    of_trainer = batch.old_logprobs if recomputes(learner.config) else None
    for name, values in (('old_logprobs', of_trainer), ('ref_logprobs', batch.ref_logprobs)):
      if values is not None:
        take_back(rows, forest, batches.to_rows(values, batch, rows, learner.config.train.micro_rows), name)


def learn(learner: Learner, batch: batches.Batch) -> dict[str, jax.Array]:
  """Updates the policy, then the critic, which may move the same backbone; returns their metrics."""
  critic, shared = learner.state.critic, critics.is_shared(learner.config)
  with meshes.issuing():
    state, result = learner.train_step(dataclasses.replace(learner.state, critic=None), batch, learner.base)
  if critic is not None:
    with meshes.issuing():
      critic = dataclasses.replace(critic, params=state.params) if shared else critic
      critic, figures = learner.critic_step(critic, batch)
    result |= {f'critic_{name}': figures[name] for name in ('loss', 'grad_norm', 'value')}
    if shared:
      state, critic = dataclasses.replace(state, params=critic.params), dataclasses.replace(critic, params={})
  learner.state = dataclasses.replace(state, critic=critic)
  return result
