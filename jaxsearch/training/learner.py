"""Opens what training works on: the policy, its sampler, its critic and the compiled programs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
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
from jaxsearch.training import critic as critics
from jaxsearch.training import saved_policies
from jaxsearch.training import state as states
from jaxsearch.training import step as steps


@dataclasses.dataclass
class Learner:
  """The policy, its sampler, and the compiled programs that train it."""
  config: ConfigDict
  model_config: DecoderConfig
  mesh: Mesh
  agent: Agent              # the policy as it samples; `update.prepare` it before a rollout
  state: states.TrainState  # of the policy, or of its adapter; with that of its critic
  base: dict | None         # the frozen parameters under the adapter; None without one
  merge: Callable           # (base, adapter) -> parameters
  reference: dict | None    # of the frozen initial policy, in the compute dtype; None if there is no KL
  fingerprint: list[float]  # of the initial policy
  train_step: Callable
  score: Callable
  key: jax.Array
  recomputes: bool          # see `recomputes`
  releases: bool            # see `releases`
  critic_step: Callable | None = None
  values: Callable | None = None       # (parameters of the critic, batch) -> values; None without a critic
  memory: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the method, see methods.Context
  failed_steps: int = 0  # in a row up to now: steps whose searches mostly failed


@memory.named('setting up training', memory.STATE)
def make_learner(config: ConfigDict) -> Learner:
  """Builds all that training needs before its first step."""
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  model_config, params = setup.load_policy(config, mesh)
  shared, warm = critics.is_shared(config), None
  if config.critic.enabled and config.critic.warm_start:
    _, warm, host = saved_policies.load_trained(config.critic.warm_start, mesh)
    check_warm_start(config, host)
  critic, critic_step = None, None
  if config.critic.enabled:
    critic, critic_step = critics.open_critic(config, model_config, params, mesh, total_updates(config), warm)
  trained = critic.params if shared else params
  if config.lora.rank:
    trained = setup.new_adapter(config, model_config, mesh)
  optimizer, train_step = make_update(config, model_config, mesh, trained)
  state = dataclasses.replace(states.create_state(trained, optimizer, mesh),
                              critic=dataclasses.replace(critic, params={}) if shared else critic)
  local = meshes.local_mesh(mesh)
  engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
  tools = setup.open_tools(config, mesh=local, services=getattr(find_method(config.method), 'SERVICES', ()))
  score = steps.make_score_step(
    model_config, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk)
  return Learner(
    config=config, model_config=model_config, mesh=mesh, agent=setup.make_agent(config, engine, tools),
    state=state, base=params if config.lora.rank else None, merge=setup.merger(config, model_config, mesh),
    reference=states.cast(params, model_config.dtype) if config.loss.kl_coef else None,
    fingerprint=hub.fingerprint(params), key=jax.random.key(config.seed), recomputes=recomputes(config),
    releases=releases(config, jax.default_backend()), train_step=train_step, score=score,
    critic_step=critic_step,
    values=steps.make_value_step(model_config, mesh=mesh, shared=shared) if config.critic.enabled else None)


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
  """Returns (optimizer, compiled training step) for parameters: arrays, or structs with shardings."""
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
  return config.steps * config.train.epochs * -(-trees // (config.train.mini_batch or trees))


def releases(config: ConfigDict, platform: str) -> bool:
  """Tells whether the sampler's weights and cache are freed while the step trains."""
  release = config.sampler.release
  return not config.train.async_steps and (platform != 'cpu' if release is None else release)
